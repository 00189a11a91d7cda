"""The signs of health on known latents and histories and on recorded runs, and what a run does about an alarm."""

import math
import random
import shutil

import pytest
import recorded_runs
import torch
from ml_collections import ConfigDict
from small import lines_of, stored, train

from flow_grpo import health, watching
from flow_grpo.settings import BY_KEY

LIMITS = recorded_runs.default_limits()
OFF = ConfigDict(dict(LIMITS) | dict.fromkeys(health.SIGNS, 0.0))
CONFIG = ConfigDict(dict(train=dict(clip_range=1e-4, objective="clip"), eval={}))


def latents(num=64, seed=0):
    return torch.randn(num, 4, 8, 8, generator=torch.Generator().manual_seed(seed))


def history(**figures):
    """Epochs of the given figures, each a list with one entry per epoch."""
    (length,) = {len(values) for values in figures.values()}
    return [health.Epoch(i, **{name: values[i] for name, values in figures.items()}) for i in range(length)]


def test_latent_rms_is_the_root_mean_square():
    assert health.measure(3 * latents(), torch.arange(64))[:, 0].mean() == pytest.approx(3, rel=0.02)


def test_white_noise_has_the_spectrums_own_share_and_a_grid_has_all_of_it():
    share = health.high_frequency_share(latents())
    high = 1 - 25 / 64  # of 8 x 8 frequencies, 5 x 5 are within a quarter cycle per pixel
    assert share.mean() == pytest.approx(high * 64 / 63, rel=0.05)  # the mean does not count
    grid = torch.ones(1, 4, 8, 8)
    grid[..., ::2] = -1
    assert health.high_frequency_share(grid + 5).item() == pytest.approx(1)
    smooth = torch.linspace(0, 2 * math.pi, 9)[:-1].sin().expand(1, 4, 8, 8)
    assert health.high_frequency_share(smooth).item() == pytest.approx(0, abs=1e-6)
    assert health.high_frequency_share(torch.ones(1, 4, 8, 8)).item() == 0


def test_diversity_is_within_a_group_and_zero_where_all_are_one():
    groups = torch.arange(8).repeat_interleave(8)
    same = latents(8).repeat_interleave(8, 0)
    assert health.measure(same, groups)[:, 2].max() == pytest.approx(0, abs=1e-6)
    assert health.measure(latents(), groups)[:, 2].mean() == pytest.approx((7 / 8) ** 0.5, rel=0.05)


def test_a_spike_is_over_the_median_of_what_came_before():
    spike = health.grad_norm_spike
    assert spike(history(grad_norms=[(1.0, 2.0, 3.0), (8.0,)])).value == 4
    assert spike(history(grad_norms=[(1.0, 2.0)])).value == 1
    assert spike(history(grad_norms=[(100.0,) * 30, *[(1.0,)] * 20, (3.0, 2.0)])).value == 3
    assert spike(history(grad_norms=[(1.0,), ()])) is None


def test_a_drop_is_counted_in_standard_errors_beyond_the_best_of_so_many_means():
    rewards = [0.5, 0.6] * 5 + [0.3] * 5  # steps of 0.1 nine times, one of 0.3
    noise = math.sqrt((9 * 0.01 + 0.09) / 14 / 2)
    drop = (0.56 - 0.3) / (noise * math.sqrt(2 / 5))
    sign = health.reward_drop(history(reward=rewards))
    assert sign.value == pytest.approx(drop - math.sqrt(math.log(3)))
    assert "from its best 0.56" in sign.sentence
    assert "to 0.3" in sign.sentence


def test_a_reward_that_is_only_noise_raises_an_alarm_in_less_than_a_tenth_of_runs():
    alarms = 0
    for seed in range(60):
        rng = random.Random(seed)
        epochs = history(reward=[rng.gauss(0.5, 0.05) for _ in range(120)])
        alarms += any(health.reward_drop(epochs[:end]).value > LIMITS.reward_drop for end in range(10, 121))
    assert alarms < 6


