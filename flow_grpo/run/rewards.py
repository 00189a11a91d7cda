"""Rewards of an epoch's images: submitted as images are finished, awaited once, logged, and turned into advantages."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from flow_grpo.algorithms.advantages import (
    best_and_worst_indices,
    combined_advantages,
    group_stats,
    groups_with_signal,
    has_signal,
    stats_of_sum,
)
from flow_grpo.algorithms.disagreement import overrated
from flow_grpo.algorithms.prompt_signal import PromptSignal, Visit, effective_number, in_order, signals_of_prompts
from flow_grpo.base import distributed
from flow_grpo.base.pixels import film_strips, to_pictures
from flow_grpo.base.prompt import captions_of
from flow_grpo.data.prompts import Batch
from flow_grpo.diffusers_patch.sample_with_logprob import Samples
from flow_grpo.monitoring import health
from flow_grpo.monitoring.sheets import GroupRow
from flow_grpo.rewards.scores import join_scores
from flow_grpo.run import sampling
from flow_grpo.run.loop import is_due
from flow_grpo.run.run import Run
from flow_grpo.scoring.pool import Pending
from flow_grpo.settings import declared
from flow_grpo.settings.sections import COMPARED, ONLINE, Config

LATENT_SIGNS = ("latent_rms", "diversity")
MOST_GROUPS_SHOWN = 4
# The user is told if one reward's spread, times its weight, is this many times another's.
UNBALANCED = 10


class ShownRow(NamedTuple):
    """Images that compete, which a row of a sheet will show with their scores."""

    title: list[str]
    pictures: list[Image.Image]
    indices: list[int]  # of the pictures among all [b * ...] images that were submitted together


class Submitted(NamedTuple):
    """Images whose scores are being computed."""

    image_numbers: list[int]  # b, global within the epoch
    groups: Tensor  # [b, ...] int64, which of them compete
    scores: Pending  # name -> [b * ...] float32 on the CPU
    latents: Tensor  # [b * ..., c, h, w] f32, unpacked, still normalised
    shown: Sequence[ShownRow] = ()  # rows of a sheet, where one is due


class Rewards(NamedTuple):
    """All scores of an epoch, the same on every rank: each rank's in the order of its images."""

    scores: dict[str, Tensor]  # name -> [all] float32, "avg" among them; NaN where one was masked
    groups: Tensor  # [all] int64, which of them compete
    shape: torch.Size  # [B, ...] of this rank's
    diversity: Tensor | None = None  # [all] float32, each image's part of health/diversity; of `wait`

    def local(self, values: Tensor, device: torch.device) -> Tensor:
        """Return this rank's part of values [all]: [B] of its images, or [B, K, J] of their outcomes."""
        return distributed.local_rows(values).view(self.shape).to(device)


def submit(
    run: Run, samples: Samples, batch: Batch, groups: Tensor | None = None, scores: Pending | None = None
) -> Submitted:
    """Begin to score images [b, ..., 3, H, W] or videos [b, ..., f, 3, H, W]. The scores of a failed reward are NaN.

    Args:
        groups: [b, ...] int64, images of one group compete; None = those of a prompt.
        scores: of the images, where they are scored already; None = by the pool.
    """
    if groups is None:
        groups = torch.tensor(batch.groups)

    # A row of the batch is one image, or all branches of a trunk.
    if scores is None:
        images_per_row = groups[0].numel()
        prompts = []
        for prompt in batch.prompts:
            prompts += [prompt] * images_per_row
        with run.board.timed("reward"):
            # train.beta_gate compares the trained rewards with those of eval.rewards, so these are computed, too.
            everything = run.config.train.gates_the_pull
            scores = run.pool.submit(samples.images.flatten(0, groups.ndim - 1), prompts, everything)
    latents = run.model.features(samples.latents.flatten(0, groups.ndim - 1), run.size)
    # The epoch's first image is on the main rank, which draws the sheet.
    shown = []
    if 0 in batch.image_numbers and run.config.evaluates and is_due(run.config.eval_freq, run.epoch):
        shown = shown_rows(samples.images, batch, groups)
    return Submitted(list(batch.image_numbers), groups, scores, latents, shown)


