"""Every run divides over the GPUs, or its message says which numbers do not and which would."""

import re
import runpy
from pathlib import Path

import pytest

from flow_grpo.batching import plan_batches

GRPO = runpy.run_path(str(Path(__file__).parents[1] / "config" / "grpo.py"))
NAMES = [run.__name__ + variant for run in GRPO["RUNS"] for variant in ("", ",smoke")]


def planned(name, world_size, **sample):
    config = GRPO["get_config"](name)
    config.sample.update(sample)
    return config, plan_batches(config, world_size)


def suggested(message):
    return [int(number) for number in re.findall(r"\d+", message[message.rindex("[") :])]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", range(1, 33))
def test_every_run_plans_or_says_what_would(name, world_size):
    try:
        config, plan = planned(name, world_size)
    except ValueError as error:
        sample = GRPO["get_config"](name).sample
        numbers = (sample.num_prompts_per_epoch, sample.num_images_per_prompt, world_size, sample.batch_size)
        assert set(numbers) <= {int(number) for number in re.findall(r"\d+", str(error))}
        assert str(error).endswith("]") == (numbers[0] * numbers[1] % world_size == 0)
        for batch_size in suggested(str(error)) if str(error).endswith("]") else []:
            planned(name, world_size, batch_size=batch_size)
        return
    sample = config.sample
    images = sample.num_prompts_per_epoch * sample.num_images_per_prompt
    assert plan.num_groups * plan.group_size == images
    assert world_size * plan.batches_per_epoch * plan.batch_size == images
    assert world_size * plan.rows_per_update * plan.updates_per_epoch == images * plan.num_trained_steps
    assert plan.rows_per_update % plan.batches_per_epoch == 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_run_plans_on_one_gpu_and_on_two(name, world_size):
    planned(name, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16])
def test_the_published_runs_plan_on_the_usual_numbers_of_gpus(world_size):
    for name in ("pickscore_qwenimage", "pickscore_qwenimage_pr"):
        planned(name, world_size)


@pytest.mark.parametrize(
    ("name", "changes", "steps"),
    [
        ("shapes_qwenimage", {}, 2),
        ("shapes_qwenimage", {"sample.sde_window_size": 0}, 9),
        ("shapes_qwenimage", {"sample.sde_window_size": 4, "train.timestep_fraction": 0.5}, 2),
        ("shapes_qwenimage_pr", {}, 7),
        ("shapes_qwenimage_pr", {"train.timestep_fraction": 0.6}, 4),
    ],
)
def test_trained_steps_are_the_windows_or_all_but_the_last(name, changes, steps):
    config = GRPO["get_config"](name)
    config.update_from_flattened_dict(changes)
    assert plan_batches(config, 1).num_trained_steps == steps


def test_updates_that_do_not_divide_are_told_which_do():
    config = GRPO["get_config"]("shapes_qwenimage_pr")
    config.train.updates_per_epoch = 3
    with pytest.raises(ValueError, match=r"16 images x 7 trained steps = 112 rows .*updates_per_epoch 3") as error:
        plan_batches(config, 1)
    assert suggested(str(error.value)) == [1, 2, 4, 7, 8, 14, 16, 28, 56, 112]


def test_a_fraction_that_leaves_no_step_is_refused():
    config = GRPO["get_config"]("shapes_qwenimage")
    config.train.timestep_fraction = 0.4
    with pytest.raises(ValueError, match=r"timestep_fraction 0\.4"):
        plan_batches(config, 1)
