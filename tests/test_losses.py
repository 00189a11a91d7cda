"""The objectives, the forward process and the advantages against golden numbers and torch's own."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flow_grpo.algorithms import losses, schedules
from flow_grpo.algorithms.advantages import best_and_worst_indices, combined_advantages, group_advantages, has_signal
from flow_grpo.algorithms.flow_matching import logit_normal_timesteps, noised, stratified_timesteps, velocity_error
from flow_grpo.algorithms.surrogates import ForwardStep
from flow_grpo.base import rng
from flow_grpo.run.update import learning_rate
from flow_grpo.settings.objectives import FORWARD_OBJECTIVES, OBJECTIVES
from flow_grpo.settings.sections import Config, Train
from flow_grpo.settings.table import BY_KEY

GOLDEN = np.load(Path(__file__).parent / "golden" / "golden.npz")


def golden(key):
    return torch.tensor(GOLDEN[key]).double()


def test_golden_surrogate():
    clip_range = float(GOLDEN["ppo/clip_range"])
    loss = losses.clipped_surrogate(
        golden("ppo/log_prob"), golden("ppo/log_prob_old"), golden("ppo/advantages"), clip_range
    )
    torch.testing.assert_close(loss.mean(), golden("ppo/loss").mean(), rtol=1e-6, atol=0)
    weighted = (loss * golden("ppo/weight")).mean()
    torch.testing.assert_close(weighted, golden("ppo/weighted_loss").mean(), rtol=1e-6, atol=1e-12)


def test_golden_kl():
    mean = golden("kl/mean")
    ref = golden("kl/mean_ref")
    kl = losses.gaussian_kl(mean, ref, golden("kl/noise_scale").expand(len(mean), 1, 1))
    torch.testing.assert_close(kl, golden("kl/gaussian"), rtol=1e-6, atol=0)


@pytest.mark.parametrize("key", [key for key in GOLDEN.files if key.startswith("step_weight/")])
def test_golden_step_weights(key):
    _, schedule, eta, mode = key.split("/")
    sigma = golden(f"sigmas/{schedule}")
    below_one = torch.where(sigma == 1, sigma[1], sigma)
    std = float(eta) * torch.sqrt(sigma / (1 - below_one))[:-1] * torch.sqrt(-sigma.diff())
    weights = losses.step_weights(std[:9].float(), mode)
    torch.testing.assert_close(weights, golden(key).float(), rtol=1e-5, atol=0)


def test_every_step_weight_and_schedule_of_the_settings_exists():
    for mode in BY_KEY["train.step_weight"].choices:
        assert losses.step_weights(torch.ones(3), mode).shape == (3,)
    for schedule in BY_KEY["train.learning_rate_schedule"].choices:
        assert schedules.learning_rate_share(0, 8, schedule, 0) == 1


def guard(**changes):
    """GRPO-Guard's objective on the golden numbers, [12] float64."""
    std = golden("guard/std_dev_t") * golden("guard/abs_dt").sqrt()
    numbers = dict(
        log_prob=golden("ppo/log_prob"),
        old_log_prob=golden("ppo/log_prob_old"),
        mean=golden("guard/mean"),
        old_mean=golden("guard/mean_old"),
        transition_std=std.expand(12, 1, 1),
        dt=-golden("guard/abs_dt").expand(12, 1, 1),
        advantages=golden("ppo/advantages"),
        clip_range=float(GOLDEN["guard/clip_range"]),
    )
    return losses.guard_surrogate(**numbers | changes)


def test_golden_guard():
    torch.testing.assert_close(guard().mean(), golden("guard/loss").mean(), rtol=1e-6, atol=0)
    minus_one = dict(advantages=-torch.ones(12, dtype=torch.float64), clip_range=1e9)
    ratio = guard(**minus_one) * float(GOLDEN["guard/abs_dt"])
    torch.testing.assert_close(ratio, golden("guard/ratio"), rtol=1e-9, atol=0)


