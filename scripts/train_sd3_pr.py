"""Per-step branch exploration on Stable Diffusion 3.5: train_qwenimage_pr.py with another model.

torchrun --nproc_per_node=8 scripts/train_sd3_pr.py --config config/grpo.py:pickscore_sd3_pr
"""

from flow_grpo.command_line import checks, command_line

if __name__ == "__main__":
    config = command_line.parse("config/grpo.py:pickscore_sd3_pr", checks.PR)  # before torch is imported
    import train_qwenimage_pr

    command_line.run(train_qwenimage_pr.main, config)