def wait(run: Run, epoch: int, submitted: list[Submitted]) -> Rewards:
    """Wait for the epoch's rewards on all ranks, and log their means and spreads and the health of the latents.

    If a fork calls it twice in an epoch, the metric `images` adds up, and the second call's other figures replace the
    first's. To wait without logging, call `gather`.
    """
    rewards = gather(run, submitted)
    rewards = rewards._replace(diversity=_measure_latents(run, submitted, rewards))
    if run.prompt_signal:
        _note_visits(run, run.prompt_signal, rewards, _all_image_numbers(submitted))
    if run.config.sample.baseline == "all":
        rewards = rewards._replace(groups=torch.zeros_like(rewards.groups))
    _log(run, epoch, rewards)
    for part in submitted:
        if part.shown:
            scores_of_rank = rewards.local(rewards.scores["avg"], torch.device("cpu"))
            _show(run, epoch, part, scores_of_rank[_places(part, submitted)])
    return rewards


def shown_rows(images: Tensor, batch: Batch, groups: Tensor) -> list[ShownRow]:
    """Return the branches of the epoch's first trunk, a row for each step, or the first groups of the batch.

    Pictures of 8 bits are kept, not tensors: the branches of a batch of trunks take hundreds of megabytes.

    Args:
        images: [b, 3, H, W], or [b, K, J, 3, H, W] of branches; of videos with frames before the channels. In groups of
            any other shape nothing is shown.
    """
    captions = captions_of(batch.prompts)
    rows = []
    if groups.ndim == 3:
        trunk = batch.image_numbers.index(0)
        indices = torch.arange(groups.numel()).view(groups.shape)[trunk].tolist()
        for step, indices_of_step in enumerate(indices):
            title = [f"step {step}", captions[trunk]] if step == 0 else [f"step {step}"]
            rows.append(ShownRow(title, to_pictures(film_strips(images[trunk, step])), indices_of_step))
    if groups.ndim == 1:
        for group in groups.unique().tolist()[:MOST_GROUPS_SHOWN]:
            indices = (groups == group).nonzero().flatten().tolist()
            pictures = to_pictures(film_strips(images[indices]))
            rows.append(ShownRow([captions[indices[0]]], pictures, indices))
    return rows


def _places(part: Submitted, submitted: list[Submitted]) -> list[int]:
    """Places of a part's images among all of this rank's, which are sorted by their numbers."""
    numbers = sorted(_image_numbers(submitted))
    return [numbers.index(number) for number in part.image_numbers]


def _show(run: Run, epoch: int, part: Submitted, scores: Tensor) -> None:
    """Draw a sheet of images that compete.

    Args:
        scores: [b, ...], of the part's images.
    """
    flat_scores = scores.flatten()
    rows = []
    for row in part.shown:
        rows.append(GroupRow(row.title, row.pictures, flat_scores[row.indices].tolist()))
    name = "branches" if part.groups.ndim == 3 else "groups"
    run.board.log_groups(rows, epoch=epoch, step=run.step, name=name)


def gather(run: Run, submitted: list[Submitted]) -> Rewards:
    """Wait for submitted rewards, and join those of all ranks. Logs nothing."""
    with run.board.timed("reward"):
        scores = [part.scores() for part in submitted]
    order = _order(submitted)

    # Every rank must gather the same names in the same order, but a rank whose reward failed has fewer of its own. So
    # all ranks join their scores by the names that any rank has.
    names = []
    for scores_of_part in scores:
        names += scores_of_part.keys()
    names = distributed.gather_objects(names)
    groups = torch.cat([part.groups for part in submitted])[order]
    gathered = {}
    for name, values in join_scores(scores, names).items():
        values_by_image = values.view(groups.shape)[order]
        gathered[name] = distributed.gather(values_by_image).flatten()
    return Rewards(gathered, distributed.gather(groups).flatten(), groups.shape)


def _image_numbers(submitted: list[Submitted]) -> list[int]:
    """Numbers of submitted images, in the order of completion."""
    numbers = []
    for part in submitted:
        numbers += part.image_numbers
    return numbers


def _all_image_numbers(submitted: list[Submitted]) -> Tensor:
    """Numbers of all ranks' submitted images, [all] int64, in the order of their scores: rank by rank, each rank's
    sorted."""
    return distributed.gather(torch.tensor(sorted(_image_numbers(submitted))))


