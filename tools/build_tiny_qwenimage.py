"""Make the tiny Qwen-Image: the real classes at toy size, trained on rendered shapes until half its pictures are right.

    python tools/build_tiny_qwenimage.py --out runs/tiny_qwenimage

The text encoder stays as it was drawn; VAE and transformer (flow matching, arXiv:2210.02747) are trained for a given
time each, on prompts of the training split. Every evaluation prints strict accuracy on held-out prompts as a JSON line
and writes the pipeline to a folder of its own. The base is imperfect on purpose: shipped is one at about 0.4, as
flow_grpo/assets/tiny_qwenimage.
"""

import argparse
import copy
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.models.transformers import transformer_qwenimage
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from draw_shapes import accuracy, balanced, pictures, rendered, shapes_prompts
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from flow_grpo.algorithms.flow_matching import velocity_error
from flow_grpo.base import rng
from flow_grpo.command_line import command_line
from flow_grpo.data import shapes
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.models.qwenimage import QwenImage
from flow_grpo.diffusers_patch.size import Size

RESOLUTION = 64
TEXT_DIM = 64
SIZE = Size(RESOLUTION, RESOLUTION)
NUM_STEPS = 10  # Euler steps of an evaluation
NO_PROMPT = " "  # Qwen-Image's negative prompt, and what a dropped prompt becomes in training
SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]

# Of the VAE's training.
VAE_BATCH = 64
VAE_LR = 2e-3
KL_WEIGHT = 1e-4
EDGE_WEIGHT = 1.0
OBJECT_WEIGHT = 4.0
SYNC_EVERY = 10  # steps, so that the time is that of steps done and not of steps ordered

# Of the transformer's training.
BATCH = 512
LR = 1e-3
WARMUP_STEPS = 200
EMA_DECAY = 0.999
PROMPT_DROPOUT = 0.1


def build_tokenizer(prompts: list[str], pipeline_class: type = QwenImagePipeline) -> Qwen2Tokenizer:
    """Return a byte-level BPE to which every word of the template and of `prompts` is one token."""
    bare = pipeline_class(**dict.fromkeys(pipeline_class._get_signature_types()))
    template = bare.prompt_template_encode
    prompts = [NO_PROMPT, *prompts]
    texts = [template.format(prompt) for prompt in prompts]
    learned = learn_bpe(texts)
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Qwen2Tokenizer(learned["vocab"], merges, extra_special_tokens=SPECIAL_TOKENS, padding_side="right")

    # The pipeline drops the prefix by its number of tokens, which has to be that of the published tokenizer.
    prefix, suffix = (tokenizer(part).input_ids for part in template.split("{}"))
    cut = bare.prompt_template_encode_start_idx
    assert len(prefix) == cut, f"the template's prefix has {len(prefix)} tokens, the pipeline drops {cut}"
    for prompt, ids in zip(prompts, tokenizer(texts).input_ids):
        assert ids[:cut] == prefix, prompt
        assert len(ids) == cut + max(len(prompt.split()), 1) + len(suffix), f"a word of {prompt!r} is not one token"
    return tokenizer


def learn_bpe(texts: list[str]) -> dict:
    """Return "vocab" and "merges" of a byte-level BPE that is learned from texts without their special tokens."""
    bpe = Tokenizer(models.BPE())
    to_words = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([to_words, to_bytes])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=4096, initial_alphabet=alphabet, show_progress=False)
    parts = []
    for text in texts:
        parts += re.split(r"<\|\w+\|>", text)
    bpe.train_from_iterator(parts, trainer)
    return json.loads(bpe.to_str())["model"]


def build_text_encoder(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """Return Qwen2.5-VL with frozen random weights.

    Embeddings have unit variance, and the layers add a little of the words before.
    """
    text = dict(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_DIM,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    )
    vision = dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=TEXT_DIM)
    vision["fullatt_block_indexes"] = [0]
    token_id = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
    )
    encoder = Qwen2_5_VLForConditionalGeneration(config).requires_grad_(False)
    for name, weight in encoder.named_parameters():
        if weight.ndim > 1:
            std = 1 if "embed_tokens" in name else 0.5 / math.sqrt(weight[0].numel())
            weight.normal_(0, std, generator=rng.generator(seed, "text encoder", name))
    return rounded(encoder)


