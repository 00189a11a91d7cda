"""Requests in slots: whoever shares a forward and whenever they arrive, trajectories are those of the full walks."""

import pytest
import torch
from build_random_pipeline import build
from small import MODELS, lines_of, train

from flow_grpo import rng
from flow_grpo.diffusers_patch.stepwise_with_logprob import Request, Slots, branches_in_order, in_order, walk

QWEN, TINY = MODELS["qwenimage"], "flow_grpo/assets/tiny_qwenimage"
PROMPTS = ["a photo of a red circle", "two blue squares", "a photo of three crosses", "a star left of a green triangle"]
SIZE = 64
SLOTS = [1, 3, 8, 64]


@pytest.fixture(scope="module")
def pipeline():
    pipeline = QWEN.PIPELINE.from_pretrained(TINY)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.transformer.double()  # a float32 forward depends on its shape in the last bits, which guidance enlarges
    return pipeline


def mix():
    """40 requests of different prompts, steps, windows, branches, kinds of noise, guidance and solvers."""
    windows = [range(0), range(0, 2), range(2, 4), range(3, 6)]
    for n in range(40):
        steps = (6, 8, 10)[n % 3]
        branches = 3 if n % 5 == 4 else 0
        noisy = range(n % 3, n % 3 + 2) if branches else windows[n % 4]
        how = dict(noise_level=(0.7, 1.0)[n % 2], sde_type=("sde", "cps", "dance")[n % 3] if n % 7 else "sde")
        how["noise_level"] = 0.3 if how["sde_type"] == "dance" else how["noise_level"]
        yield (
            n,
            dict(
                prompt=PROMPTS[n % 4],
                width=(20, 24)[n % 2],
                num_steps=steps,
                guidance_scale=(1.0, 1.0, 4.0)[n % 3],
                noisy=noisy,
                num_branches=branches,
                flash_ratio=0.5 if n % 6 == 5 else 0.0,
                how=how,
            ),
        )


def alone(pipeline, n, what):
    """What the entry points make of one request."""
    embeds = QWEN.encode_prompts(pipeline, [what["prompt"]], width=what["width"])
    how = dict(resolution=SIZE, num_steps=what["num_steps"], flash_ratio=what["flash_ratio"], **what["how"])
    how |= dict(guidance_scale=what["guidance_scale"])
    noise = [rng.generator(0, "noise", n)]
    if what["num_branches"]:
        branching = dict(steps=what["noisy"], num_branches=what["num_branches"])
        return QWEN.pipeline_with_logprob_perstep(pipeline, embeds, noise, **branching, **how)
    return QWEN.pipeline_with_logprob(pipeline, embeds, noise, window=what["noisy"], **how)


@pytest.fixture(scope="module")
def expected(pipeline):
    return {n: alone(pipeline, n, what) for n, what in mix()}


def request_of(pipeline, n, what):
    generator = rng.generator(0, "noise", n)
    latents = QWEN.initial_latents(pipeline, [generator], SIZE, "cpu")
    embeds = QWEN.encode_prompts(pipeline, [what["prompt"]], width=what["width"]).padded(32)
    options = {key: what[key] for key in ("guidance_scale", "noisy", "num_branches", "flash_ratio", "how")}
    return Request(
        n,
        embeds,
        latents,
        QWEN.schedule(pipeline, what["num_steps"], SIZE, "cpu"),
        noise=lambda num: rng.normal((num, *latents.shape[1:]), [generator])[0],
        **options,
    )


