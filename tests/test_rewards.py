"""Several rewards in one run, functions as rewards, and rewards that hang, fail, or write into what they get."""

import asyncio
import itertools
import math
import os
import secrets
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import train_qwenimage
import train_qwenimage_nft
from brightness import brightness
from recorded import assert_same
from small import ENV, ROOT, as_prompts, config_of, lines_of, random_images, stored, train
from test_scoring import listening, settings

from flow_grpo import rewards
from flow_grpo.base.errors import UserError
from flow_grpo.base.prompt import Prompt
from flow_grpo.data.prompts import Batch, load_prompts, with_absolute_sources
from flow_grpo.rewards import foreign_code
from flow_grpo.rewards.clients import client
from flow_grpo.rewards.scores import scores_of
from flow_grpo.run import rewards as run_rewards
from flow_grpo.run import sampling
from flow_grpo.scoring import pool as pools
from flow_grpo.scoring.pool import Pool
from flow_grpo.scoring.scorers import RewardFailed
from flow_grpo.settings import declared
from flow_grpo.settings.sections import Config, Train

WINDOW = "shapes_qwenimage"
BRANCHES = "shapes_qwenimage_pr"
NFT = "shapes_qwenimage_nft"
DPO = "shapes_qwenimage_dpo,online"
CPU = torch.device("cpu")
IMAGES = random_images(6, 8)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """No function that another test registered."""
    monkeypatch.setattr(rewards, "REGISTERED", dict(rewards.REGISTERED))


def pool_of(score, name="own", **how):
    """A pool of one reward, which is a function."""
    rewards.register(name, score)
    return Pool(CPU, {name: 2.0}, (), settings(**dict(batch_size=2, timeout_s=20.0) | how))


def submit(pool):
    return pool.submit(IMAGES, as_prompts(f"prompt {i}" for i in range(6)))


def test_a_function_is_a_reward_once_it_is_registered():
    def redness(images, prompts, metadata):
        return {"score": images[:, 0].mean((1, 2)), "max": images.amax((1, 2, 3))}

    scores = submit(pool_of(redness, "redness"))()
    rewards.check_rewards({"redness": 1.0})
    assert torch.equal(scores["redness"], IMAGES[:, 0].mean((1, 2)))
    assert torch.equal(scores["avg"], 2 * scores["redness"])
    assert torch.equal(scores["redness_max"], IMAGES.amax((1, 2, 3)))
    with pytest.raises(ValueError, match="'shapes': it is a file's name"):
        rewards.register("shapes", redness)
    rewards.register("redness_max", redness)  # as a figure of the other one is called
    both = Pool(CPU, {"redness": 1.0, "redness_max": 1.0}, [], settings())
    with pytest.raises(RewardFailed, match="redness_max"):
        submit(both)()


def test_calls_of_a_coroutine_function_overlap():
    arrived = []

    async def score(images, prompts, metadata):
        arrived.append(len(images))
        while len(arrived) < 3:  # until the last request has come
            await asyncio.sleep(0.001)
        assert not torch.is_grad_enabled()
        return {"score": images.mean((1, 2, 3))}

    torch.testing.assert_close(submit(pool_of(score))()["own"], IMAGES.mean((1, 2, 3)))
    assert arrived == [2, 2, 2]


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_a_reward_that_hangs_in_a_thread_ends_the_run_with_its_name(share, monkeypatch):
    monkeypatch.setattr(pools, "MAX_PENDING", 6)
    monkeypatch.setattr(client, "RETRY_S", 0.1)
    pool = pool_of(lambda *_: threading.Event().wait(20), timeout_s=0.1, max_masked_share=share)
    pending = submit(pool)
    says = r"reward 'own' \(thread\): 3 requests under way, .* first prompt: 'prompt 0'; .* allows 0.2 s"
    with pytest.raises(RewardFailed, match=says):
        submit(pool)  # for which there is no room
    with pytest.raises(RewardFailed, match=says):
        pending()


