"""The signs of health on known latents and histories and on recorded runs, and what a run does about an alarm."""

import itertools
import math
import random
from types import SimpleNamespace as Record

import pytest
import torch
from small import lines_of, stored, train

from flow_grpo.checkpoints import checkpoints
from flow_grpo.monitoring import health
from flow_grpo.run import evaluate, loop
from flow_grpo.run.rewards import latent_signs
from flow_grpo.settings.sections import Config, Eval, Health, Train
from flow_grpo.weights import policies

LIMITS = Health()
OFF = Health(**dict.fromkeys(health.SIGNS, 0.0))
CONFIG = Config()


def latents(num=64, seed=0):
    return torch.randn(num, 4, 8, 8, generator=torch.Generator().manual_seed(seed))


def history(**figures):
    """Epochs of the given figures, each a list with one entry per epoch."""
    (length,) = {len(values) for values in figures.values()}
    epochs = []
    for i in range(length):
        epochs.append(health.Epoch(i, **{name: values[i] for name, values in figures.items()}))
    return epochs


def names_of(alarms):
    return [alarm.name for alarm in alarms]


def test_latent_rms_is_the_root_mean_square_and_diversity_is_within_a_group_and_zero_where_all_are_one():
    assert latent_signs(3 * latents(), torch.arange(64))[:, 0].mean() == pytest.approx(3, rel=0.02)
    groups = torch.arange(8).repeat_interleave(8)
    same = latents(8).repeat_interleave(8, 0)
    assert latent_signs(same, groups)[:, 1].max() == pytest.approx(0, abs=1e-6)
    assert latent_signs(latents(), groups)[:, 1].mean() == pytest.approx((7 / 8) ** 0.5, rel=0.05)


def test_a_drop_is_counted_in_standard_errors_beyond_the_best_and_the_worst_of_so_many_means():
    rewards = [0.5, 0.6] * 5 + [0.3] * 5  # steps of 0.1 nine times, one of 0.3
    noise = math.sqrt((9 * 0.01 + 0.09) / 14 / 2)
    drop = (0.56 - 0.3) / (noise * math.sqrt(2 / 5))
    sign = health.reward_drop(history(reward=rewards))
    assert sign.value == pytest.approx(drop - 2 * math.sqrt(math.log(3)))
    assert "from its best 0.56" in sign.sentence
    assert "to 0.3" in sign.sentence


def test_a_reward_that_is_only_noise_raises_an_alarm_in_less_than_a_tenth_of_runs():
    num_alarmed = 0
    for seed in range(60):
        rng = random.Random(seed)
        epochs = history(reward=[rng.gauss(0.5, 0.05) for _ in range(120)])
        drops = [health.reward_drop(epochs[:end]).value for end in range(10, 121)]
        if max(drops) > LIMITS.reward_drop:
            num_alarmed += 1
    assert num_alarmed < 6


def test_an_evaluation_falls_by_standard_errors_of_the_difference_which_its_own_limit_bounds():
    epochs = history(evaluation=[0.5, None, 0.8, None, 0.6], evaluation_error=[0.03, None, 0.03, None, 0.04])
    assert health.eval_drop(epochs[:2]) is None
    (alarm,) = health.judge(epochs, LIMITS).alarms
    assert (alarm.name, health.eval_drop(epochs).value) == ("eval_drop", pytest.approx(4))
    assert "from its best 0.8 after 2 epochs" in alarm.sentence
    assert "config.health.eval_drop" in alarm.sentence
    assert health.judge(epochs, OFF).alarms == []


@pytest.mark.parametrize(
    ("values", "errors", "alarm"),
    [
        ([0.7, 0.05], [0.03, 0.03], True),
        ([0.7, 0.0], [0.03, 0.0], True),  # all prompts score alike: the collapse is total
        ([1.0, 0.0], [0.0, 0.0], True),
        ([1.0, 1.0], [0.0, 0.0], False),
        ([0.7, 0.0], [None, None], False),  # a single prompt has no error
    ],
)
def test_a_collapse_is_seen_wherever_there_is_an_error_to_compare_it_with(values, errors, alarm):
    alarms = health.judge(history(evaluation=values, evaluation_error=errors), LIMITS).alarms
    assert names_of(alarms) == (["eval_drop"] if alarm else [])


