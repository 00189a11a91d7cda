"""Runs that were measured at full size, and whether their figures hold for a config: assets/measured.json."""

import json
from functools import cache
from typing import Any, NamedTuple

from flow_grpo.base import locations
from flow_grpo.plan import sketch
from flow_grpo.settings import config_files, table
from flow_grpo.settings.sections import Config

# Measured with random weights; see docs/reference/will_it_fit.md.
FILE = locations.PACKAGE / "assets" / "measured.json"

# Settings that change neither the memory that an epoch takes nor the images per second of a GPU, which are measured
# without evaluations and without a reward's model. Every other setting is taken to change them.
FREE_SECTIONS = ("custom.", "eval.", "health.", "reward.", "reward_fn.")
FREE = {
    "name",
    "method",
    "run_name",
    "output_dir",
    "logger",
    "alert",
    "resume_from",
    "accept_changes",
    "dry_run",
    "dry_run_format",
    "seed",
    "num_epochs",
    "max_hours",
    "save_freq",
    "keep_checkpoints",
    "eval_freq",
    "signal_grace_s",
    "dataset",
    "compile_cache",
    "lora.alpha",
    "lora.base",
    "lora.path",
    "lora.export_dtype",
    "sample.noise_level",
    "sample.num_prompts_per_epoch",
    "sample.num_images_per_prompt",
    "sample.global_std",
    "sample.prompt_weights",
    "sample.prompt_weight_decay",
    "sample.prompt_weight_floor",
    "sample.baseline",
    "train.learning_rate",
    "train.learning_rate_schedule",
    "train.warmup_updates",
    "train.adam_betas",
    "train.weight_decay",
    "train.max_grad_norm",
    "train.clip_range",
    "train.parity_limit",
    "train.adv_clip_max",
    "train.step_weight",
    "train.ema_decay",
}
# Settings of which it only matters whether they are set.
COST_WHERE_SET = ("cache_dir", "train.beta")


class Row(NamedTuple):
    """A run that was measured."""

    run: str  # of config/, with its variants
    settings: dict[str, Any]  # that were changed, by dotted name
    card: str  # the smallest that does
    gib: float | None  # of each GPU; None = not measured
    images_per_s: float | None  # of each GPU; None = not measured
    gpus: int = 1
    out_of_memory: bool = False
    reserved: bool = False  # whether gib is what PyTorch reserved, and not what was in use
    text_tokens: int = 48  # of the prompts, where the config has more

    @property
    def file(self) -> str:
        """Config file that has the run."""
        name = self.run.partition(",")[0]
        return "config/nft.py" if name.endswith("_nft") else "config/grpo.py"

    def config(self) -> Config:
        """Return the config that was measured."""
        config = config_files.load(f"{self.file}:{self.run}")
        config.update_from_flattened_dict(self.settings)
        return table.typed(config)


def rows() -> list[Row]:
    """Return all runs that were measured."""
    return [Row(**row) for row in json.loads(FILE.read_text())]


@cache
def _configs() -> list[tuple[Row, Config]]:
    """Return the rows whose config file is here, each with the config that was measured."""
    here = [row for row in rows() if (config_files.CHECKOUT / row.file).is_file()]
    return [(row, row.config()) for row in here]


def of_config(config: Config) -> Row | None:
    """Find the measured run whose figures hold for a config: all settings that cost time or memory are the same.

    None if there is no such run, or if config/ is not there, as in an installed package.
    """
    for row, known in _configs():
        if not _differences(config, known, row.gpus):
            return row
    return None


def _differences(config: Config, known: Config, gpus: int) -> list[str]:
    """Names of settings that cost memory or time and are not those of a measured config."""
    values = table.flat(config)
    known_values = table.flat(known)
    differences = []
    for key in sorted({*values, *known_values}):
        if key in FREE or key.startswith(FREE_SECTIONS):
            continue
        here = values.get(key)
        there = known_values.get(key)
        if key in COST_WHERE_SET and bool(here) == bool(there):
            continue
        if key == "model" and sketch.have_same_sizes(config.model, known.model):
            continue
        if here != there:
            differences.append(key)
    if config.fsdp.mode != "replicate" and config.dry_run != gpus:
        differences.append("dry_run")
    return differences