def test_a_thread_that_hangs_does_not_hold_the_process():
    code = "import threading; from flow_grpo.rewards.clients.threads import Threads; "
    code += "Threads(1).submit(threading.Event().wait)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENV, timeout=100).returncode == 0


def test_the_process_waits_for_a_call_that_ends_soon():
    # A thread that frees tensors while the interpreter is taken down ends the process by SIGABRT.
    code = "import time; from flow_grpo.rewards.clients.threads import Threads; "
    code += "Threads(1).submit(lambda: (time.sleep(0.3), print('ended')))"
    command = [sys.executable, "-c", code]
    assert subprocess.check_output(command, cwd=ROOT, env=ENV, timeout=100, text=True) == "ended\n"


def test_what_is_waited_for_is_said(monkeypatch):
    told = threading.Event()
    lines = []
    monkeypatch.setattr(pools, "print_notice", lambda line: (lines.append(line), told.set()))
    monkeypatch.setattr(pools, "SIGN_OF_LIFE_S", 0.0)
    slow = pool_of(lambda images, *_: images.mean((1, 2, 3)) if told.wait(20) else None)
    assert torch.equal(submit(slow)()["own"], IMAGES.mean((1, 2, 3)))
    assert (
        "reward 'own' (thread): 3 requests under way, none was answered for 0 s; first prompt: 'prompt 0'" in lines[0]
    )


def set_dtype(images):
    torch.set_default_dtype(torch.float64)
    return images.mean((1, 2, 3))


WRONG = {
    "no score": (lambda images: {"other": images.mean((1, 2, 3))}, "a dict without 'score', but with 'other'"),
    "nothing": (lambda images: None, "returned None for 2 images"),
    "Flow-GRPO's": (lambda images: (images.mean((1, 2, 3)), {}), "a tuple of scores and a dict, .* scores alone"),
    "None of one": (lambda images: [0.5, None], "is None, which is no number, for 'prompt 1'"),
    "a text": (lambda images: ["0.5", "85%"], "is '0.5', which is no number"),
    "complex": (lambda images: images.mean((1, 2, 3)) * 1j, "complex numbers"),
    "complex ones": (lambda images: [1j, 0.5], "is 1j, which is no number"),
    "another dtype": (set_dtype, "set torch's default dtype to torch.float64"),
    "the end": (lambda images: sys.exit(3), "left by SystemExit: 3"),
    "no number": (lambda images: images.mean((1, 2, 3)) * torch.tensor([1, math.nan]), "is nan for 'prompt 1'"),
    "the run's": (lambda images: dict.fromkeys(("score", "masked_share"), images.mean((1, 2, 3))), "masked_share"),
}


@pytest.mark.parametrize(("score", "says"), WRONG.values(), ids=WRONG)
def test_a_reward_that_is_wrong_is_named(score, says):
    with pytest.raises(RewardFailed, match=f"reward 'own'.*{says}.*'prompt 0'"):
        submit(pool_of(lambda images, *_: score(images)))()
    assert torch.get_default_dtype() == torch.float32
    pool = pool_of(lambda images, *_: score(images), max_masked_share=0.05)
    masked = submit(pool)()
    assert masked["own"].isnan().sum() >= 3, "a list's other entries are scores"
    with pytest.raises(RewardFailed, match=r"reward 'own' \(thread\) failed for 100.0% of 6 images; .* 0.05; last: "):
        pool.masked_shares(masked)


def test_what_a_reward_writes_into_what_it_gets_is_seen_by_nobody():
    images = IMAGES[:2].clone()
    prompts = ["a", "b"]
    metadata = [{"x": [1]}, {}]

    def score(images, prompts, metadata):
        images.zero_()
        metadata[0]["x"].append(2)
        prompts.clear()
        return images.mean((1, 2, 3))

    assert scores_of("writes", score, images, prompts, metadata)["score"].tolist() == [0, 0]
    assert torch.equal(images, IMAGES[:2])
    assert (prompts, metadata) == (["a", "b"], [{"x": [1]}, {}])


