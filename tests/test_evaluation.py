"""The best policy is kept, chosen by prompts that do not judge it, and what was measured can be measured again."""

import csv
import itertools
import json
import math
import operator
import re
import shutil
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import evaluate
import pytest
import torch
import warm
from PIL import Image
from recorded import EPOCHS
from refused import assert_refused
from small import ROOT, change_json, evaluated, exported, few_prompts, flip_a_bit, lines_of, record, train

from flow_grpo import rewards
from flow_grpo.base import locations
from flow_grpo.base.errors import UserError
from flow_grpo.base.pixels import from_picture
from flow_grpo.base.prompt import Prompt
from flow_grpo.checkpoints import best, checkpoints
from flow_grpo.data import prompts
from flow_grpo.diffusers_patch import registry, sampling_params
from flow_grpo.evaluation import estimates, evaluation, policies_to_compare, variety
from flow_grpo.evaluation.saved_images import SavedImages
from flow_grpo.monitoring import run_history
from flow_grpo.run import save
from flow_grpo.run.evaluate import due_kinds, remaining_kinds
from flow_grpo.scoring.scorers import RewardFailed
from flow_grpo.settings.sections import Config, Eval, Reward, Sample
from flow_grpo.settings.table import with_values

TINY = "flow_grpo/assets/tiny_qwenimage"
WINDOW = "shapes_qwenimage"
BRANCHES = "shapes_qwenimage_pr"
SPLITS = "train", "test"


def write(folder, epoch, checkpoint=""):
    """A best/ whose weights say its epoch, and a checkpoint that contains it."""
    best.write_best(folder, record(epoch), lambda to: (to / "weights").write_text(str(epoch)))
    if checkpoint:
        (folder / checkpoint).mkdir()
        best.link_best(folder, folder / checkpoint)


def content(folder):
    """The epoch of evaluation.json, if the file beside it says so too."""
    epoch = json.loads((folder / "evaluation.json").read_text())["epoch"]
    assert (folder / "weights").read_text() == str(epoch)
    return epoch


def test_only_a_higher_finite_value_is_better():
    assert best.improves(record(2, 0.6), record(1, 0.5))
    assert best.improves(record(0, 0.4), None)
    for value in (0.5, 0.4, float("nan"), float("inf")):
        assert not best.improves(record(2, value), record(1, 0.5))
    for value in (float("nan"), float("inf")):
        assert not best.improves(record(0, value), None)


def test_too_little_variety_is_never_the_best():
    def of(epoch, value, variety):
        return replace(record(epoch, value), figures={"variety": variety})

    assert best.improves(of(2, 0.6, 0.9), of(1, 0.5, 1.0), 0.9)
    assert not best.improves(of(2, 0.6, 0.89), of(1, 0.5, 1.0), 0.9)
    assert not best.improves(of(2, 0.6, float("nan")), None, 0.9)
    # The setting has come later: what was best before is so no more, whether or not its variety is known.
    for before in (of(1, 0.7, 0.5), record(1, 0.7)):
        assert best.improves(of(2, 0.6, 0.9), before, 0.9)
        assert not best.improves(of(2, 0.6, 0.9), before)


def test_the_best_policy_of_a_run_keeps_the_variety_that_was_asked_for(recorded, tmp_path):
    """The score rises until the second epoch, while images become more alike."""
    run = recorded("nft")
    epochs = lines_of(run.folder, "eval")
    varieties = [line["eval/variety"] for line in epochs]
    least = (varieties[1] + varieties[2]) / 2
    scores = [line["eval/jpeg_compressibility"] for line in epochs]
    assert scores[2] == max(scores)
    assert varieties == sorted(varieties, reverse=True)
    folder = train(run.name, tmp_path, **run.how | dict(eval__min_variety=least))
    kept = best.read_best(folder)
    assert (kept.epoch, kept.figures["variety"]) == (1, varieties[1])
    assert lines_of(folder, "test")[-1]["test_best/jpeg_compressibility"] != scores[2]
    # Tables of runs name the same one.
    shown = run_history.scores(run_history.read_run(folder, "")).best
    assert (shown.epoch, shown.value) == (1, kept.value)


def test_a_figure_that_no_reward_has_cannot_choose():
    """Which is known once there are figures; a reward that there is not: test_refusals.py."""
    run = SimpleNamespace(config=Config(eval=Eval(best_by="shapes_beauty")), prompts=None, size=None)
    figures = dict(avg=0.5, shapes=0.5, shapes_accuracy=0.5)
    assert_refused([("", lambda: save.best_candidate(run, 0, figures), ["'shapes_beauty'", "avg, shapes, shapes_ac"])])


