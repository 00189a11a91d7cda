"""A rollout whose log-probs are not the update's is noticed, and check_parity.py says where they part and why."""

import json
import os
from dataclasses import replace
from functools import lru_cache, partial, partialmethod
from types import SimpleNamespace

import check_parity
import pytest
import torch
from small import MODELS, config_of, lines_of, train

from flow_grpo import policies, sampling
from flow_grpo import run as runs
from flow_grpo.parity import StepGaps

QWEN = MODELS["qwenimage"]
AFTER = ", after a change of the weights"


@pytest.fixture
def compared(monkeypatch):
    """() -> what check_parity finds, without a compiled graph, which takes half a minute."""
    monkeypatch.setattr(check_parity, "other_graph", lambda _: torch.enable_grad())

    def found(name="shapes_qwenimage", num_prompts=1, **how):
        return check_parity.check(config_of(name, **how), num_prompts)[0]

    return found


def test_blocks_are_compiled_for_one_cause_alone():
    transformer = QWEN.PIPELINE.from_pretrained("flow_grpo/assets/tiny_qwenimage").transformer
    blocks, own = transformer.transformer_blocks, type(transformer.transformer_blocks[0]).forward
    run = SimpleNamespace(
        config=config_of("shapes_qwenimage"), model=QWEN, pipeline=SimpleNamespace(transformer=transformer)
    )
    with check_parity.other_graph(run):
        assert all(getattr(block.forward, "__func__", None) is not own for block in blocks)
    assert all(block.forward.__func__ is own for block in blocks)


@pytest.mark.parametrize("name", ["shapes_qwenimage", "shapes_qwenimage_pr", "shapes_qwenimage,mixgrpo,fast"])
def test_a_sound_rollout_has_no_gap(name, compared):
    found = compared(name, num_prompts=2)
    assert list(found) == ["full", "stepwise", "full" + AFTER, "stepwise" + AFTER]
    assert all(one == dict(gap=0.0, first="", cause="") for one in found.values())


def test_latents_stored_in_bf16_are_named(compared, monkeypatch):
    plain = sampling.from_trace

    def rounded(*args, **how):
        rollout = plain(*args, **how)
        return replace(rollout, latents=rollout.latents.bfloat16().float())

    monkeypatch.setattr(sampling, "from_trace", rounded)
    for found in compared().values():
        assert found["gap"] > 0
        assert found["first"] == "latents: stored in bf16, not as the policy saw them"


def test_a_text_of_another_width_inside_the_model_is_named(compared, monkeypatch, tmp_path):
    """Positions and width from the mask's length while sampling, from the padded width in the update."""
    predict, sampled, drawing = QWEN.velocity, sampling.sampled, []

    def cut(model, x, t, condition, scale, size):
        return predict(model, x, t, condition.trimmed(1) if drawing else condition, scale, size)

    def draw(*args):
        drawing.append(True)
        yield from sampled(*args)
        drawing.clear()

    monkeypatch.setattr(sampling, "sampled", draw)
    monkeypatch.setattr(QWEN, "velocity", cut)
    for split in ("train", "test"):  # of one length: a rollout's batches and the update's are cut alike
        lines = [{"prompt": f"a photo of a {color} circle"} for color in ("red", "blue")]
        (tmp_path / f"{split}_metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = compared(dataset=str(tmp_path), reward_fn={"jpeg_compressibility": 1.0})
    for one in found.values():
        assert (one["first"], one["cause"]) == ("velocity", "text cut to the longest prompt")


def test_a_merged_adapter_is_named(compared, monkeypatch):
    def modes(run):
        merged = policies.merged(run.model.transformer)
        return merged, merged

    monkeypatch.setattr(sampling, "_modes", modes)
    found = compared()
    assert all(one["first"] in ("", "velocity") for one in found.values())  # by rounding, as long as B is zero
    for name, one in found.items():
        assert AFTER not in name or (one["first"], one["cause"]) == ("velocity", "merged adapter")


def test_what_is_kept_from_older_weights_is_named(compared, monkeypatch):
    plain, kept = runs.Run.velocity, {}

    def remembered(run, x, t, condition, guidance_scale=None, size=None):
        key = (x.cpu().numpy().tobytes(), t.cpu().numpy().tobytes())
        if torch.is_grad_enabled() or key not in kept:
            kept[key] = plain(run, x, t, condition, guidance_scale, size)
        return kept[key]

    monkeypatch.setattr(runs.Run, "velocity", remembered)
    found = compared()
    assert found["full"]["gap"] == found["stepwise"]["gap"] == 0
    for engine in ("full", "stepwise"):
        after = found[engine + AFTER]
        assert (after["first"], after["cause"]) == ("velocity", "weights of before the change")


def test_an_image_with_a_window_of_its_own_is_named(compared, monkeypatch):
    plain = sampling.prepare_encode

    def shifted(*args, **how):
        requests = plain(*args, **how)
        start, stop = requests[1].noisy.start, requests[1].noisy.stop
        requests[1].noisy = range(0, 2) if start else range(start + 1, stop + 1)
        return requests

    monkeypatch.setattr(sampling, "prepare_encode", shifted)
    found = compared()
    assert found["full"]["first"] == ""
    assert found["stepwise"]["first"].startswith("window: an image was noisy")


def test_a_merged_adapter_cannot_outlive_an_update(tmp_path):
    """Neither by an optimizer's step nor by a swap of weights."""
    transformer = QWEN.PIPELINE.from_pretrained("flow_grpo/assets/tiny_qwenimage").transformer
    policies.attach(transformer, config_of("shapes_qwenimage").lora, QWEN.LORA_TARGETS)
    adapter = [p for name, p in transformer.named_parameters() if "lora_" in name]
    optimizer = torch.optim.AdamW(adapter, lr=1e-3)
    merged = policies.merged(transformer)
    with merged():
        pass
    for p in adapter:
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="merge it again after an update"), merged():
        pass


