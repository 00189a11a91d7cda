"""Continuous batching: whoever shares a forward and whenever they arrive, a request becomes what it would alone."""

from typing import NamedTuple

import pytest
import torch
import train_qwenimage_pr
from small import as_prompts, lines_of, loaded, train

from flow_grpo.base import rng
from flow_grpo.diffusers_patch.denoise_with_logprob import Batching, denoise, joined
from flow_grpo.diffusers_patch.sample_with_logprob import SamplingJob, prepare_encode
from flow_grpo.diffusers_patch.sampling_params import SamplingParams
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.run import sampling

PROMPTS = ["a photo of a red circle", "two blue squares", "a photo of three crosses", "a star left of a green triangle"]
SIZE = Size(64, 64)
NUM_REQUESTS = 40

# Requests that are compared, by rows of a forward; many copies take long. A multiple of four: of another number of
# rows, MKL without AVX sums the last ones of a product in another order than the first, so that a row's bits depend on
# its place.
COMPARED = {4: range(NUM_REQUESTS), 16: range(9, NUM_REQUESTS, 13)}


class Wanted(NamedTuple):
    """One of forty requests."""

    number: int
    prompt: str
    width: int  # of its text
    size: Size
    params: SamplingParams
    noisy_steps: range
    num_branches: int


def wanted(number):
    """One of forty: of other prompts, sizes, steps, windows, branches, kinds of noise, guidance and solvers."""
    noisy_steps = (range(0), range(2), range(2, 4), range(3, 6))[number % 4]
    num_branches = 1
    if number % 5 == 4:
        first = number % 3
        noisy_steps = range(first, first + 2)
        num_branches = 3
    sde_type = ("sde", "cps", "dance")[number // 3 % 3]
    noise_level = (0.7, 1.0)[number % 2]
    if sde_type == "dance":
        noise_level = 0.3
    params = SamplingParams(
        num_steps=(6, 8, 10)[number % 3],
        guidance_scale=(1.0, 1.0, 4.0)[number % 3],
        noise_level=noise_level,
        sde_type=sde_type,
        flash_ratio=0.5 if number % 6 == 5 else 0.0,
        flash_solver="extrapolate" if number % 4 == 1 else "dpm",
    )
    size = {7: Size(64, 96), 13: Size(96, 64)}.get(number % 20, SIZE)
    return Wanted(number, PROMPTS[number % 4], (20, 24)[number % 2], size, params, noisy_steps, num_branches)


def requests_for(model, want, copies=1, scheduler=None):
    condition = model.encode(as_prompts([want.prompt] * copies), width=want.width).padded(32)
    noise = [rng.generator(0, "noise", want.number) for _ in range(copies)]
    job = SamplingJob(model, condition, noise, want.params, want.size)
    names = [want.number] if copies == 1 else range(copies)
    return prepare_encode(
        job, names=names, scheduler=scheduler, noisy_steps=want.noisy_steps, num_branches=want.num_branches
    )


def finished_in(model, rows):
    """The forty by number, come in random order."""
    order = torch.randperm(NUM_REQUESTS, generator=torch.Generator().manual_seed(rows)).tolist()
    schedules = {}
    requests = []
    for number in order:
        want = wanted(number)
        key = (want.params.num_steps, want.size)
        if key not in schedules:
            schedules[key] = model.schedule(*key)  # one for all that have it in common
        requests += requests_for(model, want, scheduler=schedules[key])
    batching = Batching(rows, rows)
    finished = {request.name: request for request in denoise(model.velocity, requests, batching)}
    assert sorted(finished) == list(range(NUM_REQUESTS))
    for request in finished.values():
        assert all(branch.finished for branch in request.branches)
    assert batching.capacity == rows * batching.num_forwards
    return finished


@torch.no_grad()
@pytest.mark.parametrize("rows", [pytest.param(4, marks=pytest.mark.slow), 16])
def test_forty_requests_of_all_kinds_become_what_they_would_alone_bit_for_bit(rows):
    """As many copies of a request as a forward has rows, together, have forwards of its shape. None is decoded, which
    takes longer than all forwards."""
    model = loaded("qwenimage")
    del model.transformer.transformer_blocks[1:]  # any velocity will do, and this one takes a quarter of the time
    finished = finished_in(model, rows)
    for number in COMPARED[rows]:
        copies = requests_for(model, wanted(number), copies=rows)
        together = denoise(model.velocity, copies, Batching(rows, rows, filled=False))
        latents, trace = joined([finished[number]])
        expected, expected_trace = joined(sorted(together, key=lambda request: request.name))
        assert torch.equal(latents, expected[:1]), number
        for ours, theirs in zip(trace, expected_trace, strict=True):
            assert torch.equal(ours.timestep, theirs.timestep[:1]), number
            assert torch.equal(ours.latents, theirs.latents[:1]), number
            for part, part_of_copies in zip(ours.step, theirs.step):
                assert torch.equal(part, part_of_copies[: len(part)]), number


@pytest.mark.parametrize(
    "name", [",fast", *(pytest.param(name, marks=pytest.mark.slow) for name in ("_pr", "_dpo,online"))]
)
def test_what_is_decoded_together_changes_nothing(name, shallow, tmp_path):
    """Neither rewards, nor losses, nor the statistics of groups whose images were decoded apart."""
    lines = {}
    for size in (64, 3):
        folder = train(
            f"shapes_qwenimage{name}",
            tmp_path / str(size),
            vae_batch_size=size,
            num_epochs=1,
            eval_freq=0,
            sample__num_prompts_per_epoch=4,
            **shallow,
        )
        lines[size] = lines_of(folder)
    keys = {"loss", "grad_norm", "reward/avg", "health/latent_rms", "health/diversity"}
    logged = set()
    for ours, theirs in zip(lines[3], lines[64], strict=True):
        logged |= set(ours)
        for key in keys & set(theirs):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-5)
        assert ours.get("parity/log_prob_abs_diff_max", 0.0) == 0.0
    assert keys <= logged