def _order(submitted: list[Submitted]) -> Tensor:
    """Order that sorts the rows of submitted images by the images' numbers, [B] int64."""
    return torch.tensor(_image_numbers(submitted)).argsort()


def scout(run: Run, epoch: int, noisy_steps: sampling.NoisySteps) -> list[int] | None:
    """Draw and score the epoch's scouts. Returns for each image the number of the scout whose noise it starts from, or
    None where sample.scouts_per_image is 0.

    Raises:
        RewardFailed: more scouts lack a score than reward.max_masked_share allows.
    """
    plan = run.plan
    scouts_per_image = run.config.sample.scouts_per_image
    if not scouts_per_image:
        return None
    submitted = []
    for batch, samples in sampling.sample_epoch(run, epoch, noisy_steps, scouts_per_image=scouts_per_image):
        submitted.append(submit(run, samples, batch))
    rewards = gather(run, submitted)
    # Raises if too many scores failed.
    run.pool.masked_shares(rewards.scores)
    scores = rewards.scores["avg"]
    run.epoch_metrics["reward/scouts"] = scores.nanmean().item()

    by_number = torch.empty_like(scores).index_copy(0, _all_image_numbers(submitted), scores)

    # A group's scouts are neighbours, so that a place in the group tells a scout's number.
    by_group = by_number.view(plan.num_groups, -1)
    first_of_group = torch.arange(plan.num_groups)[:, None] * by_group.shape[1]
    chosen = first_of_group + best_and_worst_indices(by_group, plan.group_size)
    return chosen.flatten().tolist()


