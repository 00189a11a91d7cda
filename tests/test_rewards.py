"""Several rewards in one run, and the rewards that need no model."""

import asyncio
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from small import as_prompts, config_of, lines_of, train

from flow_grpo import rewards
from flow_grpo.base.prompt import Prompt
from flow_grpo.rewards import jpeg_compressibility
from flow_grpo.run import rewards as awaited
from flow_grpo.scoring import pool as pools
from flow_grpo.scoring.pool import Pool
from flow_grpo.scoring.scorers import RewardFailed

WINDOW, BRANCHES = "shapes_qwenimage", "shapes_qwenimage_pr"
CPU = torch.device("cpu")


def images(num=3):
    return torch.rand(num, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def test_a_flat_image_compresses_best_and_an_image_alone_as_in_a_batch():
    score = jpeg_compressibility.load(CPU)
    flat, smooth = torch.full((1, 3, 64, 64), 0.5), torch.linspace(0, 1, 64).expand(1, 3, 64, 64)
    found = score(torch.cat([flat, smooth, images(1)]), ["a"] * 3, [{}] * 3)
    assert found[0] > found[1] > found[2]
    assert found.max() < 0
    assert score(images(3), ["a"] * 3, [{}] * 3)[1] == score(images(3)[1:2], ["a"], [{}])[0]


def test_watched_rewards_are_measured_on_request_and_do_not_count():
    pool = Pool(CPU, {"jpeg_compressibility": 2.0}, ["shapes"], config_of(WINDOW).reward)
    metadata = {"tag": "colors", "include": [{"class": "circle", "count": 1, "color": "red"}]}
    prompts = [Prompt("a red circle", metadata)] * 3
    plain, everything = (pool.submit(images(), prompts, everything=e).result() for e in (False, True))
    assert set(plain) == {"jpeg_compressibility", "avg"}
    assert set(everything) == {"jpeg_compressibility", "avg", "shapes", "shapes_accuracy"}
    assert torch.equal(everything["avg"], 2 * everything["jpeg_compressibility"])


def redness(images, prompts, metadata):
    return {"score": images[:, 0].mean((1, 2)), "max": images.amax((1, 2, 3))}


def test_a_function_is_a_reward_once_it_is_registered(monkeypatch):
    monkeypatch.setattr(rewards, "REGISTERED", {})
    rewards.register("redness", redness)
    rewards.check_rewards({"redness": 1.0})
    scores = Pool(CPU, {"redness": 2.0}, [], config_of(WINDOW).reward).submit(images(), as_prompts(["a"] * 3)).result()
    assert torch.equal(scores["redness"], images()[:, 0].mean((1, 2)))
    assert torch.equal(scores["avg"], 2 * scores["redness"])
    assert torch.equal(scores["redness_max"], images().amax((1, 2, 3)))
    with pytest.raises(ValueError, match="'shapes': it is a file's name"):
        rewards.register("shapes", redness)


@pytest.mark.parametrize("backend", ["inline", "thread"])
def test_calls_of_a_coroutine_function_overlap(backend, monkeypatch):
    arrived = []

    async def score(images, prompts, metadata):
        arrived.append(len(images))
        while backend == "thread" and len(arrived) < 3:  # until the last request has come
            await asyncio.sleep(0.001)
        assert not torch.is_grad_enabled()
        return {"score": images.mean((1, 2, 3))}

    monkeypatch.setattr(rewards, "REGISTERED", {})
    rewards.register("patient", score)
    settings = config_of(WINDOW).reward
    settings.update(dict(backend=backend, batch_size=2, timeout_s=20.0))
    scores = Pool(CPU, {"patient": 1.0}, [], settings).submit(images(6), as_prompts(["a"] * 6)).result()
    torch.testing.assert_close(scores["patient"], images(6).mean((1, 2, 3)))
    assert arrived == [2, 2, 2]


def test_figures_of_two_rewards_keep_apart(monkeypatch):
    monkeypatch.setattr(rewards, "REGISTERED", {})
    rewards.register("redness", redness)
    rewards.register("redness_max", redness)
    the_pool = Pool(CPU, {"redness": 1.0, "redness_max": 1.0}, [], config_of(WINDOW).reward)
    with pytest.raises(RewardFailed, match="redness_max"):
        the_pool.submit(images(), as_prompts(["a"] * 3)).result()


def test_a_reward_gets_each_images_own_prompt_with_branches_too(shallow, tmp_path, monkeypatch):
    def reads(images, prompts, metadata):
        seen.append(set(prompts))
        assert prompts == [row["prompt"] for row in metadata]
        return images.mean((1, 2, 3))

    seen = []
    monkeypatch.setattr(rewards, "REGISTERED", {})
    rewards.register("reads", reads)
    how = dict(
        model=shallow["model"],
        reward_fn={"reads": 1.0},
        sample__num_images_per_prompt=2,
        sample__batch_size=4,
        num_epochs=1,
    )
    train(BRANCHES, tmp_path, eval_freq=0, **how)
    assert {len(prompts) for prompts in seen} == {2}  # to a batch


@pytest.mark.parametrize("name", [WINDOW, BRANCHES])
def test_two_rewards_by_gdpo_with_a_third_watched(name, shallow, tmp_path):
    how = dict(model=shallow["model"], train__reward_aggregation="gdpo", train__filter_groups=True, num_epochs=1)
    folder = train(name, tmp_path, reward_fn={"jpeg_compressibility": 1.0}, eval__rewards=("shapes",), **how)
    (epoch,) = lines_of(folder, "epoch")
    assert "reward/jpeg_compressibility_group_std" in epoch
    assert not any("shapes" in key for key in epoch)
    assert {"eval/jpeg_compressibility", "eval/shapes", "eval/shapes_accuracy"} <= set(lines_of(folder, "eval")[0])


def test_seconds_of_overlapping_requests_count_once(monkeypatch):
    times = SimpleNamespace(now=0.0, perf_counter=lambda: times.now)
    monkeypatch.setattr(pools, "time", times)
    clock = pools.Clock()
    for times.now, happens in ((1.0, clock.start), (3.0, clock.start), (4.0, clock.stop), (6.0, clock.stop)):
        happens()
    assert (clock.pop(), clock.pop()) == (5.0, 0.0)


def test_seconds_of_scoring_that_nobody_waited_for_are_hidden(shallow, tmp_path, monkeypatch):
    monkeypatch.setattr(pools.Clock, "pop", lambda _: 5.0)
    monkeypatch.setattr(awaited, "time", SimpleNamespace(perf_counter=itertools.count().__next__))  # 1 s is waited for
    folder = train(WINDOW, tmp_path, eval_freq=0, num_epochs=1, **shallow)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["time/reward_hidden_s"] for line in lines if line["kind"] == "epoch"] == [4.0]