def test_guards_rows_may_stand_at_different_steps():
    scale = torch.linspace(0.5, 2, 12, dtype=torch.float64).view(12, 1, 1)
    rows = dict(transition_std=0.1 * scale, dt=-0.01 * scale)
    together = guard(**rows)
    for i in range(12):
        alone = dict(transition_std=rows["transition_std"][i : i + 1].expand(12, 1, 1))
        alone |= dict(dt=rows["dt"][i : i + 1].expand(12, 1, 1))
        torch.testing.assert_close(guard(**alone)[i], together[i])


def test_dppo_stops_the_rows_whose_step_has_gone_too_far_the_right_way():
    """The loss is -A ratio everywhere; rows are of every kind."""
    log_prob = golden("ppo/log_prob")
    old = golden("ppo/log_prob_old")
    mean = golden("guard/mean")
    old_mean = golden("guard/mean_old")
    advantages = golden("ppo/advantages")
    std = torch.linspace(0.05, 0.5, 12, dtype=torch.float64)
    ratio = (log_prob - old).exp()
    kl = (mean - old_mean).square().mean((1, 2)) / (2 * std**2)
    limit = kl.quantile(0.5).item()
    stops = (kl > limit) & (advantages.sign() == (ratio - 1).sign())
    assert 0 < stops.sum() < (kl > limit).sum()
    learned = log_prob.clone().requires_grad_()
    step = SimpleNamespace(log_prob=learned, prev_sample_mean=mean, transition_std=std.view(12, 1, 1))
    rows = SimpleNamespace(log_probs=old, means=old_mean)
    found = OBJECTIVES["dppo"].function(step, rows, advantages, Train(kl_limit=limit))
    assert torch.equal(found.beyond, kl > limit)
    torch.testing.assert_close(found.loss.detach(), -advantages * ratio, rtol=1e-9, atol=0)
    found.loss.sum().backward()
    torch.testing.assert_close(learned.grad, -advantages * ratio * ~stops, rtol=1e-9, atol=0)


@pytest.mark.parametrize("exponent", [0.0, 2.0])
def test_rsm_is_a_hinge_on_what_the_change_of_the_velocity_does_to_the_noise(exponent):
    """The published form is max(0, c|A| + A (mean (w dv)^2 / 2 + mean(w dv noise))): a step's mean is linear in the
    velocity, with a slope of -w s, and the noise is that of the rollout."""
    stream = torch.Generator().manual_seed(0)
    old_mean, noise, change = torch.randn(3, 12, 4, 5, generator=stream, dtype=torch.float64)
    advantages = torch.randn(12, generator=stream, dtype=torch.float64).clamp(-1, 1)
    advantages[3] = 0.0
    std = torch.linspace(0.1, 0.9, 12, dtype=torch.float64)
    slope = torch.linspace(-0.3, -0.1, 12, dtype=torch.float64).view(-1, 1, 1)
    outcome = old_mean + std.view(-1, 1, 1) * noise

    def log_prob(mean):
        return torch.distributions.Normal(mean, std.view(-1, 1, 1)).log_prob(outcome).mean((1, 2))

    learned = log_prob(old_mean + slope * change).requires_grad_()
    step = SimpleNamespace(log_prob=learned, transition_std=std.view(12, 1, 1))
    rows = SimpleNamespace(log_probs=log_prob(old_mean))
    train = Train(clip_range=0.02, clip_std_exponent=exponent)
    found = OBJECTIVES["rsm"].function(step, rows, advantages, train)

    weighted = slope / -std.view(-1, 1, 1) * change
    inner = weighted.square().mean((1, 2)) / 2 + (weighted * noise).mean((1, 2))
    unit = std**exponent
    published = (0.02 * advantages.abs() + advantages * inner * unit).clamp(min=0)
    torch.testing.assert_close(found.loss.detach(), published / unit, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.log_ratio.detach(), -inner * unit, rtol=1e-9, atol=1e-12)
    goes_on = published > 0
    assert 0 < goes_on.sum() < 11
    found.loss.sum().backward()
    torch.testing.assert_close(learned.grad, -advantages * goes_on, rtol=1e-9, atol=0)