def _note_visits(run: Run, signal: PromptSignal, rewards: Rewards, image_numbers: Tensor) -> None:
    """Note what an epoch's rewards say of its prompts, alike on every rank, and log it. It counts when the epoch is
    over.

    Args:
        image_numbers: [all] int64, in the order of the scores.
    """
    num_outcomes = len(rewards.groups) // len(image_numbers)
    prompts = (image_numbers // run.plan.group_size).repeat_interleave(num_outcomes)
    means = signals_of_prompts(
        {name: in_order(values, image_numbers) for name, values in rewards.scores.items()},
        dict(run.config.reward_fn),
        in_order(rewards.groups, image_numbers),
        in_order(prompts, image_numbers),
        signal.span,
    )

    # The main rank's, so that processors whose sums differ in a bit draw the same prompts.
    means = distributed.broadcast_object(means)
    picks = run.picks
    for group, mean in means.items():
        signal.visits.append(Visit(run.prompts.train[picks[group]].digest, mean))
    weights = run.prompt_weights
    assert weights is not None, "prompts are drawn by their signal"
    run.epoch_metrics["prompts/effective_number"] = effective_number(weights)
    run.epoch_metrics["prompts/signal"] = sum(means.values()) / max(len(means), 1)


def _measure_latents(run: Run, submitted: list[Submitted], rewards: Rewards) -> Tensor:
    """Log the health of the latents by whole groups, also of those that lie on several ranks. Returns each image's part
    of health/diversity, [all]."""
    # Groups whose images lie on several ranks.
    num_ranks = Counter()
    for groups_of_rank in rewards.groups.view(run.world_size, -1):
        num_ranks.update(set(groups_of_rank.tolist()))
    split = [group for group, count in num_ranks.items() if count > 1]
    signs = latent_signs(
        torch.cat([part.latents for part in submitted]),
        torch.cat([part.groups.flatten() for part in submitted]),
        sorted(split),
        lambda total: distributed.gather(total[None]).sum(0),
    )
    means = distributed.gather(signs).mean(0).tolist()
    for name, mean in zip(LATENT_SIGNS, means):
        run.epoch_metrics[f"health/{name}"] = mean
    diversity = signs[:, 1].cpu().view(rewards.shape)[_order(submitted)]
    return distributed.gather(diversity.float()).flatten()


@torch.no_grad()
def latent_signs(
    latents: Tensor, groups: Tensor, split: Iterable[int] = (), over_ranks: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return signs of health of this rank's M images, [M, 2] float64 on their device, in the order of
    LATENT_SIGNS: root mean square, and distance from the group's mean relative to it.

    Args:
        latents: [M, c, h, w] float32, unpacked, still normalised.
        groups: [M] int64 on the CPU, images that compete.
        split: groups with images on several ranks, the same on each; `over_ranks` adds up sums [S, D + 1] over them.
    """
    # G groups of this rank, and those split ones that have no image here: each rank adds its part of them.
    split_groups = torch.tensor(sorted(split), dtype=torch.int64)
    group_ids = torch.cat([groups, split_groups]).unique()
    group_index = torch.searchsorted(group_ids, groups)

    # Sums over each group, [G, D + 1]; the last column counts its images.
    flat = latents.flatten(1).double()
    counts = torch.bincount(group_index, minlength=len(group_ids))
    order = group_index.argsort(stable=True).to(flat.device)
    rows = torch.cat([flat, torch.ones_like(flat[:, :1])], 1)[order]
    sums = torch.stack([group_rows.sum(0) for group_rows in rows.split(counts.tolist())])
    if over_ranks is not None and len(split_groups):
        is_split = torch.isin(group_ids, split_groups).to(sums.device)
        sums[is_split] = over_ranks(sums[is_split])

    mean = sums[:, :-1] / sums[:, -1:]
    rms = flat.square().mean(1).sqrt()
    distance = (flat - mean[group_index.to(flat.device)]).square().mean(1).sqrt()
    return torch.stack([rms, distance / rms], 1)


def _log(run: Run, epoch: int, rewards: Rewards) -> None:
    """Log means and spreads of each score, and say if there is nothing to learn from them."""
    for name, share in run.pool.masked_shares(rewards.scores).items():
        run.epoch_metrics[f"reward/{name}_masked_share"] = share
    for name, values in rewards.scores.items():
        valid = values.isfinite()
        run.epoch_metrics[f"reward/{name}"] = values[valid].double().mean().item()
        if name != "avg":
            stats = group_stats(values[valid], rewards.groups[valid])
            run.epoch_metrics[f"reward/{name}_group_std"] = stats.std.mean().item()
            run.epoch_metrics[f"reward/{name}_zero_std_share"] = (stats.std == 0).float().mean().item()
    everywhere = torch.ones(len(rewards.groups), dtype=torch.bool)
    for name, value in spread_figures(rewards, everywhere, run.config).items():
        run.epoch_metrics[f"reward/{name}"] = value
    run.epoch_metrics |= step_figures(rewards, run.config)
    run.distributions["reward"] = rewards.scores["avg"]
    images_so_far = run.epoch_metrics.get("images", run.board.latest.get("images", 0))
    run.epoch_metrics["images"] = images_so_far + len(rewards.groups)
    if health.teaches_nothing(run.epoch_metrics, run.config):
        score = run.epoch_metrics["reward/avg"]
        alike = f"all {run.config.drawn} score alike ({score:.4g} on average)"
        run.board.say(f"epoch {epoch + 1}: in every group {alike}, so rewards teach nothing")
    compares = run.config.algorithm in COMPARED
    if epoch == 0 and compares and run.config.train.reward_aggregation == "sum":
        has_gdpo = run.config.algorithm in ONLINE
        run.board.say(unbalanced(run.epoch_metrics, dict(run.config.reward_fn), has_gdpo))


def unbalanced(figures: dict[str, float], weights: dict[str, float], has_gdpo: bool = True) -> str:
    """Return a sentence if one reward moves the sum UNBALANCED times as much as another, by their spreads within
    groups; else "".

    Args:
        figures: of an epoch, with reward/<name>_group_std.
        weights: of the rewards in the sum.
        has_gdpo: whether the algorithm reads train.reward_aggregation.
    """
    spreads = {}
    for name, weight in weights.items():
        spreads[name] = abs(weight) * figures[f"reward/{name}_group_std"]
    strongest = max(spreads, key=lambda name: spreads[name])
    weakest = min(spreads, key=lambda name: spreads[name])
    if spreads[strongest] < UNBALANCED * spreads[weakest] or not spreads[strongest]:
        return ""
    remedy = "Change the weights in reward_fn"
    if has_gdpo:
        remedy += ", or set train.reward_aggregation to 'gdpo', which compares each reward by itself"
    return (
        f"within groups the reward {weakest}, times its weight, has a standard deviation of {spreads[weakest]:.2g}, "
        f"and {strongest} one of {spreads[strongest]:.2g}: the sum hardly teaches {weakest}. {remedy}"
    )


def spread_figures(rewards: Rewards, rows: Tensor, config: Config) -> dict[str, float]:
    """Spread within groups of the weighted sum of rewards, and the share of groups that teach nothing, by name.

    Args:
        rows: [all] bool, the images that are looked at; those that lack a reward are left out.
    """
    weights = dict(config.reward_fn)
    rows = rows & rewards.scores["avg"].isfinite()
    groups = rewards.groups[rows]
    scores = {name: rewards.scores[name][rows] for name in weights}
    signal = groups_with_signal(scores, weights, groups, config.train.reward_aggregation)
    return {
        "group_std": stats_of_sum(scores, weights, groups).std.mean().item(),
        "zero_std_share": signal.logical_not().float().mean().item(),
    }


def step_figures(rewards: Rewards, config: Config) -> dict[str, float]:
    """Mean score of the branches that leave each step, and their spread within groups, by name; {} where an image has
    only one outcome.

    Late branches share most of their denoising, so they are the first that come to score alike.
    """
    if len(rewards.shape) == 1:
        return {}
    num_steps, num_branches = rewards.shape[1:]

    # Scores of all ranks lie in the order [trunk, step, branch].
    num_trunks = len(rewards.groups) // (num_steps * num_branches)
    step_of_row = torch.arange(num_steps).repeat_interleave(num_branches).repeat(num_trunks)
    figures = {}
    for step in range(num_steps):
        rows = step_of_row == step
        scores = rewards.scores["avg"][rows]
        if not scores.isfinite().any():
            continue
        spread = spread_figures(rewards, rows, config)
        figures[f"steps/reward/{step}"] = scores.nanmean().item()
        for name, value in spread.items():
            figures[f"steps/{name}/{step}"] = value
        if step == 0:
            figures |= {f"reward/first_step_{name}": value for name, value in spread.items()}
        if step == num_steps - 1:
            figures |= {f"reward/last_step_{name}": value for name, value in spread.items()}
    return figures


@declared.ours("advantages")
def advantages(run: Run, rewards: Rewards) -> tuple[Tensor, Tensor]:
    """Advantages of this rank's images [B] or outcomes [B, K, J], standardised over all ranks, and their weights in the
    mean that is the loss: 0 for what is masked or filtered."""
    config = run.config
    weights = dict(config.reward_fn)
    scored = torch.stack([rewards.scores[name].isfinite() for name in weights]).all(0)
    scores = {name: rewards.scores[name][scored] for name in weights}
    groups = rewards.groups[scored]
    if config.train.diversity_weight:
        assert rewards.diversity is not None, "`wait` measures it, `gather` does not"
        weights["diversity"] = config.train.diversity_weight
        scores["diversity"] = rewards.diversity[scored]

    # Images that lack a reward take no part: advantage 0, weight 0.
    values = torch.zeros(len(scored))
    loss_weight = scored.float()
    values[scored] = combined_advantages(
        scores, weights, groups, config.train.reward_aggregation, config.sample.global_std
    )
    if config.train.filter_groups:
        loss_weight[scored] *= has_signal(scores, weights, groups, config.train.reward_aggregation)
    loss_weight /= loss_weight.mean().clamp(min=1 / len(loss_weight))
    return rewards.local(values, run.device), rewards.local(loss_weight, run.device)


def beta_gate(run: Run, rewards: Rewards) -> Tensor | None:
    """Return which of this rank's images [B] or outcomes [B, K, J] are pulled to the reference: 1 for those that the
    trained rewards overrate most by train.beta_gate, else 0; None where it is 0."""
    config = run.config
    if not config.train.gates_the_pull:
        return None
    watched = [rewards.scores[name] for name in config.watched_rewards]
    is_pulled = overrated(rewards.scores["avg"], watched, rewards.groups, config.train.beta_gate)
    return rewards.local(is_pulled.float(), run.device)
