"""The start of a run: all that a user can get wrong is refused, then weights are loaded, then it resumes."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from ml_collections import ConfigDict

from flow_grpo import (
    batching,
    best,
    checkpoints,
    checks,
    compiled,
    distributed,
    float8,
    fsdp_utils,
    policies,
    preferences,
    prompts,
    rewards,
    sampling,
    settings,
    watching,
)
from flow_grpo.dashboards import Dashboard
from flow_grpo.diffusers_patch import loading
from flow_grpo.ema import Ema
from flow_grpo.embeddings import Cache
from flow_grpo.evaluation import evaluates, part_of
from flow_grpo.metrics import Meter
from flow_grpo.parity import StepGaps
from flow_grpo.run import Run
from flow_grpo.saving import best_candidate, state
from flow_grpo.scoring.pool import Pool
from flow_grpo.scoring.settings import check_rewards

NO_PROMPTS = prompts.Split("test", []), prompts.Split("test", [])


def start(
    config: ConfigDict,
    model: ModuleType,
    script: checks.Script,
    *,
    make_plan: Callable = batching.plan_batches,
    old: bool = False,
    reference: bool = False,
) -> Run:
    """Check everything, then load everything.

    Args:
        script: what it asks of a config.
        make_plan: how an epoch divides over the ranks, from batching.py.
        old: whether to keep a policy that follows the trained one, see Run.old.
        reference: whether to keep the first policy even where train.beta is 0.

    Raises:
        ValueError: before any weight is loaded, for all that a user can get wrong.
    """
    config.reward_fn = {name: weight for name, weight in config.reward_fn.items() if weight != 0}
    checks.check(config, script)
    data = _check_files(config, model)
    ranks = distributed.init_distributed()
    if config.sample.merged_precision == "fp8":
        float8.check_device(ranks.device)
    plan = make_plan(config, ranks.world_size)
    folder, checkpoint = distributed.broadcast_object(_choose_folder(config) if distributed.is_main() else None)
    run = _load(config, model, ranks, folder, old, reference, plan=plan, **data)
    if checkpoint:
        _resume(run, checkpoint)
    run.board.truncate(run.epoch)
    if evaluates(config) and run.choosing_prompts.name == "test":
        run.board.say(f"{config.dataset} has no validation prompts: the test prompts choose the best policy, too")
    return run


def _load(config, model, ranks, folder: Path, old: bool, reference: bool, **fields) -> Run:
    """Everything with weights, and the run folder; `fields` are the run's others."""
    torch.backends.cuda.enable_cudnn_sdp(model.CUDNN_ATTENTION)
    mesh = fsdp_utils.make_mesh(config.fsdp.mode, ranks.device, config.fsdp.shard_size, config.fsdp.offload_weights)
    no_images = bool(fields["pairs"]) and not evaluates(config)
    pool = None if no_images else Pool(ranks.device, config.reward_fn, config.eval.rewards, config.reward)
    cache, missing = None, []
    if config.embeddings_cache and not no_images:
        cache, missing = _open_cache(config, model, ranks.device, **fields)
    how = dict(vae_dtype=fsdp_utils.DTYPES[config.vae_precision], alone=no_images)
    pipeline = model.load_pipeline(config.model, ranks.device, text=cache is None or bool(missing), **how)
    embed_one = _embedder(config, model, pipeline, cache, missing)  # first: text encoders leave before weights come
    return Run(
        **fields,
        **ranks._asdict(),
        config=config,
        model=model,
        pipeline=pipeline,
        pool=pool,
        **_learner(config, model, pipeline, mesh, ranks.device, old, reference),
        board=Dashboard(folder, config, folder.name, distributed.is_main(), _synchronize(ranks.device)),
        meter=Meter(ranks.device),
        embed_one=embed_one,
        embed_short=_shortener(config.sample.text_multiple, embed_one),
        scheduler=model.schedule(pipeline, config.sample.num_steps, config.resolution, ranks.device),
        gaps=StepGaps(config.sample.num_steps, ranks.device),
        slots=sampling.slots(config.sample),
        levels=model.schedule(pipeline, 1000, config.resolution, ranks.device).timesteps,
    )


