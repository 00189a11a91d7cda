"""Flow-GRPO in one file, to be read first: the shipped tiny Qwen-Image learns to draw what its prompts say, on a CPU.

    python scripts/minimal_grpo.py

Every epoch draws a group of images of each prompt with noise in their first steps, scores them, and makes the noisy
steps of a group's better images more likely (arXiv:2505.05470). scripts/train_qwenimage.py does the same with LoRA,
evaluations, checkpoints, several GPUs and all options. The printed reward is the mean over the epoch's images.
"""

from flow_grpo.settings import command_line

if __name__ == "__main__":
    command_line.arguments(command_line.parser(__doc__))  # none but --help, before torch is imported

import torch
from diffusers import QwenImagePipeline
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.algorithms import losses
from flow_grpo.algorithms.advantages import group_advantages
from flow_grpo.base import shipped
from flow_grpo.data.prompts import load_prompts
from flow_grpo.diffusers_patch import model_classes
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.sample_with_logprob import Samples, pipeline_with_logprob
from flow_grpo.diffusers_patch.sde_with_logprob import sde_step_with_logprob
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.rewards.scores import as_scores

SIZE = Size(64, 64)
NUM_STEPS, NOISY, NOISE_LEVEL = 10, range(3), 0.7  # denoising steps; those with noise; how much
NUM_UPDATES, CLIP_RANGE, LEARNING_RATE = 2, 1e-4, 1e-4  # updates of an epoch; the second one's ratios are not 1


def sample(model: FlowModel, condition: Condition, epoch: int) -> Samples:
    """One image for each of the B rows, with the log-probs of its noisy steps."""
    num_images = len(condition.text_embeds)
    return pipeline_with_logprob(
        model.pipeline,
        condition,
        [torch.Generator().manual_seed(epoch * num_images + number) for number in range(num_images)],
        window=NOISY,
        noise_level=NOISE_LEVEL,
        num_steps=NUM_STEPS,
        height=SIZE.height,
        width=SIZE.width,
        guidance_scale=1.0,
    )


def add_gradients(model: FlowModel, condition: Condition, sampled: Samples, advantages: Tensor) -> None:
    """Of the clipped objective (eq. 5), a mean over B images and their noisy steps. advantages: [B]."""
    scheduler = model.schedule(NUM_STEPS, SIZE)
    for traced in sampled.trace:
        velocity = model.velocity(traced.latents, traced.timestep, condition, 1.0, SIZE)
        step = sde_step_with_logprob(
            scheduler,
            velocity,
            traced.timestep,
            traced.latents,
            noise_level=NOISE_LEVEL,
            prev_sample=traced.step.next_latents,
        )
        loss = losses.clipped_surrogate(step.log_prob, traced.step.log_prob, advantages, CLIP_RANGE)
        (loss.mean() / len(sampled.trace)).backward()


def train(reward: str, num_epochs: int, num_prompts: int, group_size: int) -> list[float]:
    """The mean reward of each epoch's images; `reward` names a file of flow_grpo/rewards."""
    pipeline = QwenImagePipeline.from_pretrained(shipped.find("flow_grpo/assets/tiny_qwenimage"))
    model, score = model_classes.of_pipeline(pipeline), rewards.load(reward, torch.device("cpu"))
    optimizer = torch.optim.AdamW(pipeline.transformer.parameters(), LEARNING_RATE)
    prompts = load_prompts("dataset/shapes", "train")[:num_prompts]
    prompts = [prompt for prompt in prompts for _ in range(group_size)]
    texts, metadata = [prompt.text for prompt in prompts], [prompt.metadata for prompt in prompts]
    groups, condition, means = torch.arange(num_prompts).repeat_interleave(group_size), model.encode(prompts), []
    for epoch in range(num_epochs):
        sampled = sample(model, condition, epoch)
        scores = as_scores(score(sampled.images, texts, metadata))["score"]
        for _ in range(NUM_UPDATES):
            add_gradients(model, condition, sampled, group_advantages(scores, groups))
            torch.nn.utils.clip_grad_norm_(pipeline.transformer.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        means.append(scores.mean().item())
        print(f"epoch {epoch + 1:>3}/{num_epochs}  reward {means[-1]:.3f}", flush=True)
    return means


if __name__ == "__main__":
    train("shapes", num_epochs=60, num_prompts=8, group_size=8)
