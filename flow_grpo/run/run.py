"""State of one training run."""

import math
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import DiffusionPipeline
from torch import Tensor

from flow_grpo.algorithms import batch_plan
from flow_grpo.algorithms.prompt_signal import PromptSignal
from flow_grpo.algorithms.ratio_statistics import FirstRatios
from flow_grpo.algorithms.rollout import TrainedRows
from flow_grpo.base import signals
from flow_grpo.base.prompt import Prompt
from flow_grpo.checkpoints import best
from flow_grpo.data import prompts
from flow_grpo.data.captioned_images import CaptionedImage
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.sampling_params import SamplingParams
from flow_grpo.diffusers_patch.size import Size, training_size
from flow_grpo.evaluation.evaluation import part_of
from flow_grpo.kernels import compilation
from flow_grpo.monitoring import health
from flow_grpo.monitoring.dashboard import Dashboard
from flow_grpo.monitoring.metrics import Meter, RowValues
from flow_grpo.plan import forwards
from flow_grpo.run.input_files import Inputs
from flow_grpo.scoring.pool import Pool
from flow_grpo.settings import table
from flow_grpo.settings.sections import Config
from flow_grpo.weights import policies
from flow_grpo.weights.ema import Ema


class Prompts(NamedTuple):
    """All prompts of a run."""

    train: list[Prompt]
    choosing: prompts.Split  # evaluated to choose the best policy
    test: prompts.Split  # choose nothing, but where the data set has no validation prompts
    evaluated: list[prompts.Split]  # each once; [] where nothing is evaluated
    drawn: bool  # whether images of the training prompts are made; not where they are stored
    files: list[prompts.PromptFile]  # of the data set, those that were opened
    data: list[CaptionedImage]  # of train.data; [] without it
    most_tokens: int = 0  # of text, of all of them; 0 = not counted

    @property
    def example(self) -> Prompt | None:
        """One of the prompts that images are made of; None if no image is ever made."""
        if self.drawn:
            return self.train[0]
        for split in self.evaluated:
            return split.prompts[0]
        return None


class Experiment(NamedTuple):
    """A run that has passed all checks, before anything of it is loaded."""

    config: Config
    family: type[FlowModel]
    plan: batch_plan.BatchPlan
    prompts: Prompts

    @property
    def is_guided(self) -> bool:
        """Return whether any forward needs the negative prompt."""
        # Every setting of a guidance scale has a name that ends so.
        scale_keys = [key for key in table.BY_KEY if key.endswith("guidance_scale")]
        return any(self.family.is_guided(table.value_of(self.config, key)) for key in scale_keys)

    @property
    def encoded_prompts(self) -> list[Prompt]:
        """Return the prompts that the run encodes: those that its epochs draw, those that are evaluated, and captions.
        [] where no image is ever made."""
        config = self.config
        run_prompts = self.prompts
        if run_prompts.example is None:
            return []
        encoded = []
        if run_prompts.drawn and config.sample.prompt_weights == "signal":
            # Which ones it draws is known when rewards are.
            encoded += run_prompts.train
        elif run_prompts.drawn:
            for epoch in range(config.num_epochs):
                picks = prompts.epoch_prompts(len(run_prompts.train), self.plan.num_groups, config.seed, epoch)
                encoded += [run_prompts.train[pick] for pick in picks]
        for split in run_prompts.evaluated:
            encoded += part_of(split, config.eval.num_prompts).prompts
        return encoded + [image.prompt for image in run_prompts.data]


class EpochStart(NamedTuple):
    """Copy of the training state before an epoch's first optimizer step."""

    tensors: dict[str, Tensor]  # as `save.state` names them, in host memory
    reference_moves: int


