"""How many rows of the transformer's forwards an epoch has, from its settings alone."""

from typing import NamedTuple

from flow_grpo.algorithms.batch_plan import BatchPlan
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.sampling_params import Shortcuts
from flow_grpo.diffusers_patch.solvers import num_forwards
from flow_grpo.settings import table
from flow_grpo.settings.objectives import FORWARD_OBJECTIVES
from flow_grpo.settings.sections import Config, Sample, Train


class Forwards(NamedTuple):
    """Rows of an epoch's forwards, over all GPUs. A guided row counts two."""

    exact: float  # of the rollout, whose velocity enters a log-prob, or has a gradient in the update
    fast: float  # of the rollout, the others
    frozen: float  # of the update, without gradients: reference, old policy, teachers
    trained: float  # of the update, with gradients

    @property
    def rollout(self) -> float:
        """Rows of the rollout."""
        return self.exact + self.fast

    @property
    def update(self) -> float:
        """Rows of the update; a backward counts none."""
        return self.frozen + self.trained


def of_epoch(config: Config, plan: BatchPlan, family: type[FlowModel]) -> Forwards:
    """Return the rows of an epoch's forwards; on average over the places of a window that moves."""
    num_starts = plan.num_groups * plan.group_size
    per_start = _steps_of_start(config, plan)
    update_scale = update_guidance(config)
    # A reference that moves is guided as the policy, from its first move on.
    reference_scale = update_scale
    if not config.train.moves_reference:
        reference_scale = config.train.reference_guidance_scale or update_scale

    rollout_rows = _rows(family, config.sample.guidance_scale)
    policy_rows = _rows(family, update_scale)
    inner_epochs = config.train.inner_epochs
    rows = num_starts * per_start.trained * inner_epochs
    frozen = rows * _num_other_policies(config) * policy_rows
    if has_reference(config):
        frozen += rows * _rows(family, reference_scale)
    if config.train.old_log_prob == "recompute":
        frozen += num_starts * per_start.trained * policy_rows
    trained = rows * policy_rows
    if config.train.detach_negative and policy_rows == 2:
        # The negative forward has no gradient.
        trained -= rows
        frozen += rows
    return Forwards(
        exact=num_starts * per_start.exact * rollout_rows,
        fast=num_starts * per_start.fast * rollout_rows,
        frozen=frozen,
        trained=trained + of_data(config, plan),
    )


def update_guidance(config: Config) -> float:
    """Return the guidance scale of the policy's forwards in the update. Pairs are compared without guidance."""
    if config.algorithm == table.DPO:
        return 0.0
    return config.train.guidance_scale or config.sample.guidance_scale


def has_reference(config: Config) -> bool:
    """Return whether a run keeps a reference policy: DPO's compares with one, others are held to it by train.beta."""
    return config.train.beta > 0 or config.algorithm == table.DPO


def of_data(config: Config, plan: BatchPlan) -> float:
    """Return the rows of an epoch's forwards of images of train.data, without guidance: one for each row of the update,
    and of reward gradients for each image."""
    if not config.train.data:
        return 0
    num_starts = plan.num_groups * plan.group_size
    if config.algorithm == table.REFL:
        return num_starts
    return num_starts * _steps_of_start(config, plan).trained * config.train.inner_epochs


def of_evaluation(config: Config, num_prompts: int, family: type[FlowModel], shortcuts: Shortcuts) -> float:
    """Return the rows of the forwards of an evaluation of this many prompts."""
    images = num_prompts * config.eval.noises_per_prompt
    forwards = _without_noise(config.eval.num_steps, shortcuts.flash_ratio, shortcuts.flash_solver)
    return images * forwards * _rows(family, config.eval.guidance_scale)


class _Start(NamedTuple):
    """Steps of one image or trunk, and of the branches that leave it: one forward each, without guidance."""

    exact: float  # as in Forwards
    fast: float  # as in Forwards
    trained: float  # rows of one inner epoch's update


def _rows(family: type[FlowModel], guidance_scale: float) -> int:
    """Return the rows of a forward that one velocity takes: 2 with guidance, 1 without."""
    return 2 if family.is_guided(guidance_scale) else 1


