"""DiffusionNFT on Stable Diffusion 3.5: train_qwenimage_nft.py with another model.

torchrun --nproc_per_node=8 scripts/train_sd3_nft.py --config config/nft.py:pickscore_sd3_nft
"""

import train_qwenimage_nft
from absl import app
from ml_collections import config_flags

if __name__ == "__main__":
    flag = config_flags.DEFINE_config_file("config", "config/nft.py:pickscore_sd3_nft", "Which experiment to run.")
    app.run(lambda _: train_qwenimage_nft.main(flag.value))
