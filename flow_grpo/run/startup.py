"""Start of a run: refuse everything that a user can get wrong, then load weights, then resume."""

import math
import stat
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from ml_collections import ConfigDict

from flow_grpo import rewards
from flow_grpo.algorithms.prompt_signal import PromptSignal
from flow_grpo.base import checksums, distributed, folders, locations, signals
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.base.prompt import Prompt
from flow_grpo.command_line import checks, launcher
from flow_grpo.data import captioned_images, embedding_cache, prompts
from flow_grpo.diffusers_patch import loading, model_classes, registry
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.size import training_size
from flow_grpo.kernels import compilation, flash_attention
from flow_grpo.monitoring import provenance, trackers
from flow_grpo.monitoring.dashboard import Dashboard, explained, say
from flow_grpo.monitoring.metrics import Meter
from flow_grpo.plan import sketch
from flow_grpo.run import dry_run, evaluate, input_files, loop, resume
from flow_grpo.run.run import Experiment, Prompts, Run
from flow_grpo.scoring.pool import Pool, open_pool
from flow_grpo.scoring.settings import check_rewards
from flow_grpo.settings import table
from flow_grpo.settings.sections import Config, Train
from flow_grpo.weights import base_lora, fsdp_utils, load_weights, model_files, modulation, policies, quantisation
from flow_grpo.weights.ema import Ema


def start(
    config: ConfigDict,
    script: checks.Script,
    *,
    extra_policies: tuple[str, ...] = (),
    reference: bool = False,
    stored_prompts: list[Prompt] | None = None,
) -> Run:
    """Check everything, then load everything, and resume. Raises UserError, before any weight is loaded, for all that a
    user can get wrong.

    Args:
        config: as files and flags made it. It stays as it is: from here on `run.config` has the settings.
        extra_policies: names for policies that the script keeps beside the trained one, see Run.extra_policies.
        reference: whether to keep the first policy even where train.beta is 0.
        stored_prompts: prompts of stored images, to train on in place of the data set's.
    """
    settings = checks.check(config, script)
    trackers.check_logger(settings.logger)
    _plan_by_sizes(settings, script, stored_prompts, len(extra_policies))
    family = model_classes.resolve(settings.model, settings.model_class)
    settings = model_classes.with_digest(settings, family)
    resume.check_places(settings)
    run_prompts = _check_files(settings, family, stored_prompts)
    if settings.dry_run:
        _end_dry_run(_planned(settings, script, family, run_prompts, settings.dry_run), len(extra_policies))
    ranks = _join_ranks(settings)
    experiment = _planned(settings, script, family, run_prompts, ranks.world_size)
    place = distributed.on_main(resume.take_folder, settings, run_prompts.files).absolute()
    settings = table.with_values(settings, place.kept_settings)
    with folders.released_on_error(place.folder):
        run = _load_beside_digests(experiment._replace(config=settings), ranks, place, extra_policies, reference)
    if place.checkpoint:
        resume.resume(run, place, place.checkpoint)
    run.board.truncate(run.epoch, evaluate.remaining_kinds(run))
    _say_first_lines(run)
    with explained(run.folder):
        distributed.on_main(provenance.note_start, run.folder, settings, run.world_size, run.epoch)
    signals.listen(partial(loop.lacks_time, run), partial(loop.conclude_after_signal, run))
    return run


def _load_beside_digests(
    experiment: Experiment,
    ranks: distributed.Ranks,
    place: resume.Place,
    extra_policies: tuple[str, ...],
    reference: bool,
) -> Run:
    """Load the run while the digests of a new run's model are computed, and store these before anything is trained."""
    with distributed.on_all(_later_digests, experiment.config, place) as digests:
        run = _load(experiment, ranks, place, extra_policies, reference)
        if place.checkpoint is None:
            with explained(run.folder):
                run.inputs = distributed.on_main(input_files.write_with_model, run.folder, run.inputs, digests)
    return run


def _later_digests(config: Config, place: resume.Place) -> AbstractContextManager[checksums.LaterDigests | None]:
    """Begin to compute the digests of a new run's model on the rank that stores them. A run that goes on has compared
    all of its files, before any weight is loaded."""
    if place.checkpoint or not distributed.is_main():
        return nullcontext()
    return input_files.later_model(config, place.folder)


