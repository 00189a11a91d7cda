"""Runs of train_*.py and train_*_pr.py: --config config/grpo.py:NAME, with variants NAME,mixgrpo,guard or NAME,smoke.

A function here is an experiment and overrides defaults of docs/reference/settings.md. Override further on the
command line, --config.seed=7.
"""

from pathlib import Path

from flow_grpo.base import shipped
from flow_grpo.diffusers_patch import registry
from flow_grpo.settings.config_files import select
from flow_grpo.settings.table import PR, default_config


def shapes_qwenimage():
    """Flow-GRPO with a windowed SDE on the shipped tiny model."""
    return default_config()


def shapes_qwenimage_pr():
    """Per-step branch exploration on the shipped tiny model, minutes on two CPU cores."""
    config = default_config()
    config.algorithm = PR
    config.num_epochs, config.eval_freq, config.save_freq = 28, 7, 7
    config.sample.noise_level, config.sample.num_branches = 1.0, 6
    config.sample.num_prompts_per_epoch, config.sample.num_images_per_prompt = 72, 1
    config.sample.batch_size, config.sample.completion_batch_size = 36, 128
    config.sample.flash_ratio, config.sample.rollout_weights = 0.4, "merged"
    config.train.learning_rate, config.train.updates_per_epoch = 2e-4, 12
    config.train.step_weight = "sqrt3"
    config.train.timestep_fraction = 0.6
    config.train.ema_decay, config.train.ema_interval = 0.93, 1
    return config


def pickscore_qwenimage():
    """Flow-GRPO on Qwen-Image, 512 px, published hyperparameters; any number of GPUs that divides 64 batches."""
    config = compiled_512(qwenimage_512(default_config()))
    config.sample.num_prompts_per_epoch = 32
    config.sample.num_images_per_prompt = 16
    config.sample.batch_size = 8
    return config


def pickscore_qwenimage_pr():
    """TempFlow-GRPO on Qwen-Image, 512 px: 4 trunks per prompt, 6 branches at every step but the last."""
    return branching(compiled_512(qwenimage_512(default_config())))


def pickscore_qwenimage_2512():
    """Flow-GRPO on Qwen-Image-2512, the same transformer with newer weights."""
    return qwenimage_2512(pickscore_qwenimage())


def pickscore_qwenimage_2512_pr():
    """TempFlow-GRPO on Qwen-Image-2512."""
    return qwenimage_2512(pickscore_qwenimage_pr())


def pickscore_sd3():
    """Flow-GRPO on SD3.5-medium, 512 px, published hyperparameters: 48 prompts of 24 images, all steps but the last."""
    config = sd3_512(default_config())
    config.compile = True
    config.sample.num_prompts_per_epoch, config.sample.num_images_per_prompt = 48, 24
    config.sample.batch_size, config.sample.sde_window_size = 12, 0
    config.train.beta = 0.0023  # the published 0.01 / 4.39: our KL is 4.39 times theirs, docs/algorithms/flow_grpo.md
    return config


def pickscore_sd3_fast():
    """The same without guidance, in training and evaluation, with noise in 3 of the first 5 steps by Flow-CPS."""
    config = pickscore_sd3()
    config.sample.guidance_scale = config.eval.guidance_scale = 1.0
    config.sample.sde_type, config.sample.noise_level = "cps", 0.8
    config.sample.sde_window_size = 3
    config.train.clip_range, config.train.beta = 1e-5, 0.0
    return config


def pickscore_sd3_pr():
    """TempFlow-GRPO on SD3.5-medium, 512 px."""
    return branching(sd3_512(default_config()))


def pickscore_sd35_large():
    """Flow-GRPO on SD3.5-large, with what is published for medium."""
    return sd35_large(pickscore_sd3())


def pickscore_sd35_large_pr():
    """TempFlow-GRPO on SD3.5-large."""
    return sd35_large(pickscore_sd3_pr())


def pickscore_flux():
    """Flow-GRPO on FLUX.1-dev, 512 px, published hyperparameters: 6 steps, guidance 3.5 as the model's input."""
    config = flux_512(default_config())
    config.compile = True
    config.sample.num_prompts_per_epoch, config.sample.num_images_per_prompt = 48, 24
    config.sample.batch_size, config.sample.sde_window_size = 12, 0
    return config


def pickscore_flux_pr():
    """TempFlow-GRPO on FLUX.1-dev, 512 px."""
    return branching(flux_512(default_config()))


def pickscore_flux_schnell():
    """Flow-GRPO on FLUX.1-schnell, 512 px: 4 steps, noise in all but the last."""
    return flux_schnell(pickscore_flux())


def pickscore_flux_schnell_pr():
    """TempFlow-GRPO on FLUX.1-schnell, 512 px: 4 steps."""
    return flux_schnell(pickscore_flux_pr())


def pickscore_zimage():
    """Flow-GRPO on Z-Image, 512 px: 32 prompts of 16 images, 2 noisy steps of 10. None of its settings is published."""
    config = zimage_512(default_config())
    config.sample.num_prompts_per_epoch, config.sample.num_images_per_prompt = 32, 16
    config.sample.batch_size = 8
    return config


