"""Runs of train_*_nft.py: --config config/nft.py:NAME, or NAME,smoke for seconds.

A function here is an experiment and overrides defaults of docs/reference/settings.md. Override further on the
command line, --config.seed=7.
"""

import math

from ml_collections import ConfigDict

from config import models, variants
from flow_grpo.settings.config_files import select
from flow_grpo.settings.table import NFT, default_config


def shapes_qwenimage_nft() -> ConfigDict:
    """DiffusionNFT of all weights of the shipped tiny model, held to its guided base: `make demo`."""
    config = forward(default_config())
    config.num_epochs = 28
    config.eval_freq = 7
    config.save_freq = 7
    # All weights are trained, no adapter.
    config.lora.rank = 0
    config.sample.num_prompts_per_epoch = 36
    config.sample.num_images_per_prompt = 8
    config.sample.batch_size = 36
    config.sample.flash_ratio = 0.6
    config.train.learning_rate = 2e-4
    config.train.updates_per_epoch = 1
    config.train.beta = 0.5
    # The reference is guided and the rollout is not: the policy learns to draw without guidance what it draws with it.
    config.train.reference_guidance_scale = 3.0
    config.train.shared_noise = True
    config.train.timestep_fraction = 0.3
    config.train.ema_decay = 0.95
    config.train.ema_interval = 1
    return config


def shapes_proxy_qwenimage_nft() -> ConfigDict:
    """DiffusionNFT on a learned reward that can be hacked; evaluations also show the rule that it guesses."""
    return models.on_proxy(shapes_qwenimage_nft())


def pickscore_qwenimage_nft() -> ConfigDict:
    """DiffusionNFT on Qwen-Image, 512 px, without guidance. Three of nine noise levels teach as much as all of them."""
    config = forward(models.compiled(models.qwenimage()))
    config.train.timestep_fraction = 0.3
    return config


def pickscore_qwenimage_2512_nft() -> ConfigDict:
    """DiffusionNFT on Qwen-Image-2512, the same transformer with newer weights."""
    return models.qwenimage_2512(pickscore_qwenimage_nft())


def pickscore_sd3_nft() -> ConfigDict:
    """DiffusionNFT on SD3.5-medium, 512 px, published but for `train.beta`: 48 prompts of 24 images, no guidance."""
    return forward(models.sd3())


def pickscore_sd35_large_nft() -> ConfigDict:
    """DiffusionNFT on SD3.5-large, with what is published for medium."""
    return models.sd35_large(pickscore_sd3_nft())


def pickscore_flux_nft() -> ConfigDict:
    """DiffusionNFT on FLUX.1-dev, 512 px; its guidance is an input, not a second forward, and stays at 3.5."""
    config = forward(models.flux())
    # An input of the transformer, which was never trained without it.
    config.sample.guidance_scale = config.eval.guidance_scale = 3.5
    config.sample.num_steps = 10
    return config


def pickscore_flux_schnell_nft() -> ConfigDict:
    """DiffusionNFT on FLUX.1-schnell, 512 px: 4 steps."""
    return models.flux_schnell(pickscore_flux_nft())


def pickscore_zimage_nft() -> ConfigDict:
    """DiffusionNFT on Z-Image, 512 px, without guidance."""
    config = forward(models.zimage())
    # Z-Image's scale begins at 0 where that of other models begins at 1.
    config.sample.guidance_scale = config.eval.guidance_scale = 0.0
    return config


def pickscore_zimage_turbo_nft() -> ConfigDict:
    """DiffusionNFT on Z-Image-Turbo, 512 px: 8 steps."""
    return models.zimage_turbo(pickscore_zimage_nft())


def pickscore_flux2_klein_nft() -> ConfigDict:
    """DiffusionNFT on the 4 B FLUX.2-klein, 512 px: 4 steps."""
    return forward(models.flux2_klein())


def pickscore_flux2_klein_9b_nft() -> ConfigDict:
    """DiffusionNFT on the 9 B FLUX.2-klein."""
    return models.flux2_klein_9b(pickscore_flux2_klein_nft())


def pickscore_qwenimage_21_nft() -> ConfigDict:
    """DiffusionNFT on Qwen-Image-2.1, 512 px."""
    return forward(models.qwenimage_21())


def pickscore_krea2_nft() -> ConfigDict:
    """DiffusionNFT on Krea-2-Raw, 512 px, without guidance."""
    config = forward(models.krea2())
    # As of Z-Image, no guidance is a scale of 0.
    config.sample.guidance_scale = config.eval.guidance_scale = 0.0
    return config


def pickscore_wan_nft() -> ConfigDict:
    """DiffusionNFT on Wan 2.1 T2V 1.3 B, 33 frames of 240 x 416, without guidance. Of its steps three of ten teach."""
    config = forward(models.wan())
    config.train.timestep_fraction = 0.3
    return config


def motions_wan_nft() -> ConfigDict:
    """DiffusionNFT of all weights of the shipped tiny Wan, held to its guided base."""
    return models.tiny_wan(shapes_qwenimage_nft())


def edits_qwenimage_edit_nft() -> ConfigDict:
    """DiffusionNFT on the shipped tiny editing model, which guidance hardly helps: its reference has none."""
    config = models.tiny_edit(shapes_qwenimage_nft())
    config.train.reference_guidance_scale = 0.0
    return config


def editreward_qwenimage_edit_nft() -> ConfigDict:
    """DiffusionNFT on Qwen-Image-Edit-2511, 512 px, without guidance."""
    return models.qwenimage_edit(pickscore_qwenimage_nft())


