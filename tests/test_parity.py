"""A rollout whose log-probs are not the update's is noticed, and check_parity.py says where they part and why."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import check_parity
import pytest
import torch
from small import MODELS, config_of, lines_of, train

from flow_grpo.algorithms.ratio_statistics import ParityError, add_to_meter, parity_problems
from flow_grpo.base import distributed
from flow_grpo.monitoring.metrics import Meter
from flow_grpo.run import run as runs
from flow_grpo.run import sampling, update
from flow_grpo.settings.sections import Config, Train
from flow_grpo.weights import policies

QWEN = MODELS["qwenimage"]


@pytest.fixture
def compared(shallow, monkeypatch):
    """() -> what check_parity finds, without a compiled graph, which takes half a minute."""
    monkeypatch.setattr(check_parity, "other_graph", lambda _: torch.enable_grad())

    def found(name="shapes_qwenimage", num_prompts=1, **how):
        return check_parity.check(config_of(name, **shallow | how), num_prompts)

    return found


def test_blocks_are_compiled_for_one_cause_alone():
    transformer = QWEN.PIPELINE.from_pretrained("flow_grpo/assets/tiny_qwenimage").transformer
    blocks = transformer.transformer_blocks
    own = type(blocks[0]).forward
    run = SimpleNamespace(
        config=config_of("shapes_qwenimage"), model=QWEN, pipeline=SimpleNamespace(transformer=transformer)
    )
    with check_parity.other_graph(run):
        assert all(getattr(block.forward, "__func__", None) is not own for block in blocks)
    assert all(block.forward.__func__ is own for block in blocks)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("shapes_qwenimage", {}),
        ("shapes_qwenimage_pr", {}),
        ("shapes_qwenimage,mixgrpo,fast", {}),
        ("shapes_qwenimage", dict(sample__guidance_scale=4.0, batched_guidance=True)),
    ],
)
def test_a_sound_rollout_has_no_gap(name, how, compared):
    found = compared(name, num_prompts=2, **how)
    assert list(found) == ["first weights", "changed weights"]
    assert all(one == dict(gap=0.0, first="", cause="") for one in found.values())


def stored(change, sound=0):
    """Rollouts, but for the first `sound`, are what `change` makes of them."""

    def disturb(monkeypatch):
        plain = sampling.from_trace
        calls = []

        def made(*args, **options):
            calls.append(True)
            rollout = plain(*args, **options)
            return rollout if len(calls) <= sound else change(rollout)

        monkeypatch.setattr(sampling, "from_trace", made)

    return disturb


def in_bf16(rollout):
    return replace(rollout, latents=rollout.latents.bfloat16().float())


def noisy(rollout):
    stream = torch.Generator().manual_seed(0)
    return replace(rollout, log_probs=rollout.log_probs + 1e-3 * torch.randn(rollout.log_probs.shape, generator=stream))


def conditioned(changed):
    """Rollouts, and no updates, are conditioned on changed(condition)."""

    def disturb(monkeypatch):
        predict = QWEN.velocity
        denoise = sampling.denoise
        drawing = []

        def velocity(model, x, t, condition, scale, size):
            return predict(model, x, t, changed(condition) if drawing else condition, scale, size)

        def draw(*args):
            drawing.append(True)
            yield from denoise(*args)
            drawing.clear()

        monkeypatch.setattr(sampling, "denoise", draw)
        monkeypatch.setattr(QWEN, "velocity", velocity)

    return disturb


def seeing_padding(condition):
    return replace(condition, mask=torch.ones_like(condition.mask))


def merged_adapter(monkeypatch):
    monkeypatch.setattr(policies, "fast_forwards", lambda _, model: policies.MergedWeights(model).applied)
    monkeypatch.setattr(runs.Run, "exact", property(lambda run: policies.fast_forwards("", run.model.transformer)))


def older_weights(monkeypatch):
    """A rollout's velocities are those of the first time."""
    plain = runs.Run.velocity
    kept = {}

    def remembered(run, x, t, condition, guidance_scale=None, size=None):
        key = (x.cpu().numpy().tobytes(), t.cpu().numpy().tobytes())
        if torch.is_grad_enabled() or key not in kept:
            kept[key] = plain(run, x, t, condition, guidance_scale, size)
        return kept[key]

    monkeypatch.setattr(runs.Run, "velocity", remembered)


def a_window_of_its_own(monkeypatch):
    plain = sampling.prepare_encode

    def shifted(*args, **how):
        requests = plain(*args, **how)
        steps = requests[1].noisy_steps
        requests[1].noisy_steps = range(2) if steps.start else range(steps.start + 1, steps.stop + 1)
        return requests

    monkeypatch.setattr(sampling, "prepare_encode", shifted)


