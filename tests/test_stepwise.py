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
# By rows of a forward; many copies take long. A multiple of four: of another number of rows, MKL without AVX sums the
# last ones of a product in another order than the first, so that a row's bits depend on its place.
COMPARED = {4: slice(None), 16: slice(9, 40, 13)}


class Wanted(NamedTuple):
    """What one of forty requests asks for."""

    prompt: str
    width: int  # of its text
    size: Size
    params: SamplingParams
    kind: dict  # its noisy steps and branches


def mix():
    """Requests of different prompts, sizes, steps, windows, branches, kinds of noise, guidance and solvers."""
    windows, sizes = [range(0), range(2), range(2, 4), range(3, 6)], {7: Size(64, 96), 13: Size(96, 64)}
    for n in range(40):
        sde_type = ("sde", "cps", "dance")[n // 3 % 3]
        params = SamplingParams(
            num_steps=(6, 8, 10)[n % 3],
            guidance_scale=(1.0, 1.0, 4.0)[n % 3],
            noise_level=0.3 if sde_type == "dance" else (0.7, 1.0)[n % 2],
            sde_type=sde_type,
            flash_ratio=0.5 if n % 6 == 5 else 0.0,
            flash_solver="extrapolate" if n % 4 == 1 else "dpm",
        )
        kind = dict(noisy_steps=windows[n % 4], num_branches=1)
        if n % 5 == 4:
            kind = dict(noisy_steps=range(n % 3, n % 3 + 2), num_branches=3)
        yield Wanted(PROMPTS[n % 4], (20, 24)[n % 2], sizes.get(n % 20, SIZE), params, kind)


def job(model, n, wanted, copies=1):
    condition = model.encode(as_prompts([wanted.prompt] * copies), width=wanted.width).padded(32)
    noise = [rng.generator(0, "noise", n) for _ in range(copies)]
    return SamplingJob(model, condition, noise, wanted.params, wanted.size)


def finished_in(model, rows):
    """The forty by number, come in random order."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(rows)).tolist()
    all_wanted, batching, schedules, requests = list(mix()), Batching(rows, rows), {}, []
    for n in order:
        wanted = all_wanted[n]
        key = wanted.params.num_steps, wanted.size
        scheduler = schedules.setdefault(key, model.schedule(*key))  # one for all that have it in common
        requests += prepare_encode(job(model, n, wanted), names=[n], scheduler=scheduler, **wanted.kind)
    finished = list(denoise(model.velocity, requests, batching))
    assert all(branch.finished for request in finished for branch in request.branches)
    assert sorted(request.name for request in finished) == list(range(40))
    assert batching.capacity == rows * batching.num_forwards
    return {request.name: request for request in finished}


@torch.no_grad()
@pytest.mark.parametrize("rows", COMPARED)
def test_forty_requests_of_all_kinds_become_what_they_would_alone_bit_for_bit(rows):
    """As many copies of a request as a forward has rows, together, have forwards of its shape. None is decoded, which
    takes longer than all forwards."""
    model = loaded("qwenimage")
    del model.transformer.transformer_blocks[1:]  # any velocity will do, and this one takes a quarter of the time
    finished = finished_in(model, rows)
    for n, wanted in list(enumerate(mix()))[COMPARED[rows]]:
        copies = prepare_encode(job(model, n, wanted, copies=rows), names=range(rows), **wanted.kind)
        together = denoise(model.velocity, copies, Batching(rows, rows, filled=False))
        latents, trace = joined([finished[n]])
        expected, expected_trace = joined(sorted(together, key=lambda request: request.name))
        assert torch.equal(latents, expected[:1]), n
        for ours, theirs in zip(trace, expected_trace, strict=True):
            assert torch.equal(ours.timestep, theirs.timestep[:1]), n
            assert torch.equal(ours.latents, theirs.latents[:1]), n
            for part, whole in zip(ours.step, theirs.step):
                assert torch.equal(part, whole[: len(part)]), n


@pytest.mark.parametrize("name", [",fast", "_pr", "_dpo,online"])
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


def test_a_windows_other_steps_have_more_rows_to_a_forward_up_to_the_epochs_images(shallow, tmp_path, monkeypatch):
    """16 images of 4 steps, of which 1 and 2 are noisy; all log-probs are the update's."""
    seen, plain = [], sampling.denoise
    monkeypatch.setattr(sampling, "denoise", lambda *how: seen.append(how[2]) or plain(*how))
    how = shallow | dict(sample__num_prompts_per_epoch=4, sample__sde_window_range=(1, 3), num_epochs=1, eval_freq=0)
    for rows in (0, 8, 4096):
        folder = train("shapes_qwenimage", tmp_path / str(rows), **how, sample__completion_batch_size=rows)
        assert lines_of(folder, "update")[0]["parity/log_prob_abs_diff_max"] == 0
        assert lines_of(folder, "epoch")[0]["batch_occupancy"] == 1
    assert [slots.num_forwards for slots in seen] == [4 * 4, 2 * 4 + 2 * 2, 2 * 4 + 2 * 1]


def test_an_epochs_images_cannot_be_drawn_with_two_policies(tmp_path, monkeypatch):
    """Whoever updates while requests are in flight is told so, before a row of the older weights is used."""
    plain = train_qwenimage_pr.to_rollout

    def impatient(run, samples, batch):
        run.step += 1
        return plain(run, samples, batch)

    monkeypatch.setattr(train_qwenimage_pr, "to_rollout", impatient)
    with pytest.raises(RuntimeError, match="update 1 came before its epoch had drawn all of its images"):
        train("shapes_qwenimage_pr", tmp_path, vae_batch_size=1, eval_freq=0)