def build_pipeline(prompts: list[str], seed: int, num_layers: int = 4, num_heads: int = 4) -> QwenImagePipeline:
    """Return Qwen-Image at toy size, float32, untrained. 64 x 64 pixels are 16 image tokens; a head has 32 channels."""
    tokenizer = build_tokenizer(prompts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # diffusers draws initial weights from the global generator
        vae = AutoencoderKLQwenImage(
            base_dim=8, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=1, temperal_downsample=[False, False, False]
        )
        transformer = QwenImageTransformer2DModel(
            in_channels=64,
            out_channels=16,
            num_layers=num_layers,
            num_attention_heads=num_heads,
            attention_head_dim=32,
            joint_attention_dim=TEXT_DIM,
            axes_dims_rope=(8, 12, 12),
        )
        text_encoder = build_text_encoder(tokenizer, seed)
    with torch.no_grad():  # a narrow posterior to begin with, or its noise drowns the means until they have grown
        vae.quant_conv.bias[vae.config.z_dim :] -= 6
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
    )
    pipe = QwenImagePipeline(scheduler, vae.eval(), text_encoder.eval(), tokenizer, transformer.eval())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def rounded(module: torch.nn.Module) -> torch.nn.Module:
    """Round a module's float32 weights to such that bfloat16 can hold, so that what is measured is what is saved."""
    with torch.no_grad():
        for weight in module.parameters():  # not the buffers: rotary frequencies stay float32
            weight.copy_(weight.bfloat16())
    return module


def save(pipe: DiffusionPipeline, folder: Path) -> None:
    """Write the pipeline, VAE and transformer in bfloat16.

    The text encoder stays float32: transformers loads what it finds, diffusers loads float32 unless told otherwise.
    """
    parts = dict(pipe.components)
    for name in ("vae", "transformer"):
        parts[name] = copy.deepcopy(parts[name]).to(torch.bfloat16)
    type(pipe)(**parts).save_pretrained(folder)


def sample(pipe: QwenImagePipeline, prompts: list[dict], seed: int, guidance_scale: float = 1.0) -> torch.Tensor:
    """Draw images [B, 3, R, R] in [0, 1] by the pipeline's own call; guidance is CFG with the norm rescaled."""
    guidance = dict(true_cfg_scale=guidance_scale)
    if guidance_scale > 1:
        guidance["negative_prompt"] = [NO_PROMPT] * len(prompts)
    texts = [prompt["prompt"] for prompt in prompts]
    generator = torch.Generator().manual_seed(seed)
    size = dict(height=RESOLUTION, width=RESOLUTION, num_inference_steps=NUM_STEPS)
    return pipe(texts, **size, **guidance, generator=generator, output_type="pt").images.float()