def _check_files(config, model) -> dict[str, Any]:
    """That everything the config names is there; the prompts of both splits, and pairs if there are any."""
    policies.check_lora(config.lora)
    if config.sample.text_multiple and not model.MASKED_TEXT:
        raise ValueError(
            f"config.sample.text_multiple is {config.sample.text_multiple}, but {config.model} is conditioned on its "
            "padding, so none of it can be taken away; set 0"
        )
    check_rewards(config.reward_fn, config.eval.rewards, config.reward)
    model.check_folder(config.model)
    pairs, folder = {}, config.preferences.path
    if folder:
        shapes = model.row_shapes(config.model, config.resolution, config.text_tokens)
        pairs = preferences.open_pairs(folder, shapes, config.model, config.resolution)
        taken = config.sample.num_prompts_per_epoch // config.train.updates_per_epoch
        if len(pairs["train"]) < taken:
            raise ValueError(f"{folder} holds {len(pairs['train'])} pairs to train on; an update takes {taken}")
    train = pairs["train"].prompts if folder else prompts.load_prompts(config.dataset, "train")
    chooses, test = _evaluated_prompts(config.dataset) if not folder or evaluates(config) else NO_PROMPTS
    scored = [*([] if folder else train), *chooses.prompts, *test.prompts]
    texts = [prompt.text for prompt in scored]
    rewards.check_prompts([*config.reward_fn, *config.eval.rewards], texts, [prompt.metadata for prompt in scored])
    model.check_prompts(model.without_weights(config.model), texts, config.text_tokens)
    return dict(train_prompts=train, choosing_prompts=chooses, test_prompts=test, pairs=pairs)


def _evaluated_prompts(dataset: str) -> tuple[prompts.Split, prompts.Split]:
    """Those that choose the best policy, and those of the test; without a validation file they are the same."""
    test = prompts.Split("test", prompts.load_prompts(dataset, "test"))
    if prompts.find_file(dataset, "validation") is None:
        return test, test
    return prompts.Split("validation", prompts.load_prompts(dataset, "validation")), test


def _learner(config, model, pipeline, mesh, device, old, reference) -> dict[str, Any]:
    """Lay out and fill the transformer, and build what trains it."""
    policies.attach(pipeline.transformer, config.lora, model.LORA_TARGETS)
    if config.fsdp.activation_checkpointing:
        pipeline.transformer.enable_gradient_checkpointing()
    fsdp_utils.prepare(
        pipeline.transformer,
        mesh,
        units=model.SHARD_UNITS,
        device=device,
        precision=config.precision,
        weights=model.transformer_folder(config.model),
        init=policies.adapter_init(config.lora, config.seed),
        offload=config.fsdp.offload_weights,
    )
    if config.compile:
        compiled.compile_units(pipeline.transformer, model.SHARD_UNITS, config.fsdp.activation_memory)
        loading.compile_decoder(pipeline)
    train, trained = config.train, fsdp_utils.trainable_parameters(pipeline.transformer)
    optimizer = torch.optim.AdamW(
        trained.values(),
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_eps,
        weight_decay=train.weight_decay,
        fused=next(iter(trained.values())).is_cuda,  # saves a copy of all that is trained
    )
    return dict(
        optimizer=optimizer,
        loss_scale=torch.tensor(2.0**16 if config.precision == "fp16" else 1.0, dtype=torch.float64),
        ema=Ema(trained, train.ema_decay, train.ema_interval),
        reference=_reference(config, pipeline.transformer) if train.beta > 0 or reference else None,
        old=Ema(trained) if old else None,
    )


def _reference(config: ConfigDict, transformer: torch.nn.Module) -> policies.Reference:
    return policies.Reference(
        transformer,
        interval=config.train.reference_interval,
        guidance_scale=config.train.reference_guidance_scale,
        fresh=not config.lora.path,
    )