FILES = {  # what is no reward, whatever it raises
    "syntax": "def load(device:\n",
    "import": "import nowhere_at_all\n",
    "no load": "x = 1\n",
    "a number": "load = 5\n",
    "nothing": "def load(device):\n    return None\n",
    "an error": "def load(device):\n    raise KeyError('word')\n",
    "the end": "def load(device):\n    raise SystemExit(3)\n",
    "no argument": "def load():\n    return len\n",
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes the file of the reward `misused`."""
    monkeypatch.setattr(rewards, "__path__", [*rewards.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "flow_grpo.rewards.misused", raising=False)
    return (tmp_path / "misused.py").write_text


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_reward_is_an_error_with_its_name(kind, write):
    write(FILES[kind])
    with pytest.raises(UserError, match="reward 'misused'"):
        rewards.load("misused", CPU)


@pytest.mark.parametrize("output", [([0.5], {}), [None], [1j], None, ["85%"]])
def test_what_is_no_score_is_refused_when_a_grey_image_is_tried(output):
    with pytest.raises(UserError, match=r"reward 'own' .*; tried on a grey image"):
        pool_of(lambda *_: output).try_rewards((3, 16, 16), *as_prompts(["prompt 0"]))


STRIPS = """
import torch
from flow_grpo.diffusers_patch.models.qwenimage import QwenImage


class Strips(QwenImage):
    @classmethod
    def image_shape(cls, size):
        return 3, size.height, 2 * size.width

    def decode_batch(self, latents, size):
        image = super().decode_batch(latents, size)
        return torch.cat([image, image], 3)
"""


def test_the_grey_image_has_the_shape_of_what_the_model_decodes(shallow, tmp_path, monkeypatch):
    def of_two_frames(images, prompts, metadata):
        first, second = images.chunk(2, 3)
        assert first.shape[2:] == second.shape[2:] == (64, 64)
        return first.mean((1, 2, 3))

    (tmp_path / "strips.py").write_text(STRIPS)
    monkeypatch.syspath_prepend(tmp_path)
    rewards.register("of_two_frames", of_two_frames)
    how = dict(model=shallow["model"], model_class="strips:Strips", reward_fn={"of_two_frames": 1.0})
    folder = train(WINDOW, tmp_path / "runs", num_epochs=1, eval_freq=0, **how)
    assert len(lines_of(folder, "epoch")) == 1


RANGES = {  # what a file has for RANGE, and what that means; None = it is refused
    "None": (-math.inf, math.inf),
    "(0, 1)": (0, 1),
    "[-math.inf, 0.0]": (-math.inf, 0),
    "(1, 0)": None,
    "(0,)": None,
    "5": None,
    "'01'": None,
    "(0, math.nan)": None,
}


@pytest.mark.parametrize("text", RANGES)
def test_a_range_is_a_pair_in_order_or_none(text, write):
    write(f"import math\nRANGE = {text}\ndef load(device):\n    return lambda images, *_: images.mean((1, 2, 3))\n")
    if RANGES[text]:
        rewards.load("misused", CPU)
        assert rewards.bounds("misused") == RANGES[text]
    else:
        with pytest.raises(UserError, match=r"RANGE of reward 'misused' is .* lowest and the highest"):
            rewards.load("misused", CPU)


def test_an_own_score_beyond_its_range_is_an_error(write):
    write("RANGE = (0, 1)\ndef load(device):\n    return lambda images, *_: 2 + images.mean((1, 2, 3))\n")
    with pytest.raises(RewardFailed, match=r"reward 'misused' scores 2\.\d+, but its RANGE is 0 to 1"):
        submit(Pool(CPU, {"misused": 1.0}, (), settings()))()


INTRUSIVE = """
import os, torch
os.chdir("/")
torch.set_grad_enabled(False)
torch.set_default_dtype(torch.float64)
def load(device):
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    torch.set_default_device("meta")
    def score(images, prompts, metadata):
        os.chdir("/")
        return images.mean((1, 2, 3))
    return score
def labels(images, metadata):
    os.chdir("/")
    raise KeyError("color")
"""


def state():
    modes = torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    return Path.cwd(), torch.get_default_dtype(), str(torch.get_default_device()), *modes


def test_what_a_reward_changes_of_the_process_is_put_back(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(INTRUSIVE)
    before = state()
    pool = Pool(CPU, {"misused": 1.0}, (), settings())
    assert state() == before
    assert torch.equal(submit(pool)()["misused"], IMAGES.mean((1, 2, 3)))
    assert state() == before
    with pytest.raises(UserError, match="reward 'misused' did not label the images: KeyError: 'color'"):
        rewards.image_labels(["misused"], IMAGES, as_prompts(["a"]))
    assert state() == before


def test_a_run_in_a_relative_folder_is_whole_while_rewards_change_the_directory(shallow, tmp_path, monkeypatch):
    """Scores come while the directory is another one, from which the run never returns by itself."""

    def score(images, prompts, metadata):
        os.chdir(elsewhere)
        return images.mean((1, 2, 3))

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(foreign_code, "_put_back", lambda before: None)
    rewards.register("moving", score)
    how = dict(model=shallow["model"], reward_fn={"moving": 1.0}, num_epochs=1, eval_freq=1)
    config = config_of(WINDOW, "runs", **how)
    train_qwenimage.main(config)
    (folder,) = (tmp_path / "runs").iterdir()
    assert lines_of(folder, "epoch")
    assert {"best", "checkpoints", "README.md", "metrics.jsonl"} <= {path.name for path in folder.iterdir()}
    assert list(elsewhere.iterdir()) == []


def test_sources_are_found_from_another_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    loaded = load_prompts("dataset/edits", "test")[:2]
    located = with_absolute_sources(loaded)
    monkeypatch.chdir(tmp_path)
    assert located[0].pictures()
    assert (located[0].text, located[0].metadata) == (loaded[0].text, loaded[0].metadata)


def test_scouts_without_a_score_are_compared_with_the_share_that_may_fail(shallow, tmp_path):
    """All 16 scouts of the first epoch fail, each scored alone, as the grey image does; the rollout does not."""
    alone = []

    def score(images, prompts, metadata):
        if len(alone) < 17:
            alone.extend(prompts if len(prompts) == 1 else [])
            raise RuntimeError("no score")
        return images.mean((1, 2, 3))

    rewards.register("late", score)
    how = dict(model=shallow["model"], reward_fn={"late": 1.0}, num_epochs=1, eval_freq=0)
    how |= dict(reward__max_masked_share=0.1, sample__scouts_per_image=2)
    with pytest.raises(RewardFailed, match=r"reward 'late' .* failed for 100.0% of 16 images"):
        train(WINDOW, tmp_path, **how)
    assert not lines_of(next(tmp_path.iterdir()), "epoch")


def test_a_watched_reward_is_measured_in_evaluations_alone_and_counts_nowhere(shallow, tmp_path):
    how = dict(model=shallow["model"], train__reward_aggregation="gdpo", train__filter_groups=True, num_epochs=1)
    folder = train(WINDOW, tmp_path, reward_fn={"jpeg_compressibility": 2.0}, eval__rewards=("shapes",), **how)
    (epoch,) = lines_of(folder, "epoch")
    evaluation = lines_of(folder, "eval")[0]
    assert "reward/jpeg_compressibility_group_std" in epoch
    assert not any("shapes" in key for key in epoch)
    assert {"eval/shapes", "eval/shapes_accuracy"} <= set(evaluation)
    assert evaluation["eval/avg"] == pytest.approx(2 * evaluation["eval/jpeg_compressibility"])


def test_branches_are_measured_at_each_step():
    """Two trunks, three steps, two branches: first steps differ by 2 and by 4, one of the last two is flat, and one
    reward of the second step failed."""
    scores = torch.tensor([[[1.0, 3.0], [0.0, 9.0], [5.0, 5.0]], [[0.0, 4.0], [torch.nan, 6.0], [1.0, 2.0]]])
    groups = torch.arange(6).view(2, 3, 1).expand(scores.shape)
    config = Config(reward_fn={"a": 1.0})
    by_name = {"avg": scores.flatten(), "a": scores.flatten()}
    figures = run_rewards.step_figures(run_rewards.Rewards(by_name, groups.flatten(), scores.shape), config)
    assert figures == {
        "reward/first_step_group_std": 1.5,
        "reward/first_step_zero_std_share": 0.0,
        "reward/last_step_group_std": 0.25,
        "reward/last_step_zero_std_share": 0.5,
        "steps/reward/0": 2.0,
        "steps/reward/1": 5.0,
        "steps/reward/2": 3.25,
        "steps/group_std/0": 1.5,
        "steps/group_std/1": 2.25,
        "steps/group_std/2": 0.25,
        "steps/zero_std_share/0": 0.0,
        "steps/zero_std_share/1": 0.5,
        "steps/zero_std_share/2": 0.5,
    }
    of_images = run_rewards.Rewards({"avg": torch.zeros(4)}, torch.arange(4), torch.Size([4]))
    assert run_rewards.step_figures(of_images, config) == {}


def test_a_sheet_shows_the_first_trunks_branches_and_the_first_groups_with_their_own_scores():
    """Images are grey, of their number's shade; each is to be beside the score of that number."""
    batch = Batch(image_numbers=[3, 0], prompts=[Prompt("a red circle"), Prompt("a blue square")], groups=[3, 0])
    shades = torch.arange(12) / 255
    branches = shades.view(2, 3, 2, 1, 1, 1).expand(-1, -1, -1, 3, 8, 8)
    rows = run_rewards.shown_rows(branches, batch, torch.zeros(2, 3, 2, dtype=torch.int64))
    assert [row.title for row in rows] == [["step 0", "a blue square"], ["step 1"], ["step 2"]]
    assert [row.indices for row in rows] == [[6, 7], [8, 9], [10, 11]]
    for row in rows:
        assert [picture.getpixel((0, 0))[0] for picture in row.pictures] == row.indices

    images = shades[:2].view(2, 1, 1, 1).expand(-1, 3, 8, 8)
    rows = run_rewards.shown_rows(images, batch, torch.tensor([3, 0]))
    assert [(row.title, row.indices) for row in rows] == [(["a blue square"], [1]), (["a red circle"], [0])]
    assert rows[0].pictures[0].getpixel((0, 0)) == (1, 1, 1)
    assert run_rewards.shown_rows(images, batch, torch.zeros(2, 1, dtype=torch.int64)) == [], "a fork's own shape"


@pytest.mark.parametrize(("aggregation", "share"), [("sum", 1.0), ("gdpo", 0.5)])
def test_the_share_of_flat_groups_counts_what_training_takes_for_flat(aggregation, share):
    """The first group's weighted sums are rounding; with "gdpo" its rewards count one by one. The second one is flat,
    and an image without a reward counts nothing."""
    config = Config(reward_fn={"a": 1.0, "b": -0.3}, train=Train(reward_aggregation=aggregation))
    a = torch.tensor([85.1, 85.2, 85.3, 5.0, 5.0, 7.0])
    scores = {"a": a, "b": a / 0.3 * torch.tensor([1 + 2e-7, 1, 1, 1, 1, 1])}
    scores["b"][5] = torch.nan
    scores["avg"] = scores["a"] - 0.3 * scores["b"]
    rewards = run_rewards.Rewards(scores, torch.tensor([0, 0, 0, 1, 1, 1]), torch.Size([6]))
    figures = run_rewards.spread_figures(rewards, torch.ones(6, dtype=torch.bool), config)
    assert scores["avg"][:3].unique().numel() > 1
    assert figures == {"group_std": 0.0, "zero_std_share": share}


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"a": 1.0, "b": -1.0}, "b, times its weight, has a standard deviation of 0.05, and a one of 0.5: "),
        ({"a": 1.0, "b": -1.5}, ""),
        ({"a": 0.0, "b": 1.0}, "the sum hardly teaches a."),
        ({"a": 1.0}, ""),
        ({"c": 1.0, "d": 1.0}, ""),
    ],
)
def test_a_reward_whose_spread_drowns_another_is_named(weights, words):
    """Nothing is said here of two that are flat, as both teach nothing."""
    figures = {"reward/a_group_std": 0.5, "reward/b_group_std": 0.05}
    figures |= {"reward/c_group_std": 0.0, "reward/d_group_std": 0.0}
    sentence = run_rewards.unbalanced(figures, weights)
    assert words in sentence
    assert bool(words) == bool(sentence)
    without = run_rewards.unbalanced(figures, weights, has_gdpo=False)
    assert sentence.startswith(without)
    assert ("gdpo" in sentence, "gdpo" in without) == (bool(words), False)


