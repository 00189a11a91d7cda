"""Check whether rollout and update agree on the log-probs of the same steps; if not, where they part first, and why.

    python tools/check_parity.py --config config/grpo.py:shapes_qwenimage_pr
    python tools/check_parity.py --config config/grpo.py:pickscore_sd3 --random_weights     one GPU, no download

Compares real rollouts, before and after a change of the weights, with the update's own forward over what they left
behind. Where they differ it names the first thing that does, and the cause that explains it best: the one thing with
which the update's forward is nearest to the rollout. Ends with status 1 where a rollout is off by over a tenth of
train.clip_range; train.old_log_prob = "recompute" is the cure of last resort.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flow_grpo.algorithms.rollout import StepRows, StoredSteps
from flow_grpo.base import rng
from flow_grpo.base.formatting import markdown_table
from flow_grpo.command_line import checks, command_line
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.kernels import compilation
from flow_grpo.run import sampling, startup
from flow_grpo.run.update import recompute_steps
from flow_grpo.weights import fsdp_utils, policies

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import train_qwenimage
import train_qwenimage_pr
from random_model import full_config, model_of, random_folder, random_model, registered

NUM_MINIBATCHES = 3  # of which a cause is measured
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "plain": SDPBackend.MATH,
}


class Forward(NamedTuple):
    """Results of one way of computing R rows, each an image and a step."""

    velocity: Tensor  # [R, ...]
    mean: Tensor  # [R, ...]
    log_prob: Tensor  # [R, J]


class Seen(NamedTuple):
    """A forward of the policy, as it was called."""

    x: Tensor
    t: Tensor
    condition: Condition
    velocity: Tensor


class SeenRow(NamedTuple):
    """One image of such a forward."""

    x: Tensor
    text_embeds: Tensor
    velocity: Tensor


def listen(run) -> list[Seen]:
    """Note every forward of the policy from now on."""
    seen = []
    velocity = run.velocity

    def heard(x, t, condition, guidance_scale=None, size=None):
        v = velocity(x, t, condition, guidance_scale, size)
        seen.append(Seen(x, t, condition, v.detach()))
        return v

    run.velocity = heard
    return seen


def change_weights(run, number: int) -> None:
    """Give the adapter, which does nothing at first, or the full weights other values."""
    for name, weight in sorted(fsdp_utils.trainable_parameters(run.pipeline.transformer).items()):
        noise = torch.randn(weight.shape, generator=rng.generator(0, "parity", number, name)).to(weight)
        with torch.no_grad():
            # Half of an adapter's matrices are zero, so that their own spread would change nothing.
            if "lora_" in name:
                weight.add_(0.02 * noise)
            else:
                weight.add_(0.02 * noise * weight.std())
    run.step += 1


def forward(run, seen, rollout: StoredSteps, rows: Tensor, size=0, change=lambda rows: rows, mode=torch.enable_grad):
    """Return what the update says of `rows`, image * K + step: minibatches of `size`, each changed, inside mode()."""
    velocities = []
    means = []
    log_probs = []
    plan = run.plan
    run.plan = replace(plan, batch_size=size or plan.batch_size)
    for minibatch in rows.split(run.plan.batch_size):
        num_rows = len(minibatch)
        seen.clear()
        with mode():
            step = recompute_steps(run, change(rollout.take(minibatch, len(rows))))
        velocities.append(seen[-1].velocity[:num_rows])
        means.append(step.prev_sample_mean.detach()[:: plan.num_branches])
        log_probs.append(step.log_prob.detach().view(num_rows, -1))
        del step  # and its graph, before the next one is made
    run.plan = plan
    return Forward(torch.cat(velocities), torch.cat(means), torch.cat(log_probs))


def causes(run, rollout: StoredSteps, before: Callable | None) -> dict[str, dict]:
    """Return what may differ between two forwards of the same rows, as arguments of `forward`.

    Args:
        before: () -> context in which the weights are those of before their change.
    """
    size = run.plan.batch_size
    changes = {"no gradients": {"mode": torch.no_grad}}
    for number in (1, size // 2, 2 * size):
        if number not in (0, size):
            changes[f"batches of {number}"] = {"size": number}
    changes["latents in bf16"] = {"change": with_rounded_latents}
    if rollout.condition.mask is not None:
        wider = rollout.condition.num_tokens + 16
        changes["text padded by 16 more"] = {"change": partial(with_wider_text, width=wider)}
        changes["text cut to the longest prompt"] = {"change": with_cut_text}
    changes["eager" if run.config.compile else "compiled"] = {"mode": partial(other_graph, run)}
    if run.config.lora.rank:
        changes["merged adapter"] = {"mode": policies.MergedWeights(run.pipeline.transformer).applied}
    if before:
        changes["weights of before the change"] = {"mode": before}
    for name, backend in BACKENDS.items():
        changes[f"{name} attention"] = {"mode": partial(sdpa_kernel, backend)}
    return changes


def with_rounded_latents(rows: StepRows) -> StepRows:
    """Return rows whose latents were in bfloat16 for a moment."""
    return replace(rows, latents=rows.latents.bfloat16().float())


def with_wider_text(rows: StepRows, width: int) -> StepRows:
    """Return rows whose text is padded to more tokens."""
    return replace(rows, condition=rows.condition.padded(width))


def with_cut_text(rows: StepRows) -> StepRows:
    """Return rows without text that is padding in all of them."""
    return replace(rows, condition=rows.condition.trimmed(1))


@contextmanager
def other_graph(run) -> Iterator[None]:
    """Compile the blocks inside if they are not compiled, or run them eagerly if they are."""
    if run.config.compile:
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    activation_memory = 1 - run.config.fsdp.activation_checkpointing % 1
    compilation.compile_units(run.pipeline.transformer, run.model.SHARD_UNITS, activation_memory)
    try:
        with torch.enable_grad():
            yield
    finally:
        for module in run.pipeline.transformer.modules():
            vars(module).pop("forward", None)


def some_rows(rollout: StoredSteps, size: int) -> Tensor:
    """Draw NUM_MINIBATCHES minibatches of `size` rows, each an image and a step: their numbers, [R] int64."""
    num_rows = len(rollout.image_numbers) * rollout.num_steps
    order = torch.randperm(num_rows, generator=rng.generator(0, "rows"))
    return order[: NUM_MINIBATCHES * size]


def by_cause(run, seen, rollout: StoredSteps, rows: Tensor, before: Callable | None) -> dict[str, Tensor]:
    """Return the log-probs [R, J] of `rows` with each cause."""
    shuffled = torch.randperm(len(rows), generator=rng.generator(0, "neighbours"))
    log_prob = forward(run, seen, rollout, rows[shuffled]).log_prob
    back_in_order = shuffled.argsort().to(log_prob.device)
    log_probs = {"other neighbours": log_prob[back_in_order]}
    for name, change in causes(run, rollout, before).items():
        with suppress(RuntimeError):  # not every kernel takes every input
            log_probs[name] = forward(run, seen, rollout, rows, **change).log_prob
    return log_probs


def first_difference(run, epoch: int, rollout: StoredSteps, seen: list[Seen], plain: Forward, rows: Tensor) -> str:
    """Return the first thing in which rollout and update differ, in words; "" if all are equal.

    They are compared in the order in which one follows from the other: window, latents, text, velocity, mean, log-prob.
    """
    index = rows.to(rollout.latents.device)
    at = (index // rollout.num_steps, index % rollout.num_steps)
    if not torch.equal(rollout.timesteps.cpu(), planned(run, epoch, rollout)):
        return "window: an image was noisy at other steps than the others of its block"
    x = rollout.latents[at]
    drawn = drawn_rows(x, rollout.timesteps[at], seen)
    drawn_x = torch.stack([row.x for row in drawn])
    if not torch.equal(drawn_x, x):
        kind = " in bf16" if torch.equal(drawn_x.bfloat16().float(), x) else ""
        return f"latents: stored{kind}, not as the policy saw them"
    for row, image in zip(drawn, at[0]):
        # Texts of other widths are not equal either.
        if not torch.equal(row.text_embeds, rollout.condition.text_embeds[image]):
            return "text: the policy saw other embeddings"
    velocity = torch.stack([row.velocity for row in drawn])
    if not torch.equal(velocity, plain.velocity):
        return "velocity"
    if not torch.equal(rollout.means[at], plain.mean):
        return "mean"
    if not torch.equal(rollout.log_probs[at], plain.log_prob):
        return "log-prob"
    return ""


def planned(run, epoch: int, rollout: StoredSteps) -> Tensor:
    """Return the timesteps that should have been noisy, [B, K] f32."""
    timesteps = run.scheduler.timesteps.cpu()
    if run.plan.num_branches > 1:
        return timesteps[: rollout.num_steps].expand(len(rollout.image_numbers), -1)
    config = run.config
    noisy = []
    for batch in sampling.batches(run, epoch):
        window = train_qwenimage.window_at(config.sample, config.seed, epoch, batch.block, num_updates=run.step)
        noisy += [timesteps[list(window)][: rollout.num_steps]] * len(batch.image_numbers)
    return torch.stack(noisy)


def drawn_rows(x: Tensor, t: Tensor, seen: list[Seen]) -> list[SeenRow]:
    """Return the row of a forward of the rollout for each of R rows of latents and timesteps."""
    drawn = []
    for row_x, row_t in zip(x, t):
        call, row = match(row_x, row_t, seen)
        drawn.append(SeenRow(call.x[row], call.condition.text_embeds[row], call.velocity[row]))
    return drawn


def match(x: Tensor, t: Tensor, seen: list[Seen]) -> tuple[Seen, int]:
    """Return the forward, and its row, at this timestep and nearest to these latents."""

    def distances(call: Seen) -> Tensor:
        return (call.x - x).flatten(1).square().sum(1) + 1e9 * (call.t - t).abs()

    nearest = min(seen, key=lambda call: distances(call).min())
    return nearest, distances(nearest).argmin()


def compare(run, seen, before: Callable | None) -> dict:
    """Draw an epoch and score it by the update's forward: the gap, the first difference and what explains it best."""
    seen.clear()
    script = train_qwenimage_pr if run.plan.num_branches > 1 else train_qwenimage
    rollout, _ = script.rollout(run, 0)
    drawn = list(seen)
    rows = some_rows(rollout, run.plan.batch_size)
    plain = forward(run, seen, rollout, rows)
    index = rows.to(rollout.latents.device)
    noted = rollout.log_probs[index // rollout.num_steps, index % rollout.num_steps]
    gap = largest(noted, plain.log_prob)
    result = {"gap": gap, "cause": "", "first": first_difference(run, 0, rollout, drawn, plain, rows)}
    if gap > 0:
        log_probs = by_cause(run, seen, rollout, rows, before)
        gaps = {name: largest(noted, log_prob) for name, log_prob in log_probs.items()}
        best = min(gaps, key=gaps.get)
        # A cause explains the gap where it leaves less than a tenth of it.
        if gaps[best] < 0.1 * gap:
            result["cause"] = best
    return result


def largest(a: Tensor, b: Tensor) -> float:
    """Return max |a - b|; infinite where a kernel made a NaN."""
    return (a.double() - b.double()).abs().nan_to_num(torch.inf).max().item()


def check(config, num_prompts: int = 2) -> dict[str, dict]:
    """Return what was found of each rollout that was compared, by name."""
    has_branches = config.sample.num_branches > 1
    config.sample.num_prompts_per_epoch = num_prompts
    config.sample.num_images_per_prompt = config.sample.batch_size
    config.sample.num_branches = 2 if has_branches else 1
    config.train.updates_per_epoch = 1
    with tempfile.TemporaryDirectory() as folder:
        config.output_dir = folder
        run = startup.start(config, checks.PR if has_branches else checks.GRPO)
        seen = listen(run)
        compared = {}
        before = None
        for number, when in enumerate(("first weights", "changed weights")):
            change_weights(run, number)
            compared[when] = compare(run, seen, before)
            before = policies.Reference(run.pipeline.transformer, fresh=False).applied
        run.pool.close()
        run.board.finish()
    return compared


def main(config, random_weights: bool) -> int:
    """Print the table of a config's gaps; return 1 if one is above a tenth of train.clip_range, else 0."""
    if random_weights:
        family = random_model(model_of(config.name))
        with tempfile.TemporaryDirectory() as folder, registered(family, "Random"):
            config = full_config(config, "pr", edits=family.MOST_SOURCES > 0)
            config.model = random_folder(Path(folder, "model"))
            compared = check(config, num_prompts=1)
    else:
        compared = check(config)
    settings = f"{config.precision}, batches of {config.sample.batch_size}, compiled: {config.compile}"
    rows = []
    for name, row in compared.items():
        rows.append([name, f"{row['gap']:.2g}", row["first"] or "-", row["cause"] or "-"])
    print(f"{config.name}: {settings}\n\n{markdown_table(['rollout', 'largest gap', 'parts first at', 'like'], rows)}")
    largest_gap = max(row["gap"] for row in compared.values())
    return int(largest_gap > config.train.clip_range / 10)


if __name__ == "__main__":
    # The flag is no setting of a config, whose parser would refuse it.
    flag = "--random_weights"
    random_weights = flag in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != flag]

    def run_and_exit(config) -> None:
        sys.exit(main(config, random_weights))

    command_line.run(run_and_exit, command_line.parse("config/grpo.py:shapes_qwenimage_pr", arguments=arguments))
