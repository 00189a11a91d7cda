"""Prompts drawn by their signal: their weights, their draws, and runs that draw so."""

import itertools
import json
import math
import os

import pytest
import torch
import warm
from refused import assert_refused
from small import CHECKS, ENV, change_json, command_of, config_of, few_prompts, lines_of, train
from test_ranks import on_two_ranks

from flow_grpo import rewards
from flow_grpo.algorithms.prompt_signal import (
    PromptSignal,
    Visit,
    effective_number,
    in_order,
    signals_of_prompts,
    weighted_draw,
)
from flow_grpo.base import checksums, rng
from flow_grpo.command_line import checks
from flow_grpo.data.prompts import epoch_prompts, load_prompts
from flow_grpo.run import startup
from flow_grpo.settings import table
from flow_grpo.settings.sections import Config, Sample

ONE = {"a": 1.0}
# A reward that is 1 for one of four images of noise, and 0 for the others.
COIN = """
RANGE = (0.0, 1.0)
def load(device, least=0.75):
    return lambda images, *_: (50 * images.mean((1, 2, 3)) % 1 > least).float()
"""
NAME = "shapes_qwenimage,signal"
HOW = dict(num_epochs=4, eval_freq=0, save_freq=1, sample__num_images_per_prompt=8, sample__batch_size=4)
COINS = dict(reward_fn__shapes=0.0, reward_fn__coin=1.0)