def _say_plan(run: Run) -> None:
    """Say how many images an epoch draws and what becomes of them."""
    one, several = ("GPU", "GPUs") if run.device.type == "cuda" else ("process", "processes")
    processes = f"one {one}" if run.world_size == 1 else f"each of {run.world_size} {several}"
    run.board.say(f"an epoch: {dry_run.epoch(run.config, run.plan, processes)}")


def _say_first_lines(run: Run) -> None:
    """Say what an epoch is, and what to keep in mind of a run's tracker, of its prompts and of its loss."""
    config = run.config
    _say_plan(run)
    run.board.say(trackers.notice(config.logger, run.folder))
    run.board.say(loading.caution(run.pipeline.scheduler))
    run.board.say(dry_run.overlap_notice(run.prompts.train, run.prompts.evaluated))
    run.board.say(dry_run.stretch_notice(run.prompts.example, run.size))
    run.board.say(base_lora.other_bases(config.lora, config.train.teachers))
    run.board.say(checks.caution(config))
    if config.evaluates and run.prompts.choosing.name == "test":
        run.board.say(f"{config.dataset} has no validation prompts: the test prompts choose the best policy, too")


def _join_ranks(config: Config) -> distributed.Ranks:
    """Meet the other ranks. Raise UserError where the device lacks what the config's precision or attention asks
    for."""
    ranks = distributed.init_distributed()
    quantisation.check_device(config, ranks.device)
    flash_attention.check_device(config.attention, ranks.device)
    return ranks


def _planned(
    config: Config, script: checks.Script, family: type[FlowModel], run_prompts: Prompts, world_size: int
) -> Experiment:
    """Divide an epoch over a number of GPUs. Raises UserError if it does not divide, or if files of weights are not
    whole."""
    plan = script.plan(config, world_size)
    assert plan is not None, "a script that trains has a plan"
    # Text encoders and VAE are loaded only if images are made.
    model_files.check_weights(config.model, family, frozen_parts=run_prompts.example is not None)
    return Experiment(config, family, plan, run_prompts)


def _end_dry_run(experiment: Experiment, num_extra: int) -> NoReturn:
    """Say what the run would be, which keeps `num_extra` policies beside the trained one, and end the process."""
    if launcher.is_main():
        lines = dry_run.describe(experiment, num_extra)
        is_json = experiment.config.dry_run_format == "json"
        if not is_json:
            say(lines)
        pool = _load_rewards(experiment, torch.device("cpu"))
        if pool:
            pool.close()
        # The last line, so that a program finds it.
        if is_json:
            say(lines)
    raise SystemExit(0)


def published_without_files(config: Config) -> registry.Weights | None:
    """Return the published model of a dry run whose files cannot be had, so that nothing in them can be checked; else
    None."""
    published = registry.published(config.model)
    if not config.dry_run or not published or not locations.unreachable(config.model):
        return None
    return published


def family_of(config: Config) -> type[FlowModel]:
    """Return the class of a run's model, for checks before the start; of a dry run of a published model whose files
    cannot be had, one that is made from its sizes."""
    published = published_without_files(config)
    if published:
        return sketch.family_of(published)
    return model_classes.resolve(config.model, config.model_class)


def _plan_by_sizes(config: Config, script: checks.Script, stored_prompts: list[Prompt] | None, num_extra: int) -> None:
    """End a dry run of a published model whose files cannot be had: say what the run would be by the model's sizes."""
    published = published_without_files(config)
    if published is None:
        return
    if launcher.is_main():
        family = sketch.family_of(published)
        _check_family(config, family)
        run_prompts = _load_prompts(config, stored_prompts)
        check_prompt_weights(config, run_prompts.train)
        plan = script.plan(config, config.dry_run)
        assert plan is not None, "a script that trains has a plan"
        experiment = Experiment(config, family, plan, run_prompts)
        lines = dry_run.describe(experiment, num_extra)
        if config.dry_run_format == "text":
            say(
                f"{config.model} is not on this machine, and the hub does not answer: the plan is that of its "
                "published sizes; its files, the prompts' length and the rewards were not checked"
            )
        say(lines)
    raise SystemExit(0)


