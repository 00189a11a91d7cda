"""Runs that are made once for all tests, of every process, which only read what a run leaves, or go on with a copy."""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from small import few_prompts, lines_of, make_shallow, prepare, stored, train

from flow_grpo import rewards

EPOCHS = 3
ALWAYS = dict(num_epochs=EPOCHS, eval_freq=1, save_freq=1, keep_checkpoints=9)
JPEG = dict(eval__best_by="jpeg_compressibility", eval__rewards=("jpeg_compressibility",))
MEASURED = JPEG | dict(eval__noises_per_prompt=2, eval__batch_size=5, eval__num_prompts=8, eval__test_freq=1)
PUBLISHED = dict(reward_fn={"redness": 1.0}, logger="none", eval__rewards=("shapes",))
RUNS = {
    # The page of an evaluation takes longer than an epoch.
    "window": ("shapes_qwenimage", PUBLISHED | dict(train__learning_rate=1e-2, eval_freq=EPOCHS)),
    "branches": (
        "shapes_qwenimage_pr",
        JPEG | dict(train__learning_rate=1e-2, health__action="roll_back", health__eval_drop=0.0),
    ),
    "nft": (  # its best epoch is the second
        "shapes_qwenimage_nft",
        MEASURED | dict(train__learning_rate=3e-3, train__reference_interval=3, seed=3),
    ),
    "nft, full weights": (
        "shapes_qwenimage_nft",
        MEASURED | dict(train__learning_rate=1e-3, lora__rank=0, train__old_decay_schedule=0.25),
    ),
    "dpo": ("shapes_qwenimage_dpo", dict(train__learning_rate=1e-3)),
    "online dpo": ("shapes_qwenimage_dpo,online", dict(train__learning_rate=1e-3, train__reference_interval=4)),
}


class Run(NamedTuple):
    folder: Path
    name: str  # of its config
    how: dict  # its settings by dotted name ("." written as "__")


def redness(images, prompts, metadata):
    return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))


def made_once(folder, make):
    """`folder`, which the first process that asks makes; the others wait for it."""
    with folder.with_suffix(".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            (folder / "complete").touch()
    return folder


def shared(basetemp):
    """A folder that all processes of a session have in common."""
    return basetemp.parent if "PYTEST_XDIST_WORKER" in os.environ else basetemp


def shallow_of(root):
    """Settings of a run of a model of two blocks on few prompts."""
    folder = made_once(root / "shallow", make_shallow)
    return dict(model=str(folder / "model"), dataset=str(folder / "prompts"), eval__num_steps=3)


def pairs_of(root):
    """See the fixture `pairs`."""
    folder = root / "preferences"
    how = shallow_of(root) | dict(dataset=str(folder / "data"))
    how |= dict(reward_fn__shapes=0.0, reward_fn__jpeg_compressibility=1.0)

    def make(folder):
        few_prompts(folder / "data", 48)
        prepare("shapes_qwenimage_dpo", folder / "pairs", **how)

    return how | dict(preferences__path=str(made_once(folder, make) / "pairs"))


def run_of(root, kind):
    """One of RUNS. What it printed is in the file `said` beside the folder of runs."""
    name, how = RUNS[kind]
    how = ALWAYS | how
    if kind == "dpo":
        how |= pairs_of(root)

    def make(folder):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rewards, "REGISTERED", {})
            rewards.register("redness", redness)
            with (folder / "said").open("w") as file, contextlib.redirect_stdout(file):
                train(name, folder / "runs", **how)

    (folder,) = (made_once(root / kind.replace(", ", "_").replace(" ", "_"), make) / "runs").iterdir()
    return Run(folder, name, how)


def go_on(run, folder, **more):
    """A copy of a run in `folder` that has gone on from the checkpoint of its first epoch, its last one."""
    copy = shutil.copytree(run.folder, folder / run.folder.name)
    for later in copy.glob("checkpoints/epoch_00000[2-9]"):
        shutil.rmtree(later)
    return train(run.name, folder, **run.how | dict(resume_from="latest") | more)


def assert_same(folder, other, epoch=EPOCHS):
    """All that two runs logged, and the tensors of their checkpoints, bit for bit."""
    assert lines_of(folder) == lines_of(other)
    ours = stored(folder, epoch)
    theirs = stored(other, epoch)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
