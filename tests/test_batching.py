"""Every run divides over the GPUs, or its message says which numbers do not and which would; where a window lies;
and every prompt has its turn, on any number of ranks."""

import functools
import itertools
import json
import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from refused import refusal
from train_qwenimage import window_at

from config import grpo, nft
from flow_grpo.algorithms.batch_plan import BatchPlan, plan_batches, plan_pairs
from flow_grpo.base.prompt import Prompt
from flow_grpo.data.prompts import epoch_batches, epoch_prompts, load_prompts
from flow_grpo.settings import table
from flow_grpo.settings.sections import Sample

CONFIGS = {}
for file in (grpo, nft):
    for run, variant in itertools.product(file.RUNS, ("", ",smoke")):
        CONFIGS[run.__name__ + variant] = table.typed(file.get_config(run.__name__ + variant))
NAMES = list(CONFIGS)


def assert_planned_or_explained(name, world_size):
    """The plan's numbers multiply to the epoch's images, or the message names exactly the batch sizes that would do."""
    config = CONFIGS[name]
    cell = f"{name} on {world_size} GPUs"
    sample = config.sample
    message = refusal(plan_batches, config, world_size)
    images = sample.num_prompts_per_epoch * sample.num_images_per_prompt
    if message:
        assert_explained(name, world_size, message, images, cell)
        return
    plan = plan_batches(config, world_size)
    assert plan.num_groups * plan.group_size == images, cell
    assert world_size * plan.batches_per_epoch * plan.batch_size == images, cell
    assert plan.batch_size * plan.num_trained_steps % plan.updates_per_epoch == 0, cell


@functools.cache
def with_batch_size(name, size):
    config = CONFIGS[name]
    return replace(config, sample=replace(config.sample, batch_size=size))


