"""Per-step branch exploration on FLUX.1: train_qwenimage_pr.py with another model.

torchrun --nproc_per_node=8 scripts/train_flux_pr.py --config config/grpo.py:pickscore_flux_pr
"""

import train_qwenimage_pr
from absl import app
from ml_collections import config_flags

if __name__ == "__main__":
    flag = config_flags.DEFINE_config_file("config", "config/grpo.py:pickscore_flux_pr", "Which experiment to run.")
    app.run(lambda _: train_qwenimage_pr.main(flag.value))
