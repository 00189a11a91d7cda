"""train_qwenimage_refl.py: gradients of rewards through the walk that drew an image, on the tiny model."""

import json
from collections import defaultdict
from dataclasses import replace
from functools import partial

import pytest
import torch
import train_qwenimage_refl as script
from brightness import brightness
from recorded import Run, assert_same, go_on
from refused import assert_refused
from small import MODELS, as_prompts, config_of, few_prompts, lines_of, loaded, move, plan, train
from test_ranks import HOW as RANKS
from test_ranks import assert_same as assert_about_the_same
from test_ranks import on_two_ranks

from flow_grpo import rewards
from flow_grpo.algorithms.ratio_statistics import ParityError
from flow_grpo.base import rng
from flow_grpo.diffusers_patch import loading, model_classes, registry
from flow_grpo.diffusers_patch.sample_with_logprob import pipeline_with_logprob
from flow_grpo.diffusers_patch.sde_with_logprob import sde_step_with_logprob
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.plan import forwards
from flow_grpo.run import reward_gradients
from flow_grpo.run.run import Run as LiveRun
from flow_grpo.settings import table

NAME = "shapes_proxy_qwenimage_refl"
# Tests below show the others, too.
PATHS = ["", ",leap", *(pytest.param(variant, marks=pytest.mark.slow) for variant in (",draft", ",sparse"))]
ONE = dict(num_epochs=1, eval_freq=0)
SHARDED = dict(fsdp__mode="shard")
GUIDED = dict(sample__guidance_scale=3.0)
HELD = dict(train__beta=0.5, train__reference_guidance_scale=2.0)


@pytest.fixture(scope="module")
def how(shallow):
    """Settings of a run on a model of two blocks, whose reward is the brightness of images."""
    without = {key: value for key, value in shallow.items() if not key.startswith("reward_fn")}
    return without | dict(reward_fn={"brightness": 1.0}, eval__rewards=(), logger="none")


class Enough(Exception):
    """End a run whose first images have shown what a test looks at."""


def first_lines(folder):
    return lines_of(folder, "update"), lines_of(folder, "epoch")


@pytest.mark.parametrize("variant", PATHS)
def test_a_path_trains_by_velocities_that_are_the_rollouts_bit_for_bit(variant, how, tmp_path):
    settings = how | ONE | dict(train__learning_rate=1e-3, sample__batch_size=2)
    folder = train(NAME + variant, tmp_path, **settings)
    updates, epochs = first_lines(folder)
    assert len(updates) == 2
    for line in updates:
        assert line["parity/velocity_abs_diff_max"] == 0
        assert line["grad_norm"] > 0
        assert line["image_gradient"] > 0
        assert line["loss"] == line["policy_loss"]
    assert [line["images"] for line in epochs] == [8]
    assert epochs[0]["reward/avg"] == epochs[0]["reward/brightness"]
    if variant in ("", ",sparse"):
        mean_loss = (updates[0]["policy_loss"] + updates[1]["policy_loss"]) / 2
        assert mean_loss == pytest.approx(-epochs[0]["reward/avg"], rel=1e-6)

    # ReFL's walks end where chance has it.
    config = table.of_stored(json.loads((folder / "config.json").read_text()))
    family = model_classes.of_folder(config.model)
    planned = forwards.of_epoch(config, plan(table.editable(config)), family)
    off = 0 if variant else 8
    assert abs(epochs[0]["forwards"] - (planned.rollout + planned.update)) <= off


def test_steps_without_a_gradient_take_the_rollouts_weights_and_short_text(how, tmp_path):
    """Their rounding differs; where gradients go through, velocities are those of the update all the same."""

    def losses(name, **more):
        settings = how | dict(num_epochs=2, eval_freq=0, lora__rank=4, train__learning_rate=1e-2, train__ema_decay=0.0)
        folder = train(f"{NAME},draft", tmp_path / name, **settings, **more)
        updates, _ = first_lines(folder)
        assert [line["parity/velocity_abs_diff_max"] for line in updates] == [0, 0, 0, 0]
        return torch.tensor([line["policy_loss"] for line in updates])

    exact = losses("exact")
    merged = losses("merged", sample__rollout_weights="merged")
    # An adapter begins at 0.
    assert merged[0] == exact[0]
    assert not torch.equal(merged, exact)
    torch.testing.assert_close(merged, exact, rtol=1e-4, atol=0)
    torch.testing.assert_close(losses("short", sample__text_multiple=8), exact, rtol=1e-4, atol=0)


