"""Flow-GRPO on FLUX.1: train_qwenimage.py with another model.

torchrun --nproc_per_node=8 scripts/train_flux.py --config config/grpo.py:pickscore_flux
"""

from flow_grpo.command_line import checks, command_line

if __name__ == "__main__":
    config = command_line.parse("config/grpo.py:pickscore_flux", checks.GRPO)  # before torch is imported
    import train_qwenimage

    command_line.run(train_qwenimage.main, config)