def test_since_when_evaluations_compare_survives_a_kill_before_the_next_one(tmp_path):
    write(tmp_path, 3, "checkpoint_3")
    write(tmp_path, 3)
    other = replace(record(5), guidance_scale=99.0)
    assert best.restore_best(tmp_path, tmp_path / "checkpoint_3", other)[:2] == (None, 5)
    progress = checkpoints.Progress(7, 7, evaluations_since=5)
    stored = checkpoints.save(tmp_path / "run", {"a": torch.ones(1)}, progress, config={})
    since = checkpoints.read_progress(stored).evaluations_since
    assert best.restore_best(tmp_path, stored, replace(other, epoch=7, since=since))[:2] == (None, 5)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_without_a_best_knows_from_its_checkpoint_that_it_evaluates_in_another_way_now(damaged, tmp_path):
    if damaged:
        write(tmp_path, 3, "checkpoint")
        write(tmp_path, 3)
        for folder in (tmp_path, tmp_path / "checkpoint"):
            (folder / "best" / "weights").write_text("others")
    before = best.from_settings(json.loads(json.dumps(best.settings_of(record(5)))), tmp_path)
    assert best.restore_best(tmp_path, tmp_path / "checkpoint", record(5, num_steps=9), before)[:2] == (None, 5)
    assert best.restore_best(tmp_path, tmp_path / "checkpoint", record(7, since=5), before)[:2] == (None, 5)
    # Evaluations of an older version were exact, whatever the rollout's weights.
    settings = best.settings_of(record(5))
    del settings["weights"], settings["solver"]
    older = best.from_settings(settings, tmp_path)
    assert best.restore_best(tmp_path, tmp_path / "checkpoint", record(7), older)[:2] == (None, 0)
    assert best.restore_best(tmp_path, tmp_path / "checkpoint", record(7, weights="merged"), older)[:2] == (None, 7)
    # The checkpoint of an older version does not say how its run evaluated.
    assert best.restore_best(tmp_path, tmp_path / "checkpoint", record(7, since=2))[:2] == (None, 2)


def test_a_checkpoint_says_how_its_run_evaluates_and_the_record_of_a_run_since_when(recorded, tmp_path):
    folder = shutil.copytree(recorded("window").folder, tmp_path / "run")
    chosen = best.read_best(folder)
    newest = checkpoints.find_newest(folder / "checkpoints")
    stored = checkpoints.read_progress(newest).evaluation
    assert best.from_settings(stored, newest).comparable(chosen)
    assert_refused([("", lambda: best.from_settings(stored | {"inputs": 3}, newest), ["inputs is 3"])])
    change_json(newest / "progress.json", evaluations_since=1)
    assert run_history.read_run(folder, "").evaluations_since == 1
    shutil.rmtree(folder / "best")
    assert run_history.read_run(folder, "").evaluations_since == 1
    (newest / "progress.json").write_text("")
    write(folder, 2)
    change_json(folder / "best" / best.FILE, since=2)
    assert run_history.read_run(folder, "").evaluations_since == 2


def test_held_out_figures_of_an_end_stay_unless_they_are_made_again():
    run = SimpleNamespace(config=Config(eval_freq=2, num_epochs=9), best_evaluation=None, epoch=3)
    assert remaining_kinds(run) == {"validation"}
    for epoch in (4, 9):
        run.epoch = epoch
        assert remaining_kinds(run) == set()


def test_a_resumed_run_has_the_best_of_its_checkpoint(tmp_path):
    for epoch in (3, 7):
        write(tmp_path, epoch, f"checkpoint_{epoch}")
    write(tmp_path, 9)

    def restore(name, epoch):
        return best.restore_best(tmp_path, tmp_path / name, record(epoch))

    assert restore("checkpoint_7", 8) == (record(7), 0, "")
    assert content(tmp_path / "best") == 7
    assert restore("checkpoint_3", 3) == (record(3), 0, "")
    assert content(tmp_path / "best") == content(tmp_path / "checkpoint_3" / "best") == 3
    assert restore("checkpoint_without", 3) == (record(3), 0, "")  # evaluated after the checkpoint, with its weights
    assert restore("checkpoint_without", 2) == (None, 0, "")
    assert best.find_best(tmp_path) is None


OTHERWISE = dict(split="test", num_prompts=9, noises_per_prompt=2, num_steps=5, best_by="other", guidance_scale=2.0)
OTHERWISE |= dict(height=128, width=128, vae_precision="bf16", weights="merged", solver="dpm 0.6")


@pytest.mark.parametrize("key", OTHERWISE)
def test_a_best_that_was_measured_otherwise_is_set_aside(key, tmp_path):
    write(tmp_path, 4, "checkpoint")
    evaluation_now = record(8, **{key: OTHERWISE[key]})
    restored, since, notice = best.restore_best(tmp_path, tmp_path / "checkpoint", evaluation_now)
    assert (restored, since) == (None, 8)
    assert content(tmp_path / "best_epoch_000004") == 4
    assert str(tmp_path / "best_epoch_000004") in notice


def test_figures_of_another_base_or_by_other_options_of_a_reward_are_compared_with_none_of_before():
    before = save.settings_of_figures(Config())
    options = {"vlm_judge": {"question": "is it?"}}
    changes = dict(base_precision="nf4", text_tokens=9, precision="bf16")
    changes |= {"reward.args": options, "reward.frames": 1}
    for key, value in changes.items():
        assert save.settings_of_figures(with_values(Config(), {key: value})) != before
    elsewhere = Reward(args={"vlm_judge": {"url": "http://elsewhere:1"}})
    assert save.settings_of_figures(Config(reward=elsewhere)) == before


def test_evaluations_whose_rewards_are_asked_in_other_requests_are_compared():
    def evaluation(**options):
        config = Config(reward=Reward(args={"vlm_judge": {"question": "is it?"} | options}))
        return record(3, inputs=save.settings_of_figures(config))

    smaller = evaluation(batch_size=2, max_masked_share=0.5)
    assert evaluation().comparable(smaller)
    assert not evaluation(question="is it red?").comparable(smaller)
    # Of an older evaluation the options are known together with the settings of requests alone.
    older = dict(smaller.inputs)
    del older["options of rewards"]
    assert record(3, inputs=older).comparable(smaller)
    assert not record(3, inputs=older).comparable(evaluation(batch_size=4))


def test_a_test_is_due_before_the_first_epoch_after_the_last_and_as_often_as_the_config_says():
    for eval_freq, test_freq, kinds in ((2, 0, {"eval"}), (2, 2, {"eval", "test"}), (0, 1, None)):
        config = Config(eval_freq=eval_freq, eval=Eval(test_freq=test_freq))
        both = set() if kinds is None else {"eval", "test"}
        assert [due_kinds(config, epoch) for epoch in range(3)] == [both, set(), kinds or set()]
        assert due_kinds(config, 3, last=True) == both