def assert_explained(name, world_size, message, images, cell):
    """The message names the numbers, and exactly the batch sizes and the numbers of GPUs that would do."""
    config = CONFIGS[name]
    sample = config.sample
    batch_size = sample.batch_size
    numbers = {sample.num_prompts_per_epoch, sample.num_images_per_prompt, world_size, batch_size}
    assert numbers <= set(map(int, re.findall(r"\d+", message))), cell

    # A batch holds at most a GPU's share of the images.
    working_sizes = []
    for size in range(1, images // world_size + 1):
        if not refusal(plan_batches, with_batch_size(name, size), world_size):
            working_sizes.append(size)
    assert numbers_after(r"batch sizes that do: (\[[\d, ]+\]|none);", message) == working_sizes, cell

    working_counts = []
    for count in range(1, images + 1):
        if images % count == 0 and not refusal(plan_batches, config, count):
            working_counts.append(count)
    assert numbers_after(rf"numbers of GPUs that do with {batch_size}: (.+)", message) == working_counts, cell


def numbers_after(pattern, message):
    (listed,) = re.findall(pattern, message)
    return [] if listed == "none" else json.loads(listed)


def test_every_run_plans_on_1_to_32_gpus_or_says_which_batch_sizes_would():
    # One name of those that plans could not tell apart.
    names = {}
    for name, config in CONFIGS.items():
        names[str([config.sample, config.train.updates_per_epoch, config.train.timestep_fraction])] = name
    for name in names.values():
        for world_size in range(1, 33):
            assert_planned_or_explained(name, world_size)


def test_every_run_plans_on_one_gpu_and_on_two_and_the_published_ones_on_the_usual_numbers_of_gpus():
    published = [name for name in NAMES if name.startswith("pickscore") and "," not in name]
    assert len(published) > 1
    for name, gpus in (*itertools.product(NAMES, (1, 2)), *itertools.product(published, (4, 8, 16))):
        assert refusal(plan_batches, CONFIGS[name], gpus) == "", (name, gpus)


@pytest.mark.parametrize(
    ("name", "changes", "steps"),
    [
        ("shapes_qwenimage", {"sample.sde_window_size": 3}, 3),
        ("shapes_qwenimage", {"sample.sde_window_size": 0, "sample.num_steps": 10}, 9),
        ("shapes_qwenimage_pr", {"sample.num_steps": 8, "train.timestep_fraction": 1.0}, 7),
        ("shapes_qwenimage_pr", {"sample.num_steps": 50, "train.timestep_fraction": 0.58}, 29),  # 50 * 0.58 < 29
        ("shapes_qwenimage_nft", {"train.timestep_fraction": 0.99}, 9),
        ("shapes_qwenimage_nft", {}, 3),
    ],
)
def test_trained_steps_are_the_windows_or_all_but_the_last(name, changes, steps):
    config = (nft if name.endswith("nft") else grpo).get_config(name)
    config.update_from_flattened_dict(changes | {"train.updates_per_epoch": 1})
    assert plan_batches(table.typed(config), 1).num_trained_steps == steps


def test_a_moving_window_is_cut_off_so_batches_must_divide_by_updates():
    config = table.typed(grpo.get_config("pickscore_qwenimage,mixgrpo"))
    plan_batches(config, 8)
    config = table.with_values(config, {"sample.batch_size": 2, "train.updates_per_epoch": 4})
    with pytest.raises(ValueError, match=r"= 2 rows where .* cut off .* 4; those that do: \[1, 2\]"):
        plan_batches(config, 8)


ADVICE = {  # a setting, and the words before the numbers that it may be
    "sample.batch_size": r"batch sizes that do: \[([\d, ]+)\]",
    "train.updates_per_epoch": r"; those that do: \[([\d, ]+)\]",
    "sample.num_prompts_per_epoch": r"; (\d+) do$",
    "world_size": r"numbers of GPUs that do with \d+: \[([\d, ]+)\]",
}


def advised(message):
    """Each single change that a message advises, as (setting, value)."""
    for setting, pattern in ADVICE.items():
        for numbers in re.findall(pattern, message):
            for number in numbers.split(", "):
                yield setting, int(number)


def planned(values):
    """A config of these values, as plan_batches and plan_pairs read it."""
    settings = {key: value for key, value in values.items() if key != "world_size"}
    return table.with_values(CONFIGS["shapes_qwenimage"], settings)


PLANS = st.fixed_dictionaries(
    {
        "sample.num_prompts_per_epoch": st.integers(1, 48),
        "sample.num_images_per_prompt": st.integers(1, 12),
        "sample.batch_size": st.integers(1, 24),
        "sample.sde_window_size": st.integers(0, 3),
        "sample.sde_window_interval": st.integers(0, 1),
        "train.updates_per_epoch": st.integers(1, 8),
        "train.forward_objective": st.sampled_from(["nft", "dgpo", "crd"]),
        "world_size": st.integers(1, 12),
    }
)


def holds_whole_groups(values):
    """Tell whether a batch holds whole groups, where the loss asks for it."""
    asked = values["train.forward_objective"] in ("dgpo", "crd")
    return not asked or values["sample.batch_size"] % values["sample.num_images_per_prompt"] == 0


@hypothesis_settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(PLANS, st.sampled_from([plan_batches, plan_pairs]))
def test_whatever_a_plan_advises_is_accepted(values, plan_of):
    assume(holds_whole_groups(values))  # else the loss refuses it first
    for setting, value in advised(refusal(plan_of, planned(values), values["world_size"])):
        changed = values | {setting: value}
        assert refusal(plan_of, planned(changed), changed["world_size"]) == "", (setting, value)
        assert holds_whole_groups(changed), (setting, value)


def place(interval, update=0, first_last=(0, 8), epoch=0, block=0, size=4):
    sample = Sample(num_steps=10, sde_window_size=size, sde_window_range=first_last, sde_window_interval=interval)
    return window_at(sample, 0, epoch, block, update)


@pytest.mark.parametrize(
    ("interval", "first_last", "table"),
    [
        (25, (0, 8), {0: range(4), 24: range(4), 25: range(1, 5), 49: range(1, 5), 50: range(2, 6), 100: range(4, 8)}),
        (25, (0, 8), {125: range(5, 8), 150: range(6, 8), 175: range(7, 8), 199: range(7, 8), 200: range(4)}),
        (3, (1, 7), {0: range(1, 5), 2: range(1, 5), 3: range(2, 6), 9: range(4, 7), 17: range(6, 7), 18: range(1, 5)}),
    ],
)
def test_a_progressive_window_moves_on_by_one_is_cut_off_at_the_end_and_starts_again(interval, first_last, table):
    for update, window in table.items():
        assert place(interval, update, first_last) == window


def test_random_is_uniform_over_the_places_that_fit_and_goes_by_epoch_and_block_not_by_updates():
    counts = Counter()
    for epoch, block in itertools.product(range(100), range(10)):
        counts[place(0, epoch=epoch, block=block)] += 1
    assert set(counts) == {range(start, start + 4) for start in range(5)}
    assert min(counts.values()) > 150
    assert max(counts.values()) < 250
    assert len({place(0, update) for update in range(100)}) == 1
    for update in (0, 77):
        assert place(25, update, size=0) == range(9), "all steps but the last"


DATASET = [Prompt(f"prompt {i}", {"id": i}) for i in range(11)]
IMAGES = dict(num_groups=8, group_size=6, batch_size=4, batches_per_epoch=12)
PLAN = BatchPlan(**IMAGES, num_trained_steps=2, num_branches=1, updates_per_epoch=2)


def picks(num_prompts, per_epoch, epochs, seed=0):
    drawn = []
    for epoch in range(epochs):
        drawn += epoch_prompts(num_prompts, per_epoch, seed, epoch)
    return drawn


@pytest.mark.parametrize("per_epoch", [4, 10, 25])
def test_epochs_go_on_through_passes_over_all_prompts_which_the_seed_shuffles(per_epoch):
    drawn = picks(10, per_epoch, 10)
    passes = set()
    for first in range(0, len(drawn), 10):
        assert sorted(drawn[first : first + 10]) == list(range(10))
        passes.add(tuple(drawn[first : first + 10]))
    assert len(passes) == len(drawn) // 10
    assert picks(10, per_epoch, 10, seed=1) != drawn == picks(10, per_epoch, 10)


@pytest.mark.parametrize("batch_size", [3, 4, 12])
def test_ranks_share_the_batches_of_one_rank(batch_size):
    def dealt(world_size):
        rounds = 48 // batch_size // world_size
        plan = replace(PLAN, batch_size=batch_size, batches_per_epoch=rounds)
        all_batches = []
        for rank in range(world_size):
            batches = list(epoch_batches(DATASET, plan, 0, 3, rank, world_size))
            for batch, number in zip(batches, range(rank, rounds * world_size, world_size), strict=True):
                assert batch.image_numbers[0] == batch_size * number
            all_batches += batches
        return sorted(all_batches, key=lambda batch: batch.image_numbers[0])

    one = dealt(1)
    image_numbers = []
    for batch in one:
        image_numbers += batch.image_numbers
    assert image_numbers == list(range(48))
    assert dealt(2) == one
    assert dealt(4) == one


@pytest.mark.parametrize(("batch_size", "images_per_block"), [(2, 6), (4, 12), (6, 6), (12, 12)])
def test_a_block_is_the_smallest_run_of_whole_batches_that_holds_whole_groups(batch_size, images_per_block):
    plan = replace(PLAN, batch_size=batch_size, batches_per_epoch=48 // batch_size)
    for batch in epoch_batches(DATASET, plan, 0, 0, 0, 1):
        assert {image // images_per_block for image in batch.image_numbers} == {batch.block}


@pytest.mark.parametrize(
    ("file", "stored", "texts"),
    [
        ("train.txt", b"\xef\xbb\xbfa\r\n  b \n", ["a", "b"]),
        ("train.txt", "a\u2028b\nc\u0085d\ne\x0bf\ng\x1ch\x0ci\n\U0001f600".encode(), None),
        ("train_metadata.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}', ["a", "b"]),
        ("train_metadata.jsonl", '{"prompt": "a\u2028b\u0085c"}\n{"prompt": "\\ud83d\\ude00"}'.encode(), None),
    ],
)
def test_only_line_feeds_end_lines_and_a_byte_order_mark_is_no_text(file, stored, texts, tmp_path):
    (tmp_path / file).write_bytes(stored)
    if texts is None:
        texts = stored.decode().split("\n")
        if file.endswith("jsonl"):
            texts = [json.loads(line)["prompt"] for line in texts]
    prompts = load_prompts(str(tmp_path), "train")
    assert [prompt.text for prompt in prompts] == texts
    assert prompts[0].metadata == ({"prompt": texts[0]} if file.endswith("jsonl") else {})
