"""Seconds per phase and peak memory of one epoch of a training script, as one JSON line.

    python scripts/bench.py --script train_qwenimage_pr --size tiny
    python scripts/bench.py --script train_qwenimage --size full          one GPU of 80 GiB or more, no download

It runs the script's own `main` and reads the epoch's line of metrics.jsonl; the first epoch, which warms up, is not
counted. `full` is Qwen-Image as published (transformer, VAE and text encoder of the real sizes, bf16) with random
weights, 512 px, 10 steps, CFG 4, LoRA r 64, and the prompts and reward of the shapes task.
"""

import argparse
import importlib
import json
import runpy
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from flow_grpo.diffusers_patch import qwenimage_pipeline_with_logprob as qwenimage
from flow_grpo.diffusers_patch.single_frame_vae import convolve_in_2d

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


def random_module(build, device, dtype) -> torch.nn.Module:
    """A module with small random weights, made on the device: parameters never pass through host memory."""
    with init_empty_weights():
        module = build()
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in list(module.named_parameters()):
        value = torch.empty(parameter.shape, device=device, dtype=dtype)
        if parameter.ndim > 1:
            value.normal_(0, 0.02, generator=generator)
        else:
            value.fill_(1.0 if "norm" in name and "bias" not in name else 0.0)
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, torch.nn.Parameter(value, requires_grad=False))
    return module.to(device).eval()


def full_pipeline(folder, device):
    """Qwen-Image at its published size, with random weights."""
    text_config = Qwen2_5_VLConfig(text_config=FULL_TEXT, vision_config={"out_hidden_size": 3584})
    pipeline = qwenimage.PIPELINE.from_pretrained(TINY)
    pipeline = qwenimage.PIPELINE(
        transformer=random_module(QwenImageTransformer2DModel, device, torch.bfloat16),
        vae=random_module(AutoencoderKLQwenImage, device, torch.float32),
        text_encoder=random_module(lambda: Qwen2_5_VLForConditionalGeneration(text_config), device, torch.bfloat16),
        tokenizer=pipeline.tokenizer,
        scheduler=pipeline.scheduler,
    )
    convolve_in_2d(pipeline.vae)
    return pipeline


def full_config(config):
    """One prompt of the published run of this script, on the shapes task."""
    config.dataset, config.reward_fn, config.text_tokens = "dataset/shapes", {"shapes": 1.0}, 48
    config.sample.num_prompts_per_epoch = 1 if config.sample.num_branches > 1 else 2
    if config.sample.num_branches == 1:
        config.sample.num_images_per_prompt = 16
    return config


def epoch_figures(script: str, config, model) -> dict:
    """Run two epochs and return the second one's times, rates and memory."""
    config.num_epochs, config.eval_freq, config.save_freq = 2, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        config.output_dir = folder
        importlib.import_module(script).main(config, model)
        lines = next(Path(folder).glob("*/metrics.jsonl")).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    first, last = [row for row in rows if row["kind"] == "epoch"]
    images = last["images"] - first["images"]
    parity = max(row.get("parity/log_prob_abs_diff_max", 0.0) for row in rows if row["kind"] == "update")
    figures = {name: last[name] for name in last if name.startswith(("time/", "memory/")) or name == "images_per_s"}
    return {"images": images, "parity/log_prob_abs_diff_max": parity} | figures


def main(args):
    get_config = runpy.run_path("config/grpo.py")["get_config"]
    suffix = args.script.removeprefix("train_")
    model, config = qwenimage, get_config(f"shapes_{suffix}")
    if args.size == "full":
        config = full_config(get_config(f"pickscore_{suffix}"))
        replaced = dict(load_pipeline=full_pipeline, check_folder=lambda _: None, transformer_folder=lambda _: None)
        replaced["without_weights"] = lambda _: qwenimage.without_weights(TINY)
        model = SimpleNamespace(**(vars(qwenimage) | replaced))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    what = dict(script=args.script, size=args.size, device=device, torch=torch.__version__, config=config.name)
    print(json.dumps(what | epoch_figures(args.script, config, model)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", choices=["train_qwenimage", "train_qwenimage_pr"], default="train_qwenimage_pr")
    parser.add_argument("--size", choices=["tiny", "full"], default="tiny")
    main(parser.parse_args())