def test_a_run_is_evaluated_by_its_own_settings(tmp_path):
    changes = dict(height=96, width=32, precision="bf16", base_precision="nf4", vae_precision="bf16", text_tokens=9)
    stored = Config().to_dict() | changes
    del stored["model_class"], stored["eval"]["noises_per_prompt"]  # of a run that is older than these
    (tmp_path / "config.json").write_text(json.dumps(stored))
    config = policies_to_compare.run_config(tmp_path)
    assert {name: getattr(config, name) for name in changes} == changes
    assert (config.model_class, config.eval.noises_per_prompt) == ("", 1)


@pytest.fixture
def runs(recorded):
    """Two runs that learned something else in every epoch, one of them in full; by rank of the LoRA."""
    return {4: recorded("nft").folder, 0: recorded("nft, full weights").folder}


@pytest.mark.parametrize("rank", [4, 0], ids=["LoRA", "full weights"])
def test_the_best_weights_score_on_the_test_what_they_scored_in_their_epoch(rank, runs):
    """Evaluations of one epoch are of the averaged weights; best/ has them bit for bit."""
    folder = runs[rank]
    evals = lines_of(folder, "eval")
    *tests, last = lines_of(folder, "test")
    kept = best.read_best(folder)
    values = [line["eval/jpeg_compressibility"] for line in evals]
    assert [line["epoch"] for line in tests] == [0, 1, 2, 3]
    assert (kept.epoch, kept.value, kept.split) == (values.index(max(values)), max(values), "validation")
    assert last["best_epoch"] == kept.epoch
    for name in kept.figures:
        assert last[f"test_best/{name}"] == tests[kept.epoch][f"test/{name}"]
        assert kept.figures[name] == evals[kept.epoch][f"eval/{name}"]
    assert len({line["test/jpeg_compressibility"] for line in tests}) == 4
    said = (folder.parents[1] / "said").read_text()
    assert f"{folder / 'best'} holds the best policy, of epoch {kept.epoch} of 3" in said
    assert re.search(r"on the test prompts: \S+ ± \S+ before, \S+ ± \S+ last, \S+ ± \S+ best", said)
    assert re.search(r"; shapes_accuracy \S+ before, \S+ best", said)
    assert re.search(r"; variety 1 before, 0\.\d+ best", said)


def test_a_run_goes_on_from_the_state_of_its_best_evaluation(recorded, tmp_path):
    run = recorded("branches")
    kept = best.read_best(run.folder)
    folder = shutil.copytree(run.folder, tmp_path / run.folder.name)
    assert 0 < kept.epoch < EPOCHS
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    earlier = [line for line in lines if json.loads(line)["epoch"] < kept.epoch]
    (folder / "metrics.jsonl").write_text("".join(earlier))
    shutil.rmtree(folder / "checkpoints")
    train(BRANCHES, tmp_path, **run.how | dict(resume_from=str(folder / "best" / "checkpoint")))
    assert lines_of(folder) == lines_of(run.folder)
    assert best.read_best(folder) == kept


def test_fast_evaluations_move_scores_by_rounding_and_nothing_else(shallow, tmp_path):
    how = shallow | dict(lora__rank=4, sample__rollout_weights="merged", sample__text_multiple=4, num_epochs=2)
    how |= dict(eval_freq=1, eval__test_freq=1, eval__noises_per_prompt=2)
    how |= dict(dataset=few_prompts(tmp_path / "data", 6, (*SPLITS, "validation")))
    fast = train(BRANCHES, tmp_path / "fast", **how)
    exact = train(BRANCHES, tmp_path / "exact", **how, eval__exact=True)
    assert (best.read_best(fast).weights, best.read_best(exact).weights) == ("merged", "exact")
    for kind in ("update", "epoch", "test"):
        assert lines_of(fast, kind) == lines_of(exact, kind)
    assert exported(fast).read_bytes() == exported(exact).read_bytes()
    for ours, theirs in zip(lines_of(fast, "eval"), lines_of(exact, "eval"), strict=True):
        assert ours["eval/brightness"] == pytest.approx(theirs["eval/brightness"], rel=1e-4)
        # In float64, of all latents.
        assert ours["eval/distance"] == pytest.approx(theirs["eval/distance"], rel=1e-4)
        assert ours["eval/distance"] != theirs["eval/distance"]


def test_shortcuts_of_a_validation_are_the_completions_unless_it_is_exact():
    sample = dict(rollout_weights="merged", text_multiple=16, flash_ratio=0.4, flash_solver="extrapolate")
    config = Config(sample=Sample(**sample))
    assert sampling_params.of_validation(config) == sampling_params.Shortcuts("merged", 16, 0.0, "extrapolate")
    fewer = sampling_params.of_validation(replace(config, eval=Eval(flash_ratio=0.6)))
    assert (fewer.solver, sampling_params.EXACT.solver) == ("extrapolate 0.6", "")
    assert sampling_params.of_validation(replace(config, eval=Eval(exact=True))) == sampling_params.EXACT


def test_fewer_forwards_of_a_validation_are_those_of_its_solver(shallow, tmp_path):
    how = shallow | dict(sample__flash_ratio=0.5, eval__flash_ratio=0.5, eval__num_steps=4, num_epochs=1)
    how |= dict(dataset=few_prompts(tmp_path / "data", 6, (*SPLITS, "validation")))
    folder = train(WINDOW, tmp_path / "runs", **how)
    assert best.read_best(folder).solver == "dpm 0.5"
    other = train(WINDOW, tmp_path / "full", **how | dict(eval__flash_ratio=0.0))
    assert lines_of(folder, "test") == lines_of(other, "test")
    assert lines_of(folder, "eval") != lines_of(other, "eval")


