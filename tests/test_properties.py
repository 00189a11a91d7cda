"""Properties that hold of any input, on examples that hypothesis draws: advantages, batch plans, minibatches,
conditions, values of settings on their way to config.json and back, and windows."""

import itertools
import json
import string
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from refused import refusal
from train_qwenimage import window_at

from flow_grpo.algorithms.advantages import group_advantages, has_signal
from flow_grpo.algorithms.batch_plan import BatchPlan, num_trained_steps, plan_batches, plan_pairs
from flow_grpo.algorithms.rollout import StoredSteps, shuffled_updates
from flow_grpo.base import folders
from flow_grpo.base.prompt import Prompt
from flow_grpo.command_line import checks, command_line
from flow_grpo.data.prompts import epoch_batches
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.monitoring.dashboard import plain
from flow_grpo.run.rewards import Rewards, advantages
from flow_grpo.settings import stored_config, table
from flow_grpo.settings.sections import Config, Preferences, Sample, Train

# The same examples on every machine, and none that a run before has left.
ALWAYS = dict(deadline=None, derandomize=True, database=None)
property_of = hypothesis_settings(max_examples=60, **ALWAYS)


@st.composite
def grouped_rewards(draw):
    """Rewards [B] float64 that differ visibly or not at all, and the id of each one's group [B], in any order."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    ids = draw(st.lists(st.integers(-(2**62), 2**62), min_size=len(sizes), max_size=len(sizes), unique=True))
    groups = torch.tensor(ids).repeat_interleave(torch.tensor(sizes))
    groups = groups[torch.tensor(draw(st.permutations(range(len(groups)))))]
    eighths = draw(st.lists(st.integers(-800, 800), min_size=len(groups), max_size=len(groups)))
    return torch.tensor(eighths).double() / 8, groups


@property_of
@given(grouped_rewards(), st.floats(0.01, 1000), st.integers(-1000, 1000), st.booleans(), st.data())
def test_advantages_know_neither_the_rewards_unit_and_level_nor_the_groups_names_and_places(
    rewards_and_groups, scale, shift, global_std, data
):
    rewards, groups = rewards_and_groups
    expected = group_advantages(rewards, groups, global_std, eps=0)
    order = torch.tensor(data.draw(st.permutations(range(len(groups)))))
    changed = group_advantages((scale * (rewards + shift))[order], -groups[order], global_std, eps=0)
    torch.testing.assert_close(changed, expected[order], rtol=1e-6, atol=1e-6)
    if not global_std:  # which levels of the groups would change
        levels = groups % 97
        torch.testing.assert_close(group_advantages(rewards + levels, groups, eps=0), expected, rtol=1e-6, atol=1e-6)


@property_of
@given(grouped_rewards(), st.floats(-1e6, 1e6, allow_subnormal=False), st.integers(1, 6), st.booleans())
def test_a_group_whose_rewards_are_alike_has_no_advantages_and_takes_none_from_others(
    rewards_and_groups, value, size, noisy
):
    rewards, groups = rewards_and_groups
    rewards = rewards.float()
    flat = torch.full((size,), value)
    if noisy:
        flat[::2] *= 1 + 2e-7
    new_id = groups.max() + 1
    all_rewards = torch.cat([rewards, flat])
    all_groups = torch.cat([groups, new_id.expand(size)])
    found = group_advantages(all_rewards, all_groups)
    assert torch.equal(found[len(rewards) :], torch.zeros(size))
    torch.testing.assert_close(found[: len(rewards)], group_advantages(rewards, groups))
    signal = has_signal({"a": all_rewards}, {"a": 1.0}, all_groups)
    assert not signal[len(rewards) :].any()
    assert torch.equal(signal[: len(rewards)], has_signal({"a": rewards}, {"a": 1.0}, groups))


def advantages_of(scores, groups, aggregation="sum", filter_groups=False):
    """The advantages that a run on one GPU makes of its scores by name."""
    train = Train(reward_aggregation=aggregation, filter_groups=filter_groups)
    run = SimpleNamespace(config=Config(reward_fn=dict.fromkeys(scores, 1.0), train=train), device="cpu")
    return advantages(run, Rewards(scores, groups, groups.shape))


@property_of
@given(grouped_rewards(), st.sampled_from(["sum", "gdpo"]), st.booleans(), st.data())
def test_an_image_without_a_reward_counts_nothing_and_the_others_have_what_they_would_have_without_it(
    rewards_and_groups, aggregation, filter_groups, data
):
    rewards, groups = rewards_and_groups
    columns = {"a": rewards.float(), "b": rewards.flip(0).float()}
    masked = {}
    known = torch.ones(len(groups), dtype=torch.bool)
    for name, column in columns.items():
        flags = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(groups), max_size=len(groups))))
        masked[name] = column.where(flags, torch.nan)
        known &= flags
    values, weights = advantages_of(masked, groups, aggregation, filter_groups)
    assert not values[~known].any()
    assert not weights[~known].any()
    assert values.isfinite().all()
    assert weights.sum().item() == pytest.approx(len(groups) if weights.any() else 0)
    if known.any():
        rest = {name: column[known] for name, column in columns.items()}
        alone, own_weights = advantages_of(rest, groups[known], aggregation, filter_groups)
        torch.testing.assert_close(values[known], alone)
        assert torch.equal(weights[known] > 0, own_weights > 0)


WORLDS = st.integers(1, 32)


def divisors(number):
    return [part for part in range(1, number + 1) if number % part == 0]


@st.composite
def planned_epochs(draw):
    """A config of batches that divide over some GPUs, with their number."""
    world_size = draw(WORLDS)
    batch_size = draw(st.integers(1, 8))
    images = world_size * batch_size * draw(st.integers(1, 4))
    group_size = draw(st.sampled_from(divisors(images)))
    sample = dict(num_prompts_per_epoch=images // group_size, num_images_per_prompt=group_size, batch_size=batch_size)
    return planned_config(**sample), world_size


def planned_config(updates_per_epoch=1, path="", **sample):
    return Config(
        sample=replace(Sample(sde_window_size=1), **sample),
        train=Train(updates_per_epoch=updates_per_epoch),
        preferences=Preferences(path=path),
    )


@property_of
@given(planned_epochs(), st.integers(1, 40), st.integers(0, 3))
def test_every_image_of_an_epoch_is_drawn_once_by_one_rank_in_the_batch_that_it_has_on_any_number(
    epoch, num_prompts, number
):
    config, world_size = epoch
    dataset = [Prompt(f"prompt {i}") for i in range(num_prompts)]
    plan = plan_batches(config, world_size)
    drawn = []
    for rank in range(world_size):
        of_rank = list(epoch_batches(dataset, plan, 0, number, rank, world_size))
        assert len(of_rank) == plan.batches_per_epoch
        drawn += of_rank
    drawn.sort(key=lambda batch: batch.image_numbers[0])
    images = list(itertools.chain(*(batch.image_numbers for batch in drawn)))
    assert images == list(range(plan.num_groups * plan.group_size))
    groups = list(itertools.chain(*(batch.groups for batch in drawn)))
    assert groups == [image // plan.group_size for image in images]
    one_gpu = plan_batches(config, 1)
    assert drawn == list(epoch_batches(dataset, one_gpu, 0, number, 0, 1))


SMALL = st.integers(1, 24)


@property_of
@given(SMALL, SMALL, SMALL, SMALL, WORLDS, st.sampled_from(["", "pairs"]))
def test_pairs_divide_over_gpus_and_updates_or_a_number_of_them_that_does_is_named(
    prompts, group_size, batch_size, updates, world_size, path
):
    sample = dict(num_prompts_per_epoch=prompts, num_images_per_prompt=group_size, batch_size=batch_size)
    config = planned_config(updates_per_epoch=updates, path=path, **sample)
    message = refusal(plan_pairs, config, world_size)
    if "do not divide" in message:
        advised = int(message.rpartition("; ")[2].removesuffix(" do"))
        config = table.with_values(config, {"sample.num_prompts_per_epoch": advised})
        message = refusal(plan_pairs, config, world_size)
    if message:
        assert batch_size % 2 or batch_size % group_size
        return
    plan = plan_pairs(config, world_size)
    assert plan.batches_per_epoch % updates == 0
    rows = world_size * plan.batches_per_epoch * plan.batch_size
    assert rows == config.sample.num_prompts_per_epoch * plan.group_size


@st.composite
def updates_of_an_epoch(draw):
    """A plan of one GPU, and the number of trained steps."""
    together = draw(st.sampled_from([1, 2, 3]))
    batch_size = together * draw(st.integers(1, 4))
    steps = draw(st.integers(1, 4))
    parts = batch_size // together * steps
    updates = draw(st.sampled_from(divisors(parts)))
    batches = draw(st.sampled_from([1, 2, 3, 4, 6]))
    plan = BatchPlan(batches * batch_size, 1, batch_size, batches, steps, 1, updates, images_together=together)
    return plan, steps


def numbered_rollout(images, steps, outcomes):
    """A rollout whose every number says of which image, step and outcome it is."""
    image_numbers = torch.tensor(images)
    of_image = image_numbers.float()
    of_step = of_image[:, None] * 100 + torch.arange(float(steps))
    of_outcome = of_step[:, :, None] * 100 + torch.arange(float(outcomes))
    rollout = StoredSteps(
        image_numbers=image_numbers,
        condition=Condition(of_image.view(-1, 1, 1)),
        timesteps=of_step,
        latents=of_step[..., None, None],
        next_latents=of_outcome[..., None, None],
        means=of_step[..., None, None],
        log_probs=of_outcome,
        step_weights=of_step,
        x_0=of_image.view(-1, 1, 1),
    )
    rollout.advantages = rollout.loss_weight = of_outcome
    return rollout


def assert_holds_its_rows(rows, outcomes):
    """Every column of a minibatch is of the images and steps that row_ids names."""
    images, steps = rows.row_ids.float().unbind(1)
    of_step = images * 100 + steps
    of_outcome = (of_step[:, None] * 100 + torch.arange(float(outcomes))).flatten()
    assert torch.equal(rows.condition.text_embeds.flatten(), images)
    assert torch.equal(rows.timesteps, of_step)
    assert torch.equal(rows.latents.flatten(), of_step)
    assert torch.equal(rows.x_0.flatten(), images)
    assert torch.equal(rows.means.flatten(), of_step.repeat_interleave(outcomes))
    assert torch.equal(rows.step_weights, of_step.repeat_interleave(outcomes))
    for column in (rows.next_latents.flatten(), rows.log_probs, rows.advantages, rows.loss_weight):
        assert torch.equal(column, of_outcome)


@property_of
@given(updates_of_an_epoch(), st.integers(1, 3), st.integers(0, 2), st.data())
def test_minibatches_hold_every_row_once_and_an_update_the_same_rows_on_any_number_of_ranks(
    plan_and_steps, outcomes, inner_epoch, data
):
    plan, steps = plan_and_steps
    batches = plan.batches_per_epoch
    num_ranks = data.draw(st.sampled_from(divisors(batches)))
    per_update = {1: [set() for _ in range(plan.updates_per_epoch)]}
    per_update[num_ranks] = [set() for _ in range(plan.updates_per_epoch)]
    seen = []
    for world_size, sets in per_update.items():
        for rank in range(world_size):
            of_rank = torch.arange(batches * plan.batch_size).view(batches, -1)[rank::world_size]
            rollout = numbered_rollout(of_rank.flatten().tolist(), steps, outcomes)
            for number, update in enumerate(shuffled_updates(rollout, plan, 0, 0, inner_epoch)):
                for part in update:
                    assert_holds_its_rows(part, outcomes)
                    assert len(part.row_ids) <= plan.batch_size
                    assert part.group_size == plan.images_together
                    assert part.num_update_rows == sum(len(other.row_ids) for other in update)
                    ids = [tuple(row) for row in part.row_ids.tolist()]
                    sets[number].update(ids)
                    seen += ids if world_size == num_ranks else []
    assert sorted(seen) == list(itertools.product(range(plan.num_groups), range(steps)))
    assert per_update[num_ranks] == per_update[1]


def same(ours, theirs):
    """Say whether two conditions are the same, their negatives included."""
    if (ours.negative is None) != (theirs.negative is None):
        return False
    return ours.equals(theirs) and (ours.negative is None or same(ours.negative, theirs.negative))


@st.composite
def conditions(draw):
    """Rows of texts of different lengths, padded to a common width; some with pooled texts, sources or a negative."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    width = max(lengths) + draw(st.integers(0, 3))
    places = torch.arange(width).expand(len(lengths), width)
    mask = places < torch.tensor(lengths)[:, None]
    numbers = torch.arange(len(lengths)).view(-1, 1, 1) * 100.0
    embeds = (numbers + places[..., None] + 1) * mask[..., None]
    condition = Condition(embeds, mask=mask)
    if draw(st.booleans()):
        condition = replace(condition, pooled=numbers[:, 0])
    if draw(st.booleans()):
        condition = replace(condition, source_1=numbers[..., None].expand(-1, 2, 3, 3))
    if draw(st.booleans()):
        condition = replace(condition, negative=Condition(-numbers.expand(-1, 2, 1)))
    return condition