@pytest.fixture(scope="module")
def coins(shallow, tmp_path_factory):
    """Settings of a run on a model of two blocks whose reward is COIN."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "coin.py").write_text(COIN)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOW_GRPO_REWARDS", str(folder))
        patch.setattr(rewards, "__path__", [*rewards.__path__])
        yield {key: shallow[key] for key in ("model", "dataset", "eval__num_steps")} | HOW | COINS


def signals(scores, groups, prompts, span=1.0):
    return signals_of_prompts({"a": torch.tensor(scores)}, ONE, torch.tensor(groups), torch.tensor(prompts), span)


@pytest.mark.parametrize("num_images", [2, 3, 16])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.98, 1.0])
def test_the_signal_of_rewards_of_0_and_1_is_4_p_times_1_minus_p_on_average(num_images, p):
    mean = 0.0
    for wins in range(num_images + 1):
        chance = math.comb(num_images, wins) * p**wins * (1 - p) ** (num_images - wins)
        scores = [1.0] * wins + [0.0] * (num_images - wins)
        (signal,) = signals(scores, [7] * num_images, [0] * num_images).values()
        assert signal == pytest.approx(4 * wins * (num_images - wins) / (num_images * (num_images - 1)))
        mean += chance * signal
    assert mean == pytest.approx(4 * p * (1 - p))


def test_the_signal_does_not_depend_on_the_rewards_unit_and_half_a_point_for_all_is_none():
    groups = prompts = [0] * 4
    assert signals([0.0, 100.0, 0.0, 0.0], groups, prompts, 100.0) == pytest.approx({0: 1.0})
    assert signals([0.0, 1.0, 0.0, 0.0], groups, prompts) == pytest.approx({0: 1.0})
    assert signals([0.5] * 4, groups, prompts) == {0: 0.0}
    assert signals([0.4, 0.6, 0.4, 0.6], groups, prompts)[0] == pytest.approx(4 * 0.01 * 4 / 3)


def test_the_signal_is_that_of_the_weighted_sum_and_the_mean_of_a_prompts_groups_without_what_was_not_scored():
    scores = {"a": torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 1.0]), "b": torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, math.nan])}
    weights = {"a": 1.0, "b": 1.0}
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    assert signals_of_prompts(scores, weights, groups, torch.tensor([0, 0, 0, 0, 1, 1]), 2.0) == {0: 0.0}
    found = signals_of_prompts(scores, ONE, groups, torch.tensor([0, 0, 0, 0, 1, 1]), 1.0)
    assert found == {0: 1.0, 1: 2.0}, "the mean of a group of 2 and a flat one, and a group of 2"
    assert signals_of_prompts({"a": torch.full((2,), math.nan)}, ONE, groups[:2], groups[:2], 1.0) == {}


def test_ranks_add_up_the_same_numbers_in_the_same_order():
    """Branches of three images on each of two ranks, whose batches alternate: an order that is not its own inverse."""
    values = torch.arange(18.0).view(6, 3)
    numbers = torch.tensor([0, 2, 4, 1, 3, 5])
    assert in_order(values[numbers].flatten(), numbers).tolist() == values.flatten().tolist()


def test_weights_follow_visits_from_that_of_half_to_the_floor():
    signal = PromptSignal(decay=0.5, floor=0.05, span=1.0)
    assert signal.weights(["a", "b"]).tolist() == [1.0, 1.0], "a prompt that was never drawn is tried"
    expected = [0.5, 0.25, 0.125, 0.0625, 0.05, 0.05]
    for weight in expected:
        signal.visits = [Visit("a", 0.0)]
        before = signal.weights(["a"]).tolist()
        signal.visits.append(Visit("b", 2.0))
        assert signal.weights(["a"]).tolist() == before, "an epoch's visits count when it is over"
        signal.complete_epoch()
        assert signal.weights(["a", "b", "c"]).tolist() == [weight, 1.0, 1.0]
    assert signal.visits == []
    signal.visits = [Visit("a", 0.36)]
    signal.complete_epoch()
    assert signal.signals["a"] == pytest.approx(0.5 * 0.5**6 + 0.5 * 0.36)


def chances(weights, count):
    """Exact chance of each sequence of `count` draws without putting back."""
    found = {}
    for order in itertools.permutations(range(len(weights)), count):
        left = sum(weights)
        chance = 1.0
        for prompt in order:
            chance *= weights[prompt] / left
            left -= weights[prompt]
        found[order] = chance
    return found


def test_prompts_are_drawn_by_their_weights_among_those_that_are_left():
    weights = [1.0, 0.36, 0.05, 0.5]
    counts = dict.fromkeys(chances(weights, 2), 0)
    num_draws = 20_000
    for epoch in range(num_draws):
        generator = rng.generator(0, "test", epoch)
        counts[tuple(weighted_draw(torch.tensor(weights, dtype=torch.float64), 2, generator))] += 1
    for order, chance in chances(weights, 2).items():
        error = math.sqrt(chance * (1 - chance) / num_draws)
        assert abs(counts[order] / num_draws - chance) < 4.5 * error, order


def test_an_epoch_draws_different_prompts_and_without_weights_those_that_it_always_drew():
    weights = torch.linspace(0.05, 1.0, 10, dtype=torch.float64)
    for epoch in range(20):
        assert len(set(epoch_prompts(10, 4, 0, epoch, weights))) == 4
    assert sorted(epoch_prompts(10, 10, 0, 0, weights)) == list(range(10))
    assert epoch_prompts(10, 4, 0, 2) == [4, 2, 5, 8]
    assert epoch_prompts(10, 4, 7, 0) == [7, 2, 9, 1]


def test_the_effective_number_is_that_of_equal_weights():
    assert effective_number(torch.ones(7)) == 7
    assert effective_number(torch.tensor([1.0, 1.0, 0.0, 0.0])) == 2


def test_late_in_a_run_draws_have_more_signal_than_uniform_ones():
    """A thousand prompts, of which 80 % succeed in 98 of 100 images: 1.8 times the signal and more (docs)."""
    stream = torch.Generator().manual_seed(0)
    p = torch.where(torch.arange(1000) % 5 == 0, 0.7, 0.98)
    names = [str(number) for number in range(1000)]
    signal = PromptSignal(decay=0.5, floor=0.05, span=1.0)
    shares = []
    for epoch in range(120):
        picks = weighted_draw(signal.weights(names), 48, rng.generator(0, "draws", epoch))
        images = torch.rand(48, 16, generator=stream) < p[picks][:, None]
        groups = torch.arange(48)[:, None].expand(48, 16).flatten()
        means = signals_of_prompts({"a": images.float().flatten()}, ONE, groups, groups, 1.0)
        signal.visits = [Visit(names[picks[group]], mean) for group, mean in means.items()]
        signal.complete_epoch()
        shares.append(sum(means.values()) / len(means))
    uniform = (4 * p * (1 - p)).mean().item()
    assert sum(shares[-40:]) / 40 > 1.8 * uniform


def progress_of(folder, epoch):
    return json.loads((folder / f"checkpoints/epoch_{epoch:06d}/progress.json").read_text())


def test_a_resumed_run_draws_what_the_unbroken_one_draws_bit_for_bit(coins, tmp_path):
    coins = coins | dict(keep_checkpoints=9)
    unbroken = train(NAME, tmp_path / "unbroken", **coins)
    broken = train(NAME, tmp_path / "broken", **coins | dict(num_epochs=2))
    train(NAME, tmp_path / "broken", **coins, resume_from="latest")
    assert lines_of(broken) == lines_of(unbroken)
    assert progress_of(broken, 4) == progress_of(unbroken, 4)
    seen = progress_of(unbroken, 4)["prompt_signals"]
    assert len(set(seen.values())) > 2, "a run whose prompts are alike shows nothing"
    epochs = lines_of(unbroken, "epoch")
    assert epochs[0]["prompts/effective_number"] == 24, "before the first visit"
    assert epochs[-1]["prompts/effective_number"] < 24
    weights = [min(max(value, 0.05), 1.0) for value in progress_of(unbroken, 3)["prompt_signals"].values()]
    weights += [1.0] * (24 - len(weights))
    assert epochs[-1]["prompts/effective_number"] == pytest.approx(effective_number(torch.tensor(weights)))


def test_a_signal_in_mid_epoch_saves_what_completed_epochs_have_seen(coins, tmp_path):
    """The second epoch, whose rewards are known when it comes, is drawn again by the same weights."""
    name = "shapes_qwenimage_pr,signal"
    how = coins | dict(num_epochs=3, save_freq=0, train__updates_per_epoch=2)
    unbroken = train(name, tmp_path / "unbroken", **how)
    script, *flags = command_of(name, tmp_path / "broken", **how, signal_grace_s=0.0)
    environment = {"FLOW_GRPO_REWARDS": os.environ["FLOW_GRPO_REWARDS"]}
    stopped = warm.run(["tests/signalled.py", *flags], ENV | environment)
    assert "stopped by SIGTERM after 1 epoch; epoch 2 is dropped" in stopped.stderr, stopped.stderr[-3000:]
    folder = tmp_path / "broken" / unbroken.name
    assert len(progress_of(folder, 1)["prompt_signals"]) == 2, "the prompts of one epoch"
    resumed = warm.run([script, *flags, "--config.resume_from=latest"], ENV | environment)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert lines_of(folder) == lines_of(unbroken)


@pytest.mark.parametrize("name", ["shapes_qwenimage", pytest.param("shapes_qwenimage_pr", marks=pytest.mark.slow)])
def test_two_ranks_see_and_draw_what_one_does_bit_for_bit(name, coins, tmp_path):
    """Weights stay as they are, so that the same images are scored."""
    how = coins | dict(train__learning_rate=0.0, save_freq=0)
    one = train(f"{name},signal", tmp_path / "one", **how)
    environment = {"FLOW_GRPO_REWARDS": os.environ["FLOW_GRPO_REWARDS"]}
    two = on_two_ranks(f"{name},signal", tmp_path / "two", ENV | environment, **how)
    seen = progress_of(one, 4)["prompt_signals"]
    assert len(set(seen.values())) > 2
    assert progress_of(two, 4)["prompt_signals"] == seen


@pytest.mark.parametrize(
    "name",
    [
        "shapes_qwenimage_pr,signal",
        pytest.param("shapes_qwenimage_nft,signal", marks=pytest.mark.slow),
        pytest.param("shapes_qwenimage_nft,signal,crd", marks=pytest.mark.slow),
        pytest.param("shapes_qwenimage_dpo,online,signal", marks=pytest.mark.slow),
        pytest.param("shapes_qwenimage,signal,fdfo", marks=pytest.mark.slow),
    ],
)
def test_every_script_that_compares_images_draws_by_signal(name, coins, tmp_path):
    how = coins | dict(save_freq=0, num_epochs=2)
    # A batch holds whole groups where the loss compares them.
    del how["sample__batch_size"]
    if any(word in name for word in ("crd", "fdfo", "dpo")):
        how |= dict(sample__batch_size=8)
    folder = train(name, tmp_path, **how)
    epochs = lines_of(folder, "epoch")
    assert all(epoch["prompts/signal"] > 0 for epoch in epochs)
    assert epochs[1]["prompts/effective_number"] < epochs[0]["prompts/effective_number"] == 24
    assert len(progress_of(folder, 2)["prompt_signals"]) > 2


def test_a_checkpoint_from_before_there_were_signals_is_gone_on_with_and_a_branch_of_it_may_draw_by_them(
    coins, tmp_path
):
    how = coins | dict(num_epochs=1, keep_checkpoints=9)
    name = NAME.removesuffix(",signal")
    folder = train(name, tmp_path, **how)
    checkpoint = folder / "checkpoints/epoch_000001"
    without_signals(checkpoint)
    train(name, tmp_path, **how | dict(num_epochs=2), resume_from="latest")
    assert len(lines_of(folder, "epoch")) == 2
    assert progress_of(folder, 2)["prompt_signals"] is None
    branch = train(NAME, tmp_path, **how | dict(num_epochs=2), resume_from=str(checkpoint), run_name="branch")
    assert len(progress_of(branch, 2)["prompt_signals"]) == 2, "the prompts of its one epoch"


def without_signals(checkpoint):
    """Write a checkpoint's files as an older version did."""
    path = checkpoint / "progress.json"
    progress = json.loads(path.read_text())
    del progress["prompt_signals"]
    path.write_text(json.dumps(progress))
    config = json.loads((checkpoint / "config.json").read_text())
    for key in ("prompt_weights", "prompt_weight_decay", "prompt_weight_floor"):
        del config["sample"][key]
    (checkpoint / "config.json").write_text(json.dumps(config))
    checksums.write_checksums(checkpoint)


