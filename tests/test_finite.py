"""Nothing that is not finite is saved, exported or scored, and what a message says of a run is so."""

import copy
import itertools
import math

import pytest
import torch
from safetensors.torch import load_file
from small import as_prompts, train

from flow_grpo.checkpoints import checkpoints
from flow_grpo.monitoring import health
from flow_grpo.run import rewards as run_rewards
from flow_grpo.scoring.pool import Pool
from flow_grpo.settings.sections import Health, Reward
from flow_grpo.weights import finite, fsdp_utils

NAN = math.nan
INF = math.inf
WINDOW = "shapes_qwenimage"
BRANCHES = "shapes_qwenimage_pr"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_first_tensor_that_is_not_finite_is_named(dtype):
    def problem(*rows):
        tensors = [torch.tensor(row, dtype=dtype) for row in rows]
        return finite.problem_of_tensors(dict(zip("abcd", tensors)))

    assert problem() == problem([1.0, 3e38], [], 3.0) == ""
    assert problem([1.0], [0.0, NAN], [-INF], 3.0) == "2 of 4 tensors with NaN or infinities, b the first"
    assert problem([NAN], [3e38] * 9) == "1 of 2 tensors with NaN or infinities, a the first"
    assert problem([INF], []) == "1 of 1 tensor with NaN or infinities, a the first"


def test_weights_that_are_spoilt_are_neither_saved_nor_exported(shallow, tmp_path, monkeypatch):
    """By the last update of the second epoch, which no loss sees any more."""
    plain = torch.optim.AdamW.step
    calls = []

    def step(self, *arguments):
        plain(self, *arguments)
        calls.append(None)
        if len(calls) == 4:
            self.param_groups[0]["params"][-1].data.view(-1)[-1] = NAN

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    first = tmp_path / "shapes_qwenimage_smoke" / "checkpoints" / "epoch_000001"
    says = rf"after update 4 nothing is saved \(the last checkpoint is {first}\): 2 of \d+ tensors with NaN"
    with pytest.raises(FloatingPointError, match=says):
        train("shapes_qwenimage", tmp_path, eval_freq=0, save_freq=1, **shallow)
    assert list(first.parent.iterdir()) == [first]
    for weight in load_file(first / "pytorch_lora_weights.safetensors").values():
        assert weight.isfinite().all()
    assert not list(first.parents[1].glob("*.safetensors"))


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_an_image_that_is_not_finite_is_not_scored(share):
    pool = Pool(torch.device("cpu"), {"jpeg_compressibility": 1.0}, (), Reward(max_masked_share=share))
    images = torch.full((3, 3, 16, 16), 0.5)
    images[1, 2, 5, 5] = NAN
    pending = pool.submit(images, as_prompts(["a", "b" * 5000, "c"]))
    with pytest.raises(FloatingPointError, match=r"1 of 3 images with NaN or infinities, the first of 'b+\.\.\.b+'"):
        pending()
    assert pool.submit(images[:1], as_prompts(["a"]))()["avg"].isfinite().all()


def test_a_sign_of_health_that_is_no_number_is_beyond_its_limit(monkeypatch):
    limits = Health()
    for value, is_beyond in ((NAN, True), (limits.reward_drop, False), (INF, True)):
        monkeypatch.setattr(health, "SIGNS", {"reward_drop": lambda epochs, value=value: health.Sign(value, "it fell")})
        assert bool(health.judge([health.Epoch(0)], limits).alarms) == is_beyond


OF_A_ROW = run_rewards, "combined_advantages", 1, r"loss is nan for image \d+ \('a.*'\), trained step \d,"
OF_ALL = fsdp_utils, "clip_grad_norm", 2, "gradient norm is nan"


@pytest.mark.parametrize(("name", "spoilt"), [(WINDOW, OF_A_ROW), (BRANCHES, OF_A_ROW), (WINDOW, OF_ALL)])
def test_what_is_not_finite_moves_no_weight_and_spoils_no_checkpoint(name, spoilt, shallow, tmp_path, monkeypatch):
    """A loss, or the gradient of a finite one."""
    owner, function, good_calls, says = spoilt
    plain = getattr(owner, function)
    calls = itertools.count()
    monkeypatch.setattr(owner, function, lambda *args: plain(*args) * (1.0 if next(calls) < good_calls else NAN))
    with pytest.raises(FloatingPointError, match=f"{says} in update 3") as error:
        train(name, tmp_path / "runs", eval_freq=0, save_freq=1, **shallow)
    run = next(entry.locals["run"] for entry in error.traceback if "run" in entry.locals)
    looked_at = torch.cat([part.row_ids for part in run.trained_rows])
    assert len(looked_at.unique(dim=0)) == len(looked_at), "rows of an earlier update"
    checkpoint = checkpoints.find_newest(run.folder / "checkpoints")
    assert str(error.value).endswith(f"was not made; it has moved no weight; the last checkpoint is {checkpoint}")
    state = checkpoints.training_state(run.pipeline.transformer, run.optimizer, run.ema)
    after = copy.deepcopy(state)
    assert checkpoints.load(checkpoint, state) == checkpoints.Progress(1, 2, reference_moves=0)
    torch.testing.assert_close(after, state, rtol=0, atol=0)