def _open_cache(
    config, model, device, plan, train_prompts, choosing_prompts, test_prompts, pairs
) -> tuple[Cache, list[str]]:
    """The cache of config.embeddings_cache, and the prompts that this run will draw or evaluate but the cache lacks."""
    how = dict(model.text_version(config.model), guided=_is_guided(config))
    cache = Cache(config.embeddings_cache, how, config.text_tokens, device)
    drawn = [
        train_prompts[pick].text
        for epoch in range(config.num_epochs if not pairs else 0)
        for pick in prompts.epoch_prompts(len(train_prompts), plan.num_groups, config.seed, epoch)
    ]
    splits = (choosing_prompts, test_prompts) if evaluates(config) else ()
    evaluated = [prompt.text for split in splits for prompt in part_of(split, config).prompts]
    return cache, distributed.broadcast_object(cache.missing([*drawn, *evaluated]))


def _is_guided(config) -> bool:
    reference = config.train.reference_guidance_scale
    return max(config.sample.guidance_scale, config.eval.guidance_scale, reference) > 1


def _embedder(config, model, pipeline, cache: Cache | None, missing: list[str]) -> Callable:
    """One prompt at a time, so that its numbers do not depend on its neighbours; the last 1024 are kept.

    With a cache, what it lacks is encoded now, and the text encoders are dropped.
    """
    how = dict(width=config.text_tokens, guided=_is_guided(config))
    encode = lambda text: model.encode_prompts(pipeline, [text], **how)  # noqa: E731
    if cache is None:
        return lru_cache(maxsize=1024)(encode)
    if missing:
        cache.fill(distributed.shard_list(missing), encode)
        loading.drop_text_encoders(pipeline)
    distributed.barrier()
    return lru_cache(maxsize=1024)(cache.read)


def _shortener(multiple: int, embed_one: Callable) -> Callable | None:
    return lru_cache(maxsize=1024)(lambda text: embed_one(text).trimmed(multiple)) if multiple else None


def _synchronize(device: torch.device) -> Callable | None:
    """Waits for what this thread has asked of the device, not for rewards that are scored on it meanwhile."""
    return torch.cuda.current_stream(device).synchronize if device.type == "cuda" else None


def _choose_folder(config) -> tuple[Path, Path | None]:
    """Where this run writes and what it resumes from. A new run never writes into the folder of an older one.

    Raises ValueError for a checkpoint that is not there, or of another config.
    """
    first = Path(config.output_dir, config.run_name or config.name)
    if config.resume_from not in ("", "latest"):
        checkpoint = checkpoints.find(first, config.resume_from)
        checkpoints.compare_configs(checkpoint, config.to_dict(), settings.may_differ())
        folder = checkpoint.parents[1]  # of "checkpoints", or of the best evaluation's state
        return folder.parent if folder.name == best.NAME else folder, checkpoint
    taken = [first] if first.exists() else []
    while (following := first.with_name(f"{first.name}-{len(taken) + 1}")).exists():
        taken.append(following)
    if config.resume_from == "latest" and taken:
        checkpoint = checkpoints.find(taken[-1] / "checkpoints")
        if checkpoint:
            checkpoints.compare_configs(checkpoint, config.to_dict(), settings.may_differ())
        return taken[-1], checkpoint
    return (following if taken else first), None


def _resume(run: Run, checkpoint: Path) -> None:
    """Go on as if nothing had happened: randomness is named by epoch, so weights and counters are all there is."""
    config, may_differ = run.config.to_dict(), settings.may_differ()
    run.epoch, run.step = checkpoints.load(checkpoint, state(run), config=config, may_differ=may_differ)
    run.saved_epoch = run.epoch
    if evaluates(run.config):
        candidate = best_candidate(run, run.epoch, {})
        run.best_evaluation, notice = best.restore(run.folder, checkpoint, candidate)
        if notice:
            run.board.say(notice)
    watching.resume(run)