def _load(
    experiment: Experiment,
    ranks: distributed.Ranks,
    place: resume.Place,
    extra_policies: tuple[str, ...],
    reference: bool,
) -> Run:
    """Load models and rewards, and make the state of the run."""
    config = experiment.config
    train = config.train
    mesh = fsdp_utils.make_mesh(config.fsdp.mode, ranks.device, config.fsdp.offload == "weights")
    pool = _load_rewards(experiment, ranks.device)
    model, embed_one = _load_frozen(experiment, ranks.device)
    lay_out(config, model, mesh)
    trained = fsdp_utils.trainable_parameters(model.transformer)
    return Run(
        rank=ranks.rank,
        world_size=ranks.world_size,
        device=ranks.device,
        config=config,
        plan=experiment.plan,
        model=model,
        prompts=experiment.prompts,
        loaded_pool=pool,
        optimizer=_optimizer(train, trained),
        ema=Ema(trained, train.ema_decay, train.ema_interval),
        reference=_reference(config, model.transformer) if train.beta > 0 or reference else None,
        extra_policies={name: Ema(trained) for name in extra_policies},
        inputs=place.inputs,
        board=Dashboard(place.folder, config, distributed.is_main(), _synchronizer(ranks.device)),
        meter=Meter(ranks.device),
        embed_one=embed_one,
        scheduler=model.schedule(config.sample.num_steps, training_size(config)),
        prompt_signal=prompt_signal(config),
    )


def check_prompt_weights(config: Config, prompts: list[Prompt]) -> None:
    """Raise UserError where prompts cannot be drawn by their signal: there are no more than an epoch draws, or a reward
    has no range that its spread could be compared with."""
    if config.sample.prompt_weights == "uniform":
        return
    per_epoch = config.sample.num_prompts_per_epoch
    if len(prompts) <= per_epoch:
        raise UserError(
            f"config.sample.prompt_weights is 'signal', which chooses among prompts, but an epoch draws {per_epoch} "
            f"(config.sample.num_prompts_per_epoch) and {quoted(config.dataset)} has {len(prompts)}; set fewer, or "
            "'uniform'"
        )
    for name in config.reward_fn:
        if not 0 < rewards.span(name) < math.inf:
            raise UserError(
                f"config.sample.prompt_weights is 'signal', which compares the spread of rewards with their range, but "
                f"reward {name!r} has none; set 'uniform', which loses nothing where images hardly ever score alike, "
                "or give the file of a reward of your own RANGE = (LOWEST, HIGHEST)"
            )


def prompt_signal(config: Config) -> PromptSignal | None:
    """Return the signal by which a run draws prompts, before any was drawn; None where all are drawn alike."""
    sample = config.sample
    if sample.prompt_weights == "uniform":
        return None
    span = sum(abs(weight) * rewards.span(name) for name, weight in config.reward_fn.items())
    return PromptSignal(sample.prompt_weight_decay, sample.prompt_weight_floor, span)


def _load_rewards(experiment: Experiment, device: torch.device) -> Pool | None:
    """Load and try the rewards; None if no image is ever made."""
    config = experiment.config
    prompt = experiment.prompts.example
    if prompt is None:
        return None
    shape = experiment.family.image_shape(training_size(config))
    return open_pool(device, config.reward_fn, config.eval.rewards, config.reward, shape, prompt)


