"""A run: everything that lives as long as it, and what all training scripts do between their own lines."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from ml_collections import ConfigDict
from torch import Tensor

from flow_grpo import batching, checkpoints, fsdp_utils, policies, prompts, rewards, settings
from flow_grpo.advantages import group_stats
from flow_grpo.dashboards import Dashboard, Meter
from flow_grpo.ema import Ema
from flow_grpo.evaluation import evaluate
from flow_grpo.rollout import Minibatch

MAY_DIFFER = (  # settings with which a checkpoint of other ones may be resumed: they do not change the mathematics
    "name", "run_name", "output_dir", "project", "resume_from", "num_epochs", "save_freq", "keep_checkpoints",
    "eval_freq", "eval", "fsdp", "vae_batch_size", "sample.completion_batch_size",
)  # fmt: skip


@dataclass
class Run:
    """What a script needs at hand. `velocity` is the policy; the rest are fields, used by the functions below."""

    config: ConfigDict
    plan: batching.BatchPlan
    rank: int
    world_size: int
    device: torch.device
    model: ModuleType  # a diffusers_patch/*_pipeline_with_logprob.py
    pipeline: Any  # its diffusers pipeline; pipeline.transformer is the policy
    train_prompts: list[prompts.Prompt]
    test_prompts: list[prompts.Prompt]
    score: Callable  # (images, prompts, metadata) -> {"avg": [B], name: [B], ...}
    optimizer: torch.optim.AdamW
    loss_scale: float  # 1 but in fp16
    ema: Ema
    reference: Callable | None  # () -> context in which the transformer is the reference; None where beta is 0
    board: Dashboard
    meter: Meter  # means of what the update adds, until the next optimizer step
    embed_one: Callable  # prompt -> its embeddings, one row, cached
    scheduler: Any  # the rollout's, with timesteps set
    epoch: int = 0  # epochs completed
    step: int = 0  # optimizer steps taken
    on_policy: bool = True  # no optimizer step since the rollout
    losses: list[tuple[Tensor, Minibatch]] = field(default_factory=list)  # since the last optimizer step
    epoch_figures: dict[str, float] = field(default_factory=dict)  # for this epoch's line of metrics.jsonl

    @property
    def folder(self) -> Path:
        """Where the run writes."""
        return self.board.run_dir

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """What is trained."""
        return list(fsdp_utils.trainable_parameters(self.pipeline.transformer).values())

    def velocity(self, x: Tensor, t: Tensor, embeds, guidance_scale: float | None = None) -> Tensor:
        """The policy. Rollout and update both go through here, so they cannot disagree."""
        scale = self.config.sample.guidance_scale if guidance_scale is None else guidance_scale
        dtype = fsdp_utils.DTYPES[self.config.precision]
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            return self.model.predict_velocity(self.pipeline.transformer, x, t, embeds, scale)

    def embed(self, texts: list[str]):
        """Embeddings of B prompts."""
        rows = [self.embed_one(text) for text in texts]
        return rows[0].concat(rows)


def start(config: ConfigDict, model: ModuleType, check: Callable, ignored: tuple[str, ...]) -> Run:
    """Check everything, then load everything.

    Args:
        check: of config.sample; what this script asks of it, from settings.py.
        ignored: settings that this script does not read.

    Raises:
        ValueError: before any weight is loaded, for all that a user can get wrong.
    """
    settings.check(config, ignored)
    check(config.sample)
    train_prompts, test_prompts = _check_files(config, model)
    ranks = fsdp_utils.init_distributed()
    plan = batching.plan_batches(config, ranks.world_size)
    mesh = fsdp_utils.make_mesh(config.fsdp.mode, ranks.device, config.fsdp.shard_size)
    folder, checkpoint = fsdp_utils.broadcast_object(_choose_folder(config) if fsdp_utils.is_main() else None)

    pipeline = model.load_pipeline(config.model, ranks.device)
    run = Run(
        config=config,
        plan=plan,
        **ranks._asdict(),
        model=model,
        pipeline=pipeline,
        train_prompts=train_prompts,
        test_prompts=test_prompts,
        score=rewards.multi_score(ranks.device, config.reward_fn),
        **_learner(config, model, pipeline, mesh, ranks.device),
        board=Dashboard(folder, config, folder.name, fsdp_utils.is_main(), _synchronize(ranks.device)),
        meter=Meter(ranks.device),
        embed_one=_embedder(config, model, pipeline),
        scheduler=model.schedule(pipeline, config.sample.num_steps, config.resolution, ranks.device),
    )
    if checkpoint:
        _resume(run, checkpoint)
    run.board.truncate(run.epoch)
    return run


def _check_files(config, model) -> list[list[prompts.Prompt]]:
    """That everything the config names is there; the prompts of both splits."""
    policies.check_lora(config.lora)
    rewards.check_rewards(config.reward_fn)
    splits = [prompts.load_prompts(config.dataset, split) for split in ("train", "test")]
    model.check_folder(config.model)
    texts = [prompt.text for split in splits for prompt in split]
    model.check_prompts(model.without_weights(config.model), texts, config.text_tokens)
    return splits


def _learner(config, model, pipeline, mesh, device) -> dict[str, Any]:
    """Lay out and fill the transformer, and build what trains it."""
    policies.attach(pipeline.transformer, config.lora, model.LORA_TARGETS)
    fsdp_utils.prepare(
        pipeline.transformer,
        mesh,
        units=model.SHARD_UNITS,
        device=device,
        precision=config.precision,
        weights=model.transformer_folder(config.model),
        init=policies.adapter_init(config.lora, config.seed),
        activation_checkpointing=config.fsdp.activation_checkpointing,
    )
    train, trained = config.train, fsdp_utils.trainable_parameters(pipeline.transformer)
    optimizer = torch.optim.AdamW(
        trained.values(),
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
    )
    return dict(
        optimizer=optimizer,
        loss_scale=2.0**16 if config.precision == "fp16" else 1.0,
        ema=Ema(trained, train.ema_decay, train.ema_interval),
        reference=policies.keep_reference(pipeline.transformer) if train.beta > 0 else None,
    )


def _embedder(config, model, pipeline) -> Callable:
    """One prompt at a time, so that its numbers do not depend on its neighbours; the last 1024 are kept."""
    guided = max(config.sample.guidance_scale, config.eval.guidance_scale) > 1
    encode = lambda text: model.encode_prompts(pipeline, [text], width=config.text_tokens, guided=guided)  # noqa: E731
    return lru_cache(maxsize=1024)(encode)


def _synchronize(device: torch.device) -> Callable | None:
    return torch.cuda.synchronize if device.type == "cuda" else None


def _choose_folder(config) -> tuple[Path, Path | None]:
    """Where this run writes and what it resumes from. A new run never writes into the folder of an older one.

    Raises ValueError for a checkpoint that is not there, or of another config.
    """
    first = Path(config.output_dir, config.run_name or config.name)
    if config.resume_from not in ("", "latest"):
        checkpoint = checkpoints.find(first, config.resume_from)
        checkpoints.compare_configs(checkpoint, config.to_dict(), MAY_DIFFER)
        return checkpoint.parents[1], checkpoint
    taken = [first] if first.exists() else []
    while (following := first.with_name(f"{first.name}-{len(taken) + 1}")).exists():
        taken.append(following)
    if config.resume_from == "latest" and taken:
        checkpoint = checkpoints.find(taken[-1] / "checkpoints")
        if checkpoint:
            checkpoints.compare_configs(checkpoint, config.to_dict(), MAY_DIFFER)
        return taken[-1], checkpoint
    return (following if taken else first), None


def _resume(run: Run, checkpoint: Path) -> None:
    """Go on as if nothing had happened: randomness is named by epoch, so weights and counters are all there is."""
    state = checkpoints.training_state(run.pipeline.transformer, run.optimizer, run.ema)
    run.epoch, run.step = checkpoints.load(checkpoint, state, config=run.config.to_dict(), may_differ=MAY_DIFFER)


def epochs(run: Run) -> Iterator[int]:
    """The epochs that are left; evaluates, logs and saves around them."""
    config = run.config
    for epoch in range(run.epoch, config.num_epochs):
        if config.eval_freq and (epoch == 0 or epoch % config.eval_freq == 0):
            evaluate(run, epoch)
        run.on_policy = True
        yield epoch
        run.epoch = epoch + 1
        _log_epoch(run, epoch)
        if run.epoch == config.num_epochs or (config.save_freq and run.epoch % config.save_freq == 0):
            save(run)
    if config.eval_freq:
        evaluate(run, run.epoch)


def batches(run: Run, epoch: int) -> Iterator[prompts.Batch]:
    """This rank's batches of an epoch, under a progress bar."""
    dealt = prompts.epoch_batches(run.train_prompts, run.plan, run.config.seed, epoch, run.rank, run.world_size)
    return run.board.bar(dealt, f"epoch {epoch + 1}, rollout", total=run.plan.batches_per_epoch)


