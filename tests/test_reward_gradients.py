"""Paths of reward gradients in closed form: against autograd through the walk that each of them writes, in float64."""

import itertools

import pytest
import torch

from flow_grpo.algorithms import reward_gradients
from flow_grpo.algorithms.reward_gradients import PathStep, backpropagate, choose_steps, leap_weights, path_of
from flow_grpo.settings.sections import Train

NUM_STEPS = 5
SIGMAS = [1.0, 0.9, 0.7, 0.4, 0.15, 0.0]
BATCH = 3
CHANNELS = 4


def field(seed=0):
    """The weight of a velocity, and what the velocity is: not linear, and another one at each step."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(CHANNELS, CHANNELS, generator=generator, dtype=torch.float64).requires_grad_()

    def velocity(step, x):
        return torch.tanh(x @ weight + 0.3 * SIGMAS[step]) + 0.1 * x

    return weight, velocity


def noise():
    return torch.randn(BATCH, CHANNELS, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


@torch.no_grad()
def walk(velocity):
    """States [T + 1] of Euler's walk, the last of which is the image, and its velocities [T]."""
    states = [noise()]
    velocities = []
    for step in range(NUM_STEPS):
        velocities.append(velocity(step, states[-1]))
        states.append(states[-1] + (SIGMAS[step + 1] - SIGMAS[step]) * velocities[-1])
    return torch.stack(states), torch.stack(velocities)


def reward(image):
    """A score of each image, whose gradient depends on the image."""
    return torch.sin(image).sum(1) + 0.2 * image.square().sum(1)


def gradient_of(image):
    image = image.detach().requires_grad_()
    return torch.autograd.grad(reward(image).sum(), image)[0]


def by_path(path, weight, velocity, states, image):
    """The weight's gradient, sent back through a path from the reward's gradient at an image."""
    weight.grad = None
    chosen = torch.stack([states[step.step] for step in path])
    backpropagate(path, chosen, gradient_of(image), lambda place, x: (velocity(path[place].step, x), 0.0))
    return weight.grad


def by_autograd(weight, image):
    weight.grad = None
    reward(image).sum().backward()
    return weight.grad


def straight_through(expression, value):
    return expression + (value - expression).detach()


def from_state(velocity, states, first):
    """The image by Euler from a stored state, with a graph from there."""
    x = states[first]
    for step in range(first, NUM_STEPS):
        x = x + (SIGMAS[step + 1] - SIGMAS[step]) * velocity(step, x)
    return x


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2, NUM_STEPS])
def test_draft_is_autograd_through_the_last_steps_and_through_all_of_them_the_true_gradient(count):
    weight, velocity = field()
    states, _ = walk(velocity)
    path = path_of(Train(gradient_path="draft"), list(range(NUM_STEPS - count, NUM_STEPS)), SIGMAS)
    found = by_path(path, weight, velocity, states, states[-1]).clone()
    close(found, by_autograd(weight, from_state(velocity, states, NUM_STEPS - count)))
    if count > 1:
        cut = [step._replace(passes=0.0) for step in path]
        assert (by_path(cut, weight, velocity, states, states[-1]) - found).abs().max() > 1e-2


def test_refl_is_autograd_through_one_prediction_of_the_image():
    weight, velocity = field()
    states, _ = walk(velocity)
    (step,) = path_of(Train(gradient_path="refl"), [3], SIGMAS)
    predicted = states[3] - SIGMAS[3] * velocity(3, states[3])
    close(by_path([step], weight, velocity, states, predicted), by_autograd(weight, predicted))
    assert step == PathStep(3, -0.4, 0.0)


@pytest.mark.parametrize("discount", [0.0, 0.3, 1.0])
def test_leap_is_autograd_through_two_leaps_that_land_on_the_walk(discount):
    """Both leaps have the walk's values; the second velocity passes a share of its gradient to the first leap."""
    weight, velocity = field()
    states, _ = walk(velocity)
    first = 1
    second = 3
    leaped = states[first] + (SIGMAS[second] - SIGMAS[first]) * velocity(first, states[first])
    landed = straight_through(leaped, states[second])
    read = discount * landed + (1 - discount) * landed.detach()
    image = straight_through(landed - SIGMAS[second] * velocity(second, read), states[-1])
    path = path_of(Train(gradient_path="leap", leap_discount=discount), [first, second], SIGMAS)
    found = by_path(path, weight, velocity, states, states[-1]).clone()
    close(found, by_autograd(weight, image))

    # Each of the two velocities, and the share that is passed on, counts.
    for other in (path[:1], path[1:], [path[0]._replace(passes=discount + 0.2), path[1]]):
        assert (by_path(other, weight, velocity, states, states[-1]) - found).abs().max() > 1e-3


@pytest.mark.parametrize("rescale", [0.0, 0.5, 1.0])
def test_sparse_is_autograd_through_the_chosen_velocities_of_the_whole_sum(rescale):
    weight, velocity = field()
    states, velocities = walk(velocity)
    chosen = [1, 3]
    factor = 1 + rescale * (1.0 / (0.2 + 0.25) - 1)
    image = states[0]
    for step in range(NUM_STEPS):
        value = velocities[step]
        if step in chosen:
            value = velocity(step, states[step])
            value = value.detach() + factor * (value - value.detach())
        image = image + (SIGMAS[step + 1] - SIGMAS[step]) * value
    path = path_of(Train(gradient_path="sparse", sparse_rescale=rescale), chosen, SIGMAS)
    found = by_path(path, weight, velocity, states, states[-1]).clone()
    close(found, by_autograd(weight, straight_through(image, states[-1])))
    assert reward_gradients.sparse_factor(chosen, SIGMAS, rescale) == pytest.approx(factor)
    for left_out in (path[:1], path[1:]):
        assert (by_path(left_out, weight, velocity, states, states[-1]) - found).abs().max() > 1e-3


