"""Losses as records, under the name by which forks import them; flow_grpo/settings/objectives.py has them."""

from flow_grpo.settings.objectives import FORWARD_OBJECTIVES, OBJECTIVES, Objective

__all__ = ["FORWARD_OBJECTIVES", "OBJECTIVES", "Objective"]
