"""Noise levels that DPO trains each published model at, beside the sigmas it samples at: a table of docs/.

Tokens, shift and sigmas come from the model's own class. Its scheduler is that of the tiny model, whose settings are
the published ones, but for PUBLISHED_SCHEDULERS and UNIPC_SHIFTS.
"""

from typing import NamedTuple

import torch
from diffusers import UniPCMultistepScheduler

from config import grpo
from flow_grpo.diffusers_patch import loading, model_classes, registry
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.size import Size, training_size
from flow_grpo.settings.table import typed

PUBLISHED_SCHEDULERS = {  # settings that differ from the tiny model's; from memory
    "black-forest-labs/FLUX.1-schnell": dict(use_dynamic_shifting=False, shift=1.0),
    "Tongyi-MAI/Z-Image": dict(shift=6.0),
}
UNIPC_SHIFTS = {  # of models that are published with UniPC's scheduler; from memory
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": 3.0,
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": 3.0,
}
QUANTILES = (-1.645, 0.0, 1.645)  # of a standard normal: 5 %, median, 95 %


class NoiseLevels(NamedTuple):
    """The sigmas of the runs of one published model."""

    model: str  # hub id
    num_steps: int  # sampled steps
    size: Size
    shift: str  # in words
    trained: list[float]  # 5 %, median and 95 % of what DPO draws; ascending
    sampled: list[float]  # of each sampled step, descending


def of_published_models() -> list[NoiseLevels]:
    """Return a row for each published model that config/grpo.py has a run of, at the steps and size of the first."""
    rows: dict[str, NoiseLevels] = {}
    for run in grpo.RUNS:
        config = run()
        if config.model not in rows and registry.published(config.model):
            rows[config.model] = _of_model(config.model, config.sample.num_steps, training_size(typed(config)))
    return list(rows.values())


def _of_model(hub_id: str, num_steps: int, size: Size) -> NoiseLevels:
    """Return the row of a published model that is sampled in `num_steps` steps."""
    model = with_published_scheduler(hub_id)
    levels = model.noise_levels(num_steps, size) / 1000
    # DPO draws the sigmoid of a standard normal, as a place among all levels.
    places = (torch.tensor(QUANTILES).sigmoid() * len(levels)).long()
    trained = levels[places].sort().values
    # The last sigma is 0, an image.
    sampled = model.schedule(num_steps, size).sigmas[:-1]
    return NoiseLevels(hub_id, num_steps, size, _shift_in_words(model), trained.tolist(), sampled.tolist())


def with_published_scheduler(hub_id: str) -> FlowModel:
    """Return the tiny model of a published one, without weights, its scheduler set as the published one is."""
    folder = registry.tiny_like(hub_id)
    model = model_classes.of_folder(folder).without_weights(folder)
    if hub_id in UNIPC_SHIFTS:
        model.pipeline.scheduler = UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=UNIPC_SHIFTS[hub_id]
        )
        return model
    scheduler = model.pipeline.scheduler
    settings = dict(scheduler.config) | PUBLISHED_SCHEDULERS.get(hub_id, {})
    model.pipeline.scheduler = type(scheduler).from_config(settings)
    return model


def _shift_in_words(model: FlowModel) -> str:
    config = loading.as_euler(model.pipeline.scheduler).config
    if not config.use_dynamic_shifting:
        return f"{config.shift:g}"
    if type(model).shift is not FlowModel.shift:
        return "by size and steps"
    by_size = f"by size, exp({config.base_shift:g}) to exp({config.max_shift:g})"
    return f"{by_size}, last sigma {config.shift_terminal:g}" if config.shift_terminal else by_size