@dataclass
class Run:
    """State that every algorithm needs. `velocity` is the policy. `<- NAMES`: the functions that may write a field.

    `meter` averages over the ranks by itself. Of `epoch_metrics` the main rank's are logged: gather first what differs
    between ranks, by distributed.gather.
    """

    config: Config
    plan: batch_plan.BatchPlan
    rank: int
    world_size: int
    device: torch.device
    model: FlowModel  # its transformer is the policy
    prompts: Prompts
    loaded_pool: Pool | None  # of the rewards; None where no image is ever made
    optimizer: torch.optim.AdamW
    ema: Ema
    reference: policies.Reference | None  # None where train.beta is 0, unless the script asks for it
    extra_policies: dict[str, Ema]  # what else a script keeps of the policy, by a name that checkpoints store it under
    inputs: Inputs  # digests of what the run reads
    board: Dashboard
    meter: Meter  # means of what the update adds, until the next optimizer step
    embed_one: Callable[[Prompt], Condition]  # of one prompt, one row, cached
    scheduler: Any  # the rollout's, with timesteps set
    prompt_signal: PromptSignal | None = None  # by which prompts are drawn; None = none  <- wait, log_epoch, resume
    started_s: float = field(default_factory=lambda: time.monotonic())  # the clock when weights were loaded
    epoch: int = 0  # epochs completed  <- log_epoch, resume
    step: int = 0  # optimizer steps  <- optimizer_step, resume
    first_step: int = 0  # optimizer steps when this epoch began  <- log_epoch, resume
    epoch_start: EpochStart | None = None  # to go back to after a signal; None = no copy  <- keep_epoch_start
    saved_epoch: int = 0  # epochs completed when the last checkpoint was written  <- save, resume
    stopped: bool = False  # whether the run ends with this epoch  <- log_epoch, _stop
    epoch_began_s: float = field(default_factory=time.monotonic)  # the clock  <- log_epoch
    last_epoch_s: float = math.inf  # how long the last epoch took; infinite before one has ended  <- log_epoch
    on_policy: bool = True  # no optimizer step since the rollout  <- optimizer_step, log_epoch
    num_forwards: int = 0  # transformer rows of this rank since the epoch began  <- velocity, log_epoch
    first_ratios: list[FirstRatios] = field(default_factory=list)  # of this epoch  <- record_ratios, _check_parity
    row_values: list[RowValues] = field(default_factory=list)  # of this epoch  <- record_by_step, log_by_step
    trained_rows: list[TrainedRows] = field(default_factory=list)  # of an update  <- backward, optimizer_step
    data_latents: dict[Path, Tensor] = field(default_factory=dict)  # of images of train.data  <- add_data_gradients
    epoch_metrics: dict[str, float] = field(default_factory=dict)  # of this epoch's line; anyone adds  <- log_epoch
    distributions: dict[str, Tensor] = field(default_factory=dict)  # of this epoch, for trackers  <- log_epoch
    alarms: list[health.Alarm] = field(default_factory=list)  # of the last epoch  <- judge_health
    learning_rate_factor: float = 1.0  # of the configured one  <- _lower_learning_rate, resume
    num_roll_backs: int = 0  # by config.health.action  <- _roll_back, resume
    evaluations_since: int = 0  # epochs completed; earlier evaluations were made in another way  <- resume
    best_evaluation: best.Evaluation | None = None  # whose weights best/ holds  <- keep_best, resume
    test_figures: dict[str, float] = field(default_factory=dict)  # of the last test  <- _evaluate_test

    @property
    def pipeline(self) -> DiffusionPipeline:
        """Diffusers pipeline of the model."""
        return self.model.pipeline

    @property
    def pool(self) -> Pool:
        """Rewards of the run. Raises RuntimeError where none was loaded, as the run makes no image."""
        if self.loaded_pool is None:
            raise RuntimeError("this run makes no image, so it has loaded no reward that could score one")
        return self.loaded_pool

    @property
    def prompt_weights(self) -> Tensor | None:
        """Weights of the training prompts by which this epoch draws them, [P] float64; None = it draws them in shuffled
        passes over all of them."""
        if self.prompt_signal is None:
            return None
        return self.prompt_signal.weights(prompt.digest for prompt in self.prompts.train)

    @property
    def picks(self) -> list[int]:
        """Training prompts that this epoch draws: the index of each group's prompt."""
        num_prompts = len(self.prompts.train)
        return prompts.epoch_prompts(
            num_prompts, self.plan.num_groups, self.config.seed, self.epoch, self.prompt_weights
        )

    @property
    def size(self) -> Size:
        """Size of the images that are sampled and trained on."""
        return training_size(self.config)

    @property
    def params(self) -> SamplingParams:
        """Parameters by which the rollout samples and the update computes log-probs anew."""
        return SamplingParams.of(self.config.sample)

    @property
    def update_guidance(self) -> float:
        """Guidance scale of the policy's forwards in the update."""
        return forwards.update_guidance(self.config)

    @property
    def folder(self) -> Path:
        """Folder that the run writes into."""
        return self.board.run_dir

    @property
    def seconds_left(self) -> float:
        """Seconds until config.max_hours have passed since weights were loaded; infinite without that limit."""
        limit_s = (self.config.max_hours or math.inf) * 3600
        return limit_s - (time.monotonic() - self.started_s)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """Parameters that are trained."""
        return list(self.ema.parameters.values())

    @property
    def exact(self) -> Callable:
        """Function that makes the context of forwards that must have the update's bits.

        In it compiled blocks use the graph with gradients.
        """
        if not self.config.compile:
            return nullcontext
        return partial(compilation.training_graph, self.model.network, self.model.blocks)

    def velocity(
        self, x: Tensor, t: Tensor, condition: Condition, guidance_scale: float | None = None, size: Size | None = None
    ) -> Tensor:
        """Velocity of the policy, in rollout and update alike.

        Args:
            guidance_scale: None = sample.guidance_scale.
            size: None = the training size.
        """
        signals.check()
        scale = self.config.sample.guidance_scale if guidance_scale is None else guidance_scale

        # Averaged weights are applied in evaluations, whose forwards do not count.
        if not self.ema.is_applied:
            forwards_per_row = 2 if self.model.is_guided(scale) else 1
            self.num_forwards += len(x) * forwards_per_row
        return policies.predict(self.model, self.config.precision, x, t, condition, scale, size or self.size)

    def log_images(
        self, name: str, images: Tensor, captions: list[str], rewards: Iterable[float] | None = None
    ) -> None:
        """Show N images of the main rank, with a caption and, if given, a reward for each: as one picture,
        images/NAME_EPOCH.png in the run's folder, and in its trackers. The main rank's images alone are shown, and the
        report shows only those of evaluations, whose name is "eval".

        Args:
            images: [N, 3, H, W] in [0, 1].
        """
        self.board.log_images(images, captions, rewards, epoch=self.epoch, step=self.step, name=name)

    def embed(self, prompts: list[Prompt]) -> Condition:
        """Condition of several prompts, a row for each."""
        return Condition.concat([self.embed_one(prompt) for prompt in prompts])