def test_text_is_short_in_steps_without_a_gradient_alone(how, tmp_path, monkeypatch):
    widths = defaultdict(int)
    velocity = LiveRun.velocity

    def recorded(run, x, t, condition, *more):
        widths[condition.text_embeds.shape[1]] += 1
        return velocity(run, x, t, condition, *more)

    monkeypatch.setattr(LiveRun, "velocity", recorded)
    settings = how | ONE | dict(sample__text_multiple=4, text_tokens=30, train__updates_per_epoch=1)
    folder = train(f"{NAME},draft", tmp_path, **settings | dict(train__gradient_noisings=0))
    num_batches = 2
    num_steps = json.loads((folder / "config.json").read_text())["sample"]["num_steps"]
    # The last step has a gradient: it is computed once in the rollout and once in the update.
    assert widths.pop(30) == 2 * num_batches
    assert sum(widths.values()) == (num_steps - 1) * num_batches
    assert all(width < 30 and width % 4 == 0 for width in widths)


def test_a_detached_negative_forward_is_planned_without_a_gradient(how, tmp_path):
    planned = []
    for detached in (False, True):
        config = config_of(NAME, tmp_path, **how | GUIDED | dict(train__detach_negative=detached))
        family = model_classes.of_folder(config.model)
        planned.append(forwards.of_epoch(table.typed(config), plan(config), family))
    whole, detached = planned
    assert detached.trained == whole.trained / 2
    assert detached.frozen == whole.frozen + detached.trained
    assert detached.rollout == whole.rollout


def test_the_images_of_a_rollout_are_the_deterministic_ones_of_their_noise(how, tmp_path):
    def rollout(run, *place):
        drawn = script.rollout(run, *place)
        generators = [rng.generator(run.config.seed, "noise", 0, image) for image in drawn.batch.image_numbers]
        samples = pipeline_with_logprob(
            run.pipeline,
            drawn.condition,
            generators,
            window=range(0),
            noise_level=0.0,
            num_steps=run.config.sample.num_steps,
            height=run.size.height,
            width=run.size.width,
            guidance_scale=run.config.sample.guidance_scale,
        )
        assert torch.equal(drawn.x_0, samples.latents)
        assert torch.equal(run.model.decode(drawn.x_0, run.size), samples.images)
        raise Enough

    config = config_of(f"{NAME},sparse", tmp_path, **how | ONE | GUIDED)
    with pytest.raises(Enough):
        script.main(config, rollout=rollout)