def test_an_evaluation_is_acted_upon_once_however_long_the_next_one_takes():
    epochs = []
    for i in range(60):
        bad = dict(evaluation=0.2 if i == 20 else 0.7, evaluation_error=0.01) if i % 20 == 0 else {}
        epochs.append(health.Epoch(i, **bad))
        epochs[-1] = epochs[-1]._replace(acted=health.judge(epochs, LIMITS).act)
    # A page of the run judges its epochs again.
    for epoch in epochs:
        assert epoch.acted == (epoch.number == 20)
        assert bool(health.judge(epochs[: epoch.number + 1], LIMITS).alarms) == (epoch.number == 20)


def watching(trained, watched, error=0.02):
    """Epochs with evaluations of the average and of a watched reward, as their lines of metrics.jsonl say it."""
    config = Config(reward_fn={"shapes_proxy": 1.0}, eval=Eval(rewards=("shapes",)))
    epochs = []
    for number, (average, score) in enumerate(zip(trained, watched)):
        line = {"kind": "eval", "epoch": number, "eval/avg": average, "eval/shapes": score, "eval/std_error": error}
        line |= {"eval/avg_std_error": error, "eval/shapes_std_error": error}
        epochs.append(health.summarize([line, {"kind": "epoch", "epoch": number}], config))
    return epochs


@pytest.mark.parametrize(
    ("trained", "watched", "alarm"),
    [
        ([0.5, 0.6, 0.7, 0.8], [0.6, 0.65, 0.6, 0.5], True),  # hacked: the fall is 0.15 / 0.028
        ([0.5, 0.6, 0.7, 0.8], [0.6, 0.65, 0.7, 0.75], False),  # both rise
        ([0.5, 0.6, 0.7, 0.8], [0.6, 0.65, 0.6, 0.6], False),  # a fall of 1.8 standard errors
        ([0.5, 0.7, 0.72, 0.74], [0.6, 0.65, 0.6, 0.4], False),  # since the best, the trained one hardly rose
        ([0.8, 0.8, 0.6, 0.5], [0.6, 0.65, 0.6, 0.4], False),  # both fall, which is no hacking
        ([0.5], [0.6], False),
    ],
)
def test_a_watched_reward_that_falls_while_the_trained_one_rises_raises_an_alarm(trained, watched, alarm):
    limits = Health(eval_drop=0.0)
    verdict = health.judge(watching(trained, watched), limits)
    assert names_of(verdict.alarms) == (["watched_drop"] if alarm else [])
    assert health.judge(watching(trained, watched), OFF).alarms == []
    if alarm:
        assert verdict.figures["watched_drop"] == pytest.approx(0.15 / math.hypot(0.02, 0.02))
        for part in ("shapes", "from its best 0.65 after 1 epoch to 0.5", "0.6 to 0.8", "config.health.watched_drop"):
            assert part in verdict.alarms[0].sentence


def test_nothing_is_watched_where_every_evaluated_reward_is_trained_on_or_has_no_error():
    line = {"kind": "eval", "epoch": 0, "eval/avg": 0.5, "eval/shapes": 0.5, "eval/avg_std_error": 0.1}
    epoch = {"kind": "epoch", "epoch": 0}
    trained_on = Config(eval=Eval(rewards=("shapes",)))
    watched = Config(reward_fn={"shapes_proxy": 1.0}, eval=Eval(rewards=("shapes",)))
    for config, error in ((trained_on, 0.1), (watched, math.nan), (watched, math.inf)):
        epochs = [health.summarize([line | {"eval/shapes_std_error": error}, epoch], config)] * 2
        assert health.watched_drop(epochs) is None


def test_a_run_on_a_proxy_measures_the_rule_with_its_error_and_judges_it(tmp_path):
    folder = train("shapes_proxy_qwenimage,smoke", tmp_path)
    for line in lines_of(folder, "eval"):
        assert line["eval/avg"] == line["eval/shapes_proxy"]
        assert line["eval/avg_std_error"] == line["eval/std_error"]
        assert 0 < line["eval/shapes_std_error"] < 0.5
    first, last = lines_of(folder, "epoch")
    assert first["health/watched_drop"] == 0
    assert last["health/watched_drop"] >= 0


