"""Training while rewards are still being scored: the same weights, little waiting, masks."""

import hostile
import pytest
import torch
import train_qwenimage
import train_qwenimage_nft
from hostile import http_server
from recorded import assert_same
from small import lines_of, stored, train
from test_listening import listening

from flow_grpo import rewards
from flow_grpo.run import sampling

TOKEN = "open-sesame"
WINDOW, BRANCHES = "shapes_qwenimage", "shapes_qwenimage_pr"
NFT, DPO = "shapes_qwenimage_nft", "shapes_qwenimage_dpo,online"


@pytest.fixture(scope="module")
def address():
    with listening(rewards.load("jpeg_compressibility", torch.device("cpu")), token=TOKEN) as url:
        yield url


@pytest.mark.parametrize("name", [WINDOW, BRANCHES])
def test_a_server_trains_the_same_weights_as_a_thread_and_no_token_is_stored(
    name, address, shallow, tmp_path, monkeypatch
):
    """And scores the same evaluations, which are one code for all scripts."""
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    epochs = dict(num_epochs=2, eval_freq=2) if name == WINDOW else dict(num_epochs=1, eval_freq=0)
    common = epochs | dict(model=shallow["model"], reward_fn={"jpeg_compressibility": 1.0})
    in_a_thread = train(name, tmp_path / "thread", **common)
    by_a_server = train(name, tmp_path / "url", reward__args={"jpeg_compressibility": {"url": address}}, **common)
    assert_same(in_a_thread, by_a_server, epochs["num_epochs"])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


def test_images_that_a_reward_failed_for_are_masked_and_counted(shallow, tmp_path):
    def every_third_fails(handler, body, number):
        (hostile.says({}, 400) if number % 3 == 0 else hostile.honest)(handler, body, number)

    with http_server(every_third_fails) as (url, _):
        args = {"shapes": dict(url=url, max_masked_share=0.5, batch_size=1)}
        how = dict(model=shallow["model"], num_epochs=2, eval_freq=0)
        folder = train(WINDOW, tmp_path / "mask", reward__args=args, train__filter_groups=True, **how)
        for line in lines_of(folder, "epoch"):
            assert 0.2 < line["reward/shapes_masked_share"] < 0.45
            assert line["reward/shapes"] == 0.5
        args["shapes"]["max_masked_share"] = 0.1
        with pytest.raises(RuntimeError, match=rf"reward 'shapes' \({url}\) failed for .* images"):
            train(WINDOW, tmp_path / "too_many", reward__args=args, **how)


def without_two(load):
    """A reward that fails for the first batch of images, and for the first two when it is asked about each alone."""

    def failing(device):
        score, calls = load(device), []

        def scored(*images):
            calls.append(images)
            if 1 < len(calls) < 5:  # the first is of the grey image
                raise RuntimeError("no score")
            return score(*images)

        return scored

    return failing


def spoiling_two(draw):
    """A rollout whose first two images are remembered as something else than what was drawn and is scored."""

    def sampled(*args):
        for number, (batch, drawn) in enumerate(draw(*args)):
            if number == 0:
                for tensor in (drawn.latents, *(x for t in drawn.trace for x in (t.latents, t.step.next_latents))):
                    tensor[:2] += 0.1
            yield batch, drawn

    return sampled


@pytest.fixture
def run_with(shallow, tmp_path, monkeypatch):
    """(name, masked, spoilt) -> folder of a run of one epoch: no score for the first two images, other numbers."""
    reward, plain_draw = rewards.REGISTERED["brightness"], sampling.sample_epoch
    plain_load = reward.load

    def run(name, masked, spoilt):
        monkeypatch.setattr(reward, "load", without_two(plain_load) if masked else plain_load)
        for module in (sampling, train_qwenimage, train_qwenimage_nft):
            monkeypatch.setattr(module, "sample_epoch", spoiling_two(plain_draw) if spoilt else plain_draw)
        how = shallow | dict(reward__max_masked_share=0.6, num_epochs=1)
        how |= dict(eval_freq=0)
        if name == DPO:
            how |= dict(preferences__min_margin=0.0)
        if name == WINDOW:  # ratios of what is spoilt are not 1
            how |= dict(train__parity_limit=0.0)
        folder = train(name, tmp_path / f"{masked} {spoilt}", **how)
        (epoch,) = lines_of(folder, "epoch")
        assert epoch["reward/brightness_masked_share"] == (2 / epoch["images"] if masked else 0)
        return folder

    return run


@pytest.mark.parametrize("name", [WINDOW, NFT, DPO])
def test_a_masked_image_does_not_move_the_policy(name, run_with):
    """Whatever was remembered of it, gradients and weights are the same, bit for bit; of a scored one they are not."""
    plain, spoilt = (lines_of(run_with(name, False, s), "update") for s in (False, True))
    assert plain[0]["grad_norm"] != spoilt[0]["grad_norm"]
    folders = [run_with(name, True, s) for s in (False, True)]
    plain, spoilt = (lines_of(folder, "update") for folder in folders)
    assert all(line["grad_norm"] > 0 for line in plain)
    assert [line["grad_norm"] for line in plain] == [line["grad_norm"] for line in spoilt]
    ours, theirs = (stored(folder, epoch=1) for folder in folders)
    assert all(torch.equal(values, theirs[name]) for name, values in ours.items())