@pytest.mark.parametrize("weights", ["exact", "merged"])
def test_without_validation_prompts_the_test_prompts_choose_and_the_run_says_so(weights, shallow, tmp_path, capsys):
    rewards.register("jpeg_size", lambda *images: -rewards.load("jpeg_compressibility", "cpu")(*images))
    how = shallow | dict(eval__best_by="jpeg_size", eval__rewards=("jpeg_size",))  # which falls
    how |= dict(dataset=few_prompts(tmp_path / "data", 6), num_epochs=1, eval__num_prompts=9)
    how |= dict(lora__rank=4, sample__rollout_weights=weights, eval__noises_per_prompt=2)
    folder = train(WINDOW, tmp_path / "runs", **how)
    assert "has no validation prompts: the test prompts choose the best policy, too" in capsys.readouterr().out
    kept = best.read_best(folder)
    assert (kept.split, kept.num_prompts) == ("test", 6)
    evals = lines_of(folder, "eval")
    *tests, last = lines_of(folder, "test")
    assert last["test_best/avg"] == tests[0]["test/avg"] != tests[1]["test/avg"]
    for line, test in zip(evals, tests, strict=True):
        assert line["eval/brightness"] == pytest.approx(test["test/brightness"], rel=1e-4)
    # Merged weights draw other bits, and a test's are exact.
    assert (evals[1]["eval/distance"] == tests[1]["test/distance"]) == (weights == "exact")


def test_a_test_line_has_the_accuracy_of_each_category(runs):
    """8 prompts of the test, evenly spread; the categories are equally large, but for the first."""
    line = lines_of(runs[0], "test")[0]
    spread = evaluation.spread(prompts.load_prompts(str(ROOT / "dataset/shapes"), "test"), 8)
    counts = Counter(prompt.metadata["tag"] for prompt in spread)
    accuracies = [line[f"test/shapes_accuracy/{tag}"] for tag in counts]
    total = sum(map(operator.mul, counts.values(), accuracies))
    assert total / 8 == pytest.approx(line["test/shapes_accuracy"])
    assert len(set(accuracies)) > 1
    by_tag = [name for name in line if name.count("/") == 2]
    assert len(by_tag) == len(counts), "of right or wrong alone"


def test_images_are_written_whole_with_a_table_of_prompts_noises_and_scores(shallow, tmp_path):
    """By a run and by evaluate.py alike: files of the last weights are equal, byte for byte, and score what the table
    says."""
    how = shallow | dict(eval__rewards=("jpeg_compressibility",), eval__noises_per_prompt=2, eval__save_images=3)
    folder = train(WINDOW, tmp_path / "runs", **how, num_epochs=1, eval__num_prompts=4)
    assert sorted(path.name for path in (folder / "images").glob("eval_*") if path.is_dir()) == [
        "eval_000000",
        "eval_000001",
    ]
    images = folder / "images" / "eval_000001"
    with (images / "images.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["number"], row["seed"]) for row in rows] == [(n, s) for n in "012" for s in "01"]
    assert {path.name for path in images.iterdir()} == {row["file"] for row in rows} | {"images.csv"}
    drawn = [from_picture(Image.open(images / row["file"])) for row in rows]
    assert drawn[0].shape == (3, 64, 64)
    measured = rewards.load("jpeg_compressibility", "cpu")(torch.stack(drawn), [], [])
    assert measured.tolist() == pytest.approx([float(row["jpeg_compressibility"]) for row in rows], rel=1e-2)

    evaluated(tmp_path, folder, "--weights", "last", "--split", "validation", "--save-images", 3)
    again = next(path for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert [(again / row["file"]).read_bytes() for row in rows] == [(images / row["file"]).read_bytes() for row in rows]
    shutil.rmtree(tmp_path / "out")
    evaluated(tmp_path, folder, "--save-images", 1, "--set", "eval.image_format=webp")
    (again,) = (path for path in (tmp_path / "out").iterdir() if path.is_dir())
    assert {path.name for path in again.iterdir()} == {"00000_0.webp", "00000_1.webp", "images.csv"}


def test_flags_about_saved_images_that_would_be_ignored_or_cannot_be_are_refused(tmp_path):
    rows = [
        (
            "format alone",
            lambda: evaluated(tmp_path, TINY, "--set", "eval.image_format=jpg"),
            ["without --save-images"],
        ),
        (
            "twice",
            lambda: evaluated(tmp_path, TINY, "--save-images", 1, "--set", "eval.save_images=2"),
            ["--save-images says it already"],
        ),
        ("below 0", lambda: evaluated(tmp_path, TINY, "--save-images", -3), ["save_images", "-3"]),
    ]
    assert_refused(rows)


def test_images_that_cannot_be_written_end_nothing_and_are_said_once(tmp_path):
    (tmp_path / "file").write_text("")
    prompts_of_two = [Prompt("a red circle"), Prompt("a blue square")]
    saved = SavedImages(tmp_path / "file" / "images", prompts_of_two, [0, 1], "png")
    saved.write([(0, 0), (0, 1)], torch.zeros(2, 3, 8, 8))
    assert "could not be written to" in saved.problem
    first = saved.problem
    saved.write([(0, 0)], torch.zeros(1, 3, 8, 8))
    assert saved.problem == first


def test_the_distance_between_a_prompts_images_is_measured_in_whatever_batches():
    features = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))  # noises, prompts
    features[:, 2] = features[0, 2]
    distances = variety.Distances(5)
    for noise, prompts_of_batch in ((0, [0, 1, 2]), (0, [3, 4]), (1, range(5)), (2, []), (2, range(5)), (3, range(5))):
        distances.add(features[noise, list(prompts_of_batch)], list(prompts_of_batch))
    squares = []
    for one, other in itertools.combinations(features, 2):
        squares.append((one - other).square().mean(1))
    expected = torch.stack(squares).double().mean(0).sqrt()
    estimate = distances.estimate(4)
    assert expected[2] == 0
    assert estimate.mean == pytest.approx(expected.mean().item(), rel=1e-6)
    assert estimate.num_prompts == 5