def _num_other_policies(config: Config) -> int:
    """Number of policies besides the trained one and the reference that an update asks for velocities."""
    if config.algorithm == table.NFT:
        reads_old_policy = FORWARD_OBJECTIVES[config.train.forward_objective].old_policy
        return 1 if reads_old_policy else 0
    if config.algorithm == table.DISTILL:
        return len(config.train.teachers)
    return 0


def _steps_of_start(config: Config, plan: BatchPlan) -> _Start:
    """Count the steps of an epoch's average image or trunk, as the config's algorithm takes them."""
    sample = config.sample
    if config.algorithm == table.DPO:
        # The best and the worst image of a group, or both of a stored pair, are noised once.
        if config.preferences.path:
            return _Start(exact=0, fast=0, trained=2)
        fast = _without_noise(sample.num_steps, sample.flash_ratio, sample.flash_solver)
        return _Start(exact=0, fast=fast, trained=2 / plan.group_size)
    if config.algorithm == table.REFL:
        return _steps_of_walk(sample, config.train, plan)
    if config.algorithm == table.NFT:
        fast = _without_noise(sample.num_steps, sample.flash_ratio, sample.flash_solver)
        fast += sample.scouts_per_image * _without_noise(sample.num_steps, sample.scout_ratio, sample.flash_solver)
        return _Start(exact=0, fast=fast, trained=plan.num_trained_steps)
    if plan.num_branches > 1:
        return _steps_of_trunk(sample, plan)
    return _steps_of_windowed_image(sample, plan)


def _steps_of_walk(sample: Sample, train: Train, plan: BatchPlan) -> _Start:
    """Count the steps of an image with reward gradients: those of a walk, and one for each time that the image is
    noised anew. ReFL's walk ends at one of the last steps."""
    walk = float(sample.num_steps)
    if train.gradient_path == "refl":
        walk -= (train.gradient_steps - 1) / 2
    # What the update differentiates, noisings among it, was computed exactly before.
    trained = plan.num_trained_steps
    return _Start(exact=trained, fast=walk + train.gradient_noisings - trained, trained=trained)


def _steps_of_trunk(sample: Sample, plan: BatchPlan) -> _Start:
    """Count the steps of a trunk, which ends with its last noisy step, and of its branches, which have no noise."""
    fast = 0
    for step in range(plan.num_trained_steps):
        num_left = sample.num_steps - step - 1
        fast += plan.num_branches * _without_noise(num_left, sample.flash_ratio, sample.flash_solver)
    return _Start(exact=plan.num_trained_steps, fast=fast, trained=plan.num_trained_steps)


def _steps_of_windowed_image(sample: Sample, plan: BatchPlan) -> _Start:
    """Count the steps of an image with noise in a window, and of its scouts, on average over the window's places."""
    windows = _windows(sample)
    exact = 0.0
    fast = 0.0
    trained = 0.0
    for window in windows:
        # train.timestep_fraction leaves steps out where there is no window, and the end of its range cuts a window off.
        trained += min(len(window), plan.num_trained_steps)
        before = window.start
        if sample.same_latent:
            before /= plan.group_size
        after = sample.num_steps - window.stop
        exact += len(window) * (1 + sample.scouts_per_image)
        fast += before * (1 + sample.scouts_per_image)
        fast += _without_noise(after, sample.flash_ratio, sample.flash_solver)
        fast += sample.scouts_per_image * _without_noise(after, sample.scout_ratio, sample.flash_solver)
    num_windows = len(windows)
    return _Start(exact=exact / num_windows, fast=fast / num_windows, trained=trained / num_windows)


def _windows(sample: Sample) -> list[range]:
    """All places of the window, as scripts/train_qwenimage.py chooses among them."""
    size = sample.sde_window_size
    if size == 0:
        return [range(sample.num_steps - 1)]
    first, last = sample.sde_window_range
    if sample.sde_window_interval:
        return [range(start, min(start + size, last)) for start in range(first, last)]
    return [range(start, start + size) for start in range(first, last - size + 1)]


def _without_noise(num_steps: int, ratio: float, solver: str) -> int:
    """Return the forwards of `num_steps` steps without noise, of which a solver computes a `ratio` above 0."""
    if not ratio or not num_steps:
        return num_steps
    return num_forwards(solver, num_steps, ratio)
