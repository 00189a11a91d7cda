"""Make the tiny Wan: the real classes at toy size, trained on rendered motions until a part of its videos is right.

    python tools/build_tiny_wan.py --out runs/tiny_wan

The text encoder stays as it was drawn. The VAE begins with the tiny Qwen-Image's weights: from random ones it needs
minutes to tell shapes apart. It and the transformer (flow matching, arXiv:2210.02747) are trained for a given time
each, on prompts of the training split of dataset/motions. Every evaluation prints strict accuracy on held-out
prompts as a JSON line and writes the pipeline to a folder of its own.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from build_random_pipeline import t5_tokenizer
from build_tiny_qwenimage import (
    NUM_STEPS,
    PROMPT_DROPOUT,
    RESOLUTION,
    TEXT_DIM,
    parser,
    rounded,
    take_or_train_vae,
    train_transformer,
    transformer_steps,
)
from diffusers import (
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from draw_motions import motion_table, sample_paths, videos
from draw_shapes import render
from torch import Tensor
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

from flow_grpo.algorithms.flow_matching import velocity_error
from flow_grpo.base import locations, rng
from flow_grpo.base.prompt import Prompt
from flow_grpo.command_line import command_line
from flow_grpo.data.prompts import load_prompts
from flow_grpo.diffusers_patch import registry
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.models.wan import Wan
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.rewards import motions as motions_reward

NUM_FRAMES = 9  # three frames of latents
SIZE = Size(RESOLUTION, RESOLUTION, NUM_FRAMES)
TEXT_TOKENS = 32
SHIFT = 3.0  # of the sigmas, as published for 480 lines
VAE_BATCH = 24
BATCH = 256
NUM_ENCODED = 8 * BATCH
TIMES_USED = 8
TINY_QWENIMAGE = locations.resolve(registry.tiny_folder("qwenimage"))
PROMPTS = Path(__file__).parents[1] / "dataset" / "motions" / "train_metadata.jsonl"


def prompts_of(split: str) -> list[dict]:
    """Return the metadata of a split's prompts."""
    return [prompt.metadata for prompt in load_prompts("dataset/motions", split)]


def build_text_encoder(tokenizer: T5Tokenizer, seed: int) -> UMT5EncoderModel:
    """Return UMT5 with frozen random weights, like the tiny Qwen-Image's: unit embeddings, to which the layers add a
    little of the other words."""
    config = UMT5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_DIM,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    encoder = UMT5EncoderModel(config).requires_grad_(False)
    for name, weight in encoder.named_parameters():
        if weight.ndim > 1:
            weight.normal_(0, encoder_std(name, weight), generator=rng.generator(seed, "text encoder", name))
    return rounded(encoder)


def encoder_std(name: str, weight: Tensor) -> float:
    """Return the standard deviation that a weight of the text encoder is drawn with.

    The transformer sees words without their order. A head therefore looks at words of certain distances, by its bias
    for each distance, and adds much of them: "left" is to tell which object moves there.
    """
    if "shared" in name or "embed_tokens" in name:
        return 1.0
    if "relative_attention_bias" in name:
        return 4.0
    by_width = 1 / math.sqrt(weight[0].numel())
    return by_width if name.endswith("SelfAttention.o.weight") else by_width / 2


