"""Whether rollout and update agree on the log-probs of the same steps; if not, where they part first, and why.

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
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flow_grpo.algorithms.rollout import StoredSteps
from flow_grpo.base import rng
from flow_grpo.base.formatting import markdown_table
from flow_grpo.command_line import checks, command_line
from flow_grpo.diffusers_patch import registry
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.kernels import compilation
from flow_grpo.run import sampling, startup
from flow_grpo.run.update import recompute_steps
from flow_grpo.weights import fsdp_utils, policies

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import train_qwenimage
import train_qwenimage_pr
from random_model import full_config, random_folder, random_model, registered

NUM_MINIBATCHES = 3  # of which a cause is measured
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "plain": SDPBackend.MATH,
}


class Forward(NamedTuple):
    """What one way of computing says of R (image, step) rows."""

    velocity: Tensor  # [R, ...]
    mean: Tensor  # [R, ...]
    log_prob: Tensor  # [R, J]


class Seen(NamedTuple):
    """A forward of the policy, as it was called."""

    x: Tensor
    t: Tensor
    condition: Condition
    velocity: Tensor


def listen(run) -> list[Seen]:
    """Note every forward of the policy from now on."""
    seen, velocity = [], run.velocity

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
            weight.add_(0.02 * noise if "lora_" in name else 0.02 * noise * weight.std())
    run.step += 1


def forward(run, seen, rollout: StoredSteps, rows: Tensor, size=0, change=lambda rows: rows, mode=torch.enable_grad):
    """What the update says of `rows`, image * K + step, in minibatches of `size`, each changed, inside mode()."""
    forwards, plan = [], run.plan
    run.plan = replace(plan, batch_size=size or plan.batch_size)
    for minibatch in rows.split(run.plan.batch_size):
        seen.clear()
        with mode():
            step = recompute_steps(run, change(rollout.take(minibatch, len(rows))))
        mean = step.prev_sample_mean.detach()[:: plan.num_branches]
        forwards.append(
            Forward(seen[-1].velocity[: len(minibatch)], mean, step.log_prob.detach().view(len(minibatch), -1))
        )
        del step  # and its graph, before the next one is made
    run.plan = plan
    return Forward(*(torch.cat(column) for column in zip(*forwards)))


def causes(run, rollout: StoredSteps, before: Callable | None) -> dict[str, dict]:
    """What may differ between two forwards of the same rows, as arguments of `forward`.

    before: () -> context in which the weights are those of before their change.
    """
    size, wider = run.plan.batch_size, rollout.condition.num_tokens + 16
    changes = {"no gradients": dict(mode=torch.no_grad)}
    changes |= {f"batches of {n}": dict(size=n) for n in (1, size // 2, 2 * size) if n not in (0, size)}
    changes["latents in bf16"] = dict(change=lambda rows: replace(rows, latents=rows.latents.bfloat16().float()))
    if rollout.condition.mask is not None:
        changes["text padded by 16 more"] = dict(
            change=lambda rows: replace(rows, condition=rows.condition.padded(wider))
        )
        changes["text cut to the longest prompt"] = dict(
            change=lambda rows: replace(rows, condition=rows.condition.trimmed(1))
        )
    changes["eager" if run.config.compile else "compiled"] = dict(mode=lambda: other_graph(run))
    if run.config.lora.rank:
        merged = policies.MergedWeights(run.pipeline.transformer).applied
        changes["merged adapter"] = dict(mode=lambda: merged())
    if before:
        changes["weights of before the change"] = dict(mode=before)
    return changes | {
        f"{name} attention": dict(mode=lambda b=backend: sdpa_kernel(b)) for name, backend in BACKENDS.items()
    }


@contextmanager
def other_graph(run) -> Iterator[None]:
    """Blocks compiled if they are not, eager if they are."""
    if run.config.compile:
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    compilation.compile_units(
        run.pipeline.transformer, run.model.SHARD_UNITS, 1 - run.config.fsdp.activation_checkpointing % 1
    )
    try:
        with torch.enable_grad():
            yield
    finally:
        for module in run.pipeline.transformer.modules():
            vars(module).pop("forward", None)


def some_rows(rollout: StoredSteps, size: int) -> Tensor:
    """NUM_MINIBATCHES of `size` (image, step) rows at random."""
    order = torch.randperm(len(rollout.image_numbers) * rollout.num_steps, generator=rng.generator(0, "rows"))
    return order[: NUM_MINIBATCHES * size]


def by_cause(run, seen, rollout: StoredSteps, rows: Tensor, before: Callable | None) -> dict[str, Tensor]:
    """The log-probs of `rows` with each cause."""
    shuffled = torch.randperm(len(rows), generator=rng.generator(0, "neighbours"))
    others = forward(run, seen, rollout, rows[shuffled])
    back = shuffled.argsort().to(others.log_prob.device)
    log_probs = {"other neighbours": others.log_prob[back]}
    for name, change in causes(run, rollout, before).items():
        with suppress(RuntimeError):  # not every kernel takes every input
            log_probs[name] = forward(run, seen, rollout, rows, **change).log_prob
    return log_probs


def first_difference(run, epoch: int, rollout: StoredSteps, seen: list[Seen], plain: Forward, rows: Tensor) -> str:
    """Of what follows from one another: window, latents, text, velocity, mean, log-prob; "" if all are equal."""
    index = rows.to(rollout.latents.device)
    image_index, step_index = index // rollout.num_steps, index % rollout.num_steps
    if not torch.equal(rollout.timesteps.cpu(), planned(run, epoch, rollout)):
        return "window: an image was noisy at other steps than the others of its block"
    x, t = rollout.latents[image_index, step_index], rollout.timesteps[image_index, step_index]
    calls = [match(x[i], t[i], seen) for i in range(len(rows))]
    drawn = torch.stack([call.x[row] for call, row in calls])
    if not torch.equal(drawn, x):
        kind = " in bf16" if torch.equal(drawn.bfloat16().float(), x) else ""
        return f"latents: stored{kind}, not as the policy saw them"
    texts = torch.stack([rollout.condition.text_embeds[i] for i in image_index])
    seen_texts = [call.condition.text_embeds[row] for call, row in calls]
    if any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(seen_texts, texts)):
        return "text: the policy saw other embeddings"
    velocities = torch.stack([call.velocity[row] for call, row in calls])
    noted = Forward(velocities, rollout.means[image_index, step_index], rollout.log_probs[image_index, step_index])
    names = ("velocity", "mean", "log-prob")
    return next((name for name, a, b in zip(names, noted, plain) if not torch.equal(a, b)), "")


def planned(run, epoch: int, rollout: StoredSteps) -> Tensor:
    """[B, K] f32: the timesteps that should have been noisy."""
    timesteps, sample = run.scheduler.timesteps.cpu(), run.config.sample
    if run.plan.num_branches > 1:
        return timesteps[: rollout.num_steps].expand(len(rollout.image_numbers), -1)
    blocks = [batch.block for batch in sampling.batches(run, epoch) for _ in batch.image_numbers]
    noisy_steps = [
        train_qwenimage.window_at(sample, run.config.seed, epoch, block, updates=run.step) for block in blocks
    ]
    return torch.stack([timesteps[list(window)][: rollout.num_steps] for window in noisy_steps])


def match(x: Tensor, t: Tensor, seen: list[Seen]) -> tuple[Seen, int]:
    """The forward, and its row, at this timestep and nearest to these latents."""

    def distances(call: Seen) -> Tensor:
        return (call.x - x).flatten(1).square().sum(1) + 1e9 * (call.t - t).abs()

    nearest = min(seen, key=lambda call: distances(call).min())
    return nearest, distances(nearest).argmin()


def compare(run, seen, before: Callable | None) -> dict:
    """Draw an epoch and score it by the update's forward: the gap, the first difference and what explains it best."""
    seen.clear()
    script = train_qwenimage_pr if run.plan.num_branches > 1 else train_qwenimage
    rollout, _ = script.rollout(run, 0)
    drawn, rows = list(seen), some_rows(rollout, run.plan.batch_size)
    plain = forward(run, seen, rollout, rows)
    index = rows.to(rollout.latents.device)
    noted = rollout.log_probs[index // rollout.num_steps, index % rollout.num_steps]
    result = dict(gap=largest(noted, plain.log_prob), cause="")
    result["first"] = first_difference(run, 0, rollout, drawn, plain, rows)
    if result["gap"] > 0:
        gaps = {name: largest(noted, other) for name, other in by_cause(run, seen, rollout, rows, before).items()}
        best = min(gaps, key=gaps.get)
        result["cause"] = best if gaps[best] < 0.1 * result["gap"] else ""
    return result


def largest(a: Tensor, b: Tensor) -> float:
    """max |a - b|; infinite where a kernel made a NaN."""
    return (a.double() - b.double()).abs().nan_to_num(torch.inf).max().item()


def check(config, num_prompts: int = 2) -> dict[str, dict]:
    """What was found of each rollout that was compared, by name."""
    branches, size = config.sample.num_branches > 1, config.sample.batch_size
    config.sample.num_prompts_per_epoch, config.sample.num_images_per_prompt = num_prompts, size
    config.sample.num_branches, config.train.updates_per_epoch = 2 if branches else 1, 1
    with tempfile.TemporaryDirectory() as folder:
        config.output_dir = folder
        run = startup.start(config, checks.PR if branches else checks.GRPO)
        seen, compared, before = listen(run), {}, None
        for number, when in enumerate(("first weights", "changed weights")):
            change_weights(run, number)
            compared[when] = compare(run, seen, before)
            before = policies.Reference(run.pipeline.transformer, fresh=False).applied
        run.pool.close()
        run.board.finish()
    return compared


def main(config, random_weights: bool) -> int:
    if random_weights:
        name = next(name for name in registry.names() if f"_{name}" in config.name)
        with tempfile.TemporaryDirectory() as folder, registered(random_model(name), "Random"):
            config = full_config(config, "pr")
            config.model = random_folder(Path(folder, "model"))
            compared = check(config, num_prompts=1)
    else:
        compared = check(config)
    settings = f"{config.precision}, batches of {config.sample.batch_size}, compiled: {config.compile}"
    rows = [[name, f"{row['gap']:.2g}", row["first"] or "-", row["cause"] or "-"] for name, row in compared.items()]
    print(f"{config.name}: {settings}\n\n{markdown_table(['rollout', 'largest gap', 'parts first at', 'like'], rows)}")
    return int(max(result["gap"] for result in compared.values()) > config.train.clip_range / 10)


if __name__ == "__main__":
    random_weights = {"--random_weights"} & set(sys.argv)  # the model in its published size
    words = [word for word in sys.argv[1:] if word not in random_weights]
    run = lambda config: sys.exit(main(config, bool(random_weights)))  # noqa: E731
    command_line.run(run, command_line.parse("config/grpo.py:shapes_qwenimage_pr", arguments=words))