@pytest.fixture(scope="module")
def eager(shallow, tmp_path_factory):
    """guidance -> lines of a run without anything that makes it fast."""

    @lru_cache
    def lines(guidance):
        how = dict(sample__guidance_scale=guidance, sample__merge_adapter=False, eval_freq=0)
        return lines_of(train("shapes_qwenimage_pr", tmp_path_factory.mktemp("eager"), **shallow, **how))

    return lines


GRAPHS = "aot_eager_decomp_partition"  # all that compiling does but the kernels, which take a second each


@pytest.mark.parametrize(
    ("backend", "guidance", "fast"),
    [
        pytest.param(
            *("inductor", 1.0, dict(fsdp__activation_checkpointing=True, sample__merge_adapter=False)),
            marks=pytest.mark.skipif(
                "ATEN_CPU_CAPABILITY" in os.environ,
                reason="inductor (torch 2.13) writes for the CPU's own instructions, ATen's headers for that setting's",
            ),
        ),
        (GRAPHS, 2.0, dict(fsdp__activation_memory=0.5, sample__text_multiple=16)),
    ],
    ids=["checkpointed", "part of activations, short text, merged"],
)
def test_compiled_blocks_see_the_weights_of_the_last_update(
    backend, guidance, fast, eager, shallow, tmp_path, monkeypatch
):
    """Compiled and eager runs learn alike over two epochs, and each first ratio is exactly 1."""
    torch._dynamo.reset()
    expected = eager(guidance)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="eager"))  # decoder
    how = dict(compile=True, sample__guidance_scale=guidance, eval_freq=0)
    compiled = lines_of(train("shapes_qwenimage_pr", tmp_path, **shallow, **how, **fast))
    assert compiled[-1]["epoch"] == 1
    for ours, theirs in zip(compiled, expected, strict=True):
        assert ours.get("parity/log_prob_abs_diff_max", 0.0) == 0
        for key in {"grad_norm", "reward/avg"} & set(theirs):
            assert ours[key] == pytest.approx(theirs[key], rel=2e-2)


def test_gaps_are_counted_by_denoising_step():
    gaps = StepGaps(4, "cpu")
    old = torch.tensor([-1.0, -1.0, -1.0, -2.0])
    gaps.add(torch.tensor([0, 0, 2, 2]), torch.tensor([-1.0, -1.1, -1.0, -2.0]), old, clip_range=0.01)
    gaps.add(torch.tensor([0]), torch.tensor([-1.0]), torch.tensor([-1.0]), clip_range=0.01)
    found = gaps.pop(lambda sums, maxima: (sums, maxima))
    assert {name.split("_")[1] for name in found} == {"0", "2"}
    ratio = torch.tensor(-0.1).exp().item()
    assert found["parity/step_0_log_prob_abs_diff_mean"] == pytest.approx(0.1 / 3)
    assert found["parity/step_0_log_prob_abs_diff_max"] == pytest.approx(0.1)
    assert found["parity/step_0_ratio_minus_one_e4"] == pytest.approx(1e4 * (1 - ratio) / 3)
    assert found["parity/step_0_clip_fraction"] == pytest.approx(1 / 3)
    assert not any(value for name, value in found.items() if name.startswith("parity/step_2"))
    assert gaps.pop(lambda sums, maxima: (sums, maxima)) == {}


def test_an_epoch_logs_the_gaps_of_every_trained_step(tmp_path):
    line = lines_of(train("shapes_qwenimage_pr", tmp_path, num_epochs=1, eval_freq=0), "epoch")[0]
    steps = {name.split("_")[1] for name in line if name.startswith("parity/step_")}
    assert {"0", "1"} <= steps <= {"0", "1", "2"}
    assert all(line[name] == 0 for name in line if name.startswith("parity/step_"))


def test_truncated_importance_weights_weigh_what_the_rollout_was_wrong_about(tmp_path, monkeypatch):
    plain = sampling.from_trace

    def wrong(*args, **options):
        rollout = plain(*args, **options)
        signs = (-1.0) ** torch.arange(rollout.log_probs.numel(), device=rollout.log_probs.device)
        rollout.log_probs += 0.2 * signs.view(rollout.log_probs.shape)
        return rollout

    monkeypatch.setattr(sampling, "from_trace", wrong)
    how = dict(num_epochs=1, eval_freq=0, train__old_log_prob="recompute", train__importance_cap=1.1)
    line = lines_of(train("shapes_qwenimage_pr", tmp_path, **how), "epoch")[0]
    expected = (torch.tensor(-0.2).exp() + 1.1) / 2
    assert line["parity/importance_weight_mean"] == pytest.approx(expected.item(), rel=1e-4)


def test_importance_weights_need_recomputed_log_probs(tmp_path):
    with pytest.raises(ValueError, match=r"importance_cap is 2\.0 with config\.train\.old_log_prob"):
        train("shapes_qwenimage", tmp_path, train__importance_cap=2.0)
