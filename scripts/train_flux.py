"""Flow-GRPO on FLUX.1: train_qwenimage.py with another model.

torchrun --nproc_per_node=8 scripts/train_flux.py --config config/grpo.py:pickscore_flux
"""

import train_qwenimage

from flow_grpo.settings import command_line

if __name__ == "__main__":
    command_line.run(train_qwenimage.main, "config/grpo.py:pickscore_flux")
