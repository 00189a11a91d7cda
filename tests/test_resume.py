"""Killed at any moment and resumed, a run logs what it would have logged."""

import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import warm
from PIL import Image
from recorded import Run, assert_same, go_on
from refused import assert_refused
from small import command_of, config_of, few_prompts, flip_a_bit, lines_of, permissions_hold, record, stored, train
from two_ranks import done, launch

from flow_grpo import rewards
from flow_grpo.base import checksums, folders, locations
from flow_grpo.checkpoints import best, checkpoints
from flow_grpo.command_line import checks
from flow_grpo.data import prompts
from flow_grpo.monitoring import health, model_card, provenance, run_history, trackers
from flow_grpo.run import input_files, resume
from flow_grpo.run import run as runs
from flow_grpo.settings import table

NAME = "shapes_qwenimage_pr"


def best_of(folder):
    """Everything in best/, byte for byte, but the card, which quotes settings that may differ."""
    contents = {path.name: path.read_bytes() for path in (folder / "best").iterdir()}
    contents.pop("README.md", None)
    return contents


def test_a_killed_run_goes_on_as_if_nothing_had_happened(shallow, tmp_path):
    """Kills in the middle of a save: test_checkpoints.py."""
    how = shallow | dict(num_epochs=3, eval_freq=2)
    unbroken = train(NAME, tmp_path / "unbroken", **how)
    folder = tmp_path / "broken" / f"{NAME}_smoke"
    of_training = command_of(NAME, tmp_path / "broken", **how, resume_from="latest", save_freq=1)
    command = ["tests/brightness.py", *of_training]
    killed = warm.Started(command)
    while killed.poll() is None and not (folder / "checkpoints" / "epoch_000001").exists():
        time.sleep(0.01)
    assert killed.poll() is None
    killed.kill()
    killed.wait()
    last = warm.run(command)
    assert last.returncode == 0, last.stderr[-3000:]
    assert lines_of(folder) == lines_of(unbroken)
    assert best_of(folder) == best_of(unbroken)
    assert [path.name for path in (tmp_path / "broken").iterdir()] == [folder.name]


def a_run_that_ended(folder, name, **settings):
    """The folder of a run of these settings with a checkpoint that holds no weights."""
    config = config_of(name, folder, **settings)
    progress = checkpoints.Progress(1, 2)
    checkpoint = checkpoints.save(folder / config.name / "checkpoints", {}, progress, config=config.to_dict())
    shutil.copy(checkpoint / "config.json", folder / config.name)
    return folder / config.name


WEIGHTS = [  # stored, the config's today, what a resumed run has; None = it is refused
    ("mean_one", "sqrt3", "mean_one"),
    ("equal", "", "equal"),
    ("equal", "sqrt3", "equal"),
    ("sqrt3", "sqrt3", "sqrt3"),
    ("sqrt3", "mean_one", None),
    ("mean_one", "", None),
]


@pytest.mark.skipif(sys.platform != "linux", reason="takes Linux's capabilities from root")
@pytest.mark.parametrize("name", ["checkpoints", "images", provenance.SOURCE])
def test_a_folder_that_the_run_could_not_save_into_is_refused_when_it_is_resumed(name, tmp_path):
    folder = a_run_that_ended(tmp_path, NAME)
    config = config_of(NAME, tmp_path, resume_from="latest")
    (folder / name).mkdir(exist_ok=True)
    (folder / name).chmod(0o555)
    with permissions_hold():
        assert_refused([(name, lambda: resume.take_folder(config), [f"{name} cannot be written"])])
    (folder / name).chmod(0o755)
    assert resume.take_folder(config).checkpoint, "and so it goes on"
    folders.release(folder)


@pytest.mark.parametrize(("stored", "wanted", "expected"), WEIGHTS)
def test_a_resumed_run_keeps_the_weight_of_steps_that_it_began_with_and_says_so(
    stored, wanted, expected, tmp_path, capsys
):
    folder = a_run_that_ended(tmp_path, NAME, train__step_weight=stored)
    config = config_of(NAME, tmp_path, train__step_weight=wanted, resume_from="latest")
    checks.check(config, checks.PR)
    if expected is None:
        with pytest.raises(ValueError, match=r"train\.step_weight"):
            resume.take_folder(config)
        return
    place = resume.take_folder(config)
    folders.release(folder)
    config.update_from_flattened_dict(place.kept_settings)
    assert config.train.step_weight == expected
    said = f"goes on with config.train.step_weight {expected!r}" in capsys.readouterr().out
    assert said == (wanted != expected)


def test_a_new_run_and_a_branch_without_a_choice_of_the_weight_of_steps_are_refused(tmp_path):
    folder = a_run_that_ended(tmp_path, NAME, train__step_weight="equal")
    how = dict(train__step_weight="", run_name="another")
    for resume_from in ("latest", str(folder / "checkpoints")):
        config = config_of(NAME, tmp_path, resume_from=resume_from, **how)
        with pytest.raises(ValueError, match=r"config\.train\.step_weight is ''"):
            resume.take_folder(config)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_without_branches_no_choice_of_the_weight_is_equal_and_nothing_is_said(tmp_path, capsys):
    for before, wanted in (("equal", ""), ("", "equal")):
        folder = a_run_that_ended(tmp_path / f"was_{before}", "shapes_qwenimage", train__step_weight=before)
        how = dict(train__step_weight=wanted, resume_from="latest")
        place = resume.take_folder(config_of("shapes_qwenimage", folder.parent, **how))
        folders.release(folder)
        assert not place.kept_settings
    assert "step_weight" not in capsys.readouterr().out


