"""Defences against hacking: a gated pull to the reference, a reference that moves when it is far away, given images."""

import json
from types import SimpleNamespace

import pytest
import torch
from brightness import brightness
from recorded import Run, assert_same, go_on
from refused import assert_refused
from small import lines_of, plan, random_images, train
from test_ranks import HOW as RANKS
from test_ranks import assert_same as assert_about_the_same
from test_ranks import on_two_ranks

from flow_grpo import rewards
from flow_grpo.algorithms.disagreement import overrated, win_rates
from flow_grpo.algorithms.flow_matching import noised
from flow_grpo.base import rng
from flow_grpo.base.errors import UserError
from flow_grpo.base.pixels import to_pictures
from flow_grpo.data import captioned_images
from flow_grpo.diffusers_patch import model_classes
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.monitoring.metrics import Meter
from flow_grpo.plan import forwards
from flow_grpo.run import update
from flow_grpo.settings import table

WINDOW = "shapes_qwenimage"
BRANCHES = "shapes_qwenimage_pr"
NFT = "shapes_qwenimage_nft"
REFL = "shapes_proxy_qwenimage_refl"
SCRIPTS = [WINDOW, NFT, REFL, pytest.param(BRANCHES, marks=pytest.mark.slow)]
ONE = dict(num_epochs=1, eval_freq=0, logger="none")
HELD = dict(train__beta=0.5, train__reference_guidance_scale=2.0)


def settings_of(name, shallow, opinion=""):
    """Settings of a short run on brightness, with another reward that is not trained on."""
    how = {key: value for key, value in shallow.items() if not key.startswith("reward_fn")}
    how |= dict(reward_fn={"brightness": 1.0}, eval__rewards=(opinion,) if opinion else ())
    if name == NFT:
        how |= dict(train__timestep_fraction=0.5)
    return how


CAPTIONS = ("a photo of a red circle", "a photo of a cross", "a photo of two squares")


def write_images(folder):
    """Three pictures with their captions."""
    folder.mkdir()
    lines = []
    for number, picture in enumerate(to_pictures(random_images(len(CAPTIONS)))):
        picture.save(folder / f"{number}.png")
        lines.append(json.dumps({"file_name": f"{number}.png", "text": CAPTIONS[number]}) + "\n")
    (folder / "metadata.jsonl").write_text("".join(lines))
    return str(folder)


@pytest.fixture
def opinions(shallow):
    """Rewards that rank images as the trained one does, and the other way round."""
    rewards.register("agreeing", lambda images, prompts, metadata: 2 * brightness(images, prompts, metadata))
    rewards.register("opposing", lambda images, prompts, metadata: -brightness(images, prompts, metadata))
    yield shallow
    for name in ("agreeing", "opposing"):
        del rewards.REGISTERED[name]


def test_a_win_rate_is_the_share_of_the_group_that_scores_lower_and_half_of_ties():
    nan = float("nan")
    scores = torch.tensor([1.0, 7.0, 3.0, 1.0, nan, 2.0, 9.0])
    groups = torch.tensor([4, 2, 4, 4, 4, 4, 5])
    expected = torch.tensor([1 / 6, 0, 1, 1 / 6, nan, 2 / 3, 0], dtype=torch.float64)
    torch.testing.assert_close(win_rates(scores, groups), expected, equal_nan=True)


def test_images_are_overrated_that_the_trained_reward_ranks_highest_above_the_mean_of_others():
    trained = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
    groups = torch.zeros(5, dtype=torch.int64)
    # In quarters: ranks by the trained reward 0, 1, 2, 3, 4, means of the others' 2.5, 1.5, 0, 3.5, 2.5.
    first = torch.tensor([5.0, 2.0, 1.0, 4.0, 3.0])
    second = torch.tensor([2.0, 3.0, 1.0, 5.0, 4.0])
    for share, expected in ((1.0, [2, 4]), (0.5, [2, 4]), (0.2, [2])):
        found = overrated(trained, [first, second], groups, share)
        assert found.nonzero().flatten().tolist() == expected, share
    # By the first of them alone the excesses are -4, 0, 2, 0, 2 quarters: what ties with the last image counts, too.
    for share in (0.5, 0.2):
        assert overrated(trained, [first], groups, share).nonzero().flatten().tolist() == [2, 4]
    assert not overrated(trained, [trained, 3 * trained], groups, 1.0).any()
    unknown = torch.tensor([float("nan"), 1.0, 2.0, 3.0, 0.0])
    assert overrated(trained, [unknown], groups, 1.0).tolist() == [False, False, False, False, True]
    assert overrated(unknown, [trained], groups, 1.0).tolist() == [False, True, True, True, False]