@pytest.mark.parametrize("name", [WINDOW, pytest.param(BRANCHES, marks=pytest.mark.slow)])
def test_filtered_groups_leave_the_mean_to_the_others(name, shallow, tmp_path):
    """The gradient is the unfiltered one over the share of groups that are kept: zero advantages add nothing to it."""

    def of_some_prompts(images, prompts, metadata):
        return images.mean((1, 2, 3)) * torch.tensor([len(prompt) % 2 for prompt in prompts])

    rewards.register("some", of_some_prompts)
    how = dict(model=shallow["model"], reward_fn={"some": 1.0}, num_epochs=1, eval_freq=0)
    how |= dict(sample__num_prompts_per_epoch=8, train__updates_per_epoch=1)
    how |= dict(train__max_grad_norm=1e9, train__clip_range=1.0, sample__num_images_per_prompt=2)
    plain, filtered = (train(name, tmp_path / str(f), train__filter_groups=f, **how) for f in (False, True))
    (epoch,) = lines_of(plain, "epoch")
    (before,) = lines_of(plain, "update")
    (after,) = lines_of(filtered, "update")
    share = 1 - epoch["reward/zero_std_share"]
    assert 0 < share < 1, "a rollout without zero-std groups shows nothing"
    assert after["grad_norm"] == pytest.approx(before["grad_norm"] / share, rel=1e-4)


