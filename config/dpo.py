"""Runs of train_*_dpo.py and prepare_preferences.py: --config config/dpo.py:NAME, or with variants NAME,online,smoke.

A function here is an experiment and overrides defaults of docs/reference/settings.md. Override further on the
command line, --config.seed=7.
"""

from ml_collections import ConfigDict

from config import models, variants
from flow_grpo.settings.config_files import select
from flow_grpo.settings.table import DPO, default_config


def shapes_qwenimage_dpo() -> ConfigDict:
    """Offline DPO on the shipped tiny model, from pairs of its own images; minutes on two CPU cores."""
    config = forward(default_config())
    config.preferences.path = "runs/preferences_shapes_qwenimage"
    config.num_epochs = 60
    config.eval_freq = 20
    config.save_freq = 20
    config.sample.batch_size = 64
    config.sample.flash_ratio = 0.6
    config.train.learning_rate = 1e-4
    config.train.dpo_beta = 100.0
    config.train.updates_per_epoch = 4
    config.preferences.min_margin = 0.2
    config.train.ema_decay = 0.95
    config.train.ema_interval = 1
    return config


def pickscore_qwenimage_dpo() -> ConfigDict:
    """Offline DPO on Qwen-Image, 512 px."""
    config = forward(models.qwenimage())
    config.preferences.path = "runs/preferences_pickscore_qwenimage"
    return config


def pickscore_sd3_dpo() -> ConfigDict:
    """Offline DPO on SD3.5-medium, 512 px."""
    config = forward(models.sd3())
    config.preferences.path = "runs/preferences_pickscore_sd3"
    config.sample.batch_size = 16
    return config


def pickscore_wan_dpo() -> ConfigDict:
    """Offline DPO on Wan 2.1 T2V 1.3 B, from pairs of videos of 33 frames, 240 x 416."""
    config = forward(models.wan())
    config.preferences.path = "runs/preferences_pickscore_wan"
    return config


def motions_wan_dpo() -> ConfigDict:
    """Offline DPO on the shipped tiny Wan, from pairs of its own videos."""
    config = models.tiny_wan(shapes_qwenimage_dpo())
    config.preferences.path = "runs/preferences_motions_wan"
    return config


def edits_qwenimage_edit_dpo() -> ConfigDict:
    """Offline DPO on the shipped tiny editing model, from pairs of its own images."""
    config = models.tiny_edit(shapes_qwenimage_dpo())
    config.preferences.path = "runs/preferences_edits_qwenimage_edit"
    return config


def forward(config: ConfigDict) -> ConfigDict:
    """Set what every run shares: 256 pairs, each of 8 images if a run makes them."""
    config.algorithm = DPO
    # Nothing reads it: there are no noisy steps.
    config.sample.noise_level = default_config().sample.noise_level
    config.sample.num_prompts_per_epoch = 256
    config.sample.num_images_per_prompt = 8
    config.train.learning_rate = 1e-5
    config.train.weight_decay = 0.0
    return config


def online(config: ConfigDict) -> ConfigDict:
    """Online DPO: pairs of images that the policy has just sampled; it becomes its own reference every 20 updates."""
    # Pairs are sampled, not read.
    config.preferences.path = ""
    config.sample.num_prompts_per_epoch = 64
    config.train.dpo_beta = 1000.0
    config.train.reference_interval = 20
    return config


def smoke(config: ConfigDict) -> ConfigDict:
    """The same algorithm in seconds: tiny model, two epochs, fewer steps; prepare with --max_rows=48."""
    config = variants.smoke(config)
    config.sample.num_prompts_per_epoch = 8
    config.sample.num_images_per_prompt = 4
    if config.preferences.path:
        config.preferences.path += "_smoke"
    # `variants.smoke` shortens a window, which DPO has not.
    config.sample.sde_window_range = default_config().sample.sde_window_range
    return config


RUNS = (
    shapes_qwenimage_dpo,
    pickscore_qwenimage_dpo,
    pickscore_sd3_dpo,
    pickscore_wan_dpo,
    motions_wan_dpo,
    edits_qwenimage_edit_dpo,
)
VARIANTS = (
    online,
    variants.signal,
    smoke,
)


def get_config(name: str = "shapes_qwenimage_dpo") -> ConfigDict:
    return select(name, RUNS, VARIANTS, __file__)