def resumed_with(stored_settings, folder):
    """Resume a run in whose stored config some settings, by section and name, are other ones."""
    config = config_of(NAME, folder, resume_from="latest")
    stored = json.loads(json.dumps(config.to_dict()))
    for section, values in stored_settings.items():
        stored[section] |= values
    progress = checkpoints.Progress(1, 2)
    checkpoint = checkpoints.save(folder / config.name / "checkpoints", {}, progress, config=stored)
    shutil.copy(checkpoint / "config.json", folder / config.name)
    return resume.take_folder(config)


def test_a_run_with_a_setting_that_is_none_any_more_goes_on_where_it_had_no_effect_and_else_is_told_how(tmp_path):
    place = resumed_with({"sample": {"branch_schedule": "fixed"}}, tmp_path / "fixed")
    assert place.checkpoint
    folders.release(place.folder)

    gone = {"sample": {"branch_schedule": "spread"}}
    without_a_reward = {"reward_fn": {"ocr": 1.0}}
    told = "sample.branch_schedule: spread -> no setting any more", "go on with the version that wrote it, or branch"
    told_of_both = "(reward_fn.ocr: 1.0 -> None, sample.branch", "go on with the version that wrote it, or branch"
    assert_refused(
        [
            ("gone", lambda: resumed_with(gone, tmp_path / "gone"), told),
            ("both", lambda: resumed_with(gone | without_a_reward, tmp_path / "both"), told_of_both),
            (
                "an entry of a setting",
                lambda: resumed_with(without_a_reward, tmp_path / "entry"),
                ["(reward_fn.ocr: 1.0 -> None); restore these"],
            ),
        ]
    )