@torch.no_grad()
def begin_as_pictures(vae: AutoencoderKLWan) -> None:
    """Give a VAE the weights of the tiny Qwen-Image's, which is the same network but for four layers in time.

    Each frame is then encoded by itself: kernels do not look back, of two frames that become one the newer is kept, and
    a frame that becomes two is repeated.
    """
    pictures = AutoencoderKLQwenImage.from_pretrained(TINY_QWENIMAGE, subfolder="vae", torch_dtype=torch.float32)
    in_time, unknown = vae.load_state_dict(pictures.state_dict(), strict=False)
    assert not unknown, unknown
    for name, weight in vae.named_parameters():
        if name in in_time:
            weight.zero_()
        if weight.ndim < 5:
            continue
        outputs, inputs = weight.shape[:2]
        weight[:, :, :-1] = 0  # what looks back
        if name in in_time:
            weight[:, :, -1, 0, 0] = torch.eye(inputs).repeat(outputs // inputs, 1)


def build_pipeline(seed: int) -> WanPipeline:
    """Return Wan at toy size, float32, untrained. 9 frames of 64 x 64 pixels are 48 tokens."""
    tokenizer = t5_tokenizer(PROMPTS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # diffusers draws initial weights from the global generator
        vae = AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1)
        transformer = WanTransformer3DModel(
            num_layers=4,
            num_attention_heads=4,
            attention_head_dim=32,
            ffn_dim=384,
            freq_dim=64,
            text_dim=TEXT_DIM,
        )
        text_encoder = build_text_encoder(tokenizer, seed)
    begin_as_pictures(vae)
    pipe = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder.eval(),
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        transformer=transformer.eval(),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def rendered(prompts: list[dict], batch: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (index into `prompts` [B], videos [B, f, 3, 64, 64] in [-1, 1]) endlessly."""
    table = motion_table(prompts, generator.device)
    while True:
        index = torch.randint(len(prompts), (batch,), generator=generator, device=generator.device)
        layout = sample_paths(table, index, NUM_FRAMES, generator)
        yield index, render(layout).unflatten(0, (batch, NUM_FRAMES)) * 2 - 1


def accuracy(drawn: Tensor, prompts: list[dict]) -> dict[str, float]:
    """Return the strict accuracy of videos [P, f, 3, R, R] in [0, 1]: {"all": mean, tag: ...}."""
    score = motions_reward.load(drawn.device)
    scores = score(drawn.float().cpu(), [], prompts)["accuracy"].tolist()
    by_tag: dict[str, list[float]] = {}
    for prompt, score in zip(prompts, scores, strict=True):
        by_tag.setdefault(prompt["tag"], []).append(score)
    means = {"all": round(sum(scores) / len(scores), 4)}
    for tag, values in by_tag.items():
        means[tag] = round(sum(values) / len(values), 4)
    return means


def reconstruction(vae: AutoencoderKLWan, prompts: list[dict], generator: torch.Generator) -> dict:
    """Measure what the VAE does to renders of `prompts`: pixel L1 on [-1, 1], accuracy before and after."""
    drawn = videos(prompts, NUM_FRAMES, generator)
    with torch.no_grad():
        latents = vae.encode(drawn.transpose(1, 2) * 2 - 1).latent_dist.mean
        again = (vae.decode(latents).sample.transpose(1, 2) + 1) / 2
    error = 2 * (again - drawn).abs().mean().item()
    return {"l1": round(error, 4), "renders": accuracy(drawn, prompts), "reconstructions": accuracy(again, prompts)}


def sample(pipe: WanPipeline, prompts: list[dict], seed: int, guidance_scale: float) -> Tensor:
    """Draw videos [P, f, 3, R, R] in [0, 1] by the pipeline's own call."""
    texts = [prompt["prompt"] for prompt in prompts]
    generator = torch.Generator().manual_seed(seed)
    size = dict(height=RESOLUTION, width=RESOLUTION, num_frames=NUM_FRAMES, num_inference_steps=NUM_STEPS)
    drawn = pipe(
        texts,
        **size,
        guidance_scale=guidance_scale,
        max_sequence_length=TEXT_TOKENS,
        output_type="pt",
        generator=generator,
    )
    return drawn.frames.float()


def flow_matching_loss(model: FlowModel, x_0: Tensor, condition: Condition, generator: torch.Generator) -> Tensor:
    """Return the mean of |v(x_sigma, sigma) - (noise - x_0)|^2; sigma is logit-normal and then shifted."""
    normal = torch.randn(len(x_0), generator=generator, device=x_0.device)
    even = normal.sigmoid().clamp(1e-4, 1 - 1e-4)
    sigma = SHIFT * even / (1 + (SHIFT - 1) * even)
    noise = torch.randn(x_0.shape, generator=generator, device=x_0.device)
    x_t = torch.lerp(x_0, noise, sigma.view(-1, 1, 1, 1, 1))
    velocity = model.forward(x_t, 1000 * sigma, condition, 1.0, SIZE)
    return velocity_error(velocity, x_0, noise).mean()


@torch.no_grad()
def batches(
    model: Wan, prompts: list[dict], generator: torch.Generator, num_encoded: int = NUM_ENCODED
) -> Iterator[tuple[Tensor, Condition]]:
    """Yield x_0 of rendered videos with their prompts, endlessly. The share PROMPT_DROPOUT of them has no prompt.

    Encoding takes longer than a step: of `num_encoded` videos each is used TIMES_USED times, in batches drawn anew.
    """
    device = model.device
    embeds = []
    for text in [*(prompt["prompt"] for prompt in prompts), ""]:
        embeds.append(model.encode_one(Prompt(text), TEXT_TOKENS).text_embeds)
    embeds = torch.cat(embeds)
    for index, drawn in rendered(prompts, num_encoded, generator):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            x_0 = model.encode_batch(drawn)
        for _ in range(TIMES_USED):
            order = torch.randperm(num_encoded, generator=generator, device=device)
            for rows in order.split(BATCH):
                dropped = torch.rand(len(rows), generator=generator, device=device) < PROMPT_DROPOUT
                text = index[rows].masked_fill(dropped, len(prompts))
                yield x_0[rows], Condition(embeds[text])


def main(args) -> None:
    torch.backends.cudnn.benchmark = True
    generator = torch.Generator(args.device).manual_seed(args.seed)
    train = prompts_of("train")
    held_out = prompts_of("test")[: args.eval_prompts]
    pipe = build_pipeline(args.seed).to(args.device)
    videos_of_vae = (drawn.transpose(1, 2) for _, drawn in rendered(train, VAE_BATCH, generator))
    vae_steps = take_or_train_vae(pipe, videos_of_vae, args, generator)
    line = {"part": "vae", "steps": vae_steps} | reconstruction(pipe.vae, held_out, generator)
    print(json.dumps(line), flush=True)

    def measure(current: WanPipeline, scale: float) -> dict:
        return accuracy(sample(current, held_out, args.seed, scale), held_out)

    model = Wan(pipe, generator.device)
    steps = transformer_steps(
        model, batches(model, train, generator), generator, loss_of=flow_matching_loss, recorded=True
    )
    train_transformer(pipe, steps, measure, args)


if __name__ == "__main__":
    flags = parser(__doc__)
    flags.set_defaults(vae_s=200, eval_every_s=30, eval_prompts=240)
    main(command_line.arguments(flags))
