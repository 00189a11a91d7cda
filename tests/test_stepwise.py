"""Requests in slots: whoever shares a forward and whenever they arrive, trajectories are those of walks in lockstep."""

from functools import partial

import pytest
import torch
import train_qwenimage_pr
from rounding import rounding
from small import MODELS, as_prompts, lines_of, loaded, train

from flow_grpo.base import rng
from flow_grpo.diffusers_patch.denoise_with_logprob import Batching, denoise, joined
from flow_grpo.diffusers_patch.sample_with_logprob import Branching, SamplingJob, post_decode, prepare_encode, sample
from flow_grpo.diffusers_patch.sampling_params import SamplingParams
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.run import sampling

PROMPTS = ["a photo of a red circle", "two blue squares", "a photo of three crosses", "a star left of a green triangle"]
SIZE = Size(64, 64)
SINGLE = {1: slice(None), 3: slice(0, 40, 3), 16: slice(9, 40, 13)}  # walks of many copies take long
ROUNDED = rounding(size=16)  # forwards are in float64; velocities of up to 16 are rounded to float32


def of_one_block(**parts):
    """Any velocity will do to compare walks, and this one takes a quarter of the time."""
    model = loaded("qwenimage", **parts)
    del model.transformer.transformer_blocks[1:]
    return model


@pytest.fixture(scope="module")
def single():
    return of_one_block()


@pytest.fixture(scope="module")
def model():
    model = of_one_block()
    model.transformer.double()  # a float32 forward depends on its shape in the last bits, which guidance enlarges
    return model


