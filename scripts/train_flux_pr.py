"""Per-step branch exploration on FLUX.1: train_qwenimage_pr.py with another model.

torchrun --nproc_per_node=8 scripts/train_flux_pr.py --config config/grpo.py:pickscore_flux_pr
"""

from flow_grpo.command_line import checks, command_line

if __name__ == "__main__":
    config = command_line.parse("config/grpo.py:pickscore_flux_pr", checks.PR)  # before torch is imported
    import train_qwenimage_pr

    command_line.run(train_qwenimage_pr.main, config)
