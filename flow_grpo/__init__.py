"""Reinforcement learning and preference optimisation for flow-matching image models."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from flow_grpo.notebook import LoadedRun

__version__ = "0.1.0"


def load_run(folder: "Path | str", weights: str = "best", device: "torch.device | str | None" = None) -> "LoadedRun":
    """Load a run's policy for a notebook: to draw, to branch, to score.

    Args:
        folder: the run's.
        weights: "best", those that its validation chose; "last"; or "base", config.model without an adapter.
        device: None = a GPU if there is one.

    Raises:
        UserError: the folder is no run's, or lacks these weights.
    """
    # Imported here: a script answers --help before torch is imported.
    from flow_grpo import notebook

    return notebook.load_run(folder, weights, device)
