"""Make the tiny Qwen-Image-Edit: the real classes at toy size, trained on edits of rendered shapes.

    python tools/build_tiny_qwenimage_edit.py --out runs/tiny_qwenimage_edit

The VAE is the tiny Qwen-Image's, to which the folder links. The text encoder stays as it was drawn: its tower for
pictures gives the same for all, so that an instruction is encoded once. The transformer is trained by flow matching
(arXiv:2210.02747) for a given time. Every evaluation prints strict accuracy on the test prompts as a JSON line and
writes the pipeline to a folder of its own. Shipped is one at 0.23, after 3,404 steps (215 s of an H100), as
flow_grpo/assets/tiny_qwenimage_edit. flow_grpo/assets/tiny_qwenimage_edit_first has links to all of its parts, and a
model_index.json that names the other pipeline class.
"""

import argparse
import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from build_tiny_qwenimage import (
    BATCH,
    NO_PROMPT,
    NUM_STEPS,
    PROMPT_DROPOUT,
    RESOLUTION,
    TEXT_DIM,
    build_text_encoder,
    build_tokenizer,
    evaluations,
    transformer_steps,
)
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from draw_edits import apply, render, sample_edits, sample_sources, text_index, texts
from draw_shapes import shapes_prompts
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from flow_grpo.base import locations, rng
from flow_grpo.base.prompt import Prompt, texts_of
from flow_grpo.command_line import command_line
from flow_grpo.data.prompts import load_prompts
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.models.qwenimage import encoded
from flow_grpo.diffusers_patch.models.qwenimage_edit import ImageProcessor, QwenImageEdit, QwenImageEditPlusPipeline
from flow_grpo.diffusers_patch.sample_with_logprob import pipeline_with_logprob
from flow_grpo.kernels.single_frame_vae import convolve_in_2d
from flow_grpo.rewards import edits as edits_reward

PIXELS = RESOLUTION**2  # of a source
TINY_QWENIMAGE = Path(locations.resolve("flow_grpo/assets/tiny_qwenimage"))


def build_pipeline(seed: int) -> QwenImageEditPlusPipeline:
    """Return Qwen-Image-Edit at toy size, float32, its transformer untrained. 64 x 64 pixels are 16 image tokens."""
    prompts = texts()
    for split in ("train", "test"):
        prompts += [prompt["prompt"] for prompt in shapes_prompts(split)]
    tokenizer = build_tokenizer(prompts, QwenImageEditPlusPipeline)
    text_encoder = build_text_encoder(tokenizer, seed)
    text_encoder.model.visual.merger.mlp[-1].weight.zero_()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # diffusers draws initial weights from the global generator
        transformer = QwenImageTransformer2DModel(
            in_channels=64,
            out_channels=16,
            num_layers=3,
            num_attention_heads=3,
            attention_head_dim=32,
            joint_attention_dim=TEXT_DIM,
            axes_dims_rope=(8, 12, 12),
            zero_cond_t=True,  # as of 2511
        )
    pipeline = QwenImageEditPlusPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(TINY_QWENIMAGE / "scheduler"),
        vae=AutoencoderKLQwenImage.from_pretrained(TINY_QWENIMAGE / "vae"),
        text_encoder=text_encoder.eval(),
        tokenizer=tokenizer,
        processor=ImageProcessor(Qwen2VLImageProcessorPil(), tokenizer),
        transformer=transformer.eval(),
        source_pixels=PIXELS,
        seen_pixels=PIXELS,
    )
    pipeline.register_to_config(processor=("transformers", "Qwen2VLProcessor"))  # as it is published
    convolve_in_2d(pipeline.vae.requires_grad_(False))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def save(pipeline: QwenImageEditPlusPipeline, folder: Path) -> None:
    """Write the pipeline, its transformer in bfloat16 and, beside the tiny Qwen-Image, a link for its VAE."""
    parts = dict(pipeline.components)
    parts["transformer"] = copy.deepcopy(pipeline.transformer).to(torch.bfloat16)
    copied = QwenImageEditPlusPipeline(**parts, source_pixels=PIXELS, seen_pixels=PIXELS)
    copied.register_to_config(processor=("transformers", "Qwen2VLProcessor"))
    copied.save_pretrained(folder)
    for file in (folder / "vae").iterdir():
        file.unlink()
    (folder / "vae").rmdir()
    (folder / "vae").symlink_to("../tiny_qwenimage/vae")