def test_an_evaluation_falls_by_standard_errors_of_the_difference():
    epochs = history(evaluation=[0.5, None, 0.8, None, 0.7], evaluation_error=[0.03, None, 0.03, None, 0.04])
    assert health.eval_drop(epochs[:2]) is None
    assert health.eval_drop(epochs).value == pytest.approx(2)
    assert "from its best 0.8 after 2 epochs" in health.eval_drop(epochs).sentence


BEFORE = dict(reward=0.5, latent_rms=1.0, high_frequency=0.2, diversity=0.5, grad_norms=(1.0,), loss=2.0, distance=0.1)
BEFORE |= dict(update_size=2.0, evaluation=0.5, evaluation_error=0.02)


@pytest.mark.parametrize(
    ("change", "sign", "value"),
    [
        (dict(latent_rms=1.6), "latent_rms_change", 1.6),
        (dict(latent_rms=0.5), "latent_rms_change", 2),
        (dict(high_frequency=0.5), "high_frequency_change", 2.5),
        (dict(diversity=0.05), "diversity_change", 10),
        (dict(grad_norms=(11.0,)), "grad_norm_spike", 11),
        (dict(loss=8.0), "loss_rise", (4 * 2 + 8) / 5 / 2),
        (dict(distance=30.0), "reference_distance", 30.4 / 5),
        (dict(update_size=52.0), "update_size", 12),
        (dict(evaluation=0.4), "eval_drop", 0.1 / 0.02 / math.sqrt(2)),
    ],
)
def test_each_limit_is_exceeded_by_its_own_sign(change, sign, value):
    epochs = [health.Epoch(i, **BEFORE) for i in range(11)]
    assert health.judge(epochs, LIMITS).alarms == []
    epochs[-1] = epochs[-1]._replace(**change)
    (alarm,) = health.judge(epochs, LIMITS).alarms
    assert (alarm.name, alarm.value) == (sign, pytest.approx(value))
    assert f"config.health.{sign}" in alarm.sentence
    assert health.judge(epochs, OFF).alarms == []


def test_epochs_in_a_row_without_a_signal_are_counted():
    silent = [True, False, True, True, True, True]
    epochs = history(no_signal=silent)
    assert [health.epochs_without_signal(epochs[: i + 1]).value for i in range(6)] == [1, 0, 1, 2, 3, 4]
    assert health.judge(epochs[:5], LIMITS).alarms == []
    assert [alarm.name for alarm in health.judge(epochs, LIMITS).alarms] == ["epochs_without_signal"]