def test_the_entropy_of_labels_is_of_pairs_of_a_prompts_images_that_have_one():
    """Two prompts: of three pairs one is alike, of one pair none; the third has a single label."""
    labels = torch.tensor([[3, 0, -1], [3, 1, 5], [4, -1, -1]])
    assert variety.entropy_bits(labels) == pytest.approx(2)
    assert variety.entropy_bits(torch.zeros(4, 2, dtype=torch.int64)) == 0
    assert math.isnan(variety.entropy_bits(torch.tensor([[-1], [2]])))


def test_variety_is_the_distance_over_that_before_training(runs):
    lines = lines_of(runs[0], "test")
    before = lines[0]["test/distance"]
    assert len({line["test/variety"] for line in lines[:-1]}) == 4
    for line, prefix in zip(lines, ["test"] * 4 + ["test_best"], strict=True):
        assert line[f"{prefix}/variety"] == pytest.approx(line[f"{prefix}/distance"] / before)


def test_the_first_noise_of_the_test_has_the_name_it_always_had():
    draws = []
    for split, seed in itertools.product(("test", "validation"), (0, 1)):
        draws.append(torch.rand(3, generator=evaluation.noise_generator(split, seed, 5)))
    assert torch.equal(draws[0], torch.rand(3, generator=evaluation.rng.generator(0, "eval", 5)))
    assert len(torch.stack(draws).unique(dim=0)) == 4


def figures_of_test(folder, prefix, number=-1):
    """A run's own figures on all test prompts, the last of a kind."""
    line = [line for line in lines_of(folder, "test") if f"{prefix}/avg" in line][number]
    figures = {}
    for name, value in line.items():
        if re.fullmatch(rf"{prefix}/(?!\w*std_error|variety)\w+", name):
            figures[name.split("/")[1]] = value
    return figures


def test_a_table_of_policies_reproduces_every_runs_own_test_to_the_last_digit(runs, tmp_path, monkeypatch):
    """One model after the other: no two are there together."""
    alive = []
    loaded = weakref.WeakSet()
    load = policies_to_compare.load_candidate

    def counted(*arguments):
        alive.append(len(loaded))
        model = load(*arguments)
        loaded.add(model.transformer)
        return model

    monkeypatch.setattr(policies_to_compare, "load_candidate", counted)
    lora = runs[4]
    full = runs[0]
    policies = lora, TINY, lora / "best", full, full / "best", lora
    found, rows = evaluated(tmp_path, *policies, "--weights", "last")
    best_of_lora = f"best, epoch {best.read_best(lora).epoch}"
    best_of_full = f"best, epoch {best.read_best(full).epoch}"
    labels = [row["weights"] for row in found["rows"]]
    assert labels == ["last", "base", best_of_lora, "last", best_of_full, "last"]
    assert alive == [0] * 6
    last = figures_of_test(lora, "test")
    assert rows == [
        last,
        figures_of_test(lora, "test", 0),
        figures_of_test(lora, "test_best"),
        figures_of_test(full, "test"),
        figures_of_test(full, "test_best"),
        last,
    ]
    # The errors of eval.best_by, before and after training. It is not trained on, so it has them by its name, too.
    logged = [line["test/std_error"] for line in lines_of(lora, "test") if "test/avg" in line]
    assert found["rows"][1]["all"]["jpeg_compressibility"]["error"] == logged[0]
    assert found["rows"][0]["all"]["jpeg_compressibility"]["error"] == logged[-1]
    named = [line["test/jpeg_compressibility_std_error"] for line in lines_of(lora, "test") if "test/avg" in line]
    assert named == logged
    for line in lines_of(lora, "eval"):
        assert line["eval/std_error"] > 0
    assert len({row["jpeg_compressibility"] for row in rows}) == 5


def test_a_model_of_another_pipeline_is_compared_without_the_class_of_a_runs_own_model():
    config = with_values(Config(), {"model_class": "plain_guidance:PlainGuidance@0123"})
    classes = {"flow_grpo/assets/tiny_qwenimage": config.model_class, "flow_grpo/assets/tiny_sd3": ""}
    for model, model_class in classes.items():
        candidate = policies_to_compare.find_candidate(model, config, "best")
        assert candidate.config.model_class == model_class


def test_best_of_a_run_is_evaluated_by_the_settings_of_the_run_as_the_run_is(runs):
    run = runs[4]
    of_run = evaluate.configured(evaluate.parser().parse_args([str(run)]))[1]
    of_best = evaluate.configured(evaluate.parser().parse_args([str(run / "best")]))[1]
    assert of_best == of_run != Config()
    # A reward that the run's server scores, and that has no file here, is left to the run.
    evaluate.check_words(evaluate.parser().parse_args([str(run / "best"), "--rewards", "served"]))