def sampling(run: Run) -> dict[str, Any]:
    """What the entry points of a model file take from the run."""
    config, sample = run.config, run.config.sample
    merge = sample.merge_adapter and config.lora.rank
    return dict(
        num_steps=sample.num_steps,
        noise_level=sample.noise_level,
        sde_type=sample.sde_type,
        resolution=config.resolution,
        vae_batch_size=config.vae_batch_size,
        unscored=policies.merged(run.pipeline.transformer) if merge else nullcontext,
    )


def score_images(run: Run, images: Tensor, batch: prompts.Batch) -> dict[str, Tensor]:
    """Rewards of a batch's images [B, ..., 3, H, W], each [B, ...] float32 on the CPU; nothing in them is infinite."""
    shape = images.shape[1:-3]
    repeats = shape.numel()
    texts = [text for text in batch.prompts for _ in range(repeats)]
    metadata = [row for row in batch.metadata for _ in range(repeats)]
    with run.board.timed("reward"):
        scores = run.score(images.flatten(0, -4), texts, metadata)
    return {name: values.view(len(batch.prompts), *shape) for name, values in scores.items()}


def gather_rewards(run: Run, epoch: int, scores: list[dict[str, Tensor]], groups: Tensor) -> tuple[Tensor, Tensor]:
    """The epoch's average rewards and their groups over all ranks, flat [all]; logs what there is to see in them."""
    everyone = {name: fsdp_utils.gather(torch.cat([s[name] for s in scores])).flatten() for name in scores[0]}
    groups = fsdp_utils.gather(groups).flatten()
    stats = group_stats(everyone["avg"], groups)
    run.epoch_figures |= {f"reward/{name}": values.mean().item() for name, values in everyone.items()}
    run.epoch_figures |= {
        "reward/group_std": stats.std.mean().item(),
        "reward/zero_std_share": (stats.std < 1e-6).float().mean().item(),
        "images": (epoch + 1) * len(groups),
    }
    return everyone["avg"], groups


