"""Seconds per phase, arithmetic rates and peak memory of one epoch of a training script, as one JSON line.

    python scripts/bench.py --script train_qwenimage_pr --size tiny
    python scripts/bench.py --script train_flux --size full          one GPU of 80 GiB or more, no download
    python scripts/bench.py --script train_qwenimage_pr --size full --published --set compile=True

It runs the script's own `main` and reads the epoch's line of metrics.jsonl; the first epoch, which warms up, is not
counted. `full` is the model as published (transformer, VAE and text encoders of the real sizes, bf16) with random
weights, at the config's resolution, steps, guidance and LoRA rank, with the prompts and reward of the shapes task.
"""

import argparse
import contextlib
import gc
import importlib
import json
import runpy
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import build_random_pipeline as random_pipeline
import torch
import yaml
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from flow_grpo import preferences
from flow_grpo.diffusers_patch import flux_pipeline_with_logprob as flux
from flow_grpo.diffusers_patch import loading
from flow_grpo.diffusers_patch import qwenimage_pipeline_with_logprob as qwenimage
from flow_grpo.diffusers_patch import sd3_pipeline_with_logprob as sd3
from flow_grpo.flops import matrix_rate, row_flops

MODELS = {"qwenimage": qwenimage, "sd3": sd3, "flux": flux}
TINY = "flow_grpo/assets/tiny_qwenimage"  # lends its tokenizer and scheduler to the full size
FULL_TEXT = dict(
    vocab_size=152064,
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
)


def full_qwenimage(make):
    """Qwen-Image at its published size; `make` as in build_random_pipeline.py."""
    text_config = Qwen2_5_VLConfig(text_config=FULL_TEXT, vision_config={"out_hidden_size": 3584})
    pipeline = qwenimage.PIPELINE.from_pretrained(TINY)
    return qwenimage.PIPELINE(
        transformer=make(QwenImageTransformer2DModel, torch.bfloat16),
        vae=make(AutoencoderKLQwenImage, torch.float32),
        text_encoder=make(lambda: Qwen2_5_VLForConditionalGeneration(text_config), torch.bfloat16),
        tokenizer=pipeline.tokenizer,
        scheduler=pipeline.scheduler,
    )


FULL = {
    "qwenimage": full_qwenimage,
    "sd3": partial(random_pipeline.sd3, random_pipeline.PUBLISHED),
    "flux": partial(random_pipeline.flux, random_pipeline.PUBLISHED),
}


KEPT = ("images_per_s", "slot_use")
ROWS = {  # what a published model stores of a pair at 512 px and 48 text tokens
    "qwenimage": dict(latents=(1024, 64), embeds=(48, 3584), mask=(48,)),
    "sd3": dict(latents=(16, 64, 64), embeds=(125, 4096), pooled=(2048,)),
}


def full_model(name: str) -> SimpleNamespace:
    """The model's file, but for its weights, which are random and never on a disk."""
    light = {"qwenimage": lambda: qwenimage.without_weights(TINY)}
    light |= {other: lambda: FULL[name](lambda build, dtype: None) for other in ("sd3", "flux")}

    def load(folder, device, alone=False, text=True):
        pipeline = loading.frozen(FULL[name](random_pipeline.large_random(device)), device)
        if alone:  # as for pairs from a disk
            pipeline.register_modules(
                **{part: None for part in pipeline.components if part.startswith(("vae", "text"))}
            )
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
        return pipeline

    replaced = dict(load_pipeline=load, check_folder=lambda _: None, transformer_folder=lambda _: None)
    replaced["row_shapes"] = lambda *_: ROWS[name]
    return SimpleNamespace(**vars(MODELS[name]) | replaced | dict(without_weights=lambda _: light[name]()))


def config_of(name: str, kind: str = "pr"):
    """A run's config by its name."""
    return runpy.run_path(f"config/{kind if kind in ('nft', 'dpo') else 'grpo'}.py")["get_config"](name)


def full_config(config, kind: str):
    """The published run of this script on the shapes task, with fewer prompts (1 or 2) or pairs (64)."""
    config.dataset, config.reward_fn, config.text_tokens = "dataset/shapes", {"shapes": 1.0}, 48
    config.embeddings_cache = ""  # random text encoders are others every time
    config.sample.num_prompts_per_epoch = {"pr": 1, "nft": 1, "dpo": 64}.get(kind, 2)
    return config


def random_pairs(config, shapes: dict, folder: str) -> None:
    """Pairs of noise in the place of config.preferences.path."""
    config.preferences.path, count = folder, config.sample.num_prompts_per_epoch
    draw = {name: torch.randn(count, *shapes["latents"]) for name in preferences.LATENTS}
    draw |= {name: torch.randn(count, *shapes[name]) > -9 for name in ("mask",) if name in shapes}
    draw |= {name: torch.randn(count, *shapes[name]) for name in ("embeds", "pooled") if name in shapes}
    alike = dict(prompt="a photo of a red circle", negative_prompt="", winner_score=1.0, loser_score=0.0)
    alike |= dict(model=config.model, resolution=config.resolution, dtype=config.preferences.dtype)
    rows = draw | {name: [value] * count for name, value in alike.items()}
    preferences.write_pairs(Path(folder, "train_00000.parquet"), rows, shapes, config.preferences.dtype)