def test_the_pull_is_beta_times_the_distances_that_the_gate_lets_through():
    run = SimpleNamespace(config=SimpleNamespace(train=SimpleNamespace(beta=0.5, beta_gate=0.7)), meter=Meter())
    distance = torch.tensor([2.0, 4.0, 6.0], dtype=torch.float64)
    rows = SimpleNamespace(beta_gate=torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))
    assert update.pull(run, rows, distance).tolist() == [1.0, 0.0, 3.0]
    assert run.meter.mean("beta_gate_share") == 2 / 3
    run.config.train.beta_gate = 0.0
    assert update.pull(run, rows, distance).tolist() == [1.0, 2.0, 3.0]


def loss_of_the_pull(line):
    """Part of an update's loss that the reference adds; weights of rows are 1 here."""
    return line["loss"] - line["policy_loss"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_only_images_that_rewards_disagree_about_are_pulled_to_the_reference(name, opinions, tmp_path):
    lines = {}
    for opinion in ("agreeing", "opposing"):
        how = settings_of(name, opinions, opinion) | ONE | HELD | dict(train__beta_gate=0.25)
        how |= dict(sample__guidance_scale=1.5) if name == REFL else {}
        folder = train(name, tmp_path / opinion, **how)
        lines[opinion] = lines_of(folder, "update")
        if name != REFL:
            (epoch,) = lines_of(folder, "epoch")
            assert f"reward/{opinion}" in epoch
    for line in lines["agreeing"]:
        assert line["beta_gate_share"] == 0
        assert loss_of_the_pull(line) == pytest.approx(0, abs=1e-12)
    share = sum(line["beta_gate_share"] for line in lines["opposing"]) / len(lines["opposing"])
    assert 0.1 < share < 0.5
    assert any(loss_of_the_pull(line) > 1e-8 for line in lines["opposing"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_reference_moves_after_updates_that_were_too_far_from_it_and_a_resumed_run_goes_on_with_it(
    name, opinions, tmp_path
):
    how = settings_of(name, opinions, "opposing") | HELD
    how |= dict(num_epochs=2, eval_freq=0, save_freq=1, keep_checkpoints=9, logger="none", train__learning_rate=1e-2)
    how |= dict(train__reference_guidance_scale=0.0, train__reference_kl=1e-12, train__beta_gate=0.5)
    how |= dict(train__data=write_images(tmp_path / "data"), train__data_weight=0.1)
    unbroken = Run(train(name, tmp_path / "unbroken", **how), name, how)
    lines = lines_of(unbroken.folder, "update")
    # The first update's rows, and those of the update after a move, are the reference's own.
    assert [line["reference_moves"] for line in lines] == [0, 1, 1, 2]
    key = "kl_reference" if name in (WINDOW, BRANCHES) else "reference_distance"
    assert lines[0][key] == lines[2][key] == 0 < lines[1][key]
    assert_same(unbroken.folder, go_on(unbroken, tmp_path / "resumed"), epoch=2)


@pytest.mark.parametrize("name", [NFT, *(pytest.param(name, marks=pytest.mark.slow) for name in (WINDOW, REFL))])
def test_two_ranks_defend_as_one(name, shallow, tmp_path):
    how = shallow | RANKS | HELD | dict(eval__rewards=("shapes",), logger="none")
    how |= dict(reward_fn__shapes_proxy=0.0) if name == REFL else {}
    # One rollout, whose images' ranks no rounding can change.
    how |= dict(num_epochs=1, eval_freq=0, train__updates_per_epoch=4, train__beta_gate=0.5)
    how |= dict(sample__batch_size=2) if name == REFL else {}
    how |= dict(train__reference_guidance_scale=0.0, train__reference_kl=1e-12)
    how |= dict(train__data=write_images(tmp_path / "data"), train__data_weight=0.1)
    one = train(name, tmp_path / "one", **how)
    two = on_two_ranks(name, tmp_path / "two", **how)
    assert_about_the_same(one, two)
    for key in ("reference_moves", "beta_gate_share", "data_error"):
        ours = [line[key] for line in lines_of(one, "update")]
        assert ours == pytest.approx([line[key] for line in lines_of(two, "update")], rel=1e-4)
        assert any(ours)


class LinearModel:
    """Velocity weight x + bias sigma in float64, of images that are their own latents."""

    def __init__(self):
        self.weight = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        self.bias = torch.tensor(-0.7, dtype=torch.float64, requires_grad=True)

    def encode_images(self, images):
        return images.double()

    def unguided(self, scale):
        return 0.0

    def velocity(self, x, timesteps, condition, scale):
        assert scale == 0.0
        return self.weight * x + self.bias * (timesteps / 1000).view(-1, 1, 1, 1)


def test_the_gradient_of_the_data_term_is_that_of_the_velocities_errors_on_given_images(tmp_path):
    images = captioned_images.open_folder(write_images(tmp_path / "data"), "config.train.data")
    assert [image.prompt.text for image in images] == list(CAPTIONS)
    model = LinearModel()
    run = SimpleNamespace(
        config=table.with_values(table.typed(table.default_config()), {"train.data_weight": 0.25, "seed": 3}),
        prompts=SimpleNamespace(data=images),
        scheduler=SimpleNamespace(timesteps=torch.linspace(1000, 100, 10, dtype=torch.float64)),
        size=Size(64, 64),
        device=torch.device("cpu"),
        epoch=4,
        model=model,
        meter=Meter(),
        data_latents={},
        velocity=model.velocity,
        embed=lambda prompts: prompts,
    )
    row_ids = torch.tensor([[5, 0], [9, 1], [17, 0], [6, 2]])
    update.add_data_gradients(run, row_ids, num_update_rows=12, inner_epoch=1)

    losses = []
    seen = set()
    for image, step in row_ids.tolist():
        generator = rng.generator(3, "data", 4, 1, image, step)
        number = int(torch.randint(3, (), generator=generator))
        level = run.scheduler.timesteps[int(torch.randint(10, (), generator=generator))]
        seen.add((number, level.item()))
        x_0 = captioned_images.load(images[number], run.size)[None].double()
        noise = rng.normal(x_0.shape[1:], [generator], run.device)
        x_t = noised(x_0, noise, level[None])
        losses.append((model.weight * x_t + model.bias * level / 1000 - (noise - x_0)).square().mean())
    assert len(seen) > 2
    assert run.data_latents.keys() == {images[number].path for number, _ in seen}
    expected = torch.autograd.grad(0.25 * sum(losses) / 12, (model.weight, model.bias))
    torch.testing.assert_close((model.weight.grad, model.bias.grad), expected, rtol=1e-12, atol=0)
    assert run.meter.mean("data_error").item() == pytest.approx(sum(losses).item() / 4, rel=1e-12)


@pytest.mark.parametrize("name", SCRIPTS)
def test_given_images_move_the_weights_and_their_forwards_are_counted(name, opinions, tmp_path):
    how = settings_of(name, opinions) | ONE | dict(sample__guidance_scale=1.5)
    how |= dict(sample__sde_window_size=2, sample__sde_window_range=(0, 2)) if name == WINDOW else {}
    how |= dict(train__gradient_path="leap") if name == REFL else {}
    data = dict(train__data=write_images(tmp_path / "data"))
    lines = {}
    for run_name, more in (("without", {}), ("with", data)):
        folder = train(name, tmp_path / run_name, **how | more)
        lines[run_name] = lines_of(folder, "update")
        config = table.of_stored(json.loads((folder / "config.json").read_text()))
        planned = forwards.of_epoch(config, plan(table.editable(config)), model_classes.of_folder(config.model))
        (epoch,) = lines_of(folder, "epoch")
        assert epoch["forwards"] == planned.rollout + planned.update
    assert forwards.of_data(config, plan(table.editable(config))) > 0
    first, second = (lines[run_name][0] for run_name in ("without", "with"))
    assert first["policy_loss"] == second["policy_loss"]
    assert first["grad_norm"] != second["grad_norm"]
    assert 0.1 < second["data_error"] < 10


def test_a_dry_run_opens_given_images_and_counts_their_forwards(opinions, tmp_path, capsys):
    how = settings_of(NFT, opinions) | dict(train__data=write_images(tmp_path / "data"), dry_run=1)
    with pytest.raises(SystemExit):
        train(NFT, tmp_path / "runs", **how)
    # 2 prompts of 4 images, at two timesteps each.
    assert f"data: 3 images of {tmp_path / 'data'}; 16 forwards an epoch, with gradients" in capsys.readouterr().out
    # Sizes of files are remembered: a folder that nothing has looked at.
    how |= dict(train__data=write_images(tmp_path / "other"))
    (tmp_path / "other" / "2.png").unlink()
    assert_refused([("gone", lambda: train(NFT, tmp_path / "runs", **how), ["2.png", "a photo of two squares"])])


def test_a_folder_of_images_is_refused_by_what_is_wrong_in_it(opinions, tmp_path):
    def start(change, **more):
        folder = tmp_path / f"data_{len(list(tmp_path.iterdir()))}"
        how = settings_of(NFT, opinions) | dict(train__data=write_images(folder)) | more
        change(folder)
        return lambda: train(NFT, tmp_path / "runs", **how)

    def lines(*rows):
        return lambda folder: (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    caption = {"text": "a photo of a cross"}
    rows = [
        ("no folder", start(lambda folder: None, train__data="nowhere"), ["train.data 'nowhere'", "metadata.jsonl"]),
        ("no line", start(lines()), ["metadata.jsonl", "empty"]),
        ("no caption", start(lines({"file_name": "0.png"})), ["line 1", "caption, text"]),
        ("blank", start(lines({"file_name": "0.png", "text": " "})), ["line 1", "empty prompt"]),
        ("no name", start(lines(caption)), ["a photo of a cross", '"file_name" is None']),
        ("no file", start(lines(caption | {"file_name": "9.png"})), ["9.png", "a photo of a cross"]),
        ("cut", start(lambda folder: (folder / "1.png").write_bytes(b"x")), ["1.png", "no picture"]),
        ("long", start(lines(caption | {"file_name": "0.png", "text": "cross " * 40})), ["text_tokens = 20"]),
        ("weight", start(lambda folder: None, train__data="", train__data_weight=0.1), ["data_weight is 0.1"]),
    ]
    assert_refused(rows)
    assert not (tmp_path / "runs").exists()


def test_a_resumed_run_does_not_go_on_with_other_images(opinions, tmp_path):
    how = settings_of(NFT, opinions) | ONE | dict(train__data=write_images(tmp_path / "data"))
    train(NFT, tmp_path / "runs", **how)
    to_pictures(random_images(1, seed=1))[0].save(tmp_path / "data" / "1.png")
    how |= dict(num_epochs=2, resume_from="latest")
    with pytest.raises(UserError, match=r"config\.train\.data: 1\.png"):
        train(NFT, tmp_path / "runs", **how)


def test_latents_beyond_what_is_remembered_are_encoded_again(tmp_path, monkeypatch):
    images = captioned_images.open_folder(write_images(tmp_path / "data"), "config.train.data")
    run = SimpleNamespace(size=Size(64, 64), device=torch.device("cpu"), model=LinearModel(), data_latents={})
    monkeypatch.setattr(update, "LATENTS_BYTES", 2 * 8 * 3 * 64 * 64)
    first = [update._latents_of(run, image) for image in images]
    assert [*run.data_latents] == [image.path for image in images[:2]]
    for image, latents in zip(images, first):
        again = update._latents_of(run, image)
        assert torch.equal(again, latents)
        assert (again is latents) == (image.path in run.data_latents)


def test_an_image_that_is_gone_ends_a_run_by_its_name(tmp_path):
    images = captioned_images.open_folder(write_images(tmp_path / "data"), "config.train.data")
    images[1].path.unlink()
    with pytest.raises(UserError, match=r"1\.png is an unreadable image"):
        captioned_images.load(images[1], Size(64, 64))