def test_a_run_that_lies_in_the_checkout_shares_its_settings_from_any_folder(runs, tmp_path, monkeypatch):
    run = shutil.copytree(runs[4], tmp_path / "checkout" / "runs" / "a")
    change_json(run / "config.json", reward_fn={"jpeg_compressibility": 1.0}, dataset="dataset/ocr")
    monkeypatch.setattr(locations, "PACKAGE", tmp_path / "checkout" / "flow_grpo")
    monkeypatch.chdir(tmp_path)
    args = evaluate.parser().parse_args(["runs/a"])
    ((candidate,), shared) = evaluate.configured(args)
    assert candidate.lora == run / "best"
    assert shared == candidate.config
    assert shared.dataset == "dataset/ocr"


def test_a_run_that_is_named_twice_is_no_run_of_another_seed(runs, tmp_path):
    again = shutil.copytree(runs[4], tmp_path / "again")
    change_json(again / "config.json", seed=7)
    candidates = []
    rows = []
    score = estimates.Estimate(0.5, 0.1, 4)
    for name in (runs[4], runs[4] / "best", f"{runs[4]}/", again):
        candidates.append(policies_to_compare.find_candidate(str(name), Config(), "best"))
        rows.append(evaluate.Row({}, {}, {"avg": score._replace(mean=float(len(rows)))}, {}))
    said = evaluate.over_seeds(evaluate.Table(rows[:3], "avg", False), candidates[:3])
    assert said == ""
    said = evaluate.over_seeds(evaluate.Table(rows, "avg", False), candidates)
    assert said == f"\n\navg of {runs[4]}, {again}, which differ in the seed: 1.5 ± 1.5\n"


def test_evaluate_draws_every_noise_scale_and_size_and_writes_every_score(runs, tmp_path, capsys):
    arguments = "--seeds 0 1 3 --guidance-scales 1 2 --sizes 64 64x32 --best-of 1 2 --num-prompts 3 --rewards shapes"
    found, rows = evaluated(tmp_path, runs[4], *arguments.split())
    drawn = [(row["guidance_scale"], row["size"]) for row in found["rows"]]
    assert drawn == [(1, "64x64"), (1, "64x32"), (2, "64x64"), (2, "64x32")]
    for row, means in zip(found["rows"], rows, strict=True):
        for column in row["scores"].values():
            assert torch.tensor(column).shape == (3, 3)
        assert means["shapes"] == pytest.approx(torch.tensor(row["scores"]["shapes"]).mean().item())
        assert means["shapes_accuracy pass@1"] == pytest.approx(means["shapes_accuracy"])
        assert means["shapes best of 2"] >= means["shapes best of 1"] == pytest.approx(means["shapes"])
        assert sum(part["num_prompts"] for part in row["by_category"].values()) == 3
    assert len({json.dumps(row["scores"]) for row in found["rows"]}) == 4
    table = (tmp_path / "out" / "table.md").read_text()
    assert table in capsys.readouterr().out
    assert table.count(str(runs[4])) == 8 + 3 * 2  # and the differences of three rows to the first
    assert len(list((tmp_path / "out").glob("*.png"))) == 4


@pytest.mark.slow
def test_rows_are_compared_on_what_they_share_and_runs_of_several_seeds_have_a_mean(runs, tmp_path):
    again = shutil.copytree(runs[4], tmp_path / "again")
    change_json(again / "config.json", seed=7, run_name="again")
    words = ["--num-prompts", 6, "--rewards", "shapes", "jpeg_compressibility"]
    found, rows = evaluated(tmp_path, runs[4], again, TINY, *words)
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| avg |" not in table.splitlines()[3]  # nobody said what a kilobyte is worth
    lines = [line for line in table.splitlines() if line.startswith("| 3: ")]
    for name, line in zip(("jpeg_compressibility", "shapes", "shapes_accuracy"), lines, strict=True):
        scores = [torch.tensor(row["scores"][name]) for row in found["rows"]]
        difference = (scores[2].double() - scores[0]).mean(1)
        wins = int((difference > 0).sum())
        losses = int((difference < 0).sum())
        assert f"| {name} | {difference.mean():.4g} ± " in line
        assert line.endswith(f"| {wins} | {losses} | {len(difference) - wins - losses} |")
    assert f"of {runs[4]}, {again}, which differ in the seed: {rows[0]['shapes_accuracy']:.4g} ± 0" in table


@pytest.mark.slow
def test_a_larger_batch_or_a_noise_less_changes_no_score_and_a_run_chose_its_best_by_the_same(runs, tmp_path):
    chosen_by = best.read_best(runs[4]).value

    def scores(*how):
        found, rows = evaluated(tmp_path, runs[4], "--split", "validation", *how)
        if "--seeds" not in how:
            assert rows[0]["jpeg_compressibility"] == pytest.approx(chosen_by, rel=1e-3)  # of batches of 5
        return found["rows"][0]["scores"]["shapes"]

    one = scores("--set", "eval.batch_size=1")
    for size in (3, 64):
        assert scores("--set", f"eval.batch_size={size}") == one
    fast = scores("--set", "sample.rollout_weights=merged", "sample.text_multiple=4")
    torch.testing.assert_close(torch.tensor(fast), torch.tensor(one), rtol=0, atol=1e-3)
    first_noise = [noises[:1] for noises in one]
    assert scores("--seeds", 0) == first_noise
    assert torch.tensor(one).unique().numel() > 2


@pytest.mark.slow
def test_two_ranks_write_what_one_writes(runs, tmp_path):
    command = ["scripts/evaluate.py", runs[4], runs[0], "--out"]
    ranks = [warm.run([*command, tmp_path / "one"]), *warm.torchrun([*command, tmp_path / "two"])]
    written = [tmp_path / name / "scores.json" for name in ("one", "two")]
    assert all(file.exists() for file in written), [rank.stderr[-3000:] for rank in ranks]
    by_one, by_two = (json.loads(file.read_text()) for file in written)
    assert by_one == by_two
    assert len(by_one["rows"]) == 2
    assert not (tmp_path / "two-2").exists()