@pytest.mark.parametrize(
    "kind", ["nft", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dpo", "online dpo"))]
)
def test_a_resumed_run_is_the_unbroken_one(kind, recorded, tmp_path):
    """DiffusionNFT and online DPO with a reference that moves after the checkpoint."""
    unbroken = recorded(kind)
    assert_same(unbroken.folder, go_on(unbroken, tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "shapes_qwenimage_nft,crd",  # a third policy
        pytest.param("shapes_qwenimage_nft,awm", marks=pytest.mark.slow),
        pytest.param("shapes_qwenimage_nft,ram", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_of_another_loss_is_the_unbroken_one(name, shallow, tmp_path):
    how = shallow | dict(num_epochs=2, save_freq=1, keep_checkpoints=9, eval_freq=0, train__learning_rate=1e-3)
    unbroken = Run(train(name, tmp_path / "unbroken", **how), name, how)
    assert lines_of(unbroken.folder, "update")[-1]["grad_norm"] > 0
    assert_same(unbroken.folder, go_on(unbroken, tmp_path / "resumed"), epoch=2)


def clock(step_s=1800.0):
    """Stands in for flow_grpo.run.run's time: so much passes from one look to the next."""
    return SimpleNamespace(monotonic=itertools.count(0.0, step_s).__next__)


def test_a_run_ends_as_after_its_last_epoch_once_its_hours_are_over(shallow, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "time", clock())
    how = shallow | dict(eval_freq=4)
    whole = train(NAME, tmp_path / "whole", num_epochs=1, **how)  # without a limit no hours end it
    timed = train(NAME, tmp_path / "timed", num_epochs=4, max_hours=0.5, **how)
    assert lines_of(timed) == lines_of(whole)
    assert best_of(timed) == best_of(whole)
    for file in ("checkpoints/epoch_000001", "pytorch_lora_weights.safetensors", "best", "reward.png"):
        assert (timed / file).exists()
    train(NAME, tmp_path / "timed", num_epochs=4, max_hours=0.5, resume_from="latest", **how)
    assert len(lines_of(timed, "epoch")) == 2, "a resumed run counts its hours anew"


@pytest.mark.slow
def test_all_ranks_end_by_the_main_ranks_clock(tmp_path):
    """The other rank's clock stands still: by itself it would go on, and wait for ever."""
    launch(__file__, tmp_path)
    assert len(lines_of(tmp_path / f"{NAME}_smoke", "epoch")) == 2


RUN = f"runs/{NAME}_smoke"
LAST = "checkpoints/epoch_000002"
NEWEST = f"{RUN}/{LAST}"
CASES = {  # commands in a folder that has RUN, a run's resume_from and other settings, and where it goes on, if it does
    "a config of others": (
        f"""mkdir mine; cp -r {RUN}/checkpoints mine; echo '{{"name": "mine"}}' > mine/config.json""",
        f"mine/{LAST}", {}, "",
    ),
    "a renamed run, latest": (f"cp -r {RUN} runs/renamed", "latest", dict(run_name="renamed"), ""),
    "a checkpoint at the top": (f"cp -r {NEWEST} {RUN}", f"{RUN}/epoch_000002", {}, ""),
    "the run's folder": ("", RUN, {}, ""),
    "a config that was deleted": (f"rm {RUN}/config.json", NEWEST, {}, ""),
    "a config that was deleted, latest": (f"rm {RUN}/config.json", "latest", {}, ""),
    "checkpoints on a disk that is away": (f"rm -r {RUN}/checkpoints; ln -s away {RUN}/checkpoints", "latest", {}, ""),
    "checkpoints that are another run's": (
        f"cp -r {RUN} runs/other; rm -r {RUN}/checkpoints; ln -s $PWD/runs/other/checkpoints {RUN}", "latest", {}, ""
    ),
    "a branch that never began, and its parent's checkpoint is gone": (
        f"""mkdir runs/b; echo '{{"folder": "gone", "checkpoint": "gone/epoch_000009"}}' > runs/b/{folders.PARENT}""",
        "latest", dict(run_name="b"), "",
    ),
    "an older checkpoint": ("", f"{RUN}/checkpoints/epoch_000001", {}, ""),
    "another model": ("", NEWEST, dict(run_name="other", model="flow_grpo/assets/tiny_sd3"), ""),
    "another rank": ("", NEWEST, dict(run_name="other", lora__rank=2), ""),
    "a checkpoint": ("", NEWEST, {}, RUN),
    "all": ("", f"{RUN}/checkpoints", {}, RUN),
    "the best evaluation's": ("", f"{RUN}/best/checkpoint", {}, RUN),
    "a link to a checkpoint": (f"ln -s {RUN}/checkpoints ck", "ck/epoch_000002", {}, RUN),
    "checkpoints on another disk": (
        f"mkdir disk; mv {RUN}/checkpoints disk; ln -s $PWD/disk/checkpoints {RUN}", f"disk/{LAST}", {}, RUN
    ),
    "the second of a name": (f"cp -r {RUN} {RUN}-2", f"{RUN}-2/{LAST}", {}, f"{RUN}-2"),
    "latest": ("", "latest", {}, RUN),
    "latest, beside one without a checkpoint": (f"mkdir {RUN}-2; cp {RUN}/config.json {RUN}-2", "latest", {}, RUN),
    "latest, where the first was deleted": (
        f"cp -r {RUN} {RUN}-10; cp -r {RUN} {RUN}-9; rm -r {RUN}", "latest", {}, f"{RUN}-10"
    ),
    "latest, beside another run": (
        f"cp -r {RUN} {RUN}-2; sed -i 's/{NAME}_smoke/&-2/' {RUN}-2/config.json", "latest", {}, RUN
    ),
    "a new run": ("", "", {}, f"{RUN}-2"),
    "latest, with nothing there": ("", "latest", dict(run_name="new"), "runs/new"),
}  # fmt: skip
BRANCHES = {  # resume_from, settings of the branch, and the epoch that it begins with
    "the newest": (f"{RUN}/checkpoints", dict(run_name="other"), 2),
    "an older one": (f"{RUN}/checkpoints/epoch_000001", dict(run_name="other"), 1),
    "the best": (f"{RUN}/best/checkpoint", dict(run_name="other"), 2),
    "a name that begins alike": (NEWEST, dict(run_name="shapes"), 2),
    "a longer name": (NEWEST, dict(run_name=f"{NAME}_smoke-2-2"), 2),
    "in another output_dir": (NEWEST, dict(run_name=f"{NAME}_smoke", output_dir="new"), 2),
}


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory, shallow):
    """A folder with RUN, which has two checkpoints and the state of its best evaluation."""
    folder = tmp_path_factory.mktemp("two_epochs")
    how = shallow | dict(num_epochs=2, save_freq=1, eval_freq=1, health__action="roll_back")
    how |= dict(eval__num_prompts=1)
    train(NAME, folder / "runs", **how)
    return folder, how


@pytest.fixture
def how(two_epochs, tmp_path, monkeypatch):
    """Settings of RUN, of which the working directory has a copy."""
    shutil.copytree(two_epochs[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return two_epochs[1]


def sums_of(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_unchanged(folder, before):
    """No file of before has other bytes or is gone."""
    now = sums_of(folder)
    for path, content in before.items():
        assert now.get(path) == content, path


def changed_names(folder, before):
    """Names of the files of before that have other bytes or are gone."""
    now = sums_of(folder)
    return {path.name for path, content in before.items() if now.get(path) != content}


def opened(config, splits=("train", "validation", "test")):
    """The files of prompts of a config that are there."""
    names = [split for split in splits if prompts.find_file(config.dataset, split)]
    return [prompts.open_split(config.dataset, split) for split in names]


def take_folder(how, **more):
    """Find where a run of these settings would write and what it would go on from, without holding it."""
    config = config_of(NAME, **how | dict(output_dir="runs") | more)
    settings = checks.without_unused_rewards(table.typed(config))
    place = resume.take_folder(settings, opened(settings))
    folders.release(place.folder)
    return place


@pytest.mark.parametrize(("commands", "resume_from", "others", "folder"), CASES.values(), ids=CASES)
def test_a_run_goes_on_from_nothing_but_its_own_folder(how, tmp_path, commands, resume_from, others, folder):
    subprocess.run(["sh", "-ec", commands], check=True)
    before = sums_of(tmp_path)
    if folder:
        begun = Path(folder).exists()
        place = take_folder(how, resume_from=resume_from, **others)
        assert (place.folder, place.checkpoint is not None, place.parent) == (Path(folder), begun, None)
    else:
        with pytest.raises(ValueError, match=r"^config\.resume_from|cannot change|never began"):
            take_folder(how, resume_from=resume_from, **others)
    assert changed_names(tmp_path, before) <= {folders.LOCK}
    added = sums_of(tmp_path).keys() - before
    assert {path.name for path in added} <= {folders.LOCK, folders.INPUTS, folders.DIGESTS}


def test_latest_is_what_another_process_has_saved_until_it_let_go_of_the_folder(how, monkeypatch):
    away = Path(RUN, "checkpoints").rename("checkpoints")
    lock = folders.lock
    monkeypatch.setattr(folders, "lock", lambda folder: away.rename(folder / "checkpoints") and lock(folder))
    assert take_folder(how, resume_from="latest").checkpoint == Path(NEWEST)


@pytest.mark.parametrize(("resume_from", "others", "epoch"), BRANCHES.values(), ids=BRANCHES)
def test_another_run_begins_a_branch_and_leaves_its_parent_as_it_is(how, tmp_path, resume_from, others, epoch):
    before = sums_of(tmp_path)
    for again in (resume_from, "latest"):  # as if it had been killed before its first checkpoint
        rates = dict(train__learning_rate=1e-5, train__learning_rate_schedule="linear", num_epochs=9)
        place = take_folder(how | rates, resume_from=again, **others)
        expected = Path(others.get("output_dir", "runs"), others["run_name"])
        assert (place.folder, place.parent) == (expected, tmp_path / RUN)
        parent = json.loads((place.folder / folders.PARENT).read_text())
        changed = ["train.learning_rate", "train.learning_rate_schedule", "num_epochs"]
        assert (parent["epoch"], [*parent["changed"]]) == (epoch, changed)
        assert trackers.origin(place.folder) == f"{NAME}_smoke"
    assert_unchanged(tmp_path, before)


def test_renamed_folders_that_seem_to_come_from_each_other_have_an_origin(tmp_path):
    for name, parent in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        provenance.write_parent(tmp_path / name, provenance.Parent(str(tmp_path / parent)))
    assert trackers.origin(tmp_path / "a") == "a"


@pytest.mark.slow
def test_an_unchanged_branch_repeats_its_parent_bit_for_bit(how, tmp_path):
    before, how = sums_of(tmp_path), how | dict(run_name="branch")
    branch = train(NAME, "runs", **how, resume_from=f"{RUN}/checkpoints/epoch_000001")
    assert lines_of(branch) == lines_of(tmp_path / RUN)
    ours, theirs = (sums_of(folder / LAST / "state") for folder in (branch, tmp_path / RUN))
    assert [*ours.values()] == [*theirs.values()]
    assert (branch / "checkpoints/epoch_000001").is_dir(), "from its start it resumes without its parent"
    assert_unchanged(tmp_path, before)
    folder = train(NAME, "runs", **how | dict(num_epochs=3), resume_from="latest")
    assert (folder, len(lines_of(folder, "epoch"))) == (branch, 3)


@pytest.mark.parametrize(("pairs", "kinds"), [("a", ["epoch", "validation", "eval"]), ("b", ["epoch", "eval"])])
def test_a_branch_has_losses_on_held_out_pairs_from_its_parent_only_where_its_pairs_are_the_same(
    pairs, kinds, tmp_path
):
    parent = tmp_path / "parent"
    branch = tmp_path / "branch"
    for folder, digest in ((parent, "a"), (branch, pairs)):
        folder.mkdir()
        inputs = input_files.Inputs({}, {}, {}, preferences_path={"pairs.parquet": digest}, rewards={})
        input_files.write_inputs(folder, inputs)
    lines = [{"kind": kind, "epoch": 3, "written_at": ""} for kind in ("epoch", "validation", "eval")]
    lines.append({"kind": "eval", "epoch": 2, "written_at": ""})
    (parent / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    place = resume.Place(branch, None, parent, inputs, changed={}, kept_settings={})
    resume._copy_metrics(place, parent, since=3)
    assert [line["kind"] for line in lines_of(branch)] == kinds


def test_a_branch_rolls_back_to_its_parents_best_policy_beside_which_there_was_no_old_one(how, tmp_path, monkeypatch):
    monkeypatch.setattr(health, "not_finite", lambda epoch: [health.Alarm("not_finite", "the test rings")])
    rank = json.loads((tmp_path / RUN / "config.json").read_text())["lora"]["rank"]
    how = how | dict(run_name="nft", resume_from=NEWEST, lora__rank=rank, num_epochs=3, eval_freq=9)
    # As the parent's, by which its evaluations are drawn.
    how |= dict(sample__rollout_weights="merged")
    branch = train("shapes_qwenimage_nft", "runs", **how)
    assert lines_of(branch, "epoch")[-1]["health/rolled_back_to"] == best.read_best(tmp_path / NEWEST).epoch


@pytest.mark.slow
def test_a_branch_may_change_its_reward_rate_and_algorithm(how, tmp_path, monkeypatch):
    """Comparisons with the parent begin anew, and policies that the parent had not are the loaded one."""
    read_progress = checkpoints.read_progress

    def halved(checkpoint):
        return read_progress(checkpoint)._replace(learning_rate_factor=0.5)

    monkeypatch.setattr(checkpoints, "read_progress", halved)
    how = {key: value for key, value in how.items() if not key.startswith("reward")}
    how["num_epochs"] = 3
    rank = json.loads((tmp_path / RUN / "config.json").read_text())["lora"]["rank"]
    how |= dict(run_name="nft", resume_from=NEWEST, lora__rank=rank, train__learning_rate=1e-4)
    branch = train("shapes_qwenimage_nft", "runs", **how)
    assert lines_of(branch, "epoch")[:2] == lines_of(tmp_path / RUN, "epoch")
    assert best.read_best(branch).since == input_files.stored_inputs(branch).rewards_since == 2
    assert best.read_best(branch).inputs["reward_fn"] != best.read_best(tmp_path / RUN).inputs["reward_fn"]
    evaluations = lines_of(branch, "eval") + lines_of(branch, "test")
    assert {line["epoch"] for line in evaluations} == {2, 3}
    assert lines_of(branch, "update")[-2]["old_distance"] == 0 < lines_of(branch, "update")[-1]["old_distance"]
    assert lines_of(branch, "epoch")[-1]["health/learning_rate_factor"] == 1
    how |= dict(run_name="back", resume_from=str(branch / "checkpoints"), dataset=few_prompts(tmp_path / "data"))
    back = train(NAME, "runs", **how)  # without the old policy; no epoch is left
    assert "train.shared_noise" in json.loads((back / folders.PARENT).read_text())["changed"]
    assert best.read_best(back).inputs["dataset"] != best.read_best(branch).inputs["dataset"]


def test_branches_go_on_from_windows_and_fewer_ones_from_them_with_all_that_was_trained(shallow, tmp_path):
    """The commands of docs/algorithms/tempflow_grpo.md: each run begins with its parent's state, and trains on."""
    how = shallow | dict(eval_freq=0, save_freq=1, keep_checkpoints=9)
    how |= dict(reward_fn__shapes=0.0, reward_fn__jpeg_compressibility=1.0)
    parent = train("shapes_qwenimage", tmp_path, **how | dict(num_epochs=1))
    for epoch, (run_name, number) in enumerate([("branches", 4), ("fewer_branches", 2)], 1):
        how |= dict(run_name=run_name, resume_from=str(parent / "checkpoints"), sample__num_branches=number)
        branch = train(NAME, tmp_path, **how | dict(num_epochs=epoch + 1))
        before = stored(branch, epoch)
        after = stored(branch, epoch + 1)
        for name, tensor in stored(parent, epoch).items():
            assert torch.equal(tensor, before[name])
        assert any(not torch.equal(tensor, after[name]) for name, tensor in before.items())
        assert [line["epoch"] for line in lines_of(branch, "epoch")] == list(range(epoch + 1))
        parent = branch


def test_a_run_that_evaluates_otherwise_than_before_compares_nothing_with_earlier_figures(how, tmp_path, capsys):
    newest = tmp_path / NEWEST
    for folder in (tmp_path / RUN, newest):  # it knows so without its best policy, too
        shutil.rmtree(folder / best.NAME)
    checksums.write_checksums(newest)
    folder = train(NAME, "runs", **how | dict(num_epochs=3, resume_from="latest", eval__num_steps=4))
    assert best.read_best(folder).since == 2
    said = capsys.readouterr().out
    assert " last, " in said
    assert " before" not in said
    run = run_history.read_run(folder, "run")
    rows = model_card.before_and_after(run, "test/")
    assert rows
    assert {before for _, before, _ in rows} == {""}
    assert run_history.summary([run]).rows[0][4] == f"{lines_of(folder, 'eval')[-2]['eval/avg']:.4g}"


def test_a_prolonged_run_keeps_the_evaluation_of_its_end_and_changes_no_weights_of_a_backup(how, tmp_path):
    folder = tmp_path / RUN
    backup = tmp_path / "backup"
    shutil.copytree(folder, backup, copy_function=os.link)
    before = sums_of(backup)
    lines = lines_of(folder, "eval")
    last = best.read_best(folder)
    assert last.epoch == 2  # so the end's evaluation was the best
    prolonged = how | dict(num_epochs=3, eval_freq=5, resume_from="latest")
    assert train(NAME, tmp_path / "runs", **prolonged) == folder
    assert [line["epoch"] for line in lines_of(folder, "epoch")] == [0, 1, 2]
    assert json.loads((folder / "config.json").read_text())["num_epochs"] == 3
    assert lines_of(folder, "eval")[:3] == lines
    assert [line["epoch"] for line in lines_of(folder, "eval")] == [0, 1, 2, 3]
    assert best.read_best(folder).value >= last.value
    (folder / "checkpoints" / "epoch_000001.scratch-of-a-kill" / "inside").mkdir(parents=True)
    train(NAME, tmp_path / "runs", **prolonged, keep_checkpoints=1)  # has nothing to do but to tidy
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["epoch_000003"]
    assert [line["epoch"] for line in lines_of(folder, "eval")] == [0, 1, 2, 3]  # the last one made again
    assert changed_names(backup, before) <= {folders.LOCK, "README.md", "reward.png", "samples.png"}


def test_an_alarm_without_a_state_to_go_back_to_ends_the_run_with_a_checkpoint(how, tmp_path, monkeypatch):
    monkeypatch.setattr(health, "not_finite", lambda epoch: [health.Alarm("not_finite", "")])
    for state in (tmp_path / RUN).rglob("best/checkpoint"):
        shutil.rmtree(state)
    how = how | dict(num_epochs=9, eval_freq=20, resume_from="latest")
    folder = train(NAME, tmp_path / "runs", **how)
    assert [line["health/action_taken"] for line in lines_of(folder, "epoch")[2:]] == [1.0]
    assert (folder / "checkpoints" / "epoch_000003").is_dir()


def inputs_of(config, folder, splits=("train", "test")):
    """The inputs of a run of this config, which opens these files of prompts."""
    return input_files.current_inputs(table.typed(config), folder, opened(config, splits))


@pytest.fixture
def read_files(tmp_path):
    """A config whose files are all there, and these by their settings."""
    files = {
        "dataset": tmp_path / "prompts/test.txt",
        "model": tmp_path / "model/transformer/model.safetensors",
        "lora.path": tmp_path / "lora/pytorch_lora_weights.safetensors",
        "lora.base": tmp_path / "base/pytorch_lora_weights.safetensors",
        "preferences.path": tmp_path / "pairs/train_00000.parquet",
        "train.teachers": tmp_path / "teacher/pytorch_lora_weights.safetensors",
    }
    config = config_of(NAME, tmp_path)
    for key, file in files.items():
        file.parent.mkdir(parents=True)
        file.write_text("before")
        folder = str(tmp_path / file.relative_to(tmp_path).parts[0])
        config.update_from_flattened_dict({key: (folder,) if key == "train.teachers" else folder})
    return config, files


@pytest.mark.parametrize("key", ["dataset", "model", "lora.path", "lora.base", "preferences.path", "train.teachers"])
def test_what_a_run_learns_from_is_the_same_when_it_is_resumed(key, read_files, tmp_path):
    config, files = read_files
    input_files.write_inputs(tmp_path, inputs_of(config, tmp_path))
    stored = input_files.stored_inputs(tmp_path)
    assert input_files.compare_inputs(stored, inputs_of(config, tmp_path), 3, accepts=False) == (
        stored,
        [],
    )
    files[key].write_text("after!")
    current = inputs_of(config, tmp_path)
    with pytest.raises(ValueError, match=f"config.{key}: .*{files[key].name}"):
        input_files.compare_inputs(stored, current, 3, accepts=False)
    accepted, notices = input_files.compare_inputs(stored, current, 3, accepts=True)
    assert (accepted, len(notices)) == (current._replace(rewards_since=3), 1)
    assert (accepted.of_figures() == stored.of_figures()) == (key not in ("dataset", "model", "lora.base"))


@pytest.mark.parametrize("key", ["dataset", "model", "lora.path", "lora.base", "preferences.path", "train.teachers"])
def test_a_branch_reads_other_files_where_their_setting_may_change(key, read_files, tmp_path):
    config, files = read_files
    stored = inputs_of(config, tmp_path)
    files[key].write_text("after!")
    current = inputs_of(config, tmp_path)
    call = (key, lambda: input_files.compare_inputs(stored, current, 3, accepts=False, is_branch=True))
    if key in input_files.INHERITED:
        assert_refused([(*call, [f"config.{key}: "])])
    else:
        assert call[1]() == (current._replace(rewards_since=3), [])


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_each_file_that_is_read_of_a_lora_of_peft_has_a_digest(name, read_files, tmp_path):
    config, files = read_files
    folder = files["lora.path"].parent
    files["lora.path"].rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("before")
    for path in (folder, folder / "adapter_model.safetensors"):
        config.lora.path = str(path)
        before = inputs_of(config, tmp_path).lora_path
        (folder / name).write_text(f"after, {path}")
        now = inputs_of(config, tmp_path).lora_path
        assert [file for file in now if before[file] != now[file]] == [name]


@pytest.mark.slow
def test_a_run_goes_on_with_another_data_set_where_accept_changes_says_so(shallow, tmp_path):
    dataset = tmp_path / "prompts"
    shutil.copytree(shallow["dataset"], dataset)
    how = shallow | dict(dataset=str(dataset), eval_freq=0)
    train(NAME, tmp_path, num_epochs=1, **how)
    first, *others = (dataset / "train_metadata.jsonl").read_text().splitlines(keepends=True)
    (dataset / "train_metadata.jsonl").write_text("".join([*others, first]))
    with pytest.raises(ValueError, match=r"config.dataset: .*--config.accept_changes=True goes on with other ones"):
        train(NAME, tmp_path, num_epochs=2, resume_from="latest", **how)
    folder = train(NAME, tmp_path, num_epochs=2, resume_from="latest", accept_changes=True, **how)
    assert [line["epoch"] for line in lines_of(folder, "epoch")] == [0, 1]


@pytest.mark.parametrize("is_branch", [False, True])
def test_rewards_of_other_prompts_are_not_compared(is_branch, read_files, tmp_path):
    config, files = read_files
    stored = inputs_of(config, tmp_path)
    files["dataset"].write_text("after!")
    current = inputs_of(config, tmp_path)
    accepted, _ = input_files.compare_inputs(stored, current, 3, accepts=not is_branch, is_branch=is_branch)
    assert accepted.rewards_since == 3
    assert input_files.compare_inputs(accepted, current, 5, accepts=False) == (accepted, [])


@pytest.mark.parametrize(("split", "is_comparable"), [("train", True), ("test", False)])
def test_evaluations_are_compared_where_the_prompts_that_are_evaluated_are_the_same(
    split, is_comparable, read_files, tmp_path
):
    config, files = read_files
    folder = files["dataset"].parent
    files["dataset"].unlink()
    for name in ("train", "test"):
        Image.new("RGB", (8, 8), "red").save(folder / f"{name}.png")
        line = json.dumps({"prompt": "turn it", "sources": [f"{name}.png"]})
        (folder / f"{name}_metadata.jsonl").write_text(f"{line}\n")
    stored = inputs_of(config, tmp_path)
    before = record(3, inputs=stored.of_figures())

    # Another picture, then other prompts.
    Image.new("RGB", (8, 8), "blue").save(folder / f"{split}.png")
    assert before.comparable(record(3, inputs=inputs_of(config, tmp_path).of_figures())) == is_comparable
    Image.new("RGB", (8, 8), "red").save(folder / f"{split}.png")
    with (folder / f"{split}_metadata.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "mirror it", "sources": [f"{split}.png"]}) + "\n")
    now = record(3, inputs=inputs_of(config, tmp_path).of_figures())
    assert before.comparable(now) == is_comparable

    # Of an older evaluation it is known of all prompts together alone.
    older = {name: digest for name, digest in before.inputs.items() if not name.startswith("evaluated ")}
    assert not record(3, inputs=older).comparable(now)


def test_pictures_to_be_edited_are_inputs_of_a_run(read_files, tmp_path):
    config, files = read_files
    folder = files["dataset"].parent
    Image.new("RGB", (8, 8), "red").save(folder / "a.png")
    (folder / "train_metadata.jsonl").write_text(json.dumps({"prompt": "turn it", "sources": ["a.png"]}) + "\n")
    stored = inputs_of(config, tmp_path)
    Image.new("RGB", (8, 8), "blue").save(folder / "a.png")
    current = inputs_of(config, tmp_path)
    with pytest.raises(ValueError, match=r"sources of config.dataset: a.png"):
        input_files.compare_inputs(stored, current, 3, accepts=False)
    assert current.of_figures() != stored.of_figures()
    older = stored._replace(sources=None)  # as records of before sources were kept
    assert input_files.compare_inputs(older, current, 3, accepts=False) == (current, [])


def test_a_run_on_pairs_goes_on_whatever_becomes_of_prompts_that_it_does_not_open(read_files, tmp_path):
    config, files = read_files
    train = files["dataset"].with_name("train.txt")
    train.write_text("before")
    older = inputs_of(config, tmp_path)  # which listed them
    train.write_text("after!")
    now = inputs_of(config, tmp_path, splits=["test"])
    assert input_files.compare_inputs(older, now, 3, accepts=False) == (now, [])
    unevaluated = inputs_of(config, tmp_path, splits=[])
    assert input_files.compare_inputs(now, unevaluated, 3, accepts=False) == (unevaluated, [])
    config.preferences.path = ""
    now = inputs_of(config, tmp_path)
    with pytest.raises(ValueError, match=r"config.dataset: train.txt"):
        input_files.compare_inputs(older, now, 3, accepts=False)


def test_files_that_lie_beside_pairs_are_no_inputs(read_files, tmp_path):
    config, files = read_files
    (files["preferences.path"].parent / "notes.parquet").write_text("of somebody")
    assert [*inputs_of(config, tmp_path).preferences_path] == ["train_00000.parquet"]


def shipped_rewards():
    """Each shipped reward and its file."""
    files = {name: rewards.reward_file(name) for name in rewards.reward_names()}
    return {name: file for name, file in files.items() if file and file.is_relative_to(locations.PACKAGE)}


def test_each_text_of_a_shipped_reward_is_said_to_score_as_the_one_before_or_not():
    """A text that scores alike is appended to the reward's list; one that scores otherwise begins a list anew."""
    texts = json.loads(input_files.REWARD_TEXTS.read_text())
    digests = checksums.file_digests(shipped_rewards())
    assert {name: of_reward[-1] for name, of_reward in texts.items()} == digests


def test_a_shipped_reward_whose_comments_changed_scores_as_before(read_files, tmp_path, monkeypatch):
    texts = tmp_path / "reward_texts.json"
    monkeypatch.setattr(input_files, "REWARD_TEXTS", texts)
    digest = checksums.file_digest(shipped_rewards()["shapes"])
    read_files[0].reward_fn = {"shapes": 1.0}
    texts.write_text(json.dumps({"shapes": ["older", digest]}))
    current = inputs_of(read_files[0], tmp_path)
    stored = current._replace(rewards={"shapes": "older"})
    assert input_files.compare_inputs(stored, current, 3, accepts=False) == (current, [])
    assert current.of_figures() == stored.of_figures()
    texts.write_text(json.dumps({"shapes": [digest]}))
    _, notices = input_files.compare_inputs(stored, inputs_of(read_files[0], tmp_path), 3, accepts=False)
    assert notices == ["the file of reward shapes has changed: scores from before cannot be compared"]


@pytest.mark.parametrize("changed", ["shapes", "neighbourly", "neighbourly (beside_it.py)"])
def test_a_reward_that_changed_is_named_and_its_scores_are_compared_with_no_others(
    changed, read_files, tmp_path, monkeypatch
):
    (tmp_path / "own").mkdir()
    monkeypatch.setenv("FLOW_GRPO_REWARDS", str(tmp_path / "own"))
    monkeypatch.setattr(rewards, "__path__", [*rewards.__path__])
    monkeypatch.setattr(sys, "path", [*sys.path])
    for module in ("flow_grpo.rewards.neighbourly", "beside_it"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    (tmp_path / "own" / "beside_it.py").write_text("load = len")
    (tmp_path / "own" / "neighbourly.py").write_text("from beside_it import load")
    read_files[0].reward_fn = {"shapes": 1.0, "neighbourly": 1.0}
    current = inputs_of(read_files[0], tmp_path)
    assert {*current.rewards} == {"shapes", "neighbourly", "neighbourly (beside_it.py)"}
    stored = current._replace(rewards=current.rewards | {changed: "another"})
    now, notices = input_files.compare_inputs(stored, current, 3, accepts=False)
    assert now.rewards_since == 3
    assert changed in notices[0]
    assert now.of_figures() != stored.of_figures()
    assert input_files.compare_inputs(now, current, 5, accepts=False) == (now, [])
    served = read_files[0].copy_and_resolve_references()
    served.reward.args = {"shapes": {"url": "http://127.0.0.1:1"}}
    assert "shapes" not in inputs_of(served, tmp_path).rewards


def test_rewards_that_are_links_to_their_files_are_inputs_once_each(read_files, tmp_path, monkeypatch):
    """The files lie in one folder, and neither is a module that the other one may have imported."""
    for folder in ("own", "elsewhere"):
        (tmp_path / folder).mkdir()
    names = ["linked_one", "linked_two"]
    for name in names:
        (tmp_path / "elsewhere" / f"{name}.py").write_text("load = len")
        (tmp_path / "own" / f"{name}.py").symlink_to(tmp_path / "elsewhere" / f"{name}.py")
        monkeypatch.delitem(sys.modules, f"flow_grpo.rewards.{name}", raising=False)
    monkeypatch.setenv("FLOW_GRPO_REWARDS", str(tmp_path / "own"))
    monkeypatch.setattr(rewards, "__path__", [*rewards.__path__])
    monkeypatch.setattr(sys, "path", [*sys.path])
    read_files[0].reward_fn = dict.fromkeys(names, 1.0)
    assert {*inputs_of(read_files[0], tmp_path).rewards} == {*names}


def test_the_file_of_a_service_is_an_input_since_it_runs_here_and_asks_the_server(read_files, tmp_path):
    config, _ = read_files
    address = {"url": "http://127.0.0.1:1/v1", "model": "judge"}
    config.reward_fn = {"vlm_judge": 1.0, "pickscore": 1.0}
    config.reward.args = {"vlm_judge": address, "pickscore": {"url": "http://127.0.0.1:1"}}
    assert {*inputs_of(config, tmp_path).rewards} == {"vlm_judge"}


def test_damage_is_named_and_costs_an_epoch_at_most(how, tmp_path, capfd):
    folder = tmp_path / RUN
    output_dir = tmp_path / "runs"
    before = lines_of(folder)
    (first, newest) = sorted((folder / "checkpoints").iterdir())
    for path in [next((newest / "state").iterdir()), next((first / "best").glob("*.safetensors"))]:
        flip_a_bit(path)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n[1]\n{"kind": "epoch"}\n')
    with pytest.raises(ValueError, match=f"{newest} is damaged: state/rank_0000_0000.safetensors"):
        train(NAME, output_dir, **how, resume_from=str(newest))
    capfd.readouterr()
    train(NAME, output_dir, **how, resume_from="latest")
    said = capfd.readouterr().out
    assert f"{newest} is damaged: " in said
    assert f"the run goes on from {first}" in said
    assert f"{first / 'best'} is damaged: " in said
    assert str(folder / "best_damaged") in said
    assert (folder / "best_damaged").exists()
    assert lines_of(folder, "update") == [line for line in before if line["kind"] == "update"]
    assert (folder / "best").is_dir()
    assert (folder / "samples.png").is_file()


def end_by_the_clock(folder):
    """Train on one of two ranks, for test_all_ranks_end_by_the_main_ranks_clock."""
    runs.time = clock(1800.0 if os.environ["RANK"] == "0" else 0.0)
    how = dict(sample__num_images_per_prompt=4, num_epochs=5, eval_freq=0, max_hours=1.0)
    train(NAME, folder, **how)
    done(Path(folder))


if __name__ == "__main__":
    end_by_the_clock(sys.argv[1])


def test_digests_are_remembered_in_a_cache_that_runs_share_or_in_the_runs_folder(tmp_path):
    for name in ("run", "cache"):
        (tmp_path / name).mkdir()
        input_files.current_inputs(config_of("shapes_qwenimage", cache_dir=str(tmp_path / "cache")), tmp_path / "run")
        assert (tmp_path / name / folders.DIGESTS).exists()


def test_a_new_run_computes_its_models_digests_beside_loading_and_stores_them_before_it_trains(how, tmp_path):
    stored = input_files.stored_inputs(Path(RUN))
    config = table.typed(config_of(NAME, tmp_path, **how))
    assert stored.model == input_files.current_inputs(config, tmp_path).model
    assert {"model_index.json", "transformer/config.json"} <= stored.model.keys()
    assert "model" in best.read_best(Path(RUN)).inputs


def test_a_run_that_goes_on_and_a_branch_compare_the_models_files_before_they_load_any(tmp_path):
    model = shutil.copytree("flow_grpo/assets/tiny_qwenimage", tmp_path / "model")
    folder = a_run_that_ended(tmp_path / "runs", NAME, model=str(model))
    same_run = config_of(NAME, folder.parent, model=str(model), resume_from="latest")
    branch = config_of(NAME, folder.parent, model=str(model), resume_from=str(folder / "checkpoints"), run_name="other")
    input_files.write_inputs(folder, input_files.current_inputs(same_run, folder))
    with (model / "transformer" / "config.json").open("a") as file:
        file.write(" ")
    told = ["config.model: transformer/config.json"]
    assert_refused(
        [
            ("the run", lambda: resume.take_folder(same_run), told),
            ("a branch", lambda: resume.take_folder(branch), told),
        ]
    )


def test_a_model_of_the_hub_is_known_by_its_commit_and_no_file_is_read_for_it(tmp_path, monkeypatch):
    repository = tmp_path / "hub" / "models--owner--model"
    for file, text in {"refs/main": "abc", "snapshots/abc/model_index.json": "{}"}.items():
        (repository / file).parent.mkdir(parents=True)
        (repository / file).write_text(text)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    config = table.typed(config_of(NAME, tmp_path, model="owner/model"))
    inputs = input_files.current_inputs(config, tmp_path, reads_model=False)
    assert input_files.current_inputs(config, tmp_path).model == {"commit": "abc"}
    with input_files.later_model(config, tmp_path) as digests:
        written = input_files.write_with_model(tmp_path, inputs, digests)
    assert written.model == {"commit": "abc"}
    assert input_files.stored_inputs(tmp_path) == written


def test_a_start_that_fails_waits_for_no_digest(tmp_path, monkeypatch):
    """One of a model with a file that takes hours to read."""
    model = shutil.copytree("flow_grpo/assets/tiny_qwenimage", tmp_path / "model")
    (model / "other").mkdir()
    with (model / "other" / "weights.safetensors").open("wb") as file:
        file.truncate(2**42)
    rewards.register("unusable", lambda *images: 1 / 0)
    with pytest.raises(ValueError, match="unusable"):
        train(NAME, tmp_path / "runs", model=str(model), reward_fn={"unusable": 1.0})
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(checksums.THREADS)]
    assert not (tmp_path / "runs").exists()