def _synchronizer(device: torch.device) -> Callable[[], None] | None:
    """Function that waits for the work that this thread has queued on the device, or None on a CPU.

    Rewards are scored on other streams, and are not waited for.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.current_stream(device).synchronize


def _load_frozen(experiment: Experiment, device: torch.device) -> tuple[FlowModel, Callable[[Prompt], Condition]]:
    """Load the model, its transformer still empty, and make the function from a prompt to its condition.

    Prompts are encoded one at a time, so that a condition does not depend on its neighbours. Text encoders are loaded
    only if config.cache_dir lacks prompts, and dropped when it has them.
    """
    config = experiment.config
    makes_images = experiment.prompts.example is not None
    cache = None
    missing = []
    if config.cache_dir and makes_images:
        cache, missing = _open_cache(experiment, device)
    model = experiment.family.load(
        config.model,
        device,
        vae_dtype=fsdp_utils.DTYPES[config.vae_precision],
        alone=not makes_images,
        text=cache is None or bool(missing),
    )
    guided = experiment.is_guided

    def encode(prompt: Prompt) -> Condition:
        return model.encode([prompt], width=config.text_tokens, guided=guided)

    if cache is None:
        return model, embedding_cache.remembered(encode)
    if missing:
        # Each rank encodes its share.
        cache.fill(missing[distributed.rank() :: distributed.world_size()], encode)
        loading.drop_text_encoders(model.pipeline)
    distributed.barrier()
    return model, embedding_cache.remembered(cache.read)


def _check_files(config: Config, family: type[FlowModel], stored_prompts: list[Prompt] | None) -> Prompts:
    """Return the run's prompts. Raise UserError unless everything that the config names is there and fits."""
    load_weights.check_model(config.model, config.lora, family)
    _check_family(config, family)
    if config.cache_dir and not config.dry_run:
        folders.ensure_folder(Path(config.cache_dir), "config.cache_dir")
    _check_compile_cache(config)
    check_rewards(config.reward_fn, config.eval.rewards, config.reward)
    model = family.without_weights(config.model)
    model.check_size(training_size(config))
    model.check_steps(config.sample.num_steps, "config.sample.num_steps")
    if config.evaluates:
        model.check_steps(config.eval.num_steps, "config.eval.num_steps")
    run_prompts = _load_prompts(config, stored_prompts)
    check_prompt_weights(config, run_prompts.train)
    scored = []
    for file in run_prompts.files:
        scored += file.prompts
    rewards.check_prompts(config.reward_fn, scored, config.eval.rewards)
    encoded = scored + [image.prompt for image in run_prompts.data]
    model.check_sources(encoded)
    most_tokens = model.check_prompts(encoded, config.text_tokens)
    return run_prompts._replace(most_tokens=most_tokens)


def _check_family(config: Config, family: type[FlowModel]) -> None:
    """Raise UserError for a setting that the model's class does not take. Needs no file of weights."""
    modulation.check(config, family)
    family.check_text_multiple(config.sample.text_multiple, config.model)
    if config.attention and config.attention not in family.ATTENTIONS:
        choices = ["", *family.ATTENTIONS]
        raise UserError(
            f"config.attention is {config.attention!r}; for {config.model} it may be {', '.join(map(repr, choices))}"
        )
    if config.batched_guidance and not _is_ever_guided(config, family):
        raise UserError(
            f"config.batched_guidance is True, but {family.NAME} takes no second forward at this run's guidance "
            "scales: set False"
        )


def _is_ever_guided(config: Config, family: type[FlowModel]) -> bool:
    """Tell whether a velocity of the rollout, the update or an evaluation takes a second forward."""
    scales = [
        config.sample.guidance_scale,
        config.train.guidance_scale,
        config.train.reference_guidance_scale,
        config.eval.guidance_scale,
    ]
    return any(family.is_guided(scale) for scale in scales)


def _check_compile_cache(config: Config) -> None:
    """Make config.compile_cache. Raise UserError where others could put a program into it, or where this run could not
    put its own."""
    if not config.compile or not config.compile_cache:
        return
    folder = Path(config.compile_cache)
    if not config.dry_run:
        folders.ensure_folder(folder, "config.compile_cache")
    if folder.is_dir() and folder.stat().st_mode & stat.S_IWOTH:
        raise UserError(
            f"config.compile_cache: everybody may write to {folder}, and what is in it is run as a program; take a "
            f"folder of your own or of your team's, or take the right away: chmod o-w {folder}"
        )
    try:
        if folder.is_dir():
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"config.compile_cache: {folder} cannot be written: {error.strerror}") from error


