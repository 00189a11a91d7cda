"""A trained run in a notebook: images of its policy or of its base, the branches of a prompt, and their scores.

import flow_grpo
run = flow_grpo.load_run("runs/shapes_qwenimage_nft")
prompts = run.prompts("test")[:4]
images = run.draw(prompts, seeds=[0, 1])
run.sheet(images, run.score(images, prompts)["avg"])
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch import Tensor

from flow_grpo.algorithms import batch_plan
from flow_grpo.base import folders
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import counted, quoted
from flow_grpo.base.pixels import film_strips, to_pictures
from flow_grpo.base.prompt import Prompt
from flow_grpo.data.prompts import load_prompts
from flow_grpo.diffusers_patch import model_classes
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.sample_with_logprob import SamplingJob, sample
from flow_grpo.diffusers_patch.sampling_params import SamplingParams
from flow_grpo.diffusers_patch.size import training_size
from flow_grpo.evaluation import policies_to_compare
from flow_grpo.monitoring.run_history import read_run
from flow_grpo.monitoring.sheets import GroupRow, group_sheet
from flow_grpo.rewards import check_prompts
from flow_grpo.scoring.pool import Pool
from flow_grpo.scoring.settings import check_rewards
from flow_grpo.settings.sections import Config
from flow_grpo.weights import policies

WEIGHTS = ("best", "last", "base")
# Of a run without branches.
NUM_BRANCHES = 6


@dataclass(frozen=True)
class LoadedRun:
    """A run's policy, with the settings that it was trained with. `flow_grpo.load_run` makes it."""

    folder: Path
    config: Config
    model: FlowModel
    device: torch.device

    @property
    def pipeline(self) -> DiffusionPipeline:
        """Diffusers pipeline with the run's weights; `pipeline("a cat", **run.call_arguments)` draws as evaluations
        do."""
        return self.model.pipeline

    @property
    def call_arguments(self) -> dict[str, Any]:
        """Size, steps and guidance of the run's evaluations, as the pipeline's call takes them."""
        settings = self.config.eval
        return self.model.call_arguments(training_size(self.config), settings.num_steps, settings.guidance_scale)

    def prompts(self, split: str = "test") -> list[Prompt]:
        """Return the prompts of a split of the run's data set, with what rewards need besides their texts."""
        return load_prompts(self.config.dataset, split)

    def draw(self, prompts: Sequence[str | Prompt], seeds: Sequence[int] = (0,)) -> Tensor:
        """Draw an image of each prompt and seed as the run's evaluations do, without noise in the steps.

        Returns:
            [P, S, 3, H, W] in [0, 1], of videos [P, S, f, 3, H, W].
        """
        if not prompts or not seeds:
            raise UserError("prompts or seeds is empty; there must be at least one of each")
        params = SamplingParams(self.config.eval.num_steps, self.config.eval.guidance_scale)
        rows_per_forward = self.config.eval.batch_size
        columns = []
        for seed in seeds:
            parts = []
            for start in range(0, len(prompts), rows_per_forward):
                parts.append(self._sampled(prompts[start : start + rows_per_forward], seed, params, range(0)))
            columns.append(torch.cat(parts))
        return torch.stack(columns, 1)

    def branches(self, prompt: str | Prompt, seed: int = 0, num_branches: int = 0) -> Tensor:
        """Draw the branches of one trunk with the noise, steps and guidance of the run's rollout.

        Args:
            num_branches: at each step; 0 = as the run, or NUM_BRANCHES where it has none.

        Returns:
            [K, J, 3, H, W] in [0, 1]: trained steps, branches; of videos [K, J, f, 3, H, W].
        """
        settings = self.config.sample
        num_steps = settings.num_steps - 1
        if settings.num_branches > 1:
            num_steps = batch_plan.num_trained_steps(settings, self.config.train)
            num_branches = num_branches or settings.num_branches
        params = SamplingParams.of(settings)
        return self._sampled([prompt], seed, params, range(num_steps), num_branches or NUM_BRANCHES)[0]

    def _sampled(
        self, prompts: Sequence[str | Prompt], seed: int, params: SamplingParams, steps: range, num_branches: int = 1
    ) -> Tensor:
        """Draw [P, ..., 3, H, W] from a seed's noise."""
        records = [prompt if isinstance(prompt, Prompt) else Prompt(prompt) for prompt in prompts]
        guided = self.model.is_guided(params.guidance_scale)
        condition = self.model.encode(records, width=self.config.text_tokens, guided=guided)
        generators = [torch.Generator().manual_seed(seed) for _ in records]
        job = SamplingJob(self.model, condition, generators, params, training_size(self.config))
        velocity = partial(policies.predict, self.model, self.config.precision)
        return sample(
            job,
            noisy_steps=steps,
            num_branches=num_branches,
            completion_batch_size=max(len(records), self.config.sample.completion_batch_size),
            velocity=velocity,
            vae_batch_size=self.config.vae_batch_size,
        ).images

    def score(self, images: Tensor, prompts: Sequence[str | Prompt]) -> dict[str, Tensor]:
        """Score images by the run's rewards, those of eval.rewards among them.

        Args:
            images: [P, ..., 3, H, W] in [0, 1], or videos, as `draw` returns them; of `branches`, which have one
                prompt, pass branches[None].

        Returns:
            name -> [P, ...], "avg" among them.
        """
        if len(images) != len(prompts):
            raise UserError(
                f"there are images of {counted(len(images), 'prompts')}, and {counted(len(prompts), 'prompts')}"
            )
        num_leading = images.ndim - len(self.model.image_shape(training_size(self.config)))
        shape = images.shape[:num_leading]
        per_prompt = shape[1:].numel()
        repeated = []
        for prompt in prompts:
            repeated += [prompt if isinstance(prompt, Prompt) else Prompt(prompt)] * per_prompt
        check_rewards(self.config.reward_fn, self.config.eval.rewards, self.config.reward)
        check_prompts(self.config.reward_fn, repeated, self.config.eval.rewards)
        pool = Pool(self.device, self.config.reward_fn, self.config.eval.rewards, self.config.reward)
        try:
            scores = pool.submit(images.flatten(0, num_leading - 1), repeated, everything=True)()
        finally:
            pool.close()
        return {name: values.view(shape) for name, values in scores.items()}

    def sheet(self, images: Tensor, scores: Tensor, titles: Sequence[str] = ()) -> Image.Image:
        """Draw a row for each group of images, with their scores, the best and the worst marked; a notebook shows it.

        Args:
            images: [R, C, 3, H, W] in [0, 1], or videos [R, C, f, 3, H, W].
            scores: [R, C].
            titles: R; () = the numbers of the rows.
        """
        rows = []
        for number, (group, values) in enumerate(zip(images, scores, strict=True)):
            title = titles[number] if titles else str(number)
            rows.append(GroupRow([title], to_pictures(film_strips(group)), values.tolist()))
        return group_sheet(rows)


def load_run(folder: Path | str, weights: str, device: torch.device | str | None) -> LoadedRun:
    """Load a run; `flow_grpo.load_run` says more."""
    folder = Path(folder)
    if weights not in WEIGHTS:
        raise UserError(f"weights is {quoted(weights)}; it may be {', '.join(WEIGHTS)}")
    if not folders.is_run(folder):
        raise UserError(f"{folder} is no run's folder: it has no config.json and metrics.jsonl")
    config = read_run(folder, folder.name).config
    name = config.model if weights == "base" else str(folder)
    candidate = policies_to_compare.find_candidate(name, policies_to_compare.run_config(folder), weights)
    family = model_classes.resolve(config.model, config.model_class)
    policies_to_compare.check_candidate(candidate, family)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = policies_to_compare.load_candidate(candidate, family, device)
    return LoadedRun(folder, config, model, device)