TINY_EDIT = "flow_grpo/assets/tiny_qwenimage_edit"
REFUSED = [  # the arguments, and words of the sentence
    ("{run} --rewards shapse", "'shapse'", "nearest: shapes"),
    ("runs/nowhere/at_all", "'runs/nowhere/at_all'"),
    ("docs", "'docs'"),
    ("{damaged}", "pytorch_lora_weights.safetensors"),
    ("{damaged_weights}", "transformer/", ".safetensors"),
    ("{unfinished}", "--weights last"),
    ("{run} --prompts {plain}", "'a red circle'", "include"),
    ("{run} --prompts {plain}/nowhere", "nowhere'", "test_metadata.jsonl"),
    ("{full} --set base_precision='nf4'", "base_precision", "'nf4'"),
    ("{run} --out /proc/x/ev", "--out: /proc/x/ev"),
    ("{run} --best-of 3", "--best-of [3]", "2"),
    ("{run} --seeds 1 1", "--seeds"),
    ("{run} --num-prompts 0", "no prompt to evaluate"),
    ("{run} --set eval.num_prompts=0", "no prompt to evaluate"),
    ("{run} --sizes 1000000", "--sizes", "8192"),
    ("{run} --rewards ../shapes", "'../shapes'", "nearest"),
    ("{run} --rewards shapes=1 shapes=2", "--rewards", "twice"),
    ("{run} --sizes 64 64x64", "--sizes", "twice"),
    ("{run} --guidance-scales 1 1.0", "--guidance-scales", "twice"),
    ("{run} --best-of 1 1", "--best-of", "twice"),
    ("{run} --set eval.num_steps=4 eval.num_steps=5", "--set", "twice", "eval.num_steps"),
    ("{run} --set eval.num_stepss=4", "'eval.num_stepss'", "nearest: config.eval.num_steps"),
    ("{run} --set eval.num_steps", "no value", "KEY=VALUE"),
    ("{run} --set train.learning_rate=0.1", "would be ignored", "config.train.learning_rate"),
    ("{run} --set model='x/y'", "would be ignored", "config.model"),
    ("{run} --set eval.best_by='shapes'", "would be ignored", "config.eval.best_by"),
    ("{run} --set eval.num_prompts=4 --num-prompts 3", "would be ignored", "--num-prompts"),
    ("{run} --set height=32 --sizes 64", "would be ignored", "--sizes"),
    ("{full} --set sample.rollout_weights=merged", "would be ignored", "adapter"),
    ("{run} --set sample.rollout_weights=merged base_precision=nf4", "rollout_weights is 'merged'", "'nf4'"),
    ("{run} --set reward={{}}", "'reward={}'", "section"),
    ("{run} --model {run}", "--model", "LoRA"),
    ("{run} --out=", "--out is empty"),
    ("{own_sigmas} --rewards jpeg_compressibility", "eval.num_steps (--set) is 10", "4 steps"),
    (f"{TINY_EDIT} --rewards jpeg_compressibility --set text_tokens=40 --prompts {{aspects}}", "sources", "shape"),
    ("{run} --prompts /dev/zero", "/dev/zero", "a device"),
    ("{run} --prompts {folder}", "--prompts", "test.txt"),
    (f"{{run}} --prompts {'a' * 300}", "--prompts", "too long"),
    ("{run} --prompts {long} --rewards jpeg_compressibility", "text_tokens = 20"),
]


def test_nonsense_is_refused_before_weights_are_loaded(runs, tmp_path, monkeypatch):
    (tmp_path / "plain.txt").write_text("a red circle\n")
    (tmp_path / "long.txt").write_text("a red circle " * 20)
    shutil.copytree(runs[4], tmp_path / "unfinished", ignore=shutil.ignore_patterns("best", "wandb"))
    places = dict(run=runs[4], full=runs[0], unfinished=tmp_path / "unfinished")
    places |= dict(plain=tmp_path / "plain.txt", long=tmp_path / "long.txt")
    for name, source in (("damaged", runs[4]), ("damaged_weights", runs[0])):
        places[name] = shutil.copytree(source, tmp_path / name)
        flip_a_bit(exported(tmp_path / name / "best"))

    places["own_sigmas"] = shutil.copytree(registry.tiny_folder("qwenimage_21"), tmp_path / "own_sigmas")
    change_json(places["own_sigmas"] / "model_index.json", sample_sigmas=[1.0, 0.9, 0.7, 0.4])
    places["folder"] = tmp_path / "folder.txt"
    places["folder"].mkdir()
    places["aspects"] = tmp_path / "aspects.jsonl"
    places["aspects"].write_text("")
    for side in (64, 256):
        Image.new("RGB", (side, 64)).save(tmp_path / f"{side}.png")
        with places["aspects"].open("a") as file:
            file.write(json.dumps({"prompt": "make it blue", "sources": [f"{side}.png"]}) + "\n")

    monkeypatch.setattr(evaluate.policies_to_compare, "load_candidate", None)  # to call it is a TypeError
    rows = []
    for words, *says in REFUSED:
        arguments = words.format(**places).split()
        rows.append((words, partial(evaluated, tmp_path, *arguments), says))
    assert_refused(rows)


