"""DPO on Stable Diffusion 3.5: train_qwenimage_dpo.py with another model.

torchrun --nproc_per_node=8 scripts/prepare_preferences.py --config config/dpo.py:pickscore_sd3_dpo
torchrun --nproc_per_node=8 scripts/train_sd3_dpo.py --config config/dpo.py:pickscore_sd3_dpo
"""

import train_qwenimage_dpo

from flow_grpo.settings import command_line

if __name__ == "__main__":
    command_line.run(train_qwenimage_dpo.main, "config/dpo.py:pickscore_sd3_dpo")