def test_a_branch_goes_on_with_what_its_parent_has_seen_but_not_under_other_rewards(coins, tmp_path):
    parent = train(NAME, tmp_path, **coins | dict(num_epochs=1))
    checkpoint = str(parent / "checkpoints")
    how = coins | dict(num_epochs=1, resume_from=checkpoint)
    seen = progress_of(parent, 1)["prompt_signals"]
    same = train(NAME, tmp_path, **how, run_name="same")
    assert progress_of(same, 1)["prompt_signals"] == seen
    changes = {"other": dict(reward_fn__shapes=1.0), "fairer": dict(reward__args={"coin": {"least": 0.5}})}
    for name, changed in changes.items():
        branch = train(NAME, tmp_path, **how | changed, run_name=name)
        assert progress_of(branch, 1)["prompt_signals"] == {}


def test_what_was_seen_of_prompts_does_not_count_where_the_file_of_a_reward_has_changed(coins, tmp_path):
    how = coins | dict(num_epochs=1, reward_fn__shapes=1.0)
    parent = train(NAME, tmp_path, **how)
    branched = how | dict(resume_from=str(parent / "checkpoints"))
    same = train(NAME, tmp_path, **branched, run_name="same")
    assert progress_of(same, 1)["prompt_signals"] == progress_of(parent, 1)["prompt_signals"] != {}
    change_json(parent / "inputs.json", rewards={"shapes": "another file's"})
    other = train(NAME, tmp_path, **branched, run_name="other")
    assert progress_of(other, 1)["prompt_signals"] == {}


