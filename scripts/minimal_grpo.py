"""Flow-GRPO in one file, to be read first: the shipped tiny Qwen-Image learns to draw what its prompts say, on a CPU.

    python scripts/minimal_grpo.py

Every epoch samples a group of images for each prompt with noise in their first steps, scores them, and makes the noisy
steps of a group's better images more likely (arXiv:2505.05470). scripts/train_qwenimage.py has all options.
"""

import argparse

if __name__ == "__main__":  # answers --help before torch is imported
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from diffusers import QwenImagePipeline
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.algorithms.advantages import group_advantages
from flow_grpo.algorithms.losses import clipped_surrogate
from flow_grpo.base import locations
from flow_grpo.diffusers_patch.sde_with_logprob import sde_step_with_logprob

MODEL = locations.resolve("flow_grpo/assets/tiny_qwenimage")
PROMPTS = Path(locations.resolve("dataset/shapes/train_metadata.jsonl"))

SIDE = 4  # an image is 4 x 4 tokens of 16 x 16 pixels
CHANNELS = 64  # of a token of the latents
NUM_STEPS = 10  # denoising steps
NUM_NOISY = 3  # the first of them, which have noise and are trained
NOISE_LEVEL = 0.7
NUM_UPDATES = 2  # optimizer steps per epoch
CLIP_RANGE = 1e-4
LEARNING_RATE = 1e-4


class NoisyStep(NamedTuple):
    """A denoising step with noise, as the update needs it. B images, N tokens, C channels."""

    timestep: Tensor  # [B]
    latents: Tensor  # [B, N, C], before the step
    next_latents: Tensor  # [B, N, C], after it
    log_prob: Tensor  # [B], of next_latents under the policy that drew them


def draw_noise(generators: list[torch.Generator]) -> Tensor:
    """Standard normal latents [B, N, C], each image's from a generator of its own."""
    return torch.stack([torch.randn(SIDE * SIDE, CHANNELS, generator=generator) for generator in generators])


def predict_velocity(pipeline: QwenImagePipeline, latents: Tensor, timestep: Tensor, text: tuple) -> Tensor:
    """Velocity [B, N, C] of the policy. `text` are the prompts' embeddings [B, L, D] and their mask [B, L]."""
    # Frames, rows and columns of each image.
    img_shapes = [[(1, SIDE, SIDE)]] * len(latents)
    sigma = timestep / 1000
    return pipeline.transformer(latents, *text, sigma, img_shapes, return_dict=False)[0]


@torch.no_grad()
def sample(
    pipeline: QwenImagePipeline, text: tuple, generators: list[torch.Generator]
) -> tuple[Tensor, list[NoisyStep]]:
    """Sample images [B, 3, H, W] in [0, 1], with noise in their first steps. Returns them and these steps."""
    scheduler = pipeline.scheduler
    latents = draw_noise(generators)
    noisy_steps = []
    for i, t in enumerate(scheduler.timesteps):
        timestep = t.expand(len(latents))
        velocity = predict_velocity(pipeline, latents, timestep, text)
        noise_level = NOISE_LEVEL if i < NUM_NOISY else 0.0
        noise = draw_noise(generators)
        step = sde_step_with_logprob(scheduler, velocity, timestep, latents, noise_level=noise_level, noise=noise)
        if i < NUM_NOISY:
            noisy_steps.append(NoisyStep(timestep, latents, step.prev_sample, step.log_prob))
        latents = step.prev_sample
    return decode(pipeline, latents), noisy_steps


def decode(pipeline: QwenImagePipeline, latents: Tensor) -> Tensor:
    """Images [B, 3, H, W] in [0, 1] from latents [B, N, C]."""
    vae = pipeline.vae
    mean = torch.tensor(vae.config.latents_mean).view(-1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(-1, 1, 1, 1)
    latents = pipeline._unpack_latents(latents, SIDE * 16, SIDE * 16, pipeline.vae_scale_factor)

    # The VAE is one of videos; an image is its only frame.
    images = vae.decode(latents * std + mean).sample[:, :, 0]
    return (images / 2 + 0.5).clamp(0, 1)


def add_gradients(pipeline: QwenImagePipeline, text: tuple, noisy_steps: list[NoisyStep], advantages: Tensor) -> None:
    """Add the gradients of the clipped objective (eq. 5), a mean over images and noisy steps, with advantages [B]."""
    for timestep, latents, next_latents, old_log_prob in noisy_steps:
        # The same step under the present policy: how likely is it now?
        velocity = predict_velocity(pipeline, latents, timestep, text)
        step = sde_step_with_logprob(
            pipeline.scheduler, velocity, timestep, latents, noise_level=NOISE_LEVEL, prev_sample=next_latents
        )
        loss = clipped_surrogate(step.log_prob, old_log_prob, advantages, CLIP_RANGE)
        (loss.mean() / len(noisy_steps)).backward()


def load_pipeline() -> QwenImagePipeline:
    """Load the tiny model, with the schedule that its pipeline would set for images of this size."""
    pipeline = QwenImagePipeline.from_pretrained(MODEL)

    # The limits are those of its scheduler's config.
    shift = calculate_shift(SIDE * SIDE, max_seq_len=8192, max_shift=0.9)
    pipeline.scheduler.set_timesteps(sigmas=np.linspace(1, 1 / NUM_STEPS, NUM_STEPS), mu=shift)
    return pipeline


def train(reward: str, num_epochs: int, num_prompts: int, group_size: int) -> None:
    """Train, and print the mean reward of each epoch's images. `reward` names a file of flow_grpo/rewards."""
    pipeline = load_pipeline()
    score = rewards.load(reward, torch.device("cpu"))
    optimizer = torch.optim.AdamW(pipeline.transformer.parameters(), LEARNING_RATE)

    # Each prompt stands group_size times in a row: its images are neighbours.
    metadata = []
    for line in PROMPTS.read_text().splitlines()[:num_prompts]:
        metadata += [json.loads(line)] * group_size
    prompts = [row["prompt"] for row in metadata]
    groups = torch.arange(len(prompts)) // group_size
    with torch.no_grad():
        text = pipeline.encode_prompt(prompts)

    for epoch in range(num_epochs):
        # Every image of the training has a seed of its own.
        seeds = range(epoch * len(prompts), (epoch + 1) * len(prompts))
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        images, noisy_steps = sample(pipeline, text, generators)

        # A reward returns its scores, or a dict of these and of what else it measures.
        scores = score(images, prompts, metadata)
        if isinstance(scores, dict):
            scores = scores["score"]
        advantages = group_advantages(scores, groups)

        for _ in range(NUM_UPDATES):
            add_gradients(pipeline, text, noisy_steps, advantages)
            torch.nn.utils.clip_grad_norm_(pipeline.transformer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        print(f"epoch {epoch + 1:>3}/{num_epochs}  reward {scores.mean():.3f}", flush=True)


if __name__ == "__main__":
    train("shapes", num_epochs=60, num_prompts=8, group_size=8)