def endpoint_rows(seed=0):
    """Rows of three groups of four at their own levels, the change of their velocities, which takes a gradient, and
    their advantages; float64."""
    stream = torch.Generator().manual_seed(seed)
    x_0, old_mean, change = torch.randn(3, 12, 4, 5, generator=stream, dtype=torch.float64)
    advantages = torch.randn(12, generator=stream, dtype=torch.float64)
    sigma = torch.linspace(0.95, 0.2, 12, dtype=torch.float64)
    dt = torch.full((12, 1, 1), -0.1, dtype=torch.float64)
    std_dev_t = torch.linspace(0.1, 0.7, 12, dtype=torch.float64).view(-1, 1, 1)
    change = (0.1 * change).requires_grad_()
    slope = (1 + std_dev_t**2 * (1 - sigma.view(-1, 1, 1)) / (2 * sigma.view(-1, 1, 1))) * dt
    step = SimpleNamespace(prev_sample_mean=old_mean + slope * change, std_dev_t=std_dev_t, dt=dt)
    rows = SimpleNamespace(x_0=x_0, means=old_mean, timesteps=1000 * sigma, group_size=4)
    return step, rows, change, advantages


def test_fdfo_is_the_published_loss_of_velocities_that_come_nearer_to_better_images():
    step, rows, change, advantages = endpoint_rows()
    found = OBJECTIVES["fdfo"].function(step, rows, advantages, Train(clip_range=0.03))
    for row in range(12):
        group = rows.x_0[row // 4 * 4 : row // 4 * 4 + 4]
        difference = rows.x_0[row] - group.mean(0)
        direction = difference / (difference.square().mean() + 1e-6)
        target = -direction  # less the old velocity
        log_ratio = direction.square().mean() - (change[row] - target).square().mean()
        ratio = log_ratio.exp()
        loss = -advantages[row] * ratio + advantages[row].abs() / (2 * 0.03) * (ratio - 1) ** 2
        torch.testing.assert_close(found.log_ratio[row], log_ratio, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.loss[row], loss, rtol=1e-9, atol=1e-12)


def test_fdfo_holds_a_ratio_to_one_clip_range_on_the_side_of_its_advantage():
    log_ratio = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.7, -0.4], dtype=torch.float64)
    for _ in range(2000):
        losses.fdfo_loss(log_ratio, advantages, 0.03).sum().backward()
        log_ratio = (log_ratio - 0.01 * log_ratio.grad).detach().requires_grad_()
    torch.testing.assert_close(log_ratio.exp().detach(), torch.tensor([1.03, 0.97], dtype=torch.float64))


@pytest.mark.parametrize("space", ["velocity", "x_0"])
def test_endpoint_moves_velocities_against_the_covariance_of_reward_and_image(space):
    step, rows, change, advantages = endpoint_rows()
    train = Train(endpoint_magnitude=0.3, endpoint_space=space)
    found = OBJECTIVES["endpoint"].function(step, rows, advantages, train)
    for group in range(3):
        members = range(group * 4, group * 4 + 4)
        deviations = advantages[list(members)] - advantages[list(members)].mean()
        covariance = sum(deviations[k] * rows.x_0[member] for k, member in enumerate(members)) / 3
        direction = covariance / (covariance.square().mean().sqrt() + 1e-5)
        for row in members:
            sigma = rows.timesteps[row] / 1000 if space == "x_0" else 1.0
            # The image that a velocity leads to is x - sigma v: it moves by the direction.
            target = -0.3 * direction / sigma
            loss = sigma**2 * (change[row] - target).square().mean()
            torch.testing.assert_close(found.loss[row], loss, rtol=1e-9, atol=1e-12)
    found.loss.sum().backward()
    assert change.grad.abs().min() > 0


def test_where_all_images_of_a_group_score_alike_endpoint_holds_the_old_velocity():
    step, rows, change, advantages = endpoint_rows()
    found = OBJECTIVES["endpoint"].function(step, rows, 0 * advantages, Train())
    torch.testing.assert_close(found.loss, change.square().mean((1, 2)))