def _load_prompts(config: Config, stored_prompts: list[Prompt] | None) -> Prompts:
    """Open the files of prompts that the run needs, and no others."""
    drawn = stored_prompts is None
    files = {}
    if drawn:
        files["train"] = _open_split(config.dataset, "train")
    if drawn or config.evaluates:
        if prompts.find_file(config.dataset, "validation"):
            files["validation"] = _open_split(config.dataset, "validation")
        files["test"] = _open_split(config.dataset, "test")

    # Without validation prompts the test prompts choose the best policy, too.
    test = prompts.Split("test", files["test"].prompts if "test" in files else [])
    choosing = test
    if "validation" in files:
        choosing = prompts.Split("validation", files["validation"].prompts)
    evaluated = []
    if config.evaluates:
        evaluated = [test] if choosing is test else [choosing, test]
    train = files["train"].prompts if drawn else stored_prompts
    data = []
    if config.train.data:
        data = captioned_images.open_folder(config.train.data, "config.train.data")
    return Prompts(train, choosing, test, evaluated, drawn, list(files.values()), data)


def _open_split(dataset: str, split: str) -> prompts.PromptFile:
    """Open a file of the data set; the paths of its sources do not depend on the working directory."""
    file = prompts.open_split(dataset, split)
    return file._replace(prompts=prompts.with_absolute_sources(file.prompts))


def lay_out(config: Config, model: FlowModel, mesh: fsdp_utils.DeviceMesh | None) -> None:
    """Attach adapters to a model's transformer, fill and compile it."""
    torch.backends.cuda.enable_cudnn_sdp(model.CUDNN_ATTENTION)
    policies.attach(model.transformer, config.lora, policies.targets(config.lora, type(model)))
    # At 1 diffusers computes whole blocks again. Below it the compiler may keep this share of the activations.
    recomputed = config.fsdp.activation_checkpointing
    activation_memory = 1 - recomputed
    if recomputed == 1:
        model.transformer.enable_gradient_checkpointing()
        activation_memory = 1.0
    load_weights.fill_model(config, model, mesh)
    attention = flash_attention.usable(config.attention)
    if config.compile or attention:
        model.fuse(attention)
    if config.compile:
        if config.compile_cache:
            compilation.keep_graphs(Path(config.compile_cache), model.device)
        compilation.compile_units(model.transformer, model.SHARD_UNITS, activation_memory)
        if model.COMPILES_DECODER:
            loading.compile_decoder(model.pipeline)


def _optimizer(train: Train, trained: dict[str, torch.nn.Parameter]) -> torch.optim.AdamW:
    """AdamW of the trained parameters; the fused one saves a copy of them."""
    return torch.optim.AdamW(
        trained.values(),
        lr=train.learning_rate,
        betas=train.adam_betas,
        weight_decay=train.weight_decay,
        fused=next(iter(trained.values())).is_cuda,
    )


def _reference(config: Config, transformer: torch.nn.Module) -> policies.Reference:
    """Reference policy: the transformer's present weights. A guidance scale of 0 means that of the policy."""
    return policies.Reference(
        transformer,
        interval=config.train.reference_interval,
        kl_limit=config.train.reference_kl,
        guidance_scale=config.train.reference_guidance_scale or None,
        fresh=policies.begins_as_base(config.lora),
    )


def _open_cache(experiment: Experiment, device: torch.device) -> tuple[embedding_cache.Cache, list[Prompt]]:
    """Open the cache of config.cache_dir. Returns it, and the prompts of this run that it lacks. Raises UserError if it
    cannot take them."""
    config = experiment.config
    family = experiment.family
    # Everything that decides an embedding: a model class of one's own may encode otherwise.
    digests_file = Path(config.cache_dir, folders.DIGESTS)
    version = distributed.on_main(family.text_version, config.model, digests_file)
    version = version | {"guided": experiment.is_guided}
    if config.model_class:
        version["model_class"] = config.model_class
    if family.MOST_SOURCES:
        version["vae_precision"] = config.vae_precision
    cache = embedding_cache.Cache(config.cache_dir, version, config.text_tokens, device)
    missing = distributed.on_main(cache.missing, experiment.encoded_prompts)
    if missing:
        cache.check_writable()
    return cache, missing