@torch.no_grad()
@pytest.mark.parametrize("slots", SLOTS)
def test_forty_requests_of_all_kinds_walk_as_they_would_alone(slots, pipeline, expected):
    def velocity(x, t, embeds, guidance_scale):
        return QWEN.predict_velocity(pipeline.transformer, x, t, embeds, guidance_scale)

    order = torch.randperm(40, generator=torch.Generator().manual_seed(slots)).tolist()
    wanted = dict(mix())
    used = Slots(slots, slots)
    finished = list(walk(velocity, (request_of(pipeline, n, wanted[n]) for n in order), used))
    for n, what in wanted.items():
        trunk = [r for r in finished if r.name == n]
        if what["num_branches"]:
            trunk += [r for r in finished if isinstance(r.name, tuple) and r.name[0] == n]
            latents, trace = branches_in_order(trunk)
        else:
            latents, trace = in_order(trunk)
        close = dict(rtol=0, atol=1e-6, msg=lambda text, n=n: f"request {n}: {text}")
        torch.testing.assert_close(latents, expected[n].latents, **close)
        assert len(trace) == len(expected[n].trace) == len(what["noisy"])
        for ours, theirs in zip(trace, expected[n].trace):
            assert torch.equal(ours.timestep, theirs.timestep)
            torch.testing.assert_close(ours.latents, theirs.latents, **close)
            torch.testing.assert_close(ours.step.log_prob, theirs.step.log_prob, **close)
            torch.testing.assert_close(ours.step.prev_sample, theirs.step.prev_sample, **close)
    assert used.rows <= used.offered


@pytest.mark.parametrize("slots", [2, 5])
@pytest.mark.parametrize("name", MODELS)
def test_the_entry_points_make_the_same_in_slots(name, slots, tmp_path):
    model, folder = MODELS[name], TINY
    if name != "qwenimage":
        folder = str(tmp_path / name)
        build(name, folder)
    pipeline = model.PIPELINE.from_pretrained(folder)
    how = dict(resolution=SIZE, num_steps=5, noise_level=0.7, guidance_scale=4.0)

    def noise():
        return [rng.generator(0, "noise", b) for b in range(4)]

    for entry, what in (
        (model.pipeline_with_logprob, dict(window=range(1, 3))),
        (model.pipeline_with_logprob, dict(window=range(1, 3), flash_ratio=0.5)),
        (model.pipeline_with_logprob_perstep, dict(steps=range(3), num_branches=2)),
    ):
        full, slotted = (entry(pipeline, PROMPTS, noise(), **what, **how, slots=s) for s in (None, Slots(slots, slots)))
        torch.testing.assert_close(slotted.images, full.images, rtol=0, atol=1e-4)
        for ours, theirs in zip(slotted.trace, full.trace, strict=True):
            assert torch.equal(ours.timestep, theirs.timestep)
            torch.testing.assert_close(ours.step.log_prob, theirs.step.log_prob, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["shapes_qwenimage,flash", "shapes_qwenimage_pr", "shapes_qwenimage_nft"])
def test_a_run_in_slots_logs_what_a_run_in_batches_logs(name, tmp_path):
    runs = [train(name, tmp_path / engine, sample__engine=engine) for engine in ("full", "stepwise")]
    full, slotted = (lines_of(folder) for folder in runs)
    for ours, theirs in zip(slotted, full, strict=True):
        for key in {"loss", "grad_norm", "reward/avg", "eval/avg"} & set(theirs):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5)
    firsts = [line for line in slotted if "parity/log_prob_abs_diff_max" in line]
    assert {line["parity/log_prob_abs_diff_max"] for line in firsts} <= {0.0}


def test_branches_fill_their_slots_and_take_fewer_forwards_than_one_step_after_the_other(tmp_path):
    how = dict(sample__num_prompts_per_epoch=5, sample__num_images_per_prompt=1, sample__batch_size=5)
    how |= dict(sample__num_steps=8, sample__completion_batch_size=24, train__updates_per_epoch=1)
    folder = train("shapes_qwenimage_pr", tmp_path, sample__engine="stepwise", num_epochs=1, eval_freq=0, **how)
    assert lines_of(folder, "epoch")[0]["slot_use"] > 0.9


def test_groups_that_share_their_steps_do_not_walk_in_slots(tmp_path):
    with pytest.raises(ValueError, match="slots do not share a group's steps"):
        train("shapes_qwenimage,fast", tmp_path / "runs", sample__engine="stepwise")