def test_a_watched_fall_is_acted_upon_once():
    epochs = watching([0.5, 0.6, 0.8], [0.6, 0.65, 0.4])
    assert health.watched_drop([*epochs[:-1], epochs[-1]._replace(acted=True)]) is None


def test_epochs_in_a_row_without_a_signal_are_counted():
    epochs = history(no_signal=[True, False, True, True, True, True])
    for end, count in enumerate([1, 0, 1, 2, 3, 4], start=1):
        assert health.epochs_without_signal(epochs[:end]).value == count
    assert health.judge(epochs[:5], LIMITS).alarms == []
    assert names_of(health.judge(epochs, LIMITS).alarms) == ["epochs_without_signal"]


FINITE = [
    *itertools.product(["epoch"], ["reward/avg", "health/latent_rms", "health/diversity"]),
    *itertools.product(["update"], ["grad_norm", "policy_loss", "reference_distance", "kl_reference"]),
    ("eval", "eval/avg"),
]


@pytest.mark.parametrize(("kind", "name"), FINITE)
def test_a_figure_that_is_not_finite_raises_an_alarm_once_whatever_the_limits(kind, name):
    for value, limits in itertools.product((math.nan, math.inf), (LIMITS, OFF)):
        records = [{"kind": kind, "epoch": 0, name: value}, {"kind": kind, "epoch": 0, name: 1.0}]
        epoch = health.summarize([*records, dict(kind="epoch", epoch=0)], CONFIG)
        (alarm,) = health.judge([epoch], limits).alarms
        assert alarm.name == "not_finite"
        assert name in alarm.sentence
        assert health.judge([epoch, health.Epoch(1)], limits).alarms == []


def test_an_epoch_is_summed_up_from_its_records():
    """An epoch has no signal where all groups score alike, or no update has a gradient."""
    line = {"kind": "epoch", "epoch": 3, "reward/avg": 0.4, "reward/zero_std_share": 0.5, "health/action_taken": 1.0}
    evaluation = {"kind": "eval", "epoch": 3, "eval/avg": 0.6, "eval/std_error": 0.02, "eval/other": 0.7}
    epoch = health.summarize([evaluation, dict(kind="update", epoch=3, grad_norm=1.0), line], CONFIG)
    assert epoch == health.Epoch(3, reward=0.4, evaluation=0.6, evaluation_error=0.02, acted=True, not_finite={})
    judged_by = Config(eval=Eval(best_by="other"))
    assert health.summarize([evaluation, line], judged_by).evaluation == 0.7
    for share, grad_norm, silent in ((1.0, 1.0, True), (0.9, 1.0, False), (0.9, 0.0, True)):
        records = [dict(kind="update", grad_norm=grad_norm), line | {"reward/zero_std_share": share}]
        assert health.summarize(records, CONFIG).no_signal == silent


def test_rewards_that_are_all_alike_leave_something_to_learn_where_diversity_counts():
    line = {"kind": "epoch", "epoch": 3, "reward/zero_std_share": 1.0}
    for weight, nothing in ((0.0, True), (0.5, False)):
        config = Config(train=Train(diversity_weight=weight))
        assert health.teaches_nothing(line, config) == nothing
        assert health.summarize([dict(kind="update", grad_norm=1.0), line], config).no_signal == nothing


@pytest.mark.parametrize(
    ("since", "evaluated", "min_variety", "reason"),
    [
        (3, [2], 0.0, "nothing was evaluated since the way of evaluating changed, after 3 epochs"),
        (3, [2, 3], 0.0, "no evaluation was a finite number"),
        (0, [0], 0.0, "no evaluation was a finite number"),
        (0, [0], 0.9, "no evaluation with the variety of config.eval.min_variety, 0.9, was a finite number"),
    ],
)
def test_a_run_without_a_best_policy_to_go_back_to_ends_and_says_why_there_is_none(
    since, evaluated, min_variety, reason
):
    board = Record(history=[{"kind": "update", "epoch": 4}])
    for epoch in evaluated:
        board.history.append({"kind": "eval", "epoch": epoch})
    config = Config(eval=Eval(min_variety=min_variety))
    run = Record(config=config, best_evaluation=None, stopped=False, evaluations_since=since, board=board)
    assert loop._roll_back(run) == f"{reason}, so it saves a checkpoint and ends the run"
    assert run.stopped