@torch.no_grad()
def embeddings(model: QwenImageEdit) -> tuple[Tensor, Tensor]:
    """Return the embeddings of all instructions and of none, [P, L, D], and their mask [P, L]."""
    source = torch.zeros(1, 3, RESOLUTION, RESOLUTION)
    picture = model.pipeline.image_processor.postprocess(source)[0]
    rows = [model.encode_one(Prompt(text, {}, (picture,)), None) for text in (*texts(), NO_PROMPT)]
    condition = Condition.stack(rows)
    return condition.text_embeds, condition.mask


@torch.no_grad()
def pairs(model: QwenImageEdit, num: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw latents [N, c, h, w] of edited pictures and of their sources, and numbers [N] of the instructions. N is
    `num`, rounded up to whole batches."""
    edited = []
    sources = []
    instructions = []
    for _ in range(math.ceil(num / BATCH)):
        layout = sample_sources(BATCH, generator)
        edits = sample_edits(layout, generator)
        pictures = torch.cat([render(apply(layout, edits)), render(layout)]) * 2 - 1
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
            latents = encoded(model.pipeline, pictures)
        edited.append(latents[:BATCH])
        sources.append(latents[BATCH:])
        instructions.append(text_index(layout, edits))
    return torch.cat(edited), torch.cat(sources), torch.cat(instructions)


def batches(model: QwenImageEdit, num_pairs: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Condition]]:
    """Yield x_0 of edited pictures, with the sources and instructions that they are edits of, endlessly.

    The share PROMPT_DROPOUT of them has no instruction.
    """
    embeds, mask = embeddings(model)
    device = model.device
    edited, sources, instructions = pairs(model, num_pairs, generator)
    while True:
        row = torch.randint(len(edited), (BATCH,), generator=generator, device=device)
        dropped = torch.rand(BATCH, generator=generator, device=device) < PROMPT_DROPOUT
        # The last text is none.
        text = instructions[row].masked_fill(dropped, len(embeds) - 1)
        latents = edited[row]
        x_0 = model.pipeline._pack_latents(latents, *latents.shape)
        yield x_0, Condition(embeds[text], mask=mask[text], source_1=sources[row])


def accuracy(model: QwenImageEdit, prompts: list[Prompt], seed: int, guidance_scale: float) -> dict[str, float]:
    """Return strict accuracy, of all prompts and by action."""
    generators = [rng.generator(seed, "noise", number) for number in range(len(prompts))]
    size = dict(height=RESOLUTION, width=RESOLUTION, num_steps=NUM_STEPS, guidance_scale=guidance_scale)
    images = pipeline_with_logprob(
        model.pipeline, prompts, generators, **size, window=range(0), noise_level=0.0, vae_batch_size=256
    ).images
    metadata = [prompt.metadata for prompt in prompts]
    right = edits_reward.load(images.device)(images, texts_of(prompts), metadata)["accuracy"]

    tags = [entry["tag"] for entry in metadata]
    means = {"all": round(right.mean().item(), 4)}
    for tag in sorted(set(tags)):
        has_tag = torch.tensor([tag_of_prompt == tag for tag_of_prompt in tags])
        means[tag] = round(right[has_tag].mean().item(), 4)
    return means


def train(model: QwenImageEdit, prompts: list[Prompt], args, generator: torch.Generator) -> None:
    """Train for args.transformer_s, compilation aside; evaluate and save every args.eval_every_s and at the end."""
    steps = transformer_steps(model, batches(model, args.pairs, generator), generator)
    for line, transformer in evaluations(steps, args):
        parts = model.pipeline.components | {"transformer": transformer}
        pipeline = QwenImageEditPlusPipeline(**parts, source_pixels=PIXELS, seen_pixels=PIXELS)
        current = QwenImageEdit(pipeline, model.device)
        for scale in (1, 4):
            line[f"cfg_{scale}"] = accuracy(current, prompts, args.seed, scale)
        save(pipeline, args.out / f"step_{line['steps']:06d}")
        print(json.dumps(line), flush=True)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the pipelines")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--pairs", type=int, default=65_536, help="pictures and their edits to train on, rounded up to batches of 512"
    )
    parser.add_argument("--transformer_s", type=float, default=120)
    parser.add_argument("--eval_every_s", type=float, default=12)
    return parser


def main(args) -> None:
    torch.backends.cudnn.benchmark = True
    device = torch.device(args.device)
    generator = torch.Generator(device).manual_seed(args.seed)
    model = QwenImageEdit(build_pipeline(args.seed).to(device), device)
    train(model, load_prompts("dataset/edits", "test"), args, generator)


if __name__ == "__main__":
    main(command_line.arguments(parser()))
