"""Flow-GRPO on Stable Diffusion 3.5: train_qwenimage.py with another model.

torchrun --nproc_per_node=8 scripts/train_sd3.py --config config/grpo.py:pickscore_sd3
"""

from flow_grpo.command_line import checks, command_line

if __name__ == "__main__":
    config = command_line.parse("config/grpo.py:pickscore_sd3", checks.GRPO)  # before torch is imported
    import train_qwenimage

    command_line.run(train_qwenimage.main, config)