def differentiated(run, drawn):
    """Gradients of the weights by autograd, with everything from the path's first state to the loss in one graph; for
    the last steps of a walk."""
    references = []
    for step, state in zip(drawn.path, drawn.states):
        timesteps = script.timesteps_of(run, step.step, len(state))
        references.append(script.reference_velocity(run, state, timesteps, drawn.condition))
    x = drawn.states[-1]
    pull = 0.0
    for step, reference in zip(reversed(drawn.path), reversed(references)):
        timesteps = script.timesteps_of(run, step.step, len(x))
        velocity = run.velocity(x, timesteps, drawn.condition)
        if reference is not None:
            pull = pull + (velocity - reference).square().flatten(1).mean(1).sum() / len(drawn.path)
        x = sde_step_with_logprob(run.scheduler, velocity, timesteps, x, noise_level=0.0).prev_sample
    images = run.model.decode_with_gradients(x, run.size)
    loss = torch.relu(run.config.train.reward_target - brightness(images, None, None)).sum()
    loss = (loss + run.config.train.beta * pull) / reward_gradients.images_per_update(run)
    found = torch.autograd.grad(loss, run.parameters, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("more", [{}, HELD | GUIDED], ids=["plain", "guided, with a reference"])
def test_gradients_are_those_of_one_graph_from_the_weights_to_the_reward(more, how, tmp_path):
    """Decoded three images at a time. The policy has moved away from its reference."""

    def rollout(run, *place):
        # Once: all images of an update are drawn before its gradients are taken.
        if not moved:
            moved.append(move(run.parameters))
        return script.rollout(run, *place)

    moved = []

    @script.declared.reads("train.beta")
    def add_gradients(run, drawn, gradient):
        expected = differentiated(run, drawn)
        script.add_gradients(run, drawn, gradient)
        found = [parameter.grad for parameter in run.parameters if parameter.grad is not None]
        assert len(found) == len(expected) > 20
        assert max(part.abs().max() for part in expected) > 1e-4
        for ours, theirs in zip(found, expected):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
        raise Enough

    settings = how | ONE | dict(vae_batch_size=3, train__reward_target=2.0, train__updates_per_epoch=1) | more
    settings |= dict(train__gradient_path="draft", train__gradient_steps=2, lora__rank=0)
    with pytest.raises(Enough):
        script.main(config_of(NAME, tmp_path, **settings), rollout=rollout, add_gradients=add_gradients)


def test_an_images_noisings_share_its_gradient_and_are_no_further_images(how, tmp_path):
    shares = []
    sizes = []

    @script.declared.reads("train.beta")
    def add_gradients(run, drawn, gradient):
        shares.append((drawn.share, drawn.states.shape[0], gradient.abs().max().item()))
        latents = drawn.x_0.clone().requires_grad_()
        score = brightness(run.model.decode_with_gradients(latents, run.size), None, None).sum()
        (of_score,) = torch.autograd.grad(score, latents)
        sizes.append(of_score.square().flatten(1).mean(1).sqrt().mean().item())
        script.add_gradients(run, drawn, gradient)

    config = config_of(f"{NAME},draft", tmp_path, **how | ONE | HELD)
    script.main(config, add_gradients=add_gradients)
    for line, of_update in zip(lines_of(tmp_path / config.name, "update"), (sizes[:3], sizes[3:]), strict=True):
        assert line["image_gradient"] == pytest.approx(sum(of_update) / 3, rel=1e-4)
        assert line["reference_distance"] > 0
        assert line["loss"] == pytest.approx(line["policy_loss"] + 0.5 * line["reference_distance"], rel=1e-9)
    assert len(shares) == 2 * 3
    assert {(share, steps) for share, steps, _ in shares} == {(1 / 3, 1)}
    assert len({size for *_, size in shares}) == 6, "each noising is another one"
    assert lines_of(tmp_path / config.name, "epoch")[0]["images"] == 8


@pytest.mark.slow
def test_rewards_above_the_target_teach_nothing(how, tmp_path):
    updates, _ = first_lines(train(NAME, tmp_path, **how | ONE | dict(train__reward_target=-1.0)))
    for line in updates:
        assert line["target_reached_share"] == 1
        assert line["policy_loss"] == line["grad_norm"] == line["image_gradient"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", PATHS)
def test_the_reward_rises(variant, how, tmp_path):
    settings = how | dict(num_epochs=5, eval_freq=0, train__learning_rate=3e-3, sample__num_prompts_per_epoch=4)
    _, epochs = first_lines(train(NAME + variant, tmp_path, **settings))
    scores = [line["reward/avg"] for line in epochs]
    assert scores[-1] > scores[0] + 0.02, scores


@pytest.mark.parametrize(
    "variant", [",draft", *(pytest.param(variant, marks=pytest.mark.slow) for variant in ("", ",leap", ",sparse"))]
)
def test_a_resumed_run_is_the_unbroken_one(variant, how, tmp_path):
    settings = how | dict(num_epochs=2, eval_freq=0, save_freq=1, keep_checkpoints=9, train__learning_rate=1e-3)
    settings |= dict(train__beta=0.1, train__reference_interval=3)
    unbroken = Run(train(NAME + variant, tmp_path / "unbroken", **settings), NAME + variant, settings)
    assert_same(unbroken.folder, go_on(unbroken, tmp_path / "resumed"), epoch=2)


def test_an_update_that_disagrees_with_the_rollout_ends_the_run_before_its_step(how, tmp_path):
    def rollout(run, *place):
        drawn = script.rollout(run, *place)
        return replace(drawn, velocities=drawn.velocities + 0.003)

    limit = dict(train__parity_limit=2.0)
    config = config_of(f"{NAME},sparse", tmp_path, **how | ONE | limit)
    with pytest.raises(ParityError, match=r"by up to 0\.003 \(limit 0\.002.*update 1, which was not made"):
        script.main(config, rollout=rollout)
    assert not lines_of(tmp_path / config.name, "update")


def test_what_cannot_be_meant_is_refused_before_anything_is_made(how, tmp_path):
    def start(variant="", **more):
        config = config_of(NAME + variant, tmp_path / "runs", **how | more)
        return partial(script.main, config)

    remote = {"brightness": {"url": "http://127.0.0.1:9"}}
    rows = [
        ("no gradient", start(reward_fn={"jpeg_compressibility": 1.0}), ["jpeg_compressibility", "no gradient"]),
        ("server", start(reward__args=remote), ["brightness", "server", "no gradient"]),
        ("steps", start(train__gradient_steps=5), ["gradient_steps is 5", "num_steps is 4"]),
        ("negative", start(train__detach_negative=True), ["detach_negative", "guidance_scale 1.0"]),
        (
            "batched",
            start(train__detach_negative=True, batched_guidance=True, **GUIDED),
            ["detach_negative and config.batched_guidance", "set batched_guidance to False"],
        ),
        ("leap's", start(train__leap_discount=0.5), ["leap_discount", "gradient_path 'leap'"]),
        ("sparse's", start(",leap", train__sparse_rescale=1.0), ["sparse_rescale", "gradient_path 'sparse'"]),
        ("noisings", start(",draft", train__gradient_steps=2), ["gradient_noisings", "gradient_steps 1"]),
        ("solver", start(sample__flash_ratio=0.5), ["sample.flash_ratio", "would ignore it"]),
        ("inner epochs", start(train__inner_epochs=2), ["train.inner_epochs", "would ignore it"]),
        ("updates", start(train__updates_per_epoch=3), ["updates_per_epoch 3", "= 12; batch sizes that do: none"]),
    ]
    assert_refused(rows)
    assert not (tmp_path / "runs").exists()


def test_a_negative_forward_without_gradients_changes_no_velocity_and_leaves_out_its_gradient():
    model = loaded("qwenimage")
    condition = model.encode(as_prompts(["a photo of a red circle", "a photo of a cross"]), width=20)
    size = Size(64, 64)
    x = model.noise(size, [rng.generator(0, "noise", row) for row in range(2)])
    timesteps = torch.full((2,), 700.0)
    weight = model.transformer.proj_out.weight

    def gradient_of(velocity):
        return torch.autograd.grad((velocity * x).mean(), weight)[0]

    whole = model.velocity(x, timesteps, condition, 3.0, size)
    positive = model.network(x, timesteps, condition, 3.0, size)
    negative = model.network(x, timesteps, condition.negative, 3.0, size)
    expected = gradient_of(model.guide(positive, negative.detach(), 3.0))
    model.detach_negative = True
    velocity = model.velocity(x, timesteps, condition, 3.0, size)
    assert torch.equal(velocity, whole)
    found = gradient_of(velocity)
    assert torch.equal(found, expected)
    assert (found - gradient_of(whole)).abs().max() > 1e-4
    assert torch.equal(model.velocity(x, timesteps, condition, 1.0, size), positive)


@pytest.mark.slow
def test_a_run_without_the_negatives_gradient_draws_the_same_images_and_has_another_gradient(how, tmp_path):
    updates = []
    for detached in (False, True):
        settings = how | ONE | GUIDED | dict(train__detach_negative=detached)
        updates.append(lines_of(train(NAME, tmp_path / str(detached), **settings), "update")[0])
    assert updates[0]["policy_loss"] == updates[1]["policy_loss"]
    assert updates[0]["grad_norm"] != updates[1]["grad_norm"]


def test_weights_of_rewards_and_of_leaps_count_in_the_loss(how, tmp_path):
    weights = []

    def rollout(run, *place):
        drawn = script.rollout(run, *place)
        weights.append(drawn.loss_weight)
        return drawn

    config = config_of(f"{NAME},leap", tmp_path, **how | ONE | dict(reward_fn={"brightness": 2.0}))
    script.main(config, rollout=rollout)
    updates, (epoch,) = first_lines(tmp_path / config.name)
    assert epoch["reward/avg"] == pytest.approx(2 * epoch["reward/brightness"])
    mean_loss = sum(line["policy_loss"] for line in updates) / len(updates)
    leap_weights = torch.cat(weights)
    assert 1 < leap_weights.min() <= -mean_loss / epoch["reward/avg"] <= leap_weights.max()


def test_images_are_differentiated_by_convolutions_that_add_up_in_a_fixed_order(how, tmp_path, monkeypatch):
    """On a GPU cuDNN's choice otherwise changes from run to run."""
    seen = []

    class Seen(torch.autograd.Function):
        """The same images; it notes the setting in both directions."""

        @staticmethod
        def forward(context, images):
            seen.append(torch.backends.cudnn.deterministic)
            return images.clone()

        @staticmethod
        def backward(context, gradient):
            seen.append(torch.backends.cudnn.deterministic)
            return gradient

    def score_pixels(images, prompts, metadata):
        return brightness(Seen.apply(images), prompts, metadata)

    monkeypatch.setattr(rewards, "REGISTERED", {})
    rewards.register("seen", brightness, score_pixels)
    train(NAME, tmp_path, **how | ONE | dict(reward_fn={"seen": 1.0}))
    assert len(seen) > 2
    assert all(seen)
    assert not torch.backends.cudnn.deterministic


def test_an_update_has_one_step_and_every_epoch_steps_of_its_own(how, tmp_path):
    steps = defaultdict(set)

    def rollout(run, epoch, update, batch, fast):
        drawn = script.rollout(run, epoch, update, batch, fast)
        steps[epoch, update].add(drawn.path[0].step)
        return drawn

    settings = how | dict(num_epochs=4, eval_freq=0, sample__batch_size=2)
    script.main(config_of(NAME, tmp_path, **settings), rollout=rollout)
    assert len(steps) == 4 * 2
    assert all(len(of_update) == 1 for of_update in steps.values())
    assert len(set().union(*(steps[epoch, 0] for epoch in range(4)))) > 1


OPTIONS = {
    "full weights, guided, recomputed": dict(lora__rank=0, fsdp__activation_checkpointing=1.0) | GUIDED,
    "bf16": dict(precision="bf16", vae_precision="bf16", sample__guidance_scale=3.0, train__detach_negative=True),
    "base of 8 bits": dict(base_precision="fp8_weights"),
    "several rewards": dict(reward_fn={"brightness": 0.5, "contrast": 2.0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", PATHS)
@pytest.mark.parametrize("options", OPTIONS)
def test_options_train_by_the_rollouts_velocities(options, variant, how, tmp_path, monkeypatch):
    def contrast(images, prompts, metadata):
        return images.std((1, 2, 3))

    monkeypatch.setitem(rewards.REGISTERED, "contrast", None)
    del rewards.REGISTERED["contrast"]
    rewards.register("contrast", contrast, score_pixels=contrast)
    updates, epochs = first_lines(train(NAME + variant, tmp_path, **how | ONE | HELD | OPTIONS[options]))
    for line in updates:
        assert line["parity/velocity_abs_diff_max"] == 0
        assert line["grad_norm"] > 0
        assert line["reference_distance"] >= 0
    if options == "several rewards":
        expected = 0.5 * epochs[0]["reward/brightness"] + 2 * epochs[0]["reward/contrast"]
        assert epochs[0]["reward/avg"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("more", [dict(train__detach_negative=True), dict(compile=True)], ids=["guided", "compiled"])
def test_every_model_trains_by_the_rollouts_velocities(name, more, how, tmp_path, monkeypatch):
    """With text of unequal lengths in each batch; compiled ones without guidance."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(loading, "compile_decoder", lambda pipeline: None)
    data = few_prompts(tmp_path / "prompts", splits=("train", "test", "validation"), name=name)
    of_model = dict(model=registry.tiny_folder(name), dataset=data, text_tokens=40)
    of_model |= GUIDED if "train__detach_negative" in more else {}
    if MODELS[name].NEGATIVE_PROMPT is None:
        # Its guidance is an input.
        more = {key: value for key, value in more.items() if key != "train__detach_negative"}
    updates, _ = first_lines(train(f"{NAME},leap", tmp_path / "runs", **how | ONE | of_model | more))
    for line in updates:
        assert line["parity/velocity_abs_diff_max"] == 0
        assert line["grad_norm"] > 0


RANKED = dict(reward_fn__shapes_proxy=0.0, reward_fn__brightness=1.0, eval__rewards=())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "more"),
    [
        (",draft", dict(train__gradient_steps=2, train__gradient_noisings=0) | SHARDED | GUIDED | HELD),
        ("", SHARDED),
        (",draft", {}),
        (",leap", dict(train__detach_negative=True) | SHARDED | GUIDED | HELD),
        (",sparse", dict(lora__rank=0)),
    ],
)
def test_two_ranks_equal_one(variant, more, shallow, tmp_path):
    without = {key: value for key, value in shallow.items() if not key.startswith("reward_fn")}
    settings = RANKS | without | RANKED | dict(eval_freq=0) | more
    alone = {key: value for key, value in settings.items() if key != "fsdp__mode"}
    one = train(NAME + variant, tmp_path / "one", **alone)
    two = on_two_ranks(NAME + variant, tmp_path / "two", **settings)
    assert_about_the_same(one, two)
    for ours, theirs in zip(lines_of(one, "update"), lines_of(two, "update"), strict=True):
        assert ours["image_gradient"] == pytest.approx(theirs["image_gradient"], rel=1e-3)
        assert theirs["parity/velocity_abs_diff_max"] == 0