def pickscore_zimage_pr():
    """TempFlow-GRPO on Z-Image, 512 px."""
    return branching(zimage_512(default_config()))


def pickscore_zimage_turbo():
    """Flow-GRPO on Z-Image-Turbo, 512 px: 8 steps, noise in all but the last, no guidance."""
    config = turbo(pickscore_zimage())
    config.sample.sde_window_size = 0
    return config


def pickscore_zimage_turbo_pr():
    """TempFlow-GRPO on Z-Image-Turbo, 512 px: 8 steps, no guidance."""
    return turbo(pickscore_zimage_pr())


def qwenimage_512(config):
    """What every run of the 20 B Qwen-Image shares."""
    config = large(config, registry.hub_id("qwenimage"))
    config.lora.rank, config.lora.alpha = 64, 128
    config.fsdp.activation_checkpointing = 1.0
    config.sample.guidance_scale = config.eval.guidance_scale = 4.0
    config.sample.noise_level = 1.2
    config.eval.num_steps = 50
    return config


def qwenimage_2512(config):
    """What every run of Qwen-Image-2512 changes."""
    config.model += "-2512"
    return config


def compiled_512(config):
    """Compiled blocks; forwards without a log-prob see text padded to a multiple of 16 tokens."""
    config.compile, config.sample.text_multiple = True, 16
    return config


def sd3_512(config):
    """What every run of SD3.5-medium shares."""
    config = large(config, registry.hub_id("sd3"))
    config.lora.rank, config.lora.alpha = 32, 64
    config.sample.guidance_scale = config.eval.guidance_scale = 4.5
    config.eval.num_steps = 40
    return config


def sd35_large(config):
    """What every run of the 8 B SD3.5-large changes."""
    config.model = config.model.replace("-medium", "-large")
    config.fsdp.activation_checkpointing = 1.0
    if config.eval.guidance_scale > 1:
        config.sample.guidance_scale = config.eval.guidance_scale = 3.5
    config.eval.num_steps = 28
    return config


def flux_512(config):
    """What every run of FLUX.1-dev shares."""
    config = large(config, registry.hub_id("flux"))
    config.lora.rank, config.lora.alpha = 64, 128
    config.fsdp.activation_checkpointing = 1.0
    config.sample.guidance_scale = config.eval.guidance_scale = 3.5
    config.sample.num_steps, config.sample.noise_level = 6, 0.9
    config.eval.num_steps = 28
    return config


def flux_schnell(config):
    """What every run of FLUX.1-schnell changes: it was distilled to 4 steps, and takes no guidance."""
    config.model = config.model.replace("-dev", "-schnell")
    config.sample.num_steps = config.eval.num_steps = 4
    config.sample.guidance_scale = config.eval.guidance_scale = 0.0
    return config


def zimage_512(config):
    """What every run of the 6 B Z-Image shares. It reads text in multiples of 32 tokens, and a guidance scale of 4 as
    other models read 5."""
    config = large(config, registry.hub_id("zimage"))
    config.lora.rank, config.lora.alpha = 32, 64
    config.fsdp.activation_checkpointing = 1.0
    config.compile, config.sample.text_multiple = True, 32
    config.sample.guidance_scale = config.eval.guidance_scale = 4.0
    config.eval.num_steps = 50
    return config


def turbo(config):
    """What every run of Z-Image-Turbo changes: it was distilled to 8 steps without guidance, which is a scale of 0."""
    config.model += "-Turbo"
    config.sample.num_steps = config.eval.num_steps = 8
    config.sample.guidance_scale = config.eval.guidance_scale = 0.0
    return config


def large(config, model):
    """What every run of a published model shares: 512 px, bf16, PickScore."""
    config.model, config.dataset, config.reward_fn = model, "dataset/pickscore", {"pickscore": 1.0}
    config.height, config.width, config.text_tokens, config.vae_batch_size = 512, 512, 128, 8
    config.precision = config.vae_precision = "bf16"
    config.eval.batch_size, config.cache_dir = 8, "runs/cache"
    return config


def branching(config):
    """4 trunks per prompt, 6 branches at every step but the last."""
    config.algorithm = PR
    config.sample.num_prompts_per_epoch, config.sample.num_images_per_prompt, config.sample.batch_size = 16, 4, 4
    config.sample.num_branches, config.sample.completion_batch_size = 6, 24
    config.compile = True
    config.train.step_weight = "mean_one"  # with all steps but the last, the published constants: 1.53, 2.25, 1.73
    return config


def long(config):
    """For hundreds of epochs of the tiny model: all weights, and a learning rate that suits windows of few steps."""
    config.lora.rank, config.sample.rollout_weights = 0, "exact"
    config.sample.num_prompts_per_epoch, config.sample.num_images_per_prompt = 36, 8
    config.sample.batch_size = 36
    config.train.learning_rate, config.train.updates_per_epoch = 3e-5, 4
    config.train.ema_decay, config.train.ema_interval = 0.95, 1
    return config