def golden_step(beta="1.0"):
    """Images with their velocities, which take gradients, and their advantages: golden numbers, float64."""
    x_0 = golden(f"nft/{beta}/x0")
    noise = golden(f"nft/{beta}/noise")
    sigma = golden(f"nft/{beta}/sigma")
    step = ForwardStep(
        velocity=golden(f"nft/{beta}/v_theta").requires_grad_(),
        old_velocity=golden(f"nft/{beta}/v_old"),
        x_0=x_0,
        noise=noise,
        sigma=sigma,
        x_t=noised(x_0, noise, 1000 * sigma),
    )
    return step, golden(f"nft/{beta}/advantages")


def errors_of(step):
    """The errors of both velocities, without gradients."""
    target = step.noise - step.x_0
    error = (step.velocity.detach() - target).square().mean((1, 2))
    old_error = (step.old_velocity - target).square().mean((1, 2))
    return error, old_error


@pytest.mark.parametrize("beta", ["1.0", "0.1"])
def test_golden_nft(beta):
    step, advantages = golden_step(beta)
    prob = losses.nft_reward_prob(advantages, 5.0)
    torch.testing.assert_close(prob, golden(f"nft/{beta}/reward_prob"), rtol=1e-9, atol=0)
    train = Train(adv_clip_max=5.0, nft_beta=float(beta))
    found = FORWARD_OBJECTIVES["nft"].function(step, advantages, train).loss
    torch.testing.assert_close(found.mean(), golden(f"nft/{beta}/policy_loss").mean(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("schedule", [1, 2])
def test_golden_decay_of_the_old_policy(schedule):
    found = [schedules.old_policy_decay(step, schedule) for step in range(0, 1000, 50)]
    assert found == pytest.approx(GOLDEN[f"nft/decay/{schedule}"].tolist(), abs=1e-12)
    assert [schedules.old_policy_decay(500, fixed) for fixed in (0, 0.9)] == [0, 0.9]
    assert [schedules.old_policy_decay(step, 3) for step in (0, 10, 1000)] == [0.25, 0.3, 0.999]
    for wrong in (-0.1, 1.5, 4):
        with pytest.raises(ValueError, match=rf"is {wrong}; it may be 1, 2, 3, or"):
            schedules.old_policy_decay(0, wrong)


def test_the_learning_rate_warms_up_and_falls_to_nothing():
    shares = [schedules.learning_rate_share(step, 8, "linear", warmup_updates=2) for step in range(9)]
    assert shares == pytest.approx([1 / 3, 7 / 8 * 2 / 3, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0])
    shares = [schedules.learning_rate_share(step, 8, "cosine", 0) for step in (0, 2, 4, 8)]
    assert shares == pytest.approx([1, (1 + math.sqrt(0.5)) / 2, 0.5, 0])


def test_a_schedule_ends_with_the_last_update_of_the_last_inner_epoch():
    train = Train(inner_epochs=2, updates_per_epoch=4, learning_rate=0.1, learning_rate_schedule="linear")
    config = Config(num_epochs=3, train=train)
    run = SimpleNamespace(config=config, epoch=2, first_step=116, step=118, learning_rate_factor=0.5)  # of a branch
    assert learning_rate(run) == pytest.approx(0.1 * 6 / 24 * 0.5)
    assert {schedules.learning_rate_share(step, 8, "constant", 0) for step in range(20)} == {1.0}


@pytest.mark.parametrize("clip_range", [0.01, 10.0])
def test_awm_is_ppo_of_the_exponential_of_the_errors_difference_with_bounded_advantages(clip_range):
    step, advantages = golden_step()
    error, old_error = errors_of(step)
    ratio = (old_error - error).exp()
    bounded = advantages.clamp(-1, 1)
    assert not torch.equal(bounded, advantages)
    train = Train(clip_range=clip_range, adv_clip_max=1.0)
    found = FORWARD_OBJECTIVES["awm"].function(step, advantages, train)
    expected = -torch.minimum(bounded * ratio, bounded * ratio.clamp(1 - clip_range, 1 + clip_range))
    torch.testing.assert_close(found.loss.detach(), expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.log_ratio.detach(), old_error - error, rtol=1e-9, atol=1e-12)


def test_dgpos_gradient_is_that_of_a_groups_preference_but_for_rows_that_went_far_enough():
    """sigmoid(s) A error, s = beta mean_group[A (error - reference error)]: three groups of four, some of whose rows
    have left the clip range of 0.01 either way."""
    step, advantages = golden_step()
    step = step._replace(reference_velocity=0.7 * step.old_velocity + 0.3 * step.x_0, group_size=4)
    error, old_error = errors_of(step)
    reference_error = velocity_error(step.reference_velocity, step.x_0, step.noise)
    bounded = advantages.clamp(-1, 1)
    s = 3.0 * (bounded * (error - reference_error)).view(3, 4).mean(1).repeat_interleave(4)
    weight = bounded * s.sigmoid()
    ratio = (old_error - error).exp()
    goes_on = torch.where(advantages > 0, ratio <= 1.01, ratio >= 0.99)
    assert 0 < goes_on.sum() < 12
    assert s.std() > 0.1
    train = Train(adv_clip_max=1.0, dgpo_beta=3.0, clip_range=0.01)
    found = FORWARD_OBJECTIVES["dgpo"].function(step, advantages, train)
    torch.testing.assert_close(found.loss.detach(), weight * error, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.log_ratio.detach(), old_error - error, rtol=1e-9, atol=1e-12)
    found.loss.sum().backward()
    pull = 2 * (step.velocity.detach() - (step.noise - step.x_0)) / step.x_0[0].numel()
    torch.testing.assert_close(step.velocity.grad, (weight * goes_on).view(-1, 1, 1) * pull, rtol=1e-9, atol=0)


@pytest.mark.parametrize("weight", [0.0, 30.0])
def test_elbos_gradient_is_that_of_a_ratio_held_to_one_by_its_proximal_term(weight):
    """w (rho log rho - rho) - A rho, whose derivative by the ELBO is rho (w log rho - A)."""
    step, advantages = golden_step()
    sigma = step.sigma.view(-1, 1, 1)
    error = step.x_t - sigma * step.velocity.detach() - step.x_0
    old_error = step.x_t - sigma * step.old_velocity - step.x_0
    distance = error.square().mean((1, 2)) / error.abs().mean((1, 2))
    old_distance = old_error.square().mean((1, 2)) / old_error.abs().mean((1, 2))
    rho = (old_distance - distance.requires_grad_()).exp()
    (weight * (rho * rho.log() - rho) - advantages.clamp(-1, 1) * rho).sum().backward()
    train = Train(adv_clip_max=1.0, proximal_weight=weight)
    found = FORWARD_OBJECTIVES["elbo"].function(step, advantages, train)
    assert not found.beyond.any()
    torch.testing.assert_close(found.log_ratio.detach(), old_distance - distance.detach())
    found.loss.sum().backward()
    of_error = 2 * error / error.abs().mean((1, 2), keepdim=True) / error[0].numel()
    pull = distance.grad.view(-1, 1, 1) * -sigma * of_error
    torch.testing.assert_close(step.velocity.grad, pull, rtol=1e-9, atol=1e-15)


def test_rams_gradient_and_the_pull_to_the_reference_are_that_of_a_regression_on_a_corrected_target():
    """|v - sg(v_ref + R (target - v))|^2, where R is the multiplier times the bounded advantage."""
    step, advantages = golden_step()
    reference = 0.7 * step.old_velocity + 0.3 * step.x_0
    reward = 3.0 * advantages.clamp(-1, 1).view(-1, 1, 1)
    corrected = reference + reward * (step.noise - step.x_0 - step.velocity.detach())
    published = (step.velocity - corrected).square().mean((1, 2))
    (expected,) = torch.autograd.grad(published.sum(), step.velocity)
    train = Train(adv_clip_max=1.0, reward_multiplier=3.0)
    found = FORWARD_OBJECTIVES["ram"].function(step, advantages, train)
    pull = (step.velocity - reference).square().mean((1, 2))
    (found.loss + pull).sum().backward()
    torch.testing.assert_close(step.velocity.grad, expected, rtol=1e-9, atol=1e-15)
    assert found.log_ratio is None


@pytest.mark.parametrize("beta", [1.0, 0.2])
def test_crd_fits_the_differences_of_log_ratios_within_a_group_to_those_of_its_rewards(beta):
    step, advantages = golden_step()
    step = step._replace(group_size=4)
    target = step.noise - step.x_0
    error = step.velocity.detach() - target
    old_error = step.old_velocity - target
    size = error.abs().mean((1, 2))
    implicit = old_error.square().mean((1, 2)) / old_error.abs().mean((1, 2)) - error.square().mean((1, 2)) / size
    reward = advantages.clamp(-2, 2) / 4 + 0.5
    centred = []
    for group in range(3):
        rows = slice(4 * group, 4 * group + 4)
        r = implicit[rows] - implicit[rows].mean()
        a = reward[rows] - reward[rows].mean()
        centred.append(beta * r - a)
    centred = torch.cat(centred)
    train = Train(adv_clip_max=2.0, crd_beta=beta)
    found = FORWARD_OBJECTIVES["crd"].function(step, advantages, train)
    torch.testing.assert_close(found.loss.detach(), centred**2 / beta, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.log_ratio.detach(), implicit, rtol=1e-9, atol=1e-12)
    assert not found.beyond.any()

    # The mean of a group falls out of the gradient, since what is centred adds up to 0.
    found.loss.sum().backward()
    pull = 2 * centred.view(-1, 1, 1) * -2 * error / size.view(-1, 1, 1) / error[0].numel()
    torch.testing.assert_close(step.velocity.grad, pull, rtol=1e-9, atol=1e-12)


def golden_loss(name, advantages, **settings):
    """A forward objective of the golden numbers."""
    step, _ = golden_step()
    record = FORWARD_OBJECTIVES[name]
    settings |= {key: BY_KEY[f"train.{key}"].default for key in record.reads}
    return record.function(step._replace(group_size=4), advantages, Train(**settings)).loss.detach()


@pytest.mark.parametrize("name", FORWARD_OBJECTIVES)
def test_every_loss_of_finished_images_bounds_advantages_by_a_clip_or_by_a_tanh(name):
    _, advantages = golden_step()
    how = dict(adv_clip_max=0.5)
    assert advantages.abs().max() > 1
    clipped = golden_loss(name, advantages, **how)
    assert torch.equal(clipped, golden_loss(name, advantages.clamp(-0.5, 0.5), **how))
    rounded = golden_loss(name, advantages, adv_bound="tanh", **how)
    torch.testing.assert_close(rounded, golden_loss(name, 0.5 * torch.tanh(2 * advantages), **how))
    assert (rounded - clipped).abs().max() > 1e-3


def test_crd_is_least_where_log_ratios_are_the_rewards_but_for_a_number_of_each_group():
    reward = torch.tensor([0.1, 0.4, 0.9, 0.5, 0.5, 0.2], dtype=torch.float64)
    offset = torch.tensor([3.0, -7.0], dtype=torch.float64).repeat_interleave(3)
    assert losses.crd_loss((reward + offset) / 2, reward, 3, 2.0).abs().max() < 1e-12
    assert losses.crd_loss((reward + offset) / 2, reward, 6, 2.0).min() > 1


def test_the_pull_to_the_reference_falls_with_the_reward_and_is_one_for_the_average_image():
    reward = torch.tensor([0.0, 0.25, 0.5, 1.0])
    assert losses.reference_share(reward).tolist() == [2.0, 1.5, 1.0, 0.0]


@pytest.mark.parametrize("beta", [100.0, 2000.0])
def test_golden_dpo(beta):
    win = golden("dpo/win_error")
    lose = golden("dpo/lose_error")
    ref_win = golden("dpo/win_error_ref")
    ref_lose = golden("dpo/lose_error_ref")
    loss = losses.dpo_loss(win, lose, ref_win, ref_lose, beta)
    torch.testing.assert_close(loss.mean(), golden(f"dpo/{beta}/loss").mean(), rtol=1e-6, atol=0)
    assert (win - ref_win < lose - ref_lose).double().mean() == golden(f"dpo/{beta}/accuracy")


def test_the_line_goes_from_the_image_to_the_noise_and_its_own_velocity_has_no_error():
    x_0, noise = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).unbind()
    ends = noised(x_0, noise, torch.tensor([0.0, 1000.0, 0.0]))
    assert torch.equal(ends, torch.stack([x_0[0], noise[1], x_0[2]]))
    quarter = noised(x_0, noise, torch.full((3,), 250.0))
    torch.testing.assert_close(quarter, 0.75 * x_0 + 0.25 * noise)
    assert torch.equal(velocity_error(noise - x_0, x_0, noise), torch.zeros(3))
    assert torch.allclose(velocity_error(noise - x_0 + 2, x_0, noise), torch.full((3,), 4.0))
    assert torch.equal(losses.self_normalised_error(noise - x_0, x_0, x_0, torch.zeros(3)), torch.zeros(3))


def test_noise_levels_are_logit_normal_over_the_schedule():
    levels = torch.linspace(1000, 1, 1000)
    found = logit_normal_timesteps(levels, [rng.generator(0, "t", i) for i in range(4000)])
    for quantile in (0.1, 0.25, 0.5, 0.75, 0.9):
        z = math.sqrt(2) * torch.erfinv(torch.tensor(2 * quantile - 1)).item()
        expected = 1000 * (1 - 1 / (1 + math.exp(-z)))  # levels fall with their place
        assert found.quantile(1 - quantile).item() == pytest.approx(expected, abs=25)
    assert set(found.tolist()) <= set(levels.tolist())
    again = logit_normal_timesteps(levels, [rng.generator(0, "t", i) for i in (7, 8)])
    assert torch.equal(again, found[7:9])


@pytest.mark.parametrize(("number", "shares"), [(3, [3, 3, 3]), (2, [4, 5]), (9, [1] * 9)])
def test_an_image_has_one_noise_level_of_each_share(number, shares):
    levels = torch.arange(9)
    found = stratified_timesteps(levels, number, [rng.generator(0, "t", i) for i in range(400)])
    for drawn, share in zip(found.T, levels.split(shares), strict=True):
        assert torch.equal(drawn.unique(), share)
    assert torch.equal(stratified_timesteps(levels, number, [rng.generator(0, "t", 7)]), found[7:8])


REWARDS = torch.tensor(GOLDEN["adv/rewards"]).float()
PROMPTS = json.loads(Path(__file__).with_name("golden").joinpath("prompts.json").read_text())["prompts"]
GROUPS = torch.tensor([int(name[1:]) for name in PROMPTS])


@pytest.mark.parametrize(("key", "global_std"), [("group", False), ("global_std", True)])
def test_golden_advantages_of_which_several_rewards_have_their_own(key, global_std):
    expected = torch.tensor(GOLDEN[f"adv/{key}"]).float()
    torch.testing.assert_close(group_advantages(REWARDS, GROUPS, global_std), expected, rtol=1e-5, atol=1e-6)
    both = torch.stack([REWARDS, REWARDS.flip(0) * 3 + 1], 1)
    columns = [group_advantages(column, GROUPS, global_std) for column in both.unbind(1)]
    torch.testing.assert_close(group_advantages(both, GROUPS, global_std), torch.stack(columns, 1))


def test_a_groups_level_scale_name_and_place_do_not_matter():
    rewards = torch.tensor([1.0, 10, 2, 20, 3, 30])
    groups = torch.tensor([7, 1, 7, 1, 7, 1])
    advantages = group_advantages(rewards, groups, eps=0)
    torch.testing.assert_close(advantages, torch.tensor([-1.0, -1, 0, 0, 1, 1]) * 1.5**0.5)


@pytest.mark.parametrize("value", [0.3, 8.3, 85.3, 612.7])
@pytest.mark.parametrize("rounding", [0.0, 1e-7])
def test_rewards_of_any_size_that_differ_by_rounding_alone_are_a_group_without_spread(value, rounding):
    rewards = torch.full((24,), value)
    groups = torch.zeros(24, dtype=torch.long)
    rewards[::2] *= 1 + rounding
    both = {"a": rewards, "b": 2 * rewards}
    cancelled = combined_advantages(both, {"a": 1.0, "b": -0.5}, groups, "sum")
    assert torch.equal(group_advantages(rewards, groups), torch.zeros(24))
    assert torch.equal(cancelled, torch.zeros(24))
    assert not has_signal(both, {"a": 1.0, "b": 1.0}, groups).any()
    rewards[::3] *= 1.0001
    assert has_signal({"a": rewards}, {"a": 1.0}, groups).all()


@pytest.mark.parametrize("weight", [-1.0, -0.3])
def test_rewards_that_differ_by_rounding_alone_teach_nothing_where_their_sum_cancels(weight):
    level = torch.full((24,), 85.3)
    rewards = {"a": level.clone(), "b": level / -weight}
    rewards["a"][::2] *= 1 + 2e-7
    groups = torch.zeros(24, dtype=torch.long)
    weights = {"a": 1.0, "b": weight}
    assert torch.equal(combined_advantages(rewards, weights, groups, "sum"), torch.zeros(24))
    assert not has_signal(rewards, weights, groups, "sum").any()
    rewards["a"][::2] *= 1.0001
    assert combined_advantages(rewards, weights, groups, "sum").abs().min() > 0.9
    assert has_signal(rewards, weights, groups, "sum").all()


@pytest.mark.parametrize(("aggregation", "teaches"), [("sum", False), ("gdpo", True)])
def test_rewards_that_cancel_teach_something_where_each_counts_by_itself(aggregation, teaches):
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    a = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 5.0])
    rewards = {"a": a, "b": 2 * a}
    weights = {"a": 1.0, "b": -0.5}
    signal = has_signal(rewards, weights, groups, aggregation)
    assert signal.tolist() == [teaches] * 4 + [False] * 2