@pytest.mark.slow
def test_a_windows_other_steps_have_more_rows_to_a_forward_up_to_the_epochs_images(shallow, tmp_path, monkeypatch):
    """16 images of 4 steps, of which 1 and 2 are noisy; all log-probs are the update's."""
    num_forwards = []
    plain = sampling.denoise

    def watched(velocity, requests, batching, *contexts):
        yield from plain(velocity, requests, batching, *contexts)
        num_forwards.append(batching.num_forwards)

    monkeypatch.setattr(sampling, "denoise", watched)
    settings = shallow | dict(
        sample__num_prompts_per_epoch=4, sample__sde_window_range=(1, 3), num_epochs=1, eval_freq=0
    )
    for rows in (0, 8, 4096):
        folder = train("shapes_qwenimage", tmp_path / str(rows), **settings, sample__completion_batch_size=rows)
        assert lines_of(folder, "update")[0]["parity/log_prob_abs_diff_max"] == 0
        assert lines_of(folder, "epoch")[0]["batch_occupancy"] == 1
    assert num_forwards == [4 * 4, 2 * 4 + 2 * 2, 2 * 4 + 2 * 1]


@pytest.mark.slow
def test_an_epochs_images_cannot_be_drawn_with_two_policies(tmp_path, monkeypatch):
    """Whoever updates while requests are in flight is told so, before a row of the older weights is used."""
    plain = train_qwenimage_pr.to_rollout

    def impatient(run, samples, batch):
        run.step += 1
        return plain(run, samples, batch)

    monkeypatch.setattr(train_qwenimage_pr, "to_rollout", impatient)
    with pytest.raises(RuntimeError, match="update 1 came before its epoch had drawn all of its images"):
        train("shapes_qwenimage_pr", tmp_path, vae_batch_size=1, eval_freq=0)
