"""Runs of train_qwenimage.py and train_qwenimage_pr.py: --config config/grpo.py:NAME, or NAME,smoke for seconds.

A function here is an experiment and overrides config/base.py. Override further on the command line, --config.seed=7.
"""

import difflib
import runpy
from pathlib import Path

base = runpy.run_path(str(Path(__file__).with_name("base.py")))["get_config"]


def shapes_qwenimage():
    """Flow-GRPO with a windowed SDE on the shipped tiny model."""
    return base()


def shapes_qwenimage_pr():
    """Per-step branch exploration on the shipped tiny model: `make demo`, minutes on two CPU cores."""
    config = base()
    config.num_epochs, config.eval_freq, config.save_freq = 28, 7, 7
    config.sample.noise_level, config.sample.num_branches = 1.0, 6
    config.sample.num_prompts_per_epoch, config.sample.num_images_per_prompt = 48, 1
    config.sample.batch_size = 24
    config.sample.merge_adapter = True
    config.train.learning_rate = 1e-3
    config.train.step_weight = "sqrt3"
    config.train.timestep_fraction = 0.67
    config.train.ema_decay, config.train.ema_interval = 0.95, 1
    return config


def pickscore_qwenimage():
    """Flow-GRPO on Qwen-Image, 512 px, published hyperparameters; any number of GPUs that divides 64 batches."""
    config = qwenimage_512(base())
    config.sample.num_prompts_per_epoch = 32
    config.sample.num_images_per_prompt = 16
    config.sample.batch_size = 8
    return config


def pickscore_qwenimage_pr():
    """TempFlow-GRPO on Qwen-Image, 512 px: 4 trunks per prompt, 6 branches at every step but the last."""
    config = qwenimage_512(base())
    config.sample.num_prompts_per_epoch = 16
    config.sample.num_images_per_prompt = 4
    config.sample.batch_size = 4
    config.sample.num_branches = 6
    config.sample.completion_batch_size = 24
    config.train.step_weight = "sqrt3"
    return config


def qwenimage_512(config):
    """What every run of the 20 B Qwen-Image shares."""
    config.model, config.dataset, config.reward_fn = "Qwen/Qwen-Image", "dataset/pickscore", {"pickscore": 1.0}
    config.resolution, config.text_tokens, config.precision, config.vae_batch_size = 512, 128, "bf16", 8
    config.lora.rank, config.lora.alpha = 64, 128
    config.fsdp.activation_checkpointing = True
    config.sample.guidance_scale, config.sample.noise_level = 4.0, 1.2
    config.eval.guidance_scale, config.eval.num_steps, config.eval.batch_size = 4.0, 50, 8
    return config


def smoke(config):
    """The same algorithm in seconds: tiny model, two epochs, two prompts, fewer steps."""
    tiny = base()
    for key in ("model", "dataset", "resolution", "text_tokens", "precision"):
        config[key] = tiny[key]
    config.reward_fn = dict(tiny.reward_fn)
    config.num_epochs, config.save_freq, config.eval_freq = 2, 1, 1
    config.sample.num_prompts_per_epoch, config.sample.num_images_per_prompt, config.sample.batch_size = 2, 4, 4
    config.sample.num_steps, config.eval.num_steps, config.eval.num_prompts = 4, 4, 8
    config.train.updates_per_epoch = 2
    if config.sample.num_branches == 1:
        config.sample.sde_window_range = (0, 3)
    return config


RUNS = (shapes_qwenimage, shapes_qwenimage_pr, pickscore_qwenimage, pickscore_qwenimage_pr)


def get_config(name="shapes_qwenimage"):
    runs = {run.__name__: run for run in RUNS}
    run, *variants = name.split(",")
    if run not in runs or set(variants) - {"smoke"}:
        near = difflib.get_close_matches(run, runs, cutoff=0) or runs
        raise ValueError(f"no run {name!r} in config/grpo.py; nearest: {', '.join(near)}; each also as NAME,smoke")
    try:
        config = runs[run]()
    except (AttributeError, KeyError, TypeError) as error:  # ml_collections' own words name the nearest key
        raise ValueError(f"{run} in config/grpo.py sets what config/base.py does not know: {error}") from error
    if variants:
        config = smoke(config)
    config.name = name.replace(",", "_")
    return config