def _log_epoch(run: Run, epoch: int) -> None:
    run.epoch_figures["memory/peak_gib"] = fsdp_utils.peak_memory_gib(run.device)
    run.board.log("epoch", run.epoch_figures, epoch=epoch, step=run.step)
    run.epoch_figures = {}


def save(run: Run) -> None:
    """Write a checkpoint, with the averaged adapter as a LoRA file that diffusers loads."""
    fsdp_utils.reload_optimizer_state(run.optimizer)
    with run.board.timed("save"):
        checkpoints.save(
            run.folder / "checkpoints",
            checkpoints.training_state(run.pipeline.transformer, run.optimizer, run.ema),
            epoch=run.epoch,
            step=run.step,
            config=run.config.to_dict(),
            keep=run.config.keep_checkpoints,
            extra_files=lambda folder: export(run, folder) if run.config.lora.rank else None,
        )


def export(run: Run, folder: Path) -> None:
    """Write the averaged weights for diffusers: a LoRA file, or the whole transformer in full-weight training."""
    with run.ema.applied():
        if run.config.lora.rank:
            checkpoints.save_lora(run.pipeline, folder)
        else:
            checkpoints.save_transformer(run.pipeline.transformer, folder / "transformer")


def finish(run: Run) -> None:
    """Export, draw the plots, and leave the process group."""
    export(run, run.folder)
    run.board.finish()
    fsdp_utils.close()