@pytest.mark.parametrize("name", [WINDOW, BRANCHES])
def test_filtered_groups_leave_the_mean_to_the_others(name, tmp_path):
    """The gradient is the unfiltered one over the share of groups that are kept: zero advantages add nothing to it."""
    how = dict(num_epochs=1, eval_freq=0, sample__num_prompts_per_epoch=8, train__updates_per_epoch=1)
    how |= dict(train__max_grad_norm=1e9, train__clip_range=1.0, sample__num_images_per_prompt=2)
    plain, filtered = (train(name, tmp_path / str(f), train__filter_groups=f, **how) for f in (False, True))
    (epoch,), (before,), (after,) = lines_of(plain, "epoch"), lines_of(plain, "update"), lines_of(filtered, "update")
    share = 1 - epoch["reward/zero_std_share"]
    assert 0 < share < 1, "a rollout without zero-std groups shows nothing"
    assert after["grad_norm"] == pytest.approx(before["grad_norm"] / share, rel=1e-4)


def test_a_filter_that_keeps_nothing_moves_no_weight_by_gradient_and_every_epoch_says_so(
    shallow, tmp_path, monkeypatch, capsys
):
    (tmp_path / "constant.py").write_text(
        "def load(device):\n    return lambda images, *_: images.new_ones(len(images))\n"
    )
    monkeypatch.setattr(rewards, "__path__", [*rewards.__path__, str(tmp_path)])
    how = dict(model=shallow["model"], reward_fn={"constant": 1.0}, train__filter_groups=True, eval_freq=0)
    folder = train(WINDOW, tmp_path / "runs", **how)
    assert all(line["grad_norm"] == 0 and line["loss"] == 0 for line in lines_of(folder, "update"))
    said = [line for line in capsys.readouterr().out.splitlines() if "score alike (1 on average)" in line]
    assert [line.split(":")[0] for line in said] == ["epoch 1", "epoch 2"]