def test_a_best_policy_whose_folder_was_removed_is_said_and_ends_in_no_traceback(tmp_path):
    said = []
    board = Record(say=said.append)
    chosen = Record(epoch=2, split="validation")
    run = Record(best_evaluation=chosen, num_roll_backs=0, stopped=False, folder=tmp_path, board=board)
    removed = f"the folder {tmp_path / 'best'} was removed"
    assert loop._roll_back(run) == f"{removed}, so it saves a checkpoint and ends the run"
    evaluate.conclude(run)
    assert said == [f"{tmp_path}: the folder best/ was removed, so there is no best policy"]


@pytest.mark.parametrize(
    ("algorithm", "nothing"),
    [("grpo", True), ("pr", True), ("nft", True), ("dpo", True), ("distill", False), ("refl", False)],
)
def test_rewards_that_are_all_alike_teach_only_algorithms_that_compare_images_nothing(algorithm, nothing):
    config = Config(algorithm=algorithm)
    assert health.teaches_nothing({"reward/zero_std_share": 1.0}, config) == nothing


def test_a_reference_that_is_reset_is_the_base_again():
    transformer = torch.nn.Linear(2, 2)
    reference = policies.Reference(transformer, interval=1, guidance_scale=3.0)
    assert not reference.reset()  # without an adapter the first reference is known no more
    reference.is_fresh = True
    reference.copy.averages = {"lora_A": torch.ones(2), "lora_B": torch.ones(2)}
    reference.num_moves = 2
    assert reference.reset()
    assert (reference.copy.averages["lora_B"].sum(), reference.guidance(1.0)) == (0, 3.0)


def test_a_resumed_run_takes_up_only_figures_that_later_ones_can_be_compared_with():
    lines = []
    for epoch in range(4):
        lines.append({"kind": "eval", "epoch": epoch, "eval/avg": 0.6})
        lines.append({"kind": "epoch", "epoch": epoch, "reward/avg": 0.4})
    run = Record(board=Record(history=lines[:-1]), inputs=Record(rewards_since=1), evaluations_since=2)
    run.config = CONFIG
    run.epoch_metrics = {"reward/avg": 0.5}
    first, second, third, fourth = loop.comparable_epochs(run, 3)
    assert (first.reward, first.evaluation) == (None, None)
    assert (second.reward, second.evaluation) == (0.4, None)
    assert (third.reward, third.evaluation) == (0.4, 0.6)
    assert (fourth.reward, fourth.evaluation) == (0.5, 0.6)


# Figures of a recorded run of the tiny model, an epoch each; benchmarks/LOG.md says what it was.
COLLAPSING = """.611 .624 .565 .616 .650 .697 .658 .698 .679 .671 .739 .726 .750 .732 .734 .723 .793 .792 .783 .812
.831 .819 .812 .799 .808 .800 .827 .821 .834 .816 .841 .848 .829 .839 .864 .840 .850 .808 .853 .820 .805 .842 .781 .812
.783 .835 .773 .759 .719 .730 .711 .667 .678 .669 .639 .647 .550 .523 .523 .541"""  # reward; published NFT, all weights


def test_a_recorded_loss_is_announced_in_time_and_a_run_that_still_learns_raises_no_alarm():
    """The loss, 0.73 to 0.40, is seen by the evaluation of epoch 80; until epoch 40 it learns."""
    epochs = history(reward=list(map(float, COLLAPSING.split())))
    for end in range(1, 51):
        assert health.judge(epochs[:end], LIMITS).alarms == []
    assert names_of(health.judge(epochs[:51], LIMITS).alarms) == ["reward_drop"]


NAME = "shapes_qwenimage"


def column(folder, kind, name):
    """A figure of each line of a kind; None where a line does not have it."""
    return [line.get(name) for line in lines_of(folder, kind)]


@pytest.fixture
def alarmed(monkeypatch):
    """An alarm in every epoch."""
    alarm = health.Alarm("not_finite", "the test rings")
    monkeypatch.setattr(health, "not_finite", lambda epoch: [alarm])