def decoded(vae: AutoencoderKLQwenImage | AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Decode latents [B, C, f, h, w] to videos [B, 3, F, H, W] by the decoder itself, latent frame by latent frame.

    vae.decode clamps to [-1, 1], where a saturated pixel has no gradient.
    """
    hidden = vae.post_quant_conv(latents)
    if latents.shape[2] == 1:
        return vae.decoder(hidden)
    vae.clear_cache()
    parts = []
    for place in range(latents.shape[2]):
        vae._conv_idx = [0]
        now = hidden[:, :, place : place + 1]
        parts.append(vae.decoder(now, feat_cache=vae._feat_map, feat_idx=vae._conv_idx, first_chunk=place == 0))
    vae.clear_cache()
    return torch.cat(parts, 2)


def vae_loss(
    vae: AutoencoderKLQwenImage | AutoencoderKLWan, videos: Tensor, background: Tensor, generator: torch.Generator
) -> Tensor:
    """Return L1 and L2 on pixels, those of objects weighted up, plus L1 on their differences (edges) and a little KL.

    Most pixels are background: unweighted L1 is content with the median colour, and rare colours come out grey.

    Args:
        videos: [B, 3, F, R, R] in [-1, 1]; pictures have one frame.
        background: its colour, [3, 1, 1, 1] in [-1, 1].
    """
    posterior = vae.encode(videos).latent_dist
    noise = torch.randn(posterior.mean.shape, generator=generator, device=videos.device)
    latents = posterior.mean + posterior.std * noise
    error = decoded(vae, latents).float() - videos
    weight = 1 + OBJECT_WEIGHT * ((videos - background).abs().amax(1, keepdim=True) > 0.1)
    edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    kl = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).float().mean()
    return (weight * (error.abs() + error**2)).mean() + EDGE_WEIGHT * edges + KL_WEIGHT * kl


def as_cuda_graph(
    function: Callable[..., None], example: tuple[Tensor, ...], generator: torch.Generator
) -> Callable[..., None]:
    """Record what a function of tensors does on the GPU, and return a function that does it again with other tensors.

    A step of a small model is thousands of kernels, each of which takes longer to launch than to run. The function is
    called three times for practice; `generator` is the one that it draws from.
    """
    inputs = [tensor.clone() for tensor in example]
    practice = torch.cuda.Stream()
    practice.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(practice):
        for _ in range(3):
            function(*inputs)
    torch.cuda.current_stream().wait_stream(practice)

    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    # diffusers' Qwen-Image counts the tokens of each text, reads none of the counts, and copies a number from the host
    # for them, which no graph can.
    with patch.object(transformer_qwenimage, "compute_text_seq_len_from_mask", padded_length), torch.cuda.graph(graph):
        function(*inputs)

    def replay(*new: Tensor) -> None:
        for place, tensor in zip(inputs, new, strict=True):
            place.copy_(tensor)
        graph.replay()

    return replay


def padded_length(embeds: Tensor, mask: Tensor | None) -> tuple[int, None, Tensor | None]:
    """Stand in for diffusers' function of this signature: return the width of text [B, L, C], no lengths and the mask.

    Qwen-Image's transformer reads the first and the third.
    """
    return embeds.shape[1], None, mask


def train_vae(
    vae: AutoencoderKLQwenImage | AutoencoderKLWan,
    batches: Iterator[Tensor],
    seconds: float,
    generator: torch.Generator,
) -> int:
    """Train on videos [B, 3, F, R, R] in [-1, 1] for `seconds`, the learning rate falling to zero; record the latents'
    statistics. Return the steps."""
    device = generator.device
    on_gpu = device.type == "cuda"
    background = 2 * torch.tensor(shapes.BACKGROUND, device=device)[:, None, None, None] - 1
    lr = torch.zeros((), device=device)  # a tensor, which a CUDA graph reads anew at each step
    optimizer = torch.optim.AdamW(vae.parameters(), lr=lr, fused=on_gpu, capturable=on_gpu)

    def train_on(videos: Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = vae_loss(vae, videos, background, generator)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()

    if on_gpu:
        train_on = as_cuda_graph(train_on, (next(batches),), generator)
    step = 0
    start = time.monotonic()
    progress = 0.0
    while progress < 1:
        lr.fill_(VAE_LR * min((step + 1) / 100, 1) * 0.5 * (1 + math.cos(math.pi * progress)))
        train_on(next(batches))
        step += 1
        if step % SYNC_EVERY == 0 and on_gpu:
            torch.cuda.synchronize()
        progress = (time.monotonic() - start) / seconds
    rounded(vae.requires_grad_(False))
    record_statistics(vae, batches)
    return step


def take_or_train_vae(
    pipe: DiffusionPipeline, batches: Iterator[Tensor], args: argparse.Namespace, generator: torch.Generator
) -> int:
    """Give a pipeline the VAE of the folder args.vae, or train its own for args.vae_s. Return the steps."""
    if not args.vae:
        return train_vae(pipe.vae, batches, args.vae_s, generator)
    vae = type(pipe.vae).from_pretrained(args.vae, subfolder="vae", torch_dtype=torch.float32)
    pipe.register_modules(vae=vae.to(generator.device).eval().requires_grad_(False))
    return 0


def record_statistics(vae: AutoencoderKLQwenImage | AutoencoderKLWan, batches: Iterator[Tensor]) -> None:
    """Write mean and spread of the latents of 16 batches into the VAE's config."""
    means = []
    for _ in range(16):
        means.append(vae.encode(next(batches)).latent_dist.mean)
    spread, mean = torch.std_mean(torch.cat(means), dim=(0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=spread.tolist())


def reconstruction(vae: AutoencoderKLQwenImage, prompts: list[dict], generator: torch.Generator) -> dict:
    """Measure what the VAE does to renders of `prompts`: pixel L1 on [-1, 1], accuracy before and after."""
    images = pictures(prompts, generator)
    with torch.no_grad():
        latents = vae.encode(images[:, :, None] * 2 - 1).latent_dist.mean
        again = (vae.decode(latents).sample[:, :, 0] + 1) / 2
    error = 2 * (again - images).abs().mean().item()
    return {"l1": round(error, 4), "renders": accuracy(images, prompts), "reconstructions": accuracy(again, prompts)}


def flow_matching_loss(model: FlowModel, x_0: Tensor, condition: Condition, generator: torch.Generator) -> Tensor:
    """Return the mean of |v(x_sigma, sigma) - (noise - x_0)|^2.

    sigma is logit-normal and then shifted as the scheduler shifts its grid.
    """
    scheduler = model.pipeline.scheduler
    config = scheduler.config
    num_tokens = x_0.shape[1]
    shift = calculate_shift(
        num_tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
    )
    normal = torch.randn(len(x_0), generator=generator, device=x_0.device)
    sigma = scheduler.time_shift(shift, 1.0, normal.sigmoid().clamp(1e-4, 1 - 1e-4))
    noise = torch.randn(x_0.shape, generator=generator, device=x_0.device)
    x_t = torch.lerp(x_0, noise, sigma[:, None, None])
    velocity = model.forward(x_t, 1000 * sigma, condition, 1.0, SIZE)
    return velocity_error(velocity, x_0, noise).mean()


@torch.no_grad()
def batches(model: FlowModel, prompts: list[dict], generator: torch.Generator) -> Iterator[tuple[Tensor, Condition]]:
    """Yield x_0 of rendered pictures with their prompts, endlessly. The share PROMPT_DROPOUT of them has no prompt."""
    device = model.device
    texts = [prompt["prompt"] for prompt in prompts]
    embeds, mask = model.pipeline.encode_prompt([*texts, NO_PROMPT], device)
    for index, images in rendered(prompts, BATCH, generator):
        dropped = torch.rand(BATCH, generator=generator, device=device) < PROMPT_DROPOUT
        text = index.masked_fill(dropped, len(prompts))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            yield model.encode_batch(images), Condition(embeds[text], mask=mask[text].bool())


def transformer_steps(
    model: FlowModel,
    batches: Iterator[tuple[Tensor, Condition]],
    generator: torch.Generator,
    loss_of: Callable[..., Tensor] = flow_matching_loss,
    recorded: bool = False,
) -> Iterator[tuple[int, Tensor, torch.nn.Module]]:
    """Train the transformer on x_0 and conditions, endlessly; yield (steps done, loss, EMA transformer) of each.

    Args:
        recorded: whether a step is a CUDA graph where there is a GPU.
    """
    on_gpu = model.device.type == "cuda"
    transformer = model.transformer
    ema = copy.deepcopy(transformer).requires_grad_(False)
    if on_gpu:
        torch._dynamo.config.suppress_errors = True  # what does not compile runs as it is
        transformer.compile_repeated_blocks(dynamic=False)
    weights = list(transformer.parameters())
    averages = list(ema.parameters())
    lr = torch.zeros((), device=model.device)  # a tensor, which a CUDA graph reads anew at each step
    update, loss = transformer_update(model, next(batches), lr, generator, loss_of, recorded)
    for step, (x_0, condition) in enumerate(batches, start=1):
        lr.fill_(LR * min(step / WARMUP_STEPS, 1))
        update(x_0, *condition.tensors().values())
        with torch.no_grad():
            torch._foreach_lerp_(averages, weights, 1 - min(EMA_DECAY, (1 + step) / (10 + step)))
        if step % SYNC_EVERY == 0 and on_gpu:
            torch.cuda.synchronize()
        yield step, loss, ema


def transformer_update(
    model: FlowModel,
    example: tuple[Tensor, Condition],
    lr: Tensor,
    generator: torch.Generator,
    loss_of: Callable[..., Tensor],
    recorded: bool,
) -> tuple[Callable[..., None], Tensor]:
    """Return a function of x_0 and the fields of a condition that makes a step of AdamW, and the loss that it leaves.

    Args:
        example: has the shapes of all batches.
        recorded: whether the step is a CUDA graph where there is a GPU.
    """
    on_gpu = model.device.type == "cuda"
    weights = list(model.transformer.parameters())
    optimizer = torch.optim.AdamW(weights, lr=lr, fused=on_gpu, capturable=on_gpu)
    last_loss = torch.zeros((), device=model.device)
    first_x_0, first_condition = example
    fields = first_condition.tensors()

    def update(x_0: Tensor, *values: Tensor) -> None:
        condition = Condition(**dict(zip(fields, values, strict=True)))
        with torch.autocast(model.device.type, torch.bfloat16, enabled=on_gpu):
            loss = loss_of(model, x_0, condition, generator)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        last_loss.copy_(loss.detach())

    if recorded and on_gpu:
        update = as_cuda_graph(update, (first_x_0, *fields.values()), generator)
    return update, last_loss


def train_transformer(pipe: DiffusionPipeline, steps: Iterator, measure: Callable[..., dict], args) -> None:
    """Train for args.transformer_s, compilation aside; evaluate and save every args.eval_every_s and at the end.

    Args:
        steps: from `transformer_steps`.
        measure: (pipeline, guidance scale) -> its accuracies.
    """
    for line, transformer in evaluations(steps, args):
        current = type(pipe)(**(pipe.components | {"transformer": transformer}))
        current.set_progress_bar_config(disable=True)
        for scale in (1, 4):
            line[f"cfg_{scale}"] = measure(current, scale)
        save(current, args.out / f"step_{line['steps']:06d}")
        print(json.dumps({"part": "transformer"} | line), flush=True)


def evaluations(steps: Iterator, args) -> Iterator[tuple[dict[str, float], torch.nn.Module]]:
    """Take steps (number, loss, EMA transformer) for args.transformer_s; yield what is to be evaluated.

    That is the last step and one every args.eval_every_s: what its JSON line begins with, and the rounded transformer.
    Compilation does not count.
    """
    start = time.monotonic()
    next_evaluation = args.eval_every_s
    for step, loss, ema in steps:
        if step == 1:
            start = time.monotonic()
        seconds = time.monotonic() - start
        if seconds < min(next_evaluation, args.transformer_s):
            continue
        line = {"seconds": round(seconds, 1), "steps": step, "loss": round(loss.item(), 4)}
        yield line, rounded(copy.deepcopy(ema))
        if seconds >= args.transformer_s:
            return
        next_evaluation = time.monotonic() - start + args.eval_every_s


def parser(description: str = __doc__) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the pipelines")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae", help="folder of a pipeline whose VAE is taken, in place of training one")
    parser.add_argument("--vae_s", type=float, default=160)
    parser.add_argument("--transformer_s", type=float, default=310)
    parser.add_argument("--eval_every_s", type=float, default=22)
    parser.add_argument("--eval_prompts", type=int, default=576)
    return parser


def main(args) -> None:
    torch.backends.cudnn.benchmark = True
    generator = torch.Generator(args.device).manual_seed(args.seed)
    train = shapes_prompts("train")
    test = shapes_prompts("test")
    texts = [prompt["prompt"] for prompt in train + test]
    pipe = build_pipeline(texts, args.seed, args.layers, args.heads).to(args.device)
    pictures_of_vae = (images[:, :, None] for _, images in rendered(train, VAE_BATCH, generator))
    vae_steps = take_or_train_vae(pipe, pictures_of_vae, args, generator)
    held_out = balanced(test, args.eval_prompts)
    line = {"part": "vae", "steps": vae_steps} | reconstruction(pipe.vae, held_out, generator)
    print(json.dumps(line), flush=True)

    def measure(current: QwenImagePipeline, scale: float) -> dict:
        return accuracy(sample(current, held_out, args.seed, scale), held_out)

    model = QwenImage(pipe, generator.device)
    steps = transformer_steps(model, batches(model, train, generator), generator, recorded=args.cuda_graph)
    train_transformer(pipe, steps, measure, args)


if __name__ == "__main__":
    flags = parser()
    flags.add_argument("--layers", type=int, default=4, help="of the transformer")
    flags.add_argument("--heads", type=int, default=4, help="of each of its layers, of 32 channels")
    flags.add_argument(
        "--cuda_graph",
        action="store_true",
        help="record a step of the transformer: 72 a second, where it once ended in an illegal memory access",
    )
    main(command_line.arguments(flags))