def rows_of(condition):
    return [condition.take(slice(row, row + 1)) for row in range(len(condition.text_embeds))]


@property_of
@given(conditions(), st.data())
def test_a_condition_in_pieces_is_joined_to_what_it_was(condition, data):
    rows = rows_of(condition)
    assert same(Condition.concat(rows), condition)
    assert same(Condition.stack(rows), condition)
    cut = data.draw(st.integers(0, len(rows)))
    parts = [rows[:cut], rows[cut:]]
    assert same(Condition.concat([Condition.concat(part) for part in parts if part]), condition)
    order = torch.tensor(data.draw(st.permutations(range(len(rows)))))
    assert same(condition.take(order).take(order.argsort()), condition)
    assert same(Condition.concat([rows[row] for row in order]), condition.take(order))


@property_of
@given(conditions(), st.integers(1, 4), st.integers(0, 5))
def test_padding_comes_and_goes_without_a_change_to_the_text(condition, multiple, more):
    wider = condition.padded(condition.num_tokens + more)
    assert wider.num_tokens == condition.num_tokens + more
    assert same(wider.trimmed(1), condition.trimmed(1))
    trimmed = wider.trimmed(multiple)
    longest = int(condition.mask.sum(1).max())
    assert longest <= trimmed.num_tokens < longest + multiple
    rows = [row.trimmed(1) for row in rows_of(condition)]
    assert [row.num_tokens for row in rows] == condition.mask.sum(1).tolist()
    assert same(Condition.stack(rows), condition.trimmed(1))
    assert same(Condition.stack(rows, wider.num_tokens), wider)


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
NAMES = st.text(string.ascii_letters + "_", min_size=1, max_size=8)