@pytest.mark.parametrize(
    ("disturb", "first", "cause", "always"),
    [
        (stored(in_bf16), "latents: stored in bf16, not as the policy saw them", "", True),
        (a_window_of_its_own, "window: an image was noisy", "", True),
        (conditioned(lambda condition: condition.trimmed(1)), "velocity", "text cut to the longest prompt", True),
        (merged_adapter, "velocity", "merged adapter", False),
        (older_weights, "velocity", "weights of before the change", False),
    ],
)
def test_where_a_rollout_and_the_update_part_and_why_is_named(
    disturb, first, cause, always, compared, monkeypatch, tmp_path
):
    """Not always: the first weights' B is zero, and what was kept of them is right."""
    for split in ("train", "test"):  # of one length: a rollout's batches and the update's are cut alike
        lines = [{"prompt": f"a photo of a {color} circle"} for color in ("red", "blue")]
        (tmp_path / f"{split}_metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    disturb(monkeypatch)
    found = compared(dataset=str(tmp_path))
    changed = found["changed weights"]
    before = found["first weights"]
    assert changed["first"].startswith(first)
    assert changed["cause"] == cause
    assert (before["first"], before["cause"]) == (changed["first"], cause) or not (always or before["cause"])


def test_the_statistics_of_a_ratio_are_their_closed_forms():
    meter = Meter()
    ratio = torch.tensor([1.02, 1.03, 0.98, 1.005], dtype=torch.float64)
    add_to_meter(meter, ratio.log(), torch.tensor([0.1, -0.2, 0.0, 0.4]), 0.01, on_policy=True)
    assert meter.pop(distributed.over_ranks) == pytest.approx(
        {
            "ratio_mean": ratio.mean().item(),
            "ratio_std": ratio.std(correction=0).item(),
            "approx_kl": (0.1**2 + 0.2**2 + 0.4**2) / 8,
            "clip_fraction_high": 2 / 4,
            "clip_fraction_low": 1 / 4,
            "parity/log_prob_abs_diff_mean": 0.7 / 4,
            "parity/log_prob_abs_diff_max": 0.4,
            "parity/ratio_minus_one_e4": 1e4 * 0.075 / 4,
        },
        rel=1e-5,
    )
    beyond = torch.tensor([True, False, False, True])  # of the objective's own trust region
    run = SimpleNamespace(meter=meter, on_policy=False, config=Config(train=Train(clip_range=0.01)), row_values=[])
    step = SimpleNamespace(log_prob=ratio.log(), transition_std=torch.full((4, 1, 1), 0.5))
    of_rows = dict(step_weights=torch.ones(4), advantages=torch.ones(4), timesteps=torch.tensor([1000.0, 500.0]))
    rows = SimpleNamespace(log_probs=torch.zeros(4), num_outcomes=2, **of_rows)
    update.record_ratios(run, step, rows, ratio.log(), beyond)
    (by_row,) = run.row_values
    assert by_row.timesteps.tolist() == [1000.0, 1000.0, 500.0, 500.0], "two outcomes of each row"
    assert by_row.values["clip_fraction_high"].tolist() == [1.0, 0.0, 0.0, 1.0]
    found = meter.pop(distributed.over_ranks)
    assert (found["clip_fraction_high"], found["clip_fraction_low"]) == (2 / 4, 0)


def gaps(*largest, others=0.0):
    """Gaps of a hundred rows, in clip ranges."""
    return torch.tensor([*largest, *[others] * (100 - len(largest))])


LIMITS = {  # gaps, the limit, and words of the sentences
    "at it": (gaps(1.0), 1.0, []),
    "largest": (gaps(1.1), 1.0, ["at most"]),
    "clipped": (gaps(1.1, 1.1), 1.0, ["at most", "of all rows"]),
    "mean": (gaps(others=0.2), 1.0, ["on average"]),
    "all": (gaps(1.1, -1.1, others=0.2), 1.0, ["1.1 clip ranges at most", "0.218 clip ranges on", "0.02 of all"]),
    "twice as large": (gaps(1.1), 2.0, []),
    "no limit": (gaps(9.0), 0.0, []),
    "another error names the row": (gaps(math.nan), 1.0, []),
}


@pytest.mark.parametrize(("gaps", "limit", "words"), LIMITS.values(), ids=LIMITS)
def test_limits_of_parity(gaps, limit, words):
    found = parity_problems(gaps * 1e-4, 1e-4 * (1 + 1e-6), limit)
    assert len(found) == len(words)
    assert all(word in sentence for word, sentence in zip(words, found))
    assert parity_problems(gaps, 0.0, limit) == []


@pytest.mark.parametrize(
    ("name", "disturb", "epochs"),
    [
        ("shapes_qwenimage", conditioned(seeing_padding), 0),
        ("shapes_qwenimage,guard", stored(noisy), 0),
        ("shapes_qwenimage_pr", stored(noisy), 0),
        ("shapes_qwenimage_pr", stored(noisy, sound=1), 1),
    ],
)
def test_a_rollout_that_the_update_disagrees_with_ends_the_run_before_the_step(
    name, disturb, epochs, shallow, tmp_path, monkeypatch
):
    disturb(monkeypatch)
    with pytest.raises(ParityError, match=r"the largest is at denoising step \d of image \d+ \(") as error:
        train(name, tmp_path, num_epochs=3, eval_freq=0, sample__num_prompts_per_epoch=2, **shallow)
    run = next(entry.locals["run"] for entry in error.traceback if "run" in entry.locals)
    assert not run.first_ratios, "an epoch's would be lost among those of the epochs before it"
    (folder,) = tmp_path.iterdir()
    assert len(lines_of(folder, "epoch")) == epochs
    assert len(lines_of(folder, "update")) == epochs * 2
    assert len(list(folder.glob("checkpoints/epoch_*"))) == epochs  # saved by the end alone


@pytest.mark.parametrize("kind", ["window", "branches"])
def test_the_first_update_of_every_epoch_has_the_rollouts_log_probs_bit_for_bit(kind, recorded):
    folder = recorded(kind).folder
    updates = lines_of(folder, "update")
    for first, second in zip(updates[::2], updates[1::2], strict=True):
        assert first["parity/log_prob_abs_diff_max"] == first["ratio_std"] == 0 < second["ratio_std"]
    assert updates[0]["grad_norm"] > 0