@pytest.mark.parametrize(("action", "epochs"), [("log", 3), ("stop", 1), ("roll_back", 1)])
def test_a_run_with_an_alarm_says_so_once_and_goes_on_or_stops_with_everything_saved(
    action, epochs, shallow, tmp_path, capsys, alarmed, monkeypatch
):
    monkeypatch.setattr(loop, "MAX_ROLL_BACKS", 0)
    folder = train(NAME, tmp_path, num_epochs=3, health__action=action, **shallow)
    lines = lines_of(folder, "epoch")
    assert len(lines) == epochs
    for epoch, line in enumerate(lines):
        assert line["health/limits_exceeded"] == line["health/learning_rate_factor"] == 1
        assert line["health/action_taken"] == (1 if epoch == 0 else 0)
        assert line["alarms"] == "the test rings"
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "the test rings" in line]
    assert said.startswith("ALARM, epoch 1: ")
    assert f"config.health.action {action!r}" in said
    assert (folder / "checkpoints" / f"epoch_00000{epochs}").is_dir()
    assert (folder / "reward.png").is_file()


@pytest.mark.slow
def test_a_lowered_learning_rate_and_the_pause_after_it_outlast_resuming(shallow, tmp_path, alarmed, monkeypatch):
    monkeypatch.setattr(health, "PAUSE", 3)
    how = shallow | dict(health__action="lower_learning_rate", save_freq=1, num_epochs=4, eval_freq=0)
    how |= dict(train__learning_rate=1e-3, train__warmup_updates=3)
    whole = train(NAME, tmp_path / "whole", **how)
    # The optimizer's own rate, in its warm-up and after it.
    assert column(whole, "update", "learning_rate") == pytest.approx(
        [1e-3 / 4, 1e-3 / 2, 1e-3 * 3 / 8, *[1e-3 / 2] * 5]
    )
    assert column(whole, "epoch", "health/learning_rate_factor") == [1 / 2] * 3 + [1 / 4]
    train(NAME, tmp_path / "parts", **how | dict(num_epochs=2))
    parts = train(NAME, tmp_path / "parts", **how | dict(resume_from="latest"))
    assert lines_of(parts) == lines_of(whole)
    (parts / "metrics.jsonl").unlink()  # with the pause, but not with the rate
    train(NAME, tmp_path / "parts", **how | dict(resume_from="latest", num_epochs=5))
    assert lines_of(parts, "epoch")[0]["health/learning_rate_factor"] == 1 / 8


@pytest.mark.slow
def test_a_run_rolls_back_to_its_best_weights_with_half_the_rate_and_a_resumed_one_does_so_too(
    shallow, tmp_path, alarmed
):
    how = shallow | dict(health__action="roll_back", save_freq=1, keep_checkpoints=9, num_epochs=3)
    how |= dict(
        train__learning_rate=1e-2, train__beta=1e-3, train__reference_interval=2, train__reference_guidance_scale=2.0
    )
    whole = train(NAME, tmp_path / "whole", **how)
    assert column(whole, "epoch", "health/rolled_back_to") == [0, None, None]
    assert column(whole, "epoch", "health/learning_rate_factor") == [1 / 2] * 3
    first = stored(whole, 1)
    second = stored(whole, 2)
    adapters = [name for name in first if name.startswith("model/") and "lora_B" in name]
    assert any(second[name].any() for name in adapters)
    # The first checkpoint is as before the first update.
    for name, tensor in first.items():
        if name in adapters or name.startswith("optimizer/"):
            assert not tensor.any()
    assert column(whole, "epoch", "step") == [2, 4, 6]
    # It had moved in the first epoch, too, and is the first reference again.
    assert checkpoints.read_progress(whole / "checkpoints" / "epoch_000001").reference_moves == 0
    assert checkpoints.read_progress(whole / "checkpoints" / "epoch_000002").reference_moves == 1
    train(NAME, tmp_path / "parts", **how | dict(num_epochs=1))
    parts = train(NAME, tmp_path / "parts", **how | dict(resume_from="latest"))
    for kind in ("update", "epoch"):  # the first part ended with an evaluation of its own
        assert lines_of(parts, kind) == lines_of(whole, kind)
    assert lines_of(parts, "eval")[-1] == lines_of(whole, "eval")[-1]
    assert checkpoints.read_progress(parts / "checkpoints" / "epoch_000003").num_roll_backs == 1