class Work:
    """FLOP of a run by phase. Stands in for a model file's predict_velocity and a script's update."""

    def __init__(self, script, model, full_weights: bool):
        self.plain, self.phase, self.flops, self.sizes = model.predict_velocity, "rollout", Counter(), {}
        self.trained, self.update = 3 if full_weights else 2, script.update
        self.start, self.first_update_s, self.optimizer_step = time.perf_counter(), None, script.optimizer_step

    def predict_velocity(self, transformer, x, t, embeds, guidance_scale):
        """The model's, counted."""
        texts = [embeds, embeds.negative] if embeds.negative and guidance_scale > 1 else [embeds]
        times = self.trained if self.phase == "update" and torch.is_grad_enabled() else 1
        for text in texts:
            self.flops[self.phase] += times * len(x) * self.size(transformer, x, text.embeds.shape[1])
        return self.plain(transformer, x, t, embeds, guidance_scale)

    def size(self, transformer, x, text_tokens: int) -> int:
        """FLOP of a row."""
        if text_tokens not in self.sizes:
            tokens = x.shape[1] if x.ndim == 3 else x[0, 0].numel() // transformer.config.patch_size**2
            self.sizes[text_tokens] = row_flops(transformer, tokens, text_tokens)
        return self.sizes[text_tokens]

    def counted_update(self, *args):
        """The script's, which what it computes is counted as."""
        self.phase = "update"
        self.update(*args)
        self.phase = "rollout"

    def timed_step(self, run):
        """The optimizer's, of which the first one's end is noted."""
        self.optimizer_step(run)
        self.first_update_s = self.first_update_s or time.perf_counter() - self.start


def epoch_figures(script: str, config, model) -> dict:
    """Run two epochs and return the second one's times, rates and memory."""
    config.num_epochs, config.eval_freq, config.save_freq = 2, 0, 0
    module = importlib.import_module(script)
    work = Work(module, model, config.lora.rank == 0)
    module.update, module.optimizer_step = work.counted_update, work.timed_step
    with tempfile.TemporaryDirectory() as folder:
        config.output_dir = f"{folder}/runs"
        if script.endswith("_dpo") and config.preferences.path:
            random_pairs(config, model.row_shapes(config.model, config.resolution, config.text_tokens), folder)
        module.main(config, SimpleNamespace(**vars(model) | dict(predict_velocity=work.predict_velocity)))
        lines = next(Path(folder).glob("runs/*/metrics.jsonl")).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    first, last = [row for row in rows if row["kind"] == "epoch"]
    gaps = [row["parity/log_prob_abs_diff_max"] for row in rows if "parity/log_prob_abs_diff_max" in row]
    figures = {"images": last["images"] - first["images"], "first_epoch_s": first["time/epoch_s"]}
    figures["first_update_s"] = work.first_update_s
    figures |= {"parity/log_prob_abs_diff_max": max(gaps)} if gaps else {}
    figures |= {name: last[name] for name in last if name.startswith(("time/", "memory/")) or name in KEPT}
    rates = {f"{phase}_tflops": flops / 2e12 / last[f"time/{phase}_s"] for phase, flops in work.flops.items()}
    return figures | rates


def published() -> dict[str, float]:
    """What bench_published.py measures, in a process of its own, which gives all memory back."""
    done = subprocess.run([sys.executable, "scripts/bench_published.py"], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(args):
    name, kind = [*args.script.split("_")[1:], ""][:2]
    script = f"train_qwenimage_{kind}".rstrip("_")
    suffix = args.script.removeprefix("train_") + args.variants
    if args.size == "full":
        model, config = full_model(name), full_config(config_of(f"pickscore_{suffix}", kind), kind)
    else:
        model, config = qwenimage, config_of(f"shapes_{suffix}", kind)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    what = dict(script=args.script, size=args.size, device=device, torch=torch.__version__, config=config.name)
    changes = dict(text.split("=", 1) for text in args.set)
    config.update_from_flattened_dict({key: yaml.safe_load(value) for key, value in changes.items()})
    with contextlib.redirect_stdout(sys.stderr):  # the run's own lines
        theirs = published() if args.published else {}
        figures = epoch_figures(script, config, model) | theirs
    if torch.cuda.is_available():
        figures["matrix_tflops"] = matrix_rate(torch.device("cuda")) / 1e12
    if theirs:
        prompts = config.sample.num_prompts_per_epoch * config.sample.num_images_per_prompt
        figures["prompt_s"] = figures["time/epoch_s"] / prompts
        figures["published/ratio"] = figures["published/prompt_s"] / figures["prompt_s"]
    print(json.dumps(what | changes | figures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scripts = [f"train_{model}{kind}" for model in MODELS for kind in ("", "_pr", "_nft", "_dpo")][:-1]
    parser.add_argument("--script", choices=scripts, default="train_qwenimage_pr")
    parser.add_argument("--size", choices=["tiny", "full"], default="tiny", help="tiny: Qwen-Image only")
    parser.add_argument("--variants", default="", help="of the config, for instance ,guard,flash")
    parser.add_argument("--published", action="store_true", help="with the published per-step loop's time per trunk")
    parser.add_argument("--set", nargs="*", default=[], help="settings of the config, such as sample.batch_size=2")
    main(parser.parse_args())
