"""Runs of train_*_refl.py: --config config/refl.py:NAME, with variants NAME,draft or NAME,smoke.

A function here is an experiment and overrides defaults of docs/reference/settings.md. Override further on the
command line, --config.seed=7.
"""

from ml_collections import ConfigDict

from config import models, variants
from flow_grpo.settings.config_files import select
from flow_grpo.settings.table import REFL, default_config


def shapes_proxy_qwenimage_refl() -> ConfigDict:
    """ReFL of all weights of the shipped tiny model, by a small network that has learned to score shapes."""
    config = models.on_proxy(deterministic(default_config()))
    config.num_epochs = 28
    config.eval_freq = 7
    config.save_freq = 7
    # All weights are trained, no adapter.
    config.lora.rank = 0
    config.sample.num_prompts_per_epoch = 72
    config.sample.num_images_per_prompt = 2
    config.sample.batch_size = 36
    config.train.learning_rate = 3e-5
    config.train.updates_per_epoch = 4
    config.train.ema_decay = 0.95
    config.train.ema_interval = 1
    return config


def pickscore_qwenimage_refl() -> ConfigDict:
    """ReFL on Qwen-Image, 512 px, by PickScore: an adapter, 64 images an update."""
    config = pickscore(models.qwenimage())
    config.compile = True
    config.train.detach_negative = True
    return config


def pickscore_flux2_klein_refl() -> ConfigDict:
    """ReFL on FLUX.2-klein, 512 px, by PickScore: an adapter, 64 images an update, 4 steps without guidance."""
    return pickscore(models.flux2_klein())


def pickscore(config: ConfigDict) -> ConfigDict:
    """Set what runs of published models share, whatever the model."""
    config = deterministic(config)
    config.num_epochs = 75
    config.eval_freq = 15
    config.save_freq = 15
    # Decoder and reward keep their activations for as many images.
    config.vae_batch_size = 2
    config.sample.num_prompts_per_epoch = 128
    config.sample.num_images_per_prompt = 2
    config.sample.batch_size = 8
    config.train.learning_rate = 1e-4
    config.train.updates_per_epoch = 4
    config.train.ema_decay = 0.95
    config.train.ema_interval = 1
    return config


def deterministic(config: ConfigDict) -> ConfigDict:
    """Set what every run shares: no step is noisy."""
    config.algorithm = REFL
    # Nothing reads it: there are no noisy steps.
    config.sample.noise_level = default_config().sample.noise_level
    return config


def draft(config: ConfigDict) -> ConfigDict:
    """DRaFT-LV (arXiv:2309.17400): through the last step, also of images that are noised anew."""
    config.train.gradient_path = "draft"
    config.train.gradient_steps = 1
    config.train.gradient_noisings = 2
    return config


def leap(config: ConfigDict) -> ConfigDict:
    """LeapAlign (arXiv:2604.15311): through two leaps over many steps."""
    config.train.gradient_path = "leap"
    return config


def sparse(config: ConfigDict) -> ConfigDict:
    """FlowBP (arXiv:2606.11075): through three steps, late ones more often, each at a fixed state."""
    config.train.gradient_path = "sparse"
    return config


def eight_bit_base(config: ConfigDict) -> ConfigDict:
    """Frozen weights in 8 bits: half of their memory. Steps without a gradient have products in 8 bits."""
    config.base_precision = "fp8_weights"
    config.sample.rollout_weights = "fp8"
    return config


def smoke(config: ConfigDict) -> ConfigDict:
    """The same algorithm in seconds: tiny model, two epochs, fewer steps."""
    config = variants.smoke(config)
    # `variants.smoke` shortens a window, which these runs have not, and knows no reward with a gradient.
    config.sample.sde_window_range = default_config().sample.sde_window_range
    config.reward_fn = {"shapes_proxy": 1.0}
    return config


RUNS = (
    shapes_proxy_qwenimage_refl,
    pickscore_qwenimage_refl,
    pickscore_flux2_klein_refl,
)
VARIANTS = (
    draft,
    leap,
    sparse,
    eight_bit_base,
    smoke,
)


def get_config(name: str = "shapes_proxy_qwenimage_refl") -> ConfigDict:
    return select(name, RUNS, VARIANTS, __file__)
