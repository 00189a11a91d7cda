"""DPO on Stable Diffusion 3.5: train_qwenimage_dpo.py with another model.

torchrun --nproc_per_node=8 scripts/prepare_preferences.py --config config/dpo.py:pickscore_sd3_dpo
torchrun --nproc_per_node=8 scripts/train_sd3_dpo.py --config config/dpo.py:pickscore_sd3_dpo
"""

from flow_grpo.command_line import checks, command_line

if __name__ == "__main__":
    config = command_line.parse("config/dpo.py:pickscore_sd3_dpo", checks.DPO)  # before torch is imported
    import train_qwenimage_dpo

    command_line.run(train_qwenimage_dpo.main, config)