def test_a_filter_that_keeps_nothing_moves_no_weight_by_gradient_and_every_epoch_says_so(shallow, tmp_path, capsys):
    rewards.register("constant", lambda images, *_: images.new_ones(len(images)))
    how = dict(model=shallow["model"], reward_fn={"constant": 1.0}, train__filter_groups=True, eval_freq=0)
    folder = train(WINDOW, tmp_path, **how)
    assert all(line["grad_norm"] == 0 and line["loss"] == 0 for line in lines_of(folder, "update"))
    said = [line for line in capsys.readouterr().out.splitlines() if "score alike (1 on average)" in line]
    assert [line.split(":")[0] for line in said] == ["epoch 1", "epoch 2"]


@pytest.mark.slow
def test_a_second_wait_in_an_epoch_adds_its_images_and_replaces_the_other_figures(shallow, tmp_path):
    """As a fork's rollout may wait for a part of its images. What is trained stays, bit for bit."""
    means = []

    @declared.ours("rollout")
    def waits_for_half(run, epoch):
        stored, submitted = train_qwenimage.rollout(run, epoch)
        half = submitted[: len(submitted) // 2]
        means.append(run_rewards.wait(run, epoch, half).scores["avg"].mean().item())
        assert run.epoch_metrics["reward/avg"] == pytest.approx(means[-1])
        return stored, submitted

    how = shallow | dict(num_epochs=2, eval_freq=0, vae_batch_size=4)
    plain = train(WINDOW, tmp_path / "plain", **how)
    train_qwenimage.main(config_of(WINDOW, tmp_path / "fork", **how), rollout=waits_for_half)
    (fork,) = (tmp_path / "fork").iterdir()
    assert lines_of(fork, "update") == lines_of(plain, "update")
    images = [line.pop("images") for line in (*lines_of(plain, "epoch"), *lines_of(fork, "epoch"))]
    assert images == [8, 16, 12, 24]
    for ours, theirs, mean in zip(lines_of(fork, "epoch"), lines_of(plain, "epoch"), means, strict=True):
        assert ours | dict(images=0) == theirs | dict(images=0)
        assert ours["reward/avg"] != pytest.approx(mean)


@pytest.mark.slow
def test_a_server_trains_the_same_weights_as_a_thread_and_no_token_is_stored(shallow, tmp_path, monkeypatch):
    """And scores the same evaluations."""
    token = secrets.token_hex()
    monkeypatch.setenv("REWARD_TOKEN", token)
    common = dict(num_epochs=1, eval_freq=1, model=shallow["model"], reward_fn={"jpeg_compressibility": 1.0})
    in_a_thread = train(BRANCHES, tmp_path / "thread", **common)
    with listening(rewards.load("jpeg_compressibility", CPU), token=token) as url:
        args = {"jpeg_compressibility": {"url": url}}
        by_a_server = train(BRANCHES, tmp_path / "url", reward__args=args, **common)
    assert_same(in_a_thread, by_a_server, epoch=1)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if token.encode() in path.read_bytes()]


