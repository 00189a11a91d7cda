"""Flow-GRPO on Stable Diffusion 3.5: train_qwenimage.py with another model.

torchrun --nproc_per_node=8 scripts/train_sd3.py --config config/grpo.py:pickscore_sd3
"""

import train_qwenimage
from absl import app
from ml_collections import config_flags

if __name__ == "__main__":
    flag = config_flags.DEFINE_config_file("config", "config/grpo.py:pickscore_sd3", "Which experiment to run.")
    app.run(lambda _: train_qwenimage.main(flag.value))
