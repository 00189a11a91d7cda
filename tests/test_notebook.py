"""flow_grpo.load_run, and the notebook of the docs."""

import json
from dataclasses import replace

import pytest
import torch
from refused import assert_refused
from small import ROOT, lines_of

import flow_grpo
from flow_grpo import rewards
from flow_grpo.base.pixels import from_picture
from flow_grpo.diffusers_patch.size import Size

SMALL = 2e-3  # between our sampler and diffusers' own, by 8 bits of a channel


@pytest.mark.slow
def test_a_run_is_drawn_as_it_evaluates_before_and_after_training(recorded):
    folder = recorded("branches").folder
    rewards.register("redness", lambda images, prompts, metadata: images[:, 0].mean((1, 2)))
    after = flow_grpo.load_run(folder, "last", "cpu")
    before = flow_grpo.load_run(folder, "base", "cpu")
    prompts = after.prompts("test")[:2]
    images = after.draw(prompts, seeds=[0, 1])
    assert images.shape == (2, 2, 3, 64, 64)
    assert not torch.equal(images, before.draw(prompts, seeds=[0, 1]))
    one_a_forward = replace(after, config=replace(after.config, eval=replace(after.config.eval, batch_size=1)))
    torch.testing.assert_close(one_a_forward.draw(prompts, seeds=[0, 1]), images, rtol=0, atol=1e-3)

    # The pipeline alone, with the run's arguments, from the same noise.
    noise = after.model.noise(Size(64, 64), [torch.Generator().manual_seed(1)])
    drawn = after.pipeline(prompts[1].text, latents=noise, **after.call_arguments).images[0]
    assert (from_picture(drawn) - images[1, 1]).abs().mean() < SMALL

    scores = after.score(images, prompts)
    assert scores["avg"].shape == (2, 2)
    one = after.score(images[:1], prompts[:1])
    assert torch.equal(one["avg"], scores["avg"][:1])
    page = after.sheet(images, scores["avg"], [prompt.text for prompt in prompts])
    assert page.width == 14 + 3 * (128 + 14)


def test_branches_are_those_of_the_runs_steps_and_start_alike(recorded):
    folder = recorded("branches").folder
    run = flow_grpo.load_run(folder, "last", "cpu")
    first = lines_of(folder, "epoch")[0]
    num_steps = sum(name.startswith("steps/sigma/") for name in first)
    branches = run.branches(run.prompts("test")[0])
    assert branches.shape == (num_steps, run.config.sample.num_branches, 3, 64, 64)
    spreads = branches.std(1).mean((1, 2, 3))
    assert spreads[0] > spreads[-1] > 0, "late branches share most of their denoising"


def test_what_cannot_be_loaded_is_said(tmp_path, recorded):
    folder = recorded("window").folder
    run = flow_grpo.load_run(folder, device="cpu")
    images = torch.zeros(2, 3, 64, 64)
    unknown = replace(run, config=replace(run.config, reward_fn={"redder": 1.0}))
    by_rule = replace(run, config=replace(run.config, reward_fn={"shapes": 1.0}))
    rows = [
        ("misspelt", lambda: flow_grpo.load_run(folder, "lsat"), ["'lsat'", "best, last, base"]),
        ("no run", lambda: flow_grpo.load_run(tmp_path), ["is no run's folder"]),
        ("no prompt", lambda: run.draw([]), ["prompts or seeds is empty"]),
        ("a reward that is not here", lambda: unknown.score(images, ["a", "b"]), ["'redder'", "FLOW_GRPO_REWARDS"]),
        ("a text for a rule", lambda: by_rule.score(images, ["a", "b"]), ["reward 'shapes'", "of prompt 'a'"]),
        ("another number", lambda: run.score(images, ["a"]), ["images of 2 prompts, and 1 prompt"]),
    ]
    assert_refused(rows)


def test_the_cells_of_the_notebook_run(recorded, monkeypatch):
    """With a run of a test in the place of the demo's."""
    monkeypatch.chdir(ROOT)
    cells = json.loads((ROOT / "docs/start/notebook.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (first, *others) = code
    assert "runs/shapes_qwenimage_pr" in first
    scope: dict = {}
    for source in (first.replace("runs/shapes_qwenimage_pr", str(recorded("branches").folder)), *others):
        exec(compile(source, "notebook", "exec"), scope)
    assert scope["branches"].ndim == 5


@pytest.fixture(autouse=True)
def own_rewards(monkeypatch):
    monkeypatch.setattr(rewards, "REGISTERED", dict(rewards.REGISTERED))
    rewards.register("redness", lambda images, prompts, metadata: images[:, 0].mean((1, 2)))
