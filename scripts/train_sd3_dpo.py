"""DPO on Stable Diffusion 3.5: train_qwenimage_dpo.py with another model.

torchrun --nproc_per_node=8 scripts/prepare_preferences.py --config config/dpo.py:pickscore_sd3_dpo
torchrun --nproc_per_node=8 scripts/train_sd3_dpo.py --config config/dpo.py:pickscore_sd3_dpo
"""

import train_qwenimage_dpo
from absl import app
from ml_collections import config_flags

if __name__ == "__main__":
    flag = config_flags.DEFINE_config_file("config", "config/dpo.py:pickscore_sd3_dpo", "Which experiment to run.")
    app.run(lambda _: train_qwenimage_dpo.main(flag.value))