@pytest.mark.parametrize("field", ["reward", "latent_rms", "loss", "distance", "evaluation", "update_size"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_figure_that_is_not_finite_raises_an_alarm_once_whatever_the_limits(field, value):
    epochs = [health.Epoch(i, **BEFORE) for i in range(12)]
    epochs[5] = epochs[5]._replace(**{field: value})
    for limits in (LIMITS, OFF):
        (alarm,) = health.judge(epochs[:6], limits).alarms
        assert alarm.name == "not_finite"
        assert field.replace("_", " ") in alarm.sentence
    assert health.judge(epochs, LIMITS).alarms == []


def test_what_an_algorithm_does_not_log_is_skipped():
    epochs = [health.summarize([dict(kind="epoch", epoch=i)], CONFIG) for i in range(20)]
    assert health.judge(epochs, LIMITS).figures == {"epochs_without_signal": 0}


def test_an_epoch_is_summed_up_from_its_records():
    line = {"kind": "epoch", "epoch": 3, "reward/avg": 0.4, "reward/zero_std_share": 0.5, "health/diversity": 0.8}
    evaluation = {"kind": "eval", "epoch": 3, "eval/avg": 0.6, "eval/std_error": 0.02, "eval/other": 0.7}
    forward = [dict(kind="update", epoch=3, policy_loss=x, loss=x, grad_norm=x, reference_distance=x) for x in (1, 2)]
    epoch = health.summarize([evaluation, *forward, line], CONFIG)
    assert (epoch.number, epoch.reward, epoch.diversity, epoch.latent_rms, epoch.no_signal) == (
        3,
        0.4,
        0.8,
        None,
        False,
    )
    assert (epoch.loss, epoch.distance, epoch.grad_norms, epoch.evaluation) == (1.5, 1.5, (1, 2), 0.6)
    judged_by = ConfigDict(dict(train=CONFIG.train, eval=dict(best_by="other")))
    assert health.summarize([evaluation, line], judged_by).evaluation == 0.7


def test_the_size_of_an_update_is_the_last_ones_in_clip_ranges_and_its_loss_is_not_watched():
    updates = [dict(kind="update", policy_loss=1.0, ratio_std=x, grad_norm=1.0) for x in (0.0, 3e-4, 2e-4)]
    line = {"kind": "epoch", "epoch": 0}
    epoch = health.summarize([*updates, line], CONFIG)
    assert (epoch.update_size, epoch.loss) == (pytest.approx(2), None)
    guard = ConfigDict(dict(train=dict(clip_range=1e-4, objective="guard"), eval={}))
    assert health.summarize([*updates, line], guard).update_size is None


def test_the_size_of_the_first_updates_does_not_count():
    epochs = history(update_size=[1000.0] * 5 + [2.0] * 5)
    assert health.update_size(epochs[:9]) is None
    assert health.update_size(epochs).value == 2


@pytest.mark.parametrize(("share", "grad_norm", "silent"), [(1.0, 1.0, True), (0.9, 1.0, False), (0.9, 0.0, True)])
def test_an_epoch_has_no_signal_where_all_groups_score_alike_or_no_update_has_a_gradient(share, grad_norm, silent):
    update = dict(kind="update", loss=grad_norm, grad_norm=grad_norm)
    line = {"kind": "epoch", "epoch": 0, "reward/zero_std_share": share}
    assert health.summarize([update, line], CONFIG).no_signal == silent


def test_an_action_is_followed_by_a_pause():
    epochs = []
    for number in range(25):
        epochs.append(health.Epoch(number, grad_norms=(1.0,)))
        verdict = health.judge(epochs, ConfigDict(dict(OFF) | dict(grad_norm_spike=0.5)))
        assert len(verdict.alarms) == 1
        epochs[-1] = epochs[-1]._replace(acted=verdict.act)
    assert [epoch.number for epoch in epochs if epoch.acted] == [0, 10, 20]


@pytest.fixture(scope="module")
def stories():
    return {run.name: recorded_runs.tell(run, LIMITS) for run in recorded_runs.load()}


# What had been lost, on a straight line between two evaluations, where the alarm came too late.
LATE = {"learn1_nft": 0.055, "learn1_nft_full": 0.074, "learn3_u12_clip1e-3": 0.118}


def test_recorded_runs_that_hold_raise_no_alarm(stories):
    holding = [story for story in stories.values() if story.outcome == "holds"]
    assert len(holding) == 10
    assert [story.name for story in holding if story.alarms] == []


def test_recorded_runs_that_lose_are_announced_before_an_evaluation_shows_it(stories):
    losing = [story for story in stories.values() if story.outcome != "holds"]
    assert len(losing) == 11
    for story in losing:  # an alarm after n epochs comes before the evaluation after n epochs
        assert story.alarm_after <= story.seen_after, story.name


def test_all_but_three_recorded_runs_are_announced_before_they_have_lost_five_points(stories):
    for run in recorded_runs.load():
        story = stories[run.name]
        if story.outcome != "holds":
            at_alarm = recorded_runs.accuracy_at(run, story.alarm_after, along_training=False)
            lost = 0.0 if story.alarm_after <= story.best[0] else story.best[1] - at_alarm
            assert lost <= LATE.get(story.name, recorded_runs.LOST), story.name


FALSE_ALARMS = {  # of runs that hold; benchmarks/health_recorded_runs_20261122.md says what each saw
    "A_nft_sched2_3e-4": "reward_drop",
    "B_lora_b.3_big": "grad_norm_spike",
    "B_lora_b.3_s2": "grad_norm_spike",
    "B_lora_b.3_sh": "reward_drop",
    "D_roll_back_2e-3": "grad_norm_spike",
}


def test_of_46_later_runs_the_losing_ones_are_announced_and_few_of_the_others():
    """Nothing was chosen by these: they were recorded when the limits stood."""
    stories = [recorded_runs.tell(run, LIMITS) for run in recorded_runs.load(recorded_runs.LATER)]
    assert len(stories) == 46
    for story in stories:
        if story.outcome == "holds":
            assert [alarm.name for alarm in story.alarms[:1]] == [
                name for run, name in FALSE_ALARMS.items() if run == story.name
            ], story.name
        elif story.name == "A_nft_norm10_3e-4":
            assert 0 < story.alarm_after - story.lost_after < 6  # it declines by 0.05 in 42 epochs
        else:
            assert story.alarm_after < (story.lost_after or math.inf), story.name


def test_the_limit_of_update_size_chosen_without_a_run_suits_it(stories, capsys):
    recorded_runs.leave_one_out()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("without")]
    assert len(lines) == 14
    for line in lines:
        name, alarm = line.split()[1].rstrip(":"), line.split("alarm after ")[1].split(",")[0]
        if stories[name].outcome == "holds":
            assert alarm == "None"
        elif [found.name for found in stories[name].alarms] == ["update_size"]:
            assert int(alarm) < stories[name].lost_after


NAME = "shapes_qwenimage"
HOW = dict(health__grad_norm_spike=1e-3, eval_freq=0)  # every gradient is a spike


def test_every_action_may_be_chosen():
    assert BY_KEY["health.action"].choices == tuple(watching.ACTIONS)


def test_a_run_with_an_alarm_says_so_and_goes_on(tmp_path, capsys):
    epochs = lines_of(train(NAME, tmp_path, num_epochs=4, **HOW), "epoch")
    assert [line["health/limits_exceeded"] for line in epochs] == [1, 1, 1, 1]
    assert [line["health/action_taken"] for line in epochs] == [1, 0, 0, 0]
    assert [line["health/learning_rate_factor"] for line in epochs] == [1, 1, 1, 1]
    said = [line for line in capsys.readouterr().out.splitlines() if "a gradient norm was" in line]
    assert len(said) == 1
    assert "epoch 1: " in said[0]
    assert "config.health.action 'log'" in said[0]


def test_a_run_with_an_alarm_stops_with_everything_saved(tmp_path):
    folder = train(NAME, tmp_path, num_epochs=4, health__action="stop", save_freq=0, **HOW)
    assert len(lines_of(folder, "epoch")) == 1
    assert (folder / "checkpoints" / "epoch_000001").is_dir()
    assert (folder / "reward.png").is_file()


def test_a_lowered_learning_rate_and_the_pause_after_it_outlast_resuming(tmp_path):
    how = HOW | dict(health__action="lower_learning_rate", save_freq=1, num_epochs=12, sample__num_prompts_per_epoch=1)
    how |= dict(train__target_update_size=1e6)  # which raises the rate whenever it may
    whole = train(NAME, tmp_path / "whole", **how)
    factors = [line["health/learning_rate_factor"] for line in lines_of(whole, "epoch")]
    assert factors == [1 / 2] * 10 + [1 / 4] * 2
    train(NAME, tmp_path / "parts", **how | dict(num_epochs=2))
    parts = train(NAME, tmp_path / "parts", **how | dict(resume_from="latest"))
    assert lines_of(parts) == lines_of(whole)
    (parts / "metrics.jsonl").unlink()  # with the pause, but not with the rate
    train(NAME, tmp_path / "parts", **how | dict(resume_from="latest", num_epochs=13))
    assert lines_of(parts, "epoch")[0]["health/learning_rate_factor"] == 1 / 8


def test_updates_above_the_target_size_lower_the_rate_and_smaller_ones_raise_it_again_up_to_the_configured_one(
    tmp_path,
):
    sizes = dict(num_epochs=6, eval_freq=0, train__learning_rate=1e-3, save_freq=1, keep_checkpoints=9)
    sizes |= dict(sample__num_prompts_per_epoch=1)
    for target, expected in ((1e-6, [1.5**-n for n in range(1, 7)]), (1e6, [1.0] * 6)):
        lines = lines_of(train(NAME, tmp_path / f"{target}", train__target_update_size=target, **sizes), "epoch")
        assert [line["health/learning_rate_factor"] for line in lines] == pytest.approx(expected)
    target = dict(train__target_update_size=0.5, train__learning_rate_schedule="linear", train__warmup_updates=3)
    whole = train(NAME, tmp_path / "whole", **sizes | target)
    size = [line["ratio_std"] / 1e-4 for line in lines_of(whole, "update")][1::2]
    factors = [1.0, *(line["health/learning_rate_factor"] for line in lines_of(whole, "epoch"))]
    for before, after, value in zip(factors[:-1], factors[1:], size, strict=True):
        change = min(max(math.sqrt(0.5 / value), 1 / 1.5), 1.5)
        assert after == pytest.approx(min(before * change, 1.0))
    rates = [line["learning_rate"] for line in lines_of(whole, "update")]
    shares = [min((n + 1) / 4, 1) * (1 - n / 12) for n in range(12)]
    assert rates == pytest.approx([1e-3 * share * factors[n // 2] for n, share in enumerate(shares)])
    copied = shutil.copytree(whole, tmp_path / "parts" / whole.name)
    train(NAME, tmp_path / "parts", resume_from=str(copied / "checkpoints" / "epoch_000003"), **sizes | target)
    assert lines_of(copied) == lines_of(whole)


def test_a_run_rolls_back_to_its_best_weights_with_half_the_rate_and_a_resumed_one_does_the_same(tmp_path):
    how = dict(health__action="roll_back", health__grad_norm_spike=1e-3, save_freq=1, keep_checkpoints=9)
    how |= dict(num_epochs=3, train__learning_rate=1e-2)
    whole = train(NAME, tmp_path / "whole", **how)
    epochs = lines_of(whole, "epoch")
    assert [line.get("health/rolled_back_to") for line in epochs] == [0, None, None]
    assert [line["health/learning_rate_factor"] for line in epochs] == [1 / 2] * 3
    first, second = (stored(whole, epoch) for epoch in (1, 2))
    adapters = [name for name in first if name.startswith("model/") and "lora_B" in name]
    assert adapters
    assert not any(first[name].any() for name in first if name.startswith("optimizer/"))  # as before the first update
    assert not any(first[name].any() for name in adapters)
    assert any(second[name].any() for name in adapters)
    assert [line["step"] for line in epochs] == [2, 4, 6]
    train(NAME, tmp_path / "parts", **how | dict(num_epochs=1))
    parts = train(NAME, tmp_path / "parts", **how | dict(resume_from="latest"))
    ends = ("eval", "test")  # the first part ended with an evaluation of its own
    assert [line for line in lines_of(parts) if line["kind"] not in ends] == [
        line for line in lines_of(whole) if line["kind"] not in ends
    ]
    assert lines_of(parts, "eval")[-1] == lines_of(whole, "eval")[-1]


def test_a_run_that_may_not_roll_back_any_more_stops(tmp_path):
    how = dict(health__action="roll_back", health__grad_norm_spike=1e-3, health__max_roll_backs=0, num_epochs=3)
    folder = train(NAME, tmp_path, **how)
    assert len(lines_of(folder, "epoch")) == 1
    assert (folder / "checkpoints" / "epoch_000001").is_dir()


def test_rolling_back_needs_evaluations(tmp_path):
    with pytest.raises(ValueError, match="eval_freq 0"):
        train(NAME, tmp_path, health__action="roll_back", eval_freq=0)


def test_an_evaluation_says_its_standard_error(tmp_path):
    """Of n scores in [0, 1] it is at most 0.5 / sqrt(n - 1)."""
    folder = train(NAME, tmp_path, num_epochs=1, eval__num_prompts=16)
    errors = [line["eval/std_error"] for line in lines_of(folder, "eval")]
    assert len(errors) == 2
    assert all(0 < error <= 0.5 / math.sqrt(15) for error in errors)
