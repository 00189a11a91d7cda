"""Per-step branch exploration on Stable Diffusion 3.5: train_qwenimage_pr.py with another model.

torchrun --nproc_per_node=8 scripts/train_sd3_pr.py --config config/grpo.py:pickscore_sd3_pr
"""

import train_qwenimage_pr

from flow_grpo import command_line
from flow_grpo.diffusers_patch import sd3_pipeline_with_logprob as sd3

if __name__ == "__main__":
    command_line.run(lambda config: train_qwenimage_pr.main(config, sd3), "config/grpo.py:pickscore_sd3_pr")