def mix():
    """40 requests of different prompts, sizes, steps, windows, branches, kinds of noise, guidance and solvers."""
    windows = [range(0), range(0, 2), range(2, 4), range(3, 6)]
    for n in range(40):
        steps = (6, 8, 10)[n % 3]
        branches = 3 if n % 5 == 4 else 0
        noisy = range(n % 3, n % 3 + 2) if branches else windows[n % 4]
        how = dict(noise_level=(0.7, 1.0)[n % 2], sde_type=("sde", "cps", "dance")[n // 3 % 3])
        how["noise_level"] = 0.3 if how["sde_type"] == "dance" else how["noise_level"]
        yield (
            n,
            dict(
                prompt=PROMPTS[n % 4],
                width=(20, 24)[n % 2],
                size={7: Size(64, 96), 13: Size(96, 64)}.get(n % 20, SIZE),
                noisy=noisy,
                num_branches=branches,
                params=SamplingParams(
                    num_steps=steps,
                    guidance_scale=(1.0, 1.0, 4.0)[n % 3],
                    flash_ratio=0.5 if n % 6 == 5 else 0.0,
                    flash_solver="extrapolate" if n % 4 == 1 else "dpm",
                    **how,
                ),
            ),
        )


def alone(model, n, what, copies=1):
    """What becomes of one request, or of copies of it, in lockstep."""
    condition = model.encode(as_prompts([what["prompt"]] * copies), width=what["width"]).padded(32)
    noise = [rng.generator(0, "noise", n) for _ in range(copies)]
    branching = Branching(what["num_branches"], copies) if what["num_branches"] else None
    start = SamplingJob(model, condition, noise, what["params"], what["size"])
    return sample(start, noisy=what["noisy"], branching=branching)


@pytest.fixture(scope="module")
def expected(model):
    return {n: alone(model, n, what) for n, what in mix()}


def requests_of(model, n, what, schedules):
    """The same as a request, with the text padded to a width and on a schedule that all have in common."""
    key = what["params"].num_steps, what["size"]
    scheduler = schedules.setdefault(key, model.schedule(*key))
    condition = model.encode(as_prompts([what["prompt"]]), width=what["width"]).padded(32)
    kind = dict(noisy=what["noisy"], num_branches=what["num_branches"], names=[n], scheduler=scheduler)
    return prepare_encode(
        SamplingJob(model, condition, [rng.generator(0, "noise", n)], what["params"], what["size"]), **kind
    )


def finished_in(model, slots):
    """The forty by number, come in random order, and the slots."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(slots)).tolist()
    wanted, used, schedules = dict(mix()), Batching(slots, slots), {}
    requests = (request for n in order for request in requests_of(model, n, wanted[n], schedules))
    finished = []
    for request in denoise(model.velocity, requests, used):
        assert sum(len(branch.latents) for branch in request.branches) == 2 * request.num_branches
        assert all(branch.finished for branch in request.branches)
        finished.append(request)
    assert sorted(request.name for request in finished) == list(range(40))
    return {request.name: request for request in finished}, used


@torch.no_grad()
@pytest.mark.parametrize("slots", [1, 3, 64])
def test_forty_requests_of_all_kinds_walk_as_they_would_alone(slots, model, expected):
    finished, used = finished_in(model, slots)
    for n, wanted in expected.items():
        assert_equal(*joined([finished[n]]), wanted, f"request {n}")
    assert used.rows <= used.capacity
    assert used.num_forwards >= used.rows / slots


@torch.no_grad()
@pytest.mark.parametrize("slots", SINGLE)
def test_in_float32_they_do_so_bit_for_bit_where_forwards_have_one_shape(slots, single):
    """A full walk of as many copies of a request as there are slots has the slots' shape of forward."""
    finished, _ = finished_in(single, slots)
    for n, what in list(mix())[SINGLE[slots]]:
        latents, trace = joined([finished[n]])
        full = alone(single, n, what, copies=slots)
        assert torch.equal(latents, full.latents[:1]), n
        for ours, theirs in zip(trace, full.trace, strict=True):
            assert torch.equal(ours.timestep, theirs.timestep[:1]), n
            assert torch.equal(ours.latents, theirs.latents[:1]), n
            for part, whole in zip(ours.step, theirs.step):
                assert torch.equal(part, whole[: len(part)]), n


def assert_equal(latents, trace, wanted, name):
    close = dict(rtol=0, atol=ROUNDED, msg=lambda text: f"{name}: {text}")
    torch.testing.assert_close(latents, wanted.latents, **close)
    for ours, theirs in zip(trace, wanted.trace, strict=True):
        assert torch.equal(ours.timestep, theirs.timestep)
        torch.testing.assert_close(ours.latents, theirs.latents, **close)
        torch.testing.assert_close(ours.step.log_prob, theirs.step.log_prob, **close)
        torch.testing.assert_close(ours.step.prev_sample, theirs.step.prev_sample, **close)


@torch.no_grad()
@pytest.mark.parametrize("slots", [1, 3, 64])
def test_a_group_shares_its_steps_up_to_the_window(slots, model):
    """The second group comes in other numbers; a window at the first step leaves nothing to share but the noise."""
    for window, shared in ((range(2, 4), 2), (range(0, 2), 0)):
        groups, params = [0, 0, 0, 1, 1], SamplingParams(6, 1.0, 0.7)
        texts = [PROMPTS[group] for group in groups]

        def noise():
            return [rng.generator(0, "noise", row) for row in range(5)]

        condition, how = model.encode(as_prompts(texts), width=24), dict(noisy=window, groups=groups)
        wanted = sample(SamplingJob(model, condition, noise(), params, SIZE), **how)
        used = Batching(slots, slots)
        requests = prepare_encode(SamplingJob(model, condition, noise(), params, SIZE), names=range(5), **how)
        finished = sorted(denoise(model.velocity, requests, used), key=lambda request: request.name)
        assert_equal(*joined(finished), wanted, f"{slots} slots, window {window}")
        assert used.rows == 2 * shared + 5 * (6 - shared)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_makes_the_same_in_slots(name, tmp_path):
    load = of_one_block if name == "qwenimage" else partial(loaded, name)
    model, size = load(torch_dtype=torch.float64), Size(64, 96)
    condition = model.encode(as_prompts(PROMPTS))

    def noise():
        return [rng.generator(0, "noise", b) for b in range(4)]

    kinds = (range(1, 3), 0, 0.0, 2), (range(1, 3), 0, 0.5, 5), (range(3), 2, 0.0, 5)
    for noisy, num_branches, flash_ratio, slots in kinds:
        params = SamplingParams(5, 4.0, 0.7, flash_ratio=flash_ratio)
        branching, kind = Branching(num_branches, 4) if num_branches else None, dict(noisy=noisy, names=range(4))
        full = sample(SamplingJob(model, condition, noise(), params, size), noisy=noisy, branching=branching)
        start = SamplingJob(model, condition, noise(), params, size)
        requests = prepare_encode(start, num_branches=num_branches, **kind)
        finished = denoise(model.velocity, requests, Batching(slots, slots))
        parts = list(post_decode(model, finished, vae_batch_size=3))
        assert len(parts) > 1
        for some, sampled in parts:
            assert_rows(sampled, full, [request.name for request in some])


def assert_rows(sampled, full, rows):
    """What was sampled is these rows, of four."""
    torch.testing.assert_close(sampled.images, full.images[rows], rtol=0, atol=ROUNDED)
    for ours, theirs in zip(sampled.trace, full.trace, strict=True):
        assert torch.equal(ours.timestep, theirs.timestep[rows])
        log_prob = theirs.step.log_prob.unflatten(0, (4, -1))[rows].flatten()
        torch.testing.assert_close(ours.step.log_prob, log_prob, rtol=0, atol=ROUNDED)


@pytest.mark.parametrize("name", [",fast", "_pr", "_nft", "_dpo,online"])
def test_what_is_decoded_together_changes_nothing(name, shallow, tmp_path):
    """Neither rewards, nor losses, nor the statistics of groups whose images were decoded apart."""
    how = dict(num_epochs=1, eval_freq=0, sample__num_prompts_per_epoch=4, **shallow)
    one, other = (
        lines_of(train(f"shapes_qwenimage{name}", tmp_path / str(size), vae_batch_size=size, **how)) for size in (64, 3)
    )
    keys = {"loss", "grad_norm", "reward/avg", "health/latent_rms", "health/diversity"}
    for ours, theirs in zip(other, one, strict=True):
        for key in keys & set(theirs):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5)
    assert keys <= {key for line in other for key in line}
    assert {line.get("parity/log_prob_abs_diff_max", 0.0) for line in other} == {0.0}


def test_branches_fill_their_slots_and_take_as_few_forwards_as_these_allow(shallow, tmp_path):
    how = shallow | dict(sample__num_prompts_per_epoch=10, sample__num_images_per_prompt=1, sample__batch_size=5)
    how |= dict(sample__num_steps=8, sample__completion_batch_size=12, train__updates_per_epoch=1)
    folder = train("shapes_qwenimage_pr", tmp_path, num_epochs=1, eval_freq=0, **how)
    assert lines_of(folder, "epoch")[0]["batch_occupancy"] > 0.9


def test_a_windows_other_steps_have_more_rows_to_a_forward(shallow, tmp_path, monkeypatch):
    """16 images of 4 steps, of which 1 and 2 are noisy; all log-probs are the update's."""
    seen, plain = [], sampling.denoise
    monkeypatch.setattr(sampling, "denoise", lambda *how: seen.append(how[2]) or plain(*how))
    how = shallow | dict(sample__num_prompts_per_epoch=4, sample__sde_window_range=(1, 3), num_epochs=1, eval_freq=0)
    for rows in (0, 8):
        folder = train("shapes_qwenimage", tmp_path / str(rows), **how, sample__completion_batch_size=rows)
        assert lines_of(folder, "update")[0]["parity/log_prob_abs_diff_max"] == 0
    assert [slots.num_forwards for slots in seen] == [4 * 4, 2 * 4 + 2 * 2]


def test_an_epochs_images_cannot_be_drawn_with_two_policies(tmp_path, monkeypatch):
    """Whoever updates while requests are in flight is told so, before a row of the older weights is used."""
    plain = train_qwenimage_pr.to_rollout

    def impatient(run, samples, batch):
        run.step += 1
        return plain(run, samples, batch)

    monkeypatch.setattr(train_qwenimage_pr, "to_rollout", impatient)
    with pytest.raises(RuntimeError, match="update 1 came before epoch 1 had drawn all of its images"):
        train("shapes_qwenimage_pr", tmp_path, vae_batch_size=1, eval_freq=0)