def test_the_training_reward_raises_no_alarm_where_prompts_become_harder(coins, tmp_path):
    """Eleven epochs are enough for `reward_drop`."""
    how = coins | dict(num_epochs=11, save_freq=0, sample__num_images_per_prompt=4)
    drawn_alike = train(NAME.removesuffix(",signal"), tmp_path, **how)
    assert "health/reward_drop" in lines_of(drawn_alike, "epoch")[-1]
    by_signal = train(NAME, tmp_path, **how)
    assert "health/reward_drop" not in lines_of(by_signal, "epoch")[-1]


def test_all_prompts_are_encoded_at_the_start_since_any_may_be_drawn(coins, tmp_path):
    how = coins | dict(num_epochs=1, save_freq=0, cache_dir=str(tmp_path / "cache"))
    train(NAME, tmp_path / "runs", **how)
    texts = {prompt.text for prompt in load_prompts(coins["dataset"], "train")}
    files = list((tmp_path / "cache").glob("*/*.safetensors"))
    assert len(files) >= len(texts) == 24


def test_what_cannot_be_drawn_by_signal_is_refused(tmp_path):
    few = few_prompts(tmp_path / "few", count=8)
    by_signal = Config(dataset=few, sample=Sample(prompt_weights="signal", num_prompts_per_epoch=8))
    all_prompts = load_prompts(few, "train")

    def checked(name, **settings):
        config = config_of(name, **settings)
        return lambda: checks.check(config, CHECKS[config.algorithm])

    def drawn(**settings):
        config = table.typed(config_of(NAME, **settings))
        return lambda: startup.check_prompt_weights(config, all_prompts)

    assert len(all_prompts) == 8
    assert_refused(
        [
            (
                "few prompts",
                lambda: startup.check_prompt_weights(by_signal, all_prompts),
                ["draws 8", "has 8", "'uniform'"],
            ),
            ("pickscore", drawn(reward_fn={"pickscore": 1.0}), ["'pickscore' has none", "RANGE"]),
            ("no end", drawn(reward_fn={"jpeg_compressibility": 1.0}), ["'jpeg_compressibility' has none"]),
            ("all", checked(NAME, sample__baseline="all"), ["sample.prompt_weights", "sample.baseline"]),
            ("gdpo", checked(NAME, train__reward_aggregation="gdpo"), ["sample.prompt_weights", "'sum'"]),
            ("diversity", checked(NAME, train__diversity_weight=1.0), ["sample.prompt_weights", "diversity"]),
            ("pairs", checked("shapes_qwenimage_dpo,signal"), ["sample.prompt_weights", "preferences.path"]),
            (
                "gradients",
                checked("shapes_proxy_qwenimage_refl", sample__prompt_weights="signal"),
                ["sample.prompt_weights", "this script would ignore it"],
            ),
            ("floor", checked(NAME, sample__prompt_weight_floor=0.0), ["sample.prompt_weight_floor"]),
            (
                "a floor of nothing",
                checked(NAME.removesuffix(",signal"), sample__prompt_weight_floor=0.1),
                ["sample.prompt_weight_floor", "needs config.sample.prompt_weights 'signal'"],
            ),
        ]
    )
    startup.check_prompt_weights(Config(dataset=few, sample=Sample(num_prompts_per_epoch=8)), all_prompts)


@pytest.mark.parametrize("name", ["pickscore_krea2", "editreward_flux_kontext", "pickscore_wan", "pickscore_sd3"])
def test_a_smoke_run_that_draws_by_signal_has_a_reward_with_a_range(name):
    """In the place of one that is not on this machine."""
    config = table.typed(config_of(f"{name},signal"))
    startup.check_prompt_weights(config, load_prompts(config.dataset, "train"))


def test_the_range_of_several_rewards_is_that_of_their_weighted_sum_and_geneval_counts_from_0_to_1():
    config = table.typed(config_of(NAME, reward_fn={"shapes": 2.0, "geneval": -0.5}))
    assert rewards.bounds("geneval") == (-math.inf, 1.0)
    assert startup.prompt_signal(config) == PromptSignal(0.5, 0.05, 2.5)
    assert startup.prompt_signal(Config()) is None