def editreward_qwenimage_edit_first_nft() -> ConfigDict:
    """DiffusionNFT on the first Qwen-Image-Edit, 512 px, without guidance."""
    return models.qwenimage_edit_first(editreward_qwenimage_edit_nft())


def editreward_flux_kontext_nft() -> ConfigDict:
    """DiffusionNFT on FLUX.1-Kontext-dev, 512 px; its guidance is an input, not a second forward, and stays at 2.5."""
    config = forward(models.flux_kontext())
    config.sample.guidance_scale = config.eval.guidance_scale = 2.5
    config.sample.num_steps = 10
    return config


def forward(config: ConfigDict) -> ConfigDict:
    """Set what every run shares: no noise and no guidance in the rollout, advantages over the whole epoch's std.

    The published pull to the reference, `train.beta` 1e-4, holds no run and takes a sixth of the update: there is none.
    """
    config.algorithm = NFT
    config.sample.sde_window_size = 0
    # Nothing reads it: there are no noisy steps.
    config.sample.noise_level = default_config().sample.noise_level
    config.sample.guidance_scale = config.eval.guidance_scale = 1.0
    config.sample.global_std = True
    return config


def long(config: ConfigDict) -> ConfigDict:
    """More than 100 epochs: flow matching on the run's own images, and a higher learning rate."""
    config.train.flow_matching_weight = 0.1
    config.train.learning_rate = 5e-4
    config.train.beta = 0.25
    return config


def awm(config: ConfigDict) -> ConfigDict:
    """AWM (arXiv:2509.25050): PPO's clip of flow matching errors on the rollout's images, in two updates or more.

    The clip bounds an epoch, and only a strong pull to the reference the sum over epochs.
    """
    config.train.forward_objective = "awm"
    config.train.beta = 2.0
    config.train.clip_range = 1e-2
    config.train.old_decay_schedule = 0.0
    # In the first update every ratio is 1, and there is nothing to clip.
    config.train.updates_per_epoch = max(config.train.updates_per_epoch, 2)
    return config


def dgpo(config: ConfigDict) -> ConfigDict:
    """DGPO (arXiv:2510.08425): a group at one noise and level is a preference. Forwards hold whole groups."""
    config.train.forward_objective = "dgpo"
    # Groups are compared over a fixed reference.
    config.train.beta = config.train.beta or 1e-4
    config.train.clip_range = 1e-2
    config.train.shared_noise = True
    config.train.updates_per_epoch = 1
    # Whole groups, and whole batches of the rollout.
    config.sample.batch_size = math.lcm(config.sample.batch_size, config.sample.num_images_per_prompt)
    return config


def elbo(config: ConfigDict) -> ConfigDict:
    """The policy gradient of the final image's ELBO (arXiv:2602.04663), held to the old policy."""
    config.train.forward_objective = "elbo"
    config.train.updates_per_epoch = 1
    return config


def ram(config: ConfigDict) -> ConfigDict:
    """RAM (arXiv:2605.10759): flow matching weighted by signed rewards, on images of the present policy."""
    config.train.forward_objective = "ram"
    config.train.old_decay_schedule = 0.0
    config.train.beta = 1.0
    config.train.updates_per_epoch = 1
    return config


def crd(config: ConfigDict) -> ConfigDict:
    """CRD (arXiv:2603.14128): the log-ratio to a lagging policy is fitted to rewards, within groups."""
    config.train.forward_objective = "crd"
    config.train.old_decay_schedule = 3.0
    config.train.sampler_decay_schedule = 2.0
    config.train.beta = 0.1
    config.train.adaptive_beta = True
    # Held to the guided reference, unless the run has chosen another scale.
    config.train.reference_guidance_scale = config.train.reference_guidance_scale or 4.5
    config.train.shared_noise = True
    config.train.updates_per_epoch = 1
    # Whole groups, and whole batches of the rollout.
    config.sample.batch_size = math.lcm(config.sample.batch_size, config.sample.num_images_per_prompt)
    return config


def eight_bit_base(config: ConfigDict) -> ConfigDict:
    """Frozen weights in 8 bits. All products are exact, since the loss learns from the images themselves."""
    config.base_precision = "fp8_weights"
    config.sample.rollout_weights = "exact"
    return config


RUNS = (
    shapes_qwenimage_nft,
    shapes_proxy_qwenimage_nft,
    pickscore_qwenimage_nft,
    pickscore_qwenimage_2512_nft,
    pickscore_sd3_nft,
    pickscore_sd35_large_nft,
    pickscore_flux_nft,
    pickscore_flux_schnell_nft,
    pickscore_zimage_nft,
    pickscore_zimage_turbo_nft,
    pickscore_flux2_klein_nft,
    pickscore_flux2_klein_9b_nft,
    pickscore_qwenimage_21_nft,
    pickscore_krea2_nft,
    pickscore_wan_nft,
    motions_wan_nft,
    edits_qwenimage_edit_nft,
    editreward_qwenimage_edit_nft,
    editreward_qwenimage_edit_first_nft,
    editreward_flux_kontext_nft,
)
VARIANTS = (
    long,
    awm,
    variants.flash,
    variants.signal,
    variants.large_gpu,
    variants.gpu_80gb,
    eight_bit_base,
    variants.four_bit_base,
    dgpo,
    elbo,
    ram,
    crd,
    variants.px1024,
    variants.px1328,
    variants.smoke,
)


def get_config(name: str = "shapes_qwenimage_nft") -> ConfigDict:
    return select(name, RUNS, VARIANTS, __file__)