def mixgrpo(config):
    """MixGRPO (arXiv:2507.21802): a window of 4 steps moves on by one every 25 updates; train_*.py."""
    last = config.sample.num_steps - 2
    config.sample.sde_window_size, config.sample.sde_window_range = min(4, last), (0, last)
    config.sample.sde_window_interval = 25
    return config


def flash(config):
    """MixGRPO-Flash: DPM-Solver++ after the noise, in 0.4 of the steps."""
    config.sample.flash_ratio = 0.4
    return config


def fast(config):
    """Flow-GRPO-Fast: the images of a group share all steps before the window; train_*.py."""
    config.sample.same_latent = True
    return config


def large_gpu(config):
    """For published sizes: faster, in 110 GiB with Qwen-Image. A batch has 8 rows, forwards without a log-prob use a
    merged copy of the weights, and compiled blocks store half of their activations."""
    config.sample.batch_size, config.sample.rollout_weights = 8, "merged" if config.lora.rank else "exact"
    config.compile, config.fsdp.activation_checkpointing = True, 0.5
    return config


def eight_bit_base(config):
    """The frozen weights in 8 bits: half of their memory. Products are in 8 bits where no log-prob is computed, and use
    a merged copy if the run merges."""
    config.base_precision = "fp8_weights"
    config.sample.rollout_weights = "merged_fp8" if "merged" in config.sample.rollout_weights else "fp8"
    return config


def four_bit_base(config):
    """The frozen weights in 4 bits, for Qwen-Image on a card of 24 GB: small batches, and the optimizer state in host
    memory between steps."""
    config.base_precision, config.sample.rollout_weights = "nf4", "exact"
    config.sample.batch_size, config.fsdp.offload = 4, "optimizer"
    return config


def guard(config):
    """GRPO-Guard (arXiv:2510.22319), published hyperparameters."""
    config.train.objective, config.train.clip_range = "guard", 4e-6
    config.train.learning_rate, config.train.beta = 1e-4, 0.0
    return config


def dppo(config):
    """Flow-DPPO (arXiv:2606.11025): rows stop at a KL of their step (`train.kl_limit`) instead of at a ratio."""
    config.train.objective, config.train.clip_range = "dppo", default_config().train.clip_range
    return config


def smoke(config):
    """The same algorithm in seconds: two epochs, two prompts, fewer steps. What is not on this machine is replaced."""
    tiny = default_config()
    if not Path(shipped.find(config.dataset)).is_dir():
        config.dataset, config.text_tokens = tiny.dataset, tiny.text_tokens
    if not Path(shipped.find(config.model)).is_dir():
        config.model = registry.tiny_like(config.model)
        for key in ("height", "width", "precision", "vae_precision", "attention", "compile", "cache_dir"):
            config[key] = tiny[key]
        config.sample.text_multiple = tiny.sample.text_multiple
        config.fsdp.activation_checkpointing = round(config.fsdp.activation_checkpointing)  # 0.5 becomes 0
    config.reward_fn = {name: weight for name, weight in config.reward_fn.items() if is_here(name)}
    draws_shapes = (config.model, config.dataset) == (tiny.model, tiny.dataset)
    if not config.reward_fn or ("shapes" in config.reward_fn and not draws_shapes):
        config.reward_fn = dict(tiny.reward_fn) if draws_shapes else {"jpeg_compressibility": 1.0}
    config.num_epochs, config.save_freq, config.eval_freq = 2, 1, 1
    config.sample.num_prompts_per_epoch, config.sample.num_images_per_prompt, config.sample.batch_size = 2, 4, 4
    config.sample.num_steps, config.eval.num_steps, config.eval.num_prompts = 4, 4, 8
    config.train.updates_per_epoch = 2
    if config.sample.num_branches == 1:
        config.sample.sde_window_range = (0, 3) if config.sample.sde_window_size else config.sample.sde_window_range
        config.sample.sde_window_size = min(config.sample.sde_window_size, 2)
    return config


def is_here(reward):
    """Whether a reward needs neither weights from the hub nor a server: one of one's own may need anything."""
    ours = (shipped.PACKAGE / "rewards" / f"{reward}.py").exists()
    return not ours or reward in ("shapes", "ocr", "jpeg_compressibility")


RUNS = (
    *(shapes_qwenimage, shapes_qwenimage_pr, pickscore_qwenimage, pickscore_qwenimage_pr),
    *(pickscore_qwenimage_2512, pickscore_qwenimage_2512_pr),
    *(pickscore_sd3, pickscore_sd3_fast, pickscore_sd3_pr, pickscore_sd35_large, pickscore_sd35_large_pr),
    *(pickscore_flux, pickscore_flux_pr, pickscore_flux_schnell, pickscore_flux_schnell_pr),
    *(pickscore_zimage, pickscore_zimage_pr, pickscore_zimage_turbo, pickscore_zimage_turbo_pr),
)
# in this order, whatever the command line's is
VARIANTS = (long, mixgrpo, flash, fast, guard, dppo, large_gpu, eight_bit_base, four_bit_base, smoke)


def get_config(name="shapes_qwenimage"):
    return select(name, RUNS, VARIANTS, "config/grpo.py")
