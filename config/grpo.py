"""Runs of train_*.py and train_*_pr.py: --config config/grpo.py:NAME, with variants NAME,mixgrpo,guard or NAME,smoke.

A function here is an experiment and overrides defaults of docs/reference/settings.md. Override further on the
command line, --config.seed=7.
"""

from config import variants
from config.variants import dppo, eight_bit_base, fast, flash, four_bit_base, guard, large_gpu, long, mixgrpo, smoke
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
    return zimage_512(default_config())


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


def pickscore_flux2_klein():
    """Flow-GRPO on the 4 B FLUX.2-klein, 512 px: 4 steps, noise in all but the last. No setting is published."""
    config = flux2_klein_512(default_config())
    config.sample.sde_window_size = 0
    return config


def pickscore_flux2_klein_pr():
    """TempFlow-GRPO on the 4 B FLUX.2-klein, 512 px: 4 steps, no guidance."""
    return branching(flux2_klein_512(default_config()))


def pickscore_flux2_klein_9b():
    """Flow-GRPO on the 9 B FLUX.2-klein, with the settings of the 4 B one."""
    return flux2_klein_9b(pickscore_flux2_klein())


def pickscore_flux2_klein_9b_pr():
    """TempFlow-GRPO on the 9 B FLUX.2-klein."""
    return flux2_klein_9b(pickscore_flux2_klein_pr())


def pickscore_qwenimage_21():
    """Flow-GRPO on Qwen-Image-2.1, 512 px: 32 prompts of 16 images, 2 noisy steps of 10. No setting is published."""
    return qwenimage_21_512(default_config())


def pickscore_qwenimage_21_pr():
    """TempFlow-GRPO on Qwen-Image-2.1, 512 px, without guidance."""
    return branching(qwenimage_21_512(default_config()))


def edits_qwenimage_edit():
    """Flow-GRPO with a windowed SDE on the shipped tiny editing model and its task."""
    return tiny_edit(shapes_qwenimage())


def edits_qwenimage_edit_pr():
    """Per-step branch exploration on the shipped tiny editing model."""
    return tiny_edit(shapes_qwenimage_pr())


def editreward_qwenimage_edit():
    """Flow-GRPO on Qwen-Image-Edit-2511, 512 px, with Qwen-Image's settings and EditReward. No setting is published."""
    return qwenimage_edit(pickscore_qwenimage())


def editreward_qwenimage_edit_pr():
    """TempFlow-GRPO on Qwen-Image-Edit-2511, 512 px."""
    return qwenimage_edit(pickscore_qwenimage_pr())


def tiny_edit(config):
    """What every run of the tiny editing model changes."""
    config.model, config.dataset = registry.tiny_folder("qwenimage_edit"), "dataset/edits"
    config.reward_fn, config.text_tokens = {"edits": 1.0}, variants.TASKS[config.model].text_tokens
    return config


def qwenimage_edit(config):
    """What every run of Qwen-Image-Edit changes. A source takes about 200 tokens of text, and of the transformer as
    many as an image of 1024 x 1024 pixels."""
    config.model, config.dataset = registry.hub_id("qwenimage_edit"), "dataset/editing"
    config.reward_fn, config.text_tokens = {"editreward": 1.0}, 512
    return config


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
    config.sample.num_prompts_per_epoch, config.sample.num_images_per_prompt = 32, 16
    config.sample.batch_size = 8
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


def flux2_klein_512(config):
    """What every run of FLUX.2-klein shares: it was distilled to 4 steps without guidance. It sees the padding of its
    text, of which its pipeline has 512 tokens; fewer are faster and other images."""
    config = large(config, registry.hub_id("flux2_klein"))
    config.sample.num_prompts_per_epoch, config.sample.num_images_per_prompt = 32, 16
    config.sample.batch_size = 8
    config.lora.rank, config.lora.alpha = 32, 64
    config.fsdp.activation_checkpointing = 1.0
    config.compile, config.text_tokens = True, 512
    config.sample.num_steps = config.eval.num_steps = 4
    config.sample.guidance_scale = config.eval.guidance_scale = 1.0
    return config


def flux2_klein_9b(config):
    """What every run of the 9 B FLUX.2-klein changes."""
    config.model = config.model.replace("-4B", "-9B")
    return config


def qwenimage_21_512(config):
    """What every run of the 7 B Qwen-Image-2.1 shares: guidance is distilled in."""
    config = compiled_512(large(config, registry.hub_id("qwenimage_21")))
    config.sample.num_prompts_per_epoch, config.sample.num_images_per_prompt = 32, 16
    config.sample.batch_size = 8
    config.lora.rank, config.lora.alpha = 32, 64
    config.fsdp.activation_checkpointing = 1.0
    config.sample.guidance_scale = config.eval.guidance_scale = 1.0
    config.eval.num_steps = 40
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


RUNS = (
    *(shapes_qwenimage, shapes_qwenimage_pr, pickscore_qwenimage, pickscore_qwenimage_pr),
    *(pickscore_qwenimage_2512, pickscore_qwenimage_2512_pr),
    *(pickscore_sd3, pickscore_sd3_fast, pickscore_sd3_pr, pickscore_sd35_large, pickscore_sd35_large_pr),
    *(pickscore_flux, pickscore_flux_pr, pickscore_flux_schnell, pickscore_flux_schnell_pr),
    *(pickscore_zimage, pickscore_zimage_pr, pickscore_zimage_turbo, pickscore_zimage_turbo_pr),
    *(pickscore_flux2_klein, pickscore_flux2_klein_pr, pickscore_flux2_klein_9b, pickscore_flux2_klein_9b_pr),
    *(pickscore_qwenimage_21, pickscore_qwenimage_21_pr),
    *(edits_qwenimage_edit, edits_qwenimage_edit_pr, editreward_qwenimage_edit, editreward_qwenimage_edit_pr),
)
# in this order, whatever the command line's is
VARIANTS = (long, mixgrpo, flash, fast, guard, dppo, large_gpu, eight_bit_base, four_bit_base, variants.distill, smoke)


def get_config(name="shapes_qwenimage"):
    return select(name, RUNS, VARIANTS, "config/grpo.py")
