"""Flow-GRPO on FLUX.1: train_qwenimage.py with another model.

torchrun --nproc_per_node=8 scripts/train_flux.py --config config/grpo.py:pickscore_flux
"""

import train_qwenimage

from flow_grpo import command_line
from flow_grpo.diffusers_patch import flux_pipeline_with_logprob as flux

if __name__ == "__main__":
    command_line.run(lambda config: train_qwenimage.main(config, flux), "config/grpo.py:pickscore_flux")