TWO = {"a": REWARDS, "b": REWARDS.flip(0) * 100}


def test_a_sum_of_rewards_is_one_reward():
    for global_std in (False, True):
        found = combined_advantages(TWO | {"c": REWARDS}, {"a": 2.0, "b": 0.5}, GROUPS, "sum", global_std)
        torch.testing.assert_close(found, group_advantages(2 * TWO["a"] + 0.5 * TWO["b"], GROUPS, global_std))


def test_gdpo_gives_each_reward_its_weight_whatever_its_scale():
    larger = {"a": TWO["a"] * 50, "b": TWO["b"]}
    for by in (False, True):  # the std of each group, of all images
        found = combined_advantages(TWO, {"a": 2.0, "b": 1.0}, GROUPS, "gdpo", by)
        scaled = combined_advantages(larger, {"a": 2.0, "b": 1.0}, GROUPS, "gdpo", by)
        by_hand = 2 * group_advantages(TWO["a"], GROUPS, by) + group_advantages(TWO["b"], GROUPS, by)
        expected = (by_hand - by_hand.mean()) / by_hand.std(unbiased=False)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found, scaled, rtol=0.02, atol=0.02)


def test_the_best_and_the_worst_of_a_group_are_picked_and_an_unknown_score_is_neither():
    values = torch.tensor([[0.3, 0.9, torch.nan, 0.1, 0.5], [1.0, 1.0, 0.0, 1.0, 1.0]])
    assert best_and_worst_indices(values, 2).tolist() == [[1, 3], [0, 2]]
    assert best_and_worst_indices(values, 3).tolist() == [[1, 4, 3], [0, 1, 2]]
    assert best_and_worst_indices(values, 5)[0].tolist() == [1, 4, 0, 2, 3]


def test_a_group_is_kept_if_any_reward_that_counts_differs_in_it():
    rewards = {"a": torch.tensor([1.0, 1, 2, 2]), "b": torch.tensor([5.0, 5, 5, 6]), "c": torch.tensor([1.0, 2, 3, 4])}
    groups = torch.tensor([0, 0, 1, 1])
    for aggregation in ("sum", "gdpo"):
        signal = has_signal(rewards, {"a": 1.0, "b": 1.0}, groups, aggregation)
        assert signal.tolist() == [False, False, True, True]
    assert has_signal(rewards, {"a": 1.0}, groups).tolist() == [False] * 4
    assert has_signal(rewards, {"c": 1.0}, groups).tolist() == [True] * 4
    share = 1 - has_signal({"a": REWARDS}, {"a": 1.0}, GROUPS).float().mean()
    assert share.item() == pytest.approx(float(GOLDEN["adv/zero_std_ratio"]))