def test_a_table_of_scores_of_which_more_failed_than_may_is_refused(runs, tmp_path, monkeypatch):
    def brightness(images, prompts, metadata):
        scores = images.mean((1, 2, 3))
        failed = torch.tensor([prompt in first_prompts for prompt in prompts])
        return torch.where(failed, torch.nan, scores)

    monkeypatch.setattr(rewards, "REGISTERED", {})
    rewards.register("brightness", brightness)
    words = [runs[4], "--rewards", "brightness", "--num-prompts", 4, "--set"]
    first_prompts = [prompt.text for prompt in evaluation.spread(prompts.load_prompts("dataset/shapes", "test"), 4)[:2]]
    with pytest.raises(RewardFailed, match=r"'brightness' .* failed for 50.0% of 8 images; .*max_masked_share is 0.4"):
        evaluated(tmp_path, *words, "reward.max_masked_share=0.4")
    found, _ = evaluated(tmp_path, *words, "reward.max_masked_share=0.5")
    (row,) = found["rows"]
    assert ["nan" in scores for scores in row["scores"]["brightness"]] == [True, True, False, False]


def test_a_reward_that_fails_ends_an_evaluation_before_a_model_is_loaded(runs, tmp_path, monkeypatch):
    def broken(images, prompts, metadata):
        raise RuntimeError("the key has expired")

    monkeypatch.setattr(rewards, "REGISTERED", {})
    rewards.register("broken", broken)
    monkeypatch.setattr(evaluate.policies_to_compare, "load_candidate", None)  # to call it is a TypeError
    with pytest.raises(UserError, match=r"the key has expired.*; tried on a grey image before anything is loaded"):
        evaluated(tmp_path, runs[4], "--rewards", "broken", "--num-prompts", 4)
    assert not list(tmp_path.iterdir()), "nor is a folder made"


def summarised(*rows):
    """The table of rows of scores [2, 4] by name, without images."""
    scored = []
    for number, columns in enumerate(rows):
        values = {name: torch.tensor(column) for name, column in columns.items()}
        settings = dict(policy=f"p{number}", weights="best", guidance_scale=1.0, size="64x64")
        scored.append(evaluate.Scored(settings, evaluation.Scores(values, {}, {}, {})))
    return evaluate.summarise(scored, False, ["text", "text", "logo", "logo"], [2])


def test_columns_mean_the_same_in_all_rows():
    nothing = [[0.0] * 4] * 2
    alike = [[0.8] * 4] * 2
    part = [[0.5, 0.4, 0.3, 0.9], [0.6, 0.2, 0.4, 0.7]]
    more = [[1.3, 1.2, 1.1, 1.7], [1.4, 1.0, 1.2, 1.5]]
    table = summarised(dict(ocr=nothing, pick=alike, avg=alike), dict(ocr=part, pick=alike, avg=more))
    assert table.by == "avg"
    for row in table.rows:
        columns = list(evaluate.shown_columns(table, row))
        assert columns == ["ocr", "pick", "avg", "ocr best of 2", "pick best of 2", "avg best of 2"]
    assert table.rows[0].by_category["text"].mean == pytest.approx(0.8)


def test_a_row_that_lacks_an_estimate_of_another_one_has_an_empty_cell_below_its_name():
    """Entropies are of what two images of a prompt show, which not every policy draws."""
    rows = [evaluate.Row(dict(policy=name), {}, {}, {}) for name in "ab"]
    distance = estimates.Estimate(0.5, math.nan, 4)
    color = estimates.Estimate(0.25, math.nan, 2)
    size = estimates.Estimate(1.0, math.nan, 4)
    columns = [dict(distance=distance, size=size), dict(distance=distance, color=color, size=size)]
    lines = evaluate.table_of_estimates(rows, ["policy"], columns).splitlines()
    assert lines[0] == "| policy | distance | color | size |"
    assert lines[2:] == ["| a | 0.5 |  | 1 |", "| b | 0.5 | 0.25 | 1 |"]


def test_prompts_with_more_and_less_are_counted_against_the_first_row():
    levels = [[0.5, 0.5, 0.5, 0.5], [0.6, 0.4, 0.5, 0.6], [0.9, 0.9, 0.4, 0.9]]
    table = summarised(*({"pick": [level] * 2, "avg": [level] * 2} for level in levels))
    lines = evaluate.differences(table).strip().splitlines()[2:]
    assert [line.split(" | ")[-3:] for line in lines] == [["2", "1", "1 |"], ["3", "1", "0 |"]]


def test_best_of_k_and_pass_at_k_are_means_over_all_choices_of_k():
    values = torch.rand(5, 7, generator=torch.Generator().manual_seed(0))
    right = (values > 0.6).float()
    for k in range(1, 6):
        choices = list(itertools.combinations(range(5), k))
        highest = torch.stack([values[list(rows)].amax(0) for rows in choices]).double().mean(0)
        passed = torch.stack([right[list(rows)].amax(0) for rows in choices]).double().mean(0)
        assert estimates.best_of(values, k).mean == pytest.approx(highest.mean().item())
        assert estimates.best_of(values, k).error == pytest.approx(highest.std().item() / 7**0.5)
        assert estimates.best_of(right, k).mean == pytest.approx(passed.mean().item())


def test_errors_are_of_prompts_scores_that_failed_are_left_out_and_categories_keep_their_order():
    values = torch.tensor([[0.0, float("nan"), 1.0], [1.0, float("nan"), float("nan")]])
    assert estimates.mean(values) == pytest.approx((2 / 3, 0.25, 2))
    assert estimates.best_of(values, 2)[::2] == pytest.approx((1.0, 1))
    by_category = estimates.by_category(values, ["two", "one", "two"])
    assert list(by_category) == ["two", "one"]
    assert (by_category["two"].num_prompts, by_category["one"].num_prompts) == (2, 0)