def legal_values(setting, default):
    """Values that an entry of the table allows, of the default's type."""
    if setting.choices:
        return st.sampled_from(list(setting.choices))
    if default == ():
        return st.lists(NAMES, max_size=3).map(tuple)
    if isinstance(default, tuple):
        return st.tuples(*(legal_values(setting, entry) for entry in default))
    by_type = {
        bool: st.booleans(),
        int: st.integers(int(setting.min), int(setting.max)),
        float: st.floats(setting.min, setting.max),
        str: TEXTS,
    }
    return by_type[type(default)]


PLAIN_SETTINGS = [setting for setting in table.SETTINGS if not isinstance(setting.default, dict)]
LEGAL = {setting.key: legal_values(setting, setting.default) for setting in PLAIN_SETTINGS}
DEFAULT = "config/grpo.py:shapes_qwenimage"


def stored_and_read(config, folder):
    """A config as a run's folder gives it back."""
    file = folder / "config.json"
    file.write_text(json.dumps(plain(config.to_dict())))
    return stored_config.with_defaults(folders.read_json(file), file)


# Beside rank 0, lora.alpha may not be typed.
LEGAL_TOGETHER = LEGAL | {"lora.rank": LEGAL["lora.rank"].filter(bool)}


@hypothesis_settings(max_examples=15, **ALWAYS)
@given(st.fixed_dictionaries(LEGAL_TOGETHER))
def test_legal_values_of_all_settings_are_the_same_from_flags_to_the_config_its_file_and_back(folder, values):
    assume(values["lora.rank"])  # without an adapter, lora.alpha on the command line is refused
    for key, value in values.items():
        table.BY_KEY[key].check(value, key)
    flags = [f"--config.{key}={value}" for key, value in values.items()]
    config = command_line.config_of(flags, DEFAULT)
    for key, value in values.items():
        assert table.value_of(config, key) == value, key
        assert type(table.value_of(config, key)) is type(value), key
    stored = stored_and_read(config, folder)
    assert stored_config.changes(stored, config.to_dict(), folder) == {}
    again = table.flat(stored)
    assert again.keys() == table.flat(config).keys()
    for key, value in values.items():
        assert again[key] == (list(value) if isinstance(value, tuple) else value), key


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@st.composite
def windows(draw):
    """Settings of a rollout's window, of which about half can be meant."""
    num_steps = draw(st.integers(2, 12))
    anywhere = st.integers(-1, num_steps + 1)
    first = draw(st.integers(0, num_steps - 2))
    last = draw(st.integers(first + 1, num_steps - 1) | anywhere)
    size = draw(st.integers(1, max(1, last - first)) | anywhere)
    sde_window_range = (first, last) if size > 0 else (0, num_steps - 1)
    return Sample(
        num_steps=num_steps,
        sde_window_size=max(size, 0),
        sde_window_range=sde_window_range,
        sde_window_interval=draw(st.integers(0, 5)),
        num_images_per_prompt=4,
    )


@property_of
@given(windows(), st.integers(0, 200))
def test_a_window_that_is_accepted_lies_in_its_range_and_moves_by_one(sample, updates):
    if refusal(checks.check_window, sample):
        return
    for block in range(10):  # of which each may have another place
        assert_window_is_within_its_range(sample, block, updates)


def assert_window_is_within_its_range(sample, block, updates):
    window = window_at(sample, 0, 0, block, updates)
    size = sample.sde_window_size
    interval = sample.sde_window_interval
    if not size:
        assert window == range(sample.num_steps - 1)
        return
    first, last = sample.sde_window_range
    assert 0 <= first <= window.start < window.stop <= last < sample.num_steps
    assert num_trained_steps(sample, Train()) == size
    if interval:
        following = window_at(sample, 0, 0, block, updates + interval)
        assert following.start == (window.start + 1 if window.start + 1 < last else first)
        assert len(window) == min(size, last - window.start)
    else:
        assert len(window) == size