def without_two():
    """A reward that fails for the first batch of images, and for the first two when it is asked about each alone."""
    calls = []

    def score(images, prompts, metadata):
        calls.append(prompts)
        if 1 < len(calls) < 5:  # the first is of the grey image
            raise RuntimeError("no score")
        return brightness(images, prompts, metadata)

    return score


def spoiling_two(draw):
    """A rollout whose first two images are remembered as something else than what was drawn and is scored."""

    def sampled(*args, **how):
        for number, (batch, drawn) in enumerate(draw(*args, **how)):
            if number == 0:
                for tensor in (drawn.latents, *(x for t in drawn.trace for x in (t.latents, t.step.prev_sample))):
                    tensor[:2] += 0.1
            yield batch, drawn

    return sampled


@pytest.mark.parametrize(
    ("name", "more"),
    [
        (WINDOW, dict(train__parity_limit=0.0)),  # ratios of what is spoilt are not 1
        pytest.param(NFT, {}, marks=pytest.mark.slow),
        pytest.param(DPO, dict(preferences__min_margin=0.0), marks=pytest.mark.slow),
    ],
)
def test_a_masked_image_does_not_move_the_policy(name, more, shallow, tmp_path, monkeypatch):
    """Whatever was remembered of it, gradients and weights are the same, bit for bit; of a scored one they are not."""
    how = shallow | more | dict(reward__max_masked_share=0.6, num_epochs=1, eval_freq=0)
    gradients = []
    weights = []
    draws = sampling.sample_epoch, spoiling_two(sampling.sample_epoch)
    for masked, draw in itertools.product((0, 2), draws):
        rewards.register("brightness", without_two() if masked else brightness)
        for module in (sampling, train_qwenimage, train_qwenimage_nft):
            monkeypatch.setattr(module, "sample_epoch", draw)
        folder = train(name, tmp_path / f"run {len(gradients)}", **how)
        (epoch,) = lines_of(folder, "epoch")
        assert "reward/shapes" not in epoch, "a weight of 0 leaves it out"
        assert epoch["reward/brightness_masked_share"] == masked / epoch["images"]
        assert 0 < epoch["reward/brightness"] < 1
        gradients.append([line["grad_norm"] for line in lines_of(folder, "update")])
        weights.append(stored(folder, epoch=1))
    scored, scored_spoilt, masked, masked_spoilt = gradients
    assert scored != scored_spoilt
    assert masked == masked_spoilt
    assert min(masked) > 0
    assert all(torch.equal(values, weights[3][name]) for name, values in weights[2].items())
