"""Every run divides over the GPUs, or its message says which numbers do not and which would."""

import itertools
import json
import re
from types import SimpleNamespace

import pytest
from ml_collections import ConfigDict

from config import grpo, nft
from flow_grpo.algorithms.batch_plan import plan_batches

CONFIGS = {
    run.__name__ + variant: file.get_config(run.__name__ + variant)
    for file in (grpo, nft)
    for run in file.RUNS
    for variant in ("", ",smoke")
}
NAMES = list(CONFIGS)


def problem(config, world_size):
    """What the message says; "" where there is a plan."""
    try:
        plan_batches(config, world_size)
    except ValueError as error:
        return str(error)
    return ""


def plain(config):
    """With attributes that are read and set ten times faster than a ConfigDict's."""
    values = {key: plain(value) if isinstance(value, ConfigDict) else value for key, value in config.items()}
    return SimpleNamespace(**values)


def assert_planned_or_explained(name, world_size):
    """The plan's numbers multiply to the epoch's images, or the message names exactly the batch sizes that would do."""
    config, cell = plain(CONFIGS[name]), f"{name} on {world_size} GPUs"
    sample, message = config.sample, problem(config, world_size)
    images = sample.num_prompts_per_epoch * sample.num_images_per_prompt
    if message:
        numbers = {sample.num_prompts_per_epoch, sample.num_images_per_prompt, world_size, sample.batch_size}
        assert numbers <= {int(number) for number in re.findall(r"\d+", message)}, cell
        works, batch_size = [], sample.batch_size
        for sample.batch_size in range(1, images + 1):
            works += [sample.batch_size] if not problem(config, world_size) else []
        (named,) = re.findall(r"batch sizes that do: (\[[\d, ]+\]|none);", message)
        assert json.loads(named.replace("none", "[]")) == works, cell
        counts = json.loads(re.search(r"numbers of GPUs that do[\w ]*: (\[.+\])", message)[1])
        assert counts, cell
        assert all(images % (batch_size * count) == 0 for count in counts) == (images % batch_size == 0), cell
        return
    plan = plan_batches(config, world_size)
    assert plan.num_groups * plan.group_size == images, cell
    assert world_size * plan.batches_per_epoch * plan.batch_size == images, cell
    assert plan.batch_size * plan.num_trained_steps % plan.updates_per_epoch == 0, cell


def test_every_run_plans_on_1_to_32_gpus_or_says_which_batch_sizes_would():
    for name in NAMES:
        for world_size in range(1, 33):
            assert_planned_or_explained(name, world_size)


def test_every_run_plans_on_one_gpu_and_on_two_and_the_published_ones_on_the_usual_numbers_of_gpus():
    published = [name for name in NAMES if name.startswith("pickscore") and "," not in name]
    assert len(published) > 1
    cells = [*itertools.product(NAMES, (1, 2)), *itertools.product(published, (4, 8, 16))]
    messages = {(name, gpus): problem(CONFIGS[name], gpus) for name, gpus in cells}
    assert {cell: message for cell, message in messages.items() if message} == {}


@pytest.mark.parametrize(
    ("name", "changes", "steps"),
    [
        ("shapes_qwenimage", {"sample.sde_window_size": 3}, 3),
        ("shapes_qwenimage", {"sample.sde_window_size": 0, "sample.num_steps": 10}, 9),
        ("shapes_qwenimage_pr", {"sample.num_steps": 8, "train.timestep_fraction": 1.0}, 7),
        ("shapes_qwenimage_pr", {"sample.num_steps": 8, "train.timestep_fraction": 0.6}, 4),
        ("shapes_qwenimage_pr", {"train.timestep_fraction": 0.5}, 5),  # of 10, as published
        ("shapes_qwenimage_pr", {"sample.num_steps": 50, "train.timestep_fraction": 0.58}, 29),  # 50 * 0.58 < 29
        ("shapes_qwenimage_pr", {"train.timestep_fraction": 0.99}, 9),
        ("shapes_qwenimage_nft", {"train.timestep_fraction": 0.99}, 9),
        ("shapes_qwenimage", {"sample.sde_window_size": 0, "train.timestep_fraction": 0.5}, 5),
        ("shapes_qwenimage_pr", {}, 6),
        ("shapes_qwenimage_nft", {}, 3),
    ],
)
def test_trained_steps_are_the_windows_or_all_but_the_last(name, changes, steps):
    config = (nft if name.endswith("nft") else grpo).get_config(name)
    config.update_from_flattened_dict(changes | {"train.updates_per_epoch": 1})
    assert plan_batches(config, 1).num_trained_steps == steps


def test_a_moving_window_is_cut_off_so_batches_must_divide_by_updates():
    config = grpo.get_config("pickscore_qwenimage,mixgrpo")
    plan_batches(config, 8)
    config.sample.batch_size, config.train.updates_per_epoch = 2, 4
    with pytest.raises(ValueError, match=r"up to 4 must divide: .*batch_size 2 .* 4; updates that do: \[1, 2\]"):
        plan_batches(config, 8)
