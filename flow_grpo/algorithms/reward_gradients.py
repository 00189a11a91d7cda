"""Gradients of an image's reward through some of the velocities that drew it: pure functions of tensors.

Euler's walk of T steps goes from noise to the image: x_{i+1} = x_i + (sigma_{i+1} - sigma_i) v_i with v_i = v(x_i).
Below, x_0 is the image at the walk's end, not the walk's first state. A path writes x_0 as an expression of some of the
velocities, which are computed anew at states that the walk has stored. The value of x_0 stays that of the walk (with
refl: that which v_k predicts); a path only decides its gradient. sg stops gradients:

    refl    x_0 = sg(x_k) - sigma_k v_k                               ReFL (arXiv:2304.05977), of a flow
    draft   the walk's last K steps from sg(x_{T-K})                  DRaFT-K (arXiv:2309.17400)
    leap    x_j = sg(x_k) + (sigma_j - sigma_k) v_k,                  LeapAlign (arXiv:2604.15311)
            x_0 = x_j - sigma_j v(a x_j + (1 - a) sg(x_j))
    sparse  x_0 = x_T + sum (sigma_{i+1} - sigma_i) v(sg(x_i))        FlowBP (arXiv:2606.11075)
            over all steps, where only K chosen ones have gradients

So the gradient with respect to the image can be computed first. Then it goes back through one velocity at a time
(`backpropagate`), and there is never more than the graph of one forward, however many steps a path has.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flow_grpo.settings.sections import Train


class PathStep(NamedTuple):
    """A velocity that gradients go through."""

    step: int  # of the walk, from 0: where it is computed
    weight: float  # of the velocity in what comes after it on the path
    passes: float = 0.0  # share of the gradient with respect to its input that goes on to the path's step before it


def choose_steps(train: Train, num_steps: int, generator: torch.Generator) -> list[int]:
    """Draw the steps of train.gradient_path, in the order of the walk, which has `num_steps`."""
    if train.gradient_path == "leap":
        return sorted(torch.randperm(num_steps, generator=generator)[:2].tolist())
    first_late_step = num_steps - train.gradient_steps
    if train.gradient_path == "refl":
        return [int(torch.randint(first_late_step, num_steps, (), generator=generator))]
    if train.gradient_path == "draft":
        return list(range(first_late_step, num_steps))

    # FlowBP: step i with probability ~ (i + 1)^2, without replacement.
    odds = torch.arange(1.0, num_steps + 1).square()
    return sorted(torch.multinomial(odds, train.gradient_steps, generator=generator).tolist())


def path_of(train: Train, steps: list[int], sigmas: list[float]) -> list[PathStep]:
    """Return the velocities of train.gradient_path from the last to the first, as gradients meet them.

    Args:
        steps: as from `choose_steps`.
        sigmas: [T + 1] of the walk.
    """
    if train.gradient_path == "refl":
        (step,) = steps
        return [PathStep(step, -sigmas[step])]
    if train.gradient_path == "draft":
        return [PathStep(step, sigmas[step + 1] - sigmas[step], passes=1.0) for step in reversed(steps)]
    if train.gradient_path == "leap":
        first, second = steps
        return [
            PathStep(second, -sigmas[second], passes=train.leap_discount),
            PathStep(first, sigmas[second] - sigmas[first]),
        ]
    assert train.gradient_path == "sparse", train.gradient_path
    factor = sparse_factor(steps, sigmas, train.sparse_rescale)
    return [PathStep(step, factor * (sigmas[step + 1] - sigmas[step])) for step in reversed(steps)]


def sparse_factor(steps: list[int], sigmas: list[float], rescale: float) -> float:
    """Factor of the chosen steps' gradients: 1 + rescale (length of the walk / that of its chosen steps - 1) (FlowBP,
    arXiv:2606.11075)."""
    chosen = sum(sigmas[step] - sigmas[step + 1] for step in steps)
    return 1 + rescale * ((sigmas[0] - sigmas[-1]) / chosen - 1)


def leap_weights(path: list[PathStep], states: Tensor, velocities: Tensor, x_0: Tensor, tolerance: float) -> Tensor:
    """Weights of images in the loss, [B]: 1 / (d_j + d_0), where d_j and d_0 are the mean absolute differences between
    where the leaps land and the walk's own states x_j and x_0, at least `tolerance` each (LeapAlign, arXiv:2604.15311).

    Args:
        path: of "leap", its second step first.
        states, velocities: [2, B, ...], the walk's at the path's steps, in the order of the path.
        x_0: [B, ...], the walk's image.
    """
    second, first = path
    x_j, x_k = states
    v_j, v_k = velocities
    landed_j = x_k + first.weight * v_k
    landed_0 = x_j + second.weight * v_j
    distance_j = (landed_j - x_j).abs().flatten(1).mean(1)
    distance_0 = (landed_0 - x_0).abs().flatten(1).mean(1)
    return 1 / (distance_j.clamp(min=tolerance) + distance_0.clamp(min=tolerance))


def reward_loss(rewards: Tensor, target: float) -> Tensor:
    """Loss of rewards [B], [B]: max(0, target - reward), or -reward where there is no target (0)."""
    if target:
        return F.relu(target - rewards)
    return -rewards


# (place on the path, state [B, ...]) -> the velocity there [B, ...], and a further loss of it, [], or 0.
Recompute = Callable[[int, Tensor], tuple[Tensor, Tensor | float]]


def backpropagate(path: list[PathStep], states: Tensor, gradient: Tensor, recompute: Recompute) -> None:
    """Add the gradients of a loss of the image to whatever the velocities depend on, the last velocity first.

    Args:
        path: of K steps, as from `path_of`.
        states: [K, B, ...], of the walk at these steps.
        gradient: [B, ...], of the loss with respect to the image.
    """
    for place, step in enumerate(path):
        state = states[place].detach()
        passes_on = step.passes > 0 and place + 1 < len(path)
        state.requires_grad_(passes_on)
        velocity, further_loss = recompute(place, state)
        loss = (velocity * (step.weight * gradient)).sum() + further_loss
        loss.backward()
        if passes_on:
            # An earlier step moves the image in two ways: by the state, to which later steps only add (weight 1), and
            # by the velocity that this step computes from it.
            assert state.grad is not None
            gradient = gradient + step.passes * state.grad