def test_sparse_over_all_steps_is_the_true_gradient_where_velocities_do_not_depend_on_the_state():
    weight = torch.randn(CHANNELS, CHANNELS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weight.requires_grad_()

    def velocity(step, x):
        return torch.ones_like(x) @ weight * (step + 1)

    states, _ = walk(velocity)
    path = path_of(Train(gradient_path="sparse", sparse_rescale=1.0), list(range(NUM_STEPS)), SIGMAS)
    assert reward_gradients.sparse_factor(list(range(NUM_STEPS)), SIGMAS, 1.0) == pytest.approx(1.0)
    found = by_path(path, weight, velocity, states, states[-1]).clone()
    close(found, by_autograd(weight, from_state(velocity, states, 0)))


def test_a_further_loss_of_the_velocities_is_added_and_its_gradient_goes_on_with_theirs():
    weight, velocity = field()
    states, _ = walk(velocity)
    path = path_of(Train(gradient_path="draft"), [3, 4], SIGMAS)

    def recompute(place, x):
        value = velocity(path[place].step, x)
        return value, 0.7 * (value - 1).square().sum()

    weight.grad = None
    backpropagate(path, states[[4, 3]], gradient_of(states[-1]), recompute)
    found = weight.grad.clone()
    middle_velocity = velocity(3, states[3])
    middle = states[3] + (SIGMAS[4] - SIGMAS[3]) * middle_velocity
    last_velocity = velocity(4, middle)
    image = middle + (SIGMAS[5] - SIGMAS[4]) * last_velocity
    pull = 0.7 * ((middle_velocity - 1).square().sum() + (last_velocity - 1).square().sum())
    weight.grad = None
    (reward(image).sum() + pull).backward()
    close(found, weight.grad)


def test_an_images_weight_is_one_over_the_distances_of_its_leaps_which_count_as_the_tolerance_at_least():
    _, velocity = field()
    states, velocities = walk(velocity)
    path = path_of(Train(gradient_path="leap"), [1, 3], SIGMAS)
    leaped = states[1] + (0.4 - 0.9) * velocities[1]
    image = states[3] - 0.4 * velocities[3]
    first = (leaped - states[3]).abs().mean(1)
    second = (image - states[-1]).abs().mean(1)
    found = leap_weights(path, states[[3, 1]], velocities[[3, 1]], states[-1], 1e-6)
    close(found, 1 / (first + second))
    assert (first - second).abs().min() > 1e-3, "each of the two distances counts"
    between = (min(first.min(), second.min()) + max(first.max(), second.max())).item() / 2
    found = leap_weights(path, states[[3, 1]], velocities[[3, 1]], states[-1], between)
    close(found, 1 / (first.clamp(min=between) + second.clamp(min=between)))


def test_rewards_above_the_target_have_no_gradient_and_without_a_target_all_have():
    rewards = torch.tensor([0.2, 0.5, 0.9], requires_grad=True)
    loss = reward_gradients.reward_loss(rewards, 0.6)
    torch.testing.assert_close(loss.detach(), torch.tensor([0.4, 0.1, 0.0]))
    assert torch.autograd.grad(loss.sum(), rewards)[0].tolist() == [-1, -1, 0]
    loss = reward_gradients.reward_loss(rewards, 0.0)
    assert torch.autograd.grad(loss.sum(), rewards)[0].tolist() == [-1, -1, -1]


def drawn(path, count, times=3000):
    generator = torch.Generator().manual_seed(0)
    train = Train(gradient_path=path, gradient_steps=count)
    return [choose_steps(train, NUM_STEPS, generator) for _ in range(times)]


def test_refl_draws_one_of_the_last_steps_and_draft_takes_all_of_them():
    of_refl = [step for (step,) in drawn("refl", 2)]
    assert sorted(set(of_refl)) == [3, 4]
    assert of_refl.count(3) / 3000 == pytest.approx(0.5, abs=0.04)
    assert drawn("draft", 2, times=1) == [[3, 4]]


def test_leaps_are_between_any_two_steps_each_pair_as_often_as_another():
    pairs = drawn("leap", 1)
    for first, second in itertools.combinations(range(NUM_STEPS), 2):
        assert pairs.count([first, second]) / 3000 == pytest.approx(0.1, abs=0.03)


def test_sparse_draws_distinct_steps_late_ones_more_often():
    once = [step for (step,) in drawn("sparse", 1)]
    for step in range(NUM_STEPS):
        assert once.count(step) / 3000 == pytest.approx((step + 1) ** 2 / 55, abs=0.04)
    for steps in drawn("sparse", 3, times=50):
        assert steps == sorted(set(steps))
    assert drawn("sparse", NUM_STEPS, times=1) == [[0, 1, 2, 3, 4]]
