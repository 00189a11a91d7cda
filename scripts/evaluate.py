"""Evaluate policies without training, several in one table: base models, LoRA folders, runs.

    python scripts/evaluate.py flow_grpo/assets/tiny_qwenimage runs/shapes_qwenimage_pr
    torchrun --nproc_per_node=8 scripts/evaluate.py runs/pickscore_sd3 --guidance-scales 1 4.5 --seeds 0 1 2 3

A policy is a run's folder (its best weights, or --weights last), a folder with a LoRA file (of --model), or a diffusers
model. A run is evaluated with the settings of its config.json; what is no run, with those of the first run, or else the
defaults. Prompts, rewards and seeds are the first run's for all. Flags override each of them. Without flags a run
scores what its own test scored, to the last digit on a CPU. The output folder holds scores.json, table.md and a contact
sheet for each row of the table. docs/howto/evaluate.md has examples.
"""

import argparse
import html
import itertools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from ml_collections import ConfigDict

from flow_grpo import rewards
from flow_grpo.base import folders, locations
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import counted, quoted
from flow_grpo.command_line import command_line
from flow_grpo.diffusers_patch.size import Size, training_size
from flow_grpo.settings import unknown_names
from flow_grpo.settings.sections import Config
from flow_grpo.settings.table import BY_KEY, default_config, editable, flat, typed, value_of


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command_line.parser(__doc__)
    add = parser.add_argument
    add(
        "policies", nargs="+", help="a run's folder, a folder with a LoRA file, or a diffusers model (folder or hub id)"
    )
    add("--weights", choices=["best", "last"], default="best", help="of runs")
    add("--model", help="the base of LoRA folders; default: the first run's, or else the shipped tiny model")
    add("--prompts", help="a data set's folder, or a file of prompts; default: the first run's data set")
    add("--split", choices=["test", "validation", "train"], default="test", help="of a data set's folder")
    add("--num-prompts", type=int, help="evenly spread; default: all of --prompts, or as many as the run evaluated")
    add("--rewards", nargs="+", type=reward_and_weight, help="NAME or NAME=WEIGHT; default: the first run's")
    add("--seeds", type=int, nargs="+", help="of the noises; default: as the run evaluated")
    add("--guidance-scales", type=float, nargs="+", help="a row of the table for each")
    sizes = "768x512, height first, 512, or 240x416x33 with frames; a row of the table for each"
    add("--sizes", type=size, nargs="+", help=sizes)
    add("--best-of", type=int, nargs="+", help="k of pass@k and of best of k; at most the number of seeds")
    add("--save-images", type=int, metavar="N", help="write the images of N prompts at full size, with a table of them")
    settings = (
        "settings of the config, such as eval.num_steps=20 or precision=bf16; faster, and not to the last digit as "
    )
    settings += "a run's test: sample.rollout_weights=merged, sample.text_multiple=16"
    add("--set", nargs="*", default=[], help=settings)
    add("--out", default="runs/evaluation", help="output folder; one that is there is left alone: -2 is appended")
    return parser


def reward_and_weight(text: str) -> tuple[str, float | None]:
    """Parse NAME=WEIGHT, or NAME, whose weight is None."""
    name, _, weight = text.partition("=")
    try:
        return name, float(weight) if weight else None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"the weight of {quoted(text)} is no number") from error


def size(text: str) -> Size:
    try:
        return Size.parse(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def check_flags(args: argparse.Namespace) -> None:
    """Raise UserError for a flag that is empty, or says something twice."""
    for name in ("model", "prompts", "out"):
        if getattr(args, name) == "":
            raise UserError(f"--{name} is empty")
    listed = {
        "--rewards": [name for name, _ in args.rewards or ()],
        "--seeds": args.seeds,
        "--guidance-scales": args.guidance_scales,
        "--sizes": args.sizes,
        "--best-of": args.best_of,
    }
    for flag, values in listed.items():
        command_line.check_no_repeats(flag, values)
    command_line.check_set(args.set)


def set_value(config: ConfigDict, text: str) -> None:
    """Put the KEY=VALUE of --set into a config. Raises UserError for what is no setting, or no value of its type."""
    key, _, value = text.partition("=")
    try:
        before = value_of(config, key)
    except (KeyError, TypeError) as error:
        raise UserError(unknown_names.answer(key, flat(config), f"{quoted(key)} (--set)")) from error
    if isinstance(before, ConfigDict) and key not in BY_KEY:
        raise UserError(
            f"--set {quoted(text)} names a section: name one of its settings, such as {key}.{next(iter(before))}"
        )
    try:
        config.update_from_flattened_dict({key: yaml.safe_load(value)})
    except (KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"--set {quoted(text)} is no setting with a value of its type: {error}") from error


def override(config: ConfigDict, args: argparse.Namespace) -> None:
    """Put what the flags say into a config."""
    if args.num_prompts is not None:
        config.eval.num_prompts = args.num_prompts
    if args.save_images is not None:
        config.eval.save_images = args.save_images
    for text in args.set:
        set_value(config, text)
    if args.rewards:
        weights = {}
        for name, weight in args.rewards:
            # A ConfigDict takes no key with a dot, and its sentence would not name the flag.
            if "." in name:
                rewards.check_reward_name(name, "--rewards")
            weights[name] = 1.0 if weight is None else weight
        with config.unlocked():
            config.reward_fn = weights
            config.eval.rewards = ()


def check_words(args: argparse.Namespace) -> None:
    """Raise UserError for a misspelt policy, setting or reward, as far as no run has to be read for it."""
    for name in args.policies:
        try:
            is_there = Path(locations.resolve(name)).exists()
        except OSError as error:  # a name that is too long, or a folder that nobody may look into
            raise UserError(f"{quoted(name)}: {error.strerror}") from error
        if not is_there and not locations.is_hub_id(name):
            raise UserError(f"{name!r} is neither a folder nor a hub id")
    for model in filter(None, [args.model, *args.policies]):
        locations.check_hub_connection(model)
    check_flags(args)
    override(default_config(), args)
    # A run may have rewards of its own.
    if args.rewards and not any(map(folders.find_run, args.policies)):
        rewards.check_rewards({name: weight or 0.0 for name, weight in args.rewards})


args = None
if __name__ == "__main__":  # before torch is imported, so that --help and mistakes are answered at once
    args = command_line.arguments(parser(), check_words)

import torch
from torch import Tensor

from flow_grpo.base import checksums, distributed
from flow_grpo.base.formatting import markdown_table, with_error
from flow_grpo.base.pixels import beside_sources
from flow_grpo.base.prompt import captions_of, texts_of
from flow_grpo.command_line import checks
from flow_grpo.data import embedding_cache, prompt_files, prompts
from flow_grpo.diffusers_patch import loading, model_classes
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.sampling_params import EXACT, Shortcuts
from flow_grpo.evaluation import estimates, evaluation, policies_to_compare
from flow_grpo.evaluation.estimates import Estimate
from flow_grpo.evaluation.policies_to_compare import Candidate
from flow_grpo.monitoring import progress, run_history
from flow_grpo.monitoring.dashboard import attempt, plain, say
from flow_grpo.monitoring.sheets import contact_sheet, write_animation
from flow_grpo.scoring.pool import Pool, open_pool
from flow_grpo.scoring.settings import check_rewards
from flow_grpo.weights import policies, quantisation

READ = (*policies_to_compare.READ, *policies_to_compare.OF_THE_COMMAND)
SAID_BY_FLAGS = {  # setting -> the flag that says the same
    "dataset": "prompts",
    "reward_fn": "rewards",
    "height": "sizes",
    "width": "sizes",
    "frames": "sizes",
    "eval.rewards": "rewards",
    "eval.num_prompts": "num_prompts",
    "eval.noises_per_prompt": "seeds",
    "eval.guidance_scale": "guidance_scales",
    "eval.save_images": "save_images",
}


def check_set(args: argparse.Namespace) -> None:
    """Raise UserError for a setting of --set that would be ignored."""
    saves_images = args.save_images or any(text.startswith("eval.save_images=") for text in args.set)
    for text in args.set:
        key = text.partition("=")[0]
        setting = next((read for read in READ if f"{key}.".startswith(f"{read}.")), None)
        if setting is None:
            raise UserError(f"--set {quoted(text)} would be ignored: an evaluation does not read config.{key}")
        flag = SAID_BY_FLAGS.get(setting, "")
        if flag and getattr(args, flag) is not None:
            raise UserError(f"--set {quoted(text)} would be ignored: --{flag.replace('_', '-')} says it already")
        if key == "eval.image_format" and not saves_images:
            raise UserError(f"--set {quoted(text)} would be ignored without --save-images")


class Comparison(NamedTuple):
    """Policies that are compared, and the prompts and noises that they share."""

    policies: list[Candidate]
    split: prompts.Split
    seeds: list[int]

    @property
    def categories(self) -> list[str]:
        """Category of each prompt, "" for none."""
        return [prompt.metadata.get("tag", "") for prompt in self.split.prompts]


class Scored(NamedTuple):
    """One policy's scores at one guidance scale and size."""

    settings: dict[str, Any]  # policy, weights, guidance_scale, size, num_steps, precision
    scores: evaluation.Scores


class Row(NamedTuple):
    """A row of the table."""

    settings: dict[str, Any]  # as in Scored
    values: dict[str, Tensor]  # name -> [S, P] float32
    columns: dict[str, Estimate]
    by_category: dict[str, Estimate]  # of the table's `by`; {} of prompts without categories


class Table(NamedTuple):
    """All rows; what a column is, they decide together."""

    rows: list[Row]
    by: str  # the score that is shown by category
    hides_sum: bool  # the weighted sum repeats a score, or nobody has given weights


def configured(args: argparse.Namespace) -> tuple[list[Candidate], Config]:
    """Return the policies, each with its settings, and the settings that all share, the first run's."""
    runs = filter(None, map(folders.find_run, args.policies))
    first_run = next(runs, None)
    common = policies_to_compare.run_config(first_run) if first_run else Config()
    common = policies_to_compare.with_model(common, args.model or common.model)
    compared = []
    for name in args.policies:
        candidate = policies_to_compare.find_candidate(name, common, args.weights)
        compared.append(replace(candidate, config=overridden(candidate.config, args)))
    return compared, checks.without_unused_rewards(overridden(common, args))


def overridden(config: Config, args: argparse.Namespace) -> Config:
    """Return a config with the changes that the flags make. Raises UserError for a value that is not allowed."""
    edited = editable(config)
    override(edited, args)
    return typed(edited)


def chosen_prompts(args: argparse.Namespace, config: Config) -> prompts.Split:
    """Return the prompts of --prompts, a data set's folder or a file, or of the run's data set."""
    path = Path(args.prompts or config.dataset)
    # What is neither a file nor a folder, such as a pipe, is refused as a file.
    is_file = not path.is_dir() if folders.exists(path) else prompt_files.is_prompt_file(path)
    if is_file:
        name = path.name
        loaded = prompts.load_file(path)
    else:
        name = args.split
        setting = "--prompts" if args.prompts else prompts.DATASET
        loaded = prompts.load_prompts(str(path), args.split, setting)
    split = prompts.Split(name, prompts.with_absolute_sources(loaded))
    # Prompts of one's own are all evaluated, those of a run as many as the run evaluated.
    if args.prompts and args.num_prompts is None:
        return split
    return evaluation.part_of(split, config.eval.num_prompts)


def check_common(args: argparse.Namespace, comparison: Comparison, config: Config) -> None:
    """Raise UserError for prompts, rewards and flags that are wrong or not there for any policy."""
    num_seeds = len(comparison.seeds)
    if not comparison.split.prompts:
        raise UserError(
            "there is no prompt to evaluate: --num-prompts, or the run's eval.num_prompts, must be 1 or more"
        )
    if args.best_of and not 1 <= min(args.best_of) <= max(args.best_of) <= num_seeds:
        raise UserError(f"--best-of {args.best_of}: each must be from 1 to {num_seeds}, the number of --seeds")
    check_rewards(config.reward_fn, config.eval.rewards, config.reward)
    rewards.check_prompts(config.reward_fn, comparison.split.prompts, config.eval.rewards)
    for scale in args.guidance_scales or ():
        BY_KEY["eval.guidance_scale"].check(scale, "eval.guidance_scale (--guidance-scales)")
    weights = config.sample.rollout_weights
    if weights != EXACT.weights and all(candidate.lora is None for candidate in comparison.policies):
        raise UserError(f"--set sample.rollout_weights={weights} would be ignored: none of the policies has an adapter")
    if args.model and all(candidate.weights != "LoRA" for candidate in comparison.policies):
        raise UserError(f"--model {quoted(args.model)} is the base of LoRA folders, and none of the policies is one")


def checked_family(args: argparse.Namespace, candidate: Candidate, split: prompts.Split) -> type[FlowModel]:
    """Return a policy's model class. Raises UserError, before any weight is loaded, for a model, a setting or a size
    that it cannot be evaluated with."""
    config = candidate.config
    family = model_classes.resolve(config.model, config.model_class)
    policies_to_compare.check_candidate(candidate, family)
    checks.check_rollout_weights(config)
    family.check_text_multiple(config.sample.text_multiple, config.model)
    light = family.without_weights(config.model)
    light.check_prompts(split.prompts, config.text_tokens)
    light.check_sources(split.prompts)
    light.check_steps(config.eval.num_steps, "eval.num_steps (--set)")
    for size in sizes_of(args, config):
        BY_KEY["height"].check(size.height, "the height (--sizes)")
        BY_KEY["width"].check(size.width, "the width (--sizes)")
        BY_KEY["frames"].check(size.frames, "the frames (--sizes)")
        light.check_size(size)
        checks.check_saved_images(config.eval, size.frames)
    return family


def sizes_of(args: argparse.Namespace, config: Config) -> list[Size]:
    """Return the sizes of --sizes, or else the one of a run."""
    return args.sizes or [training_size(config)]


def score_policy(
    args: argparse.Namespace,
    comparison: Comparison,
    candidate: Candidate,
    model: FlowModel,
    pool: Pool,
    images_of: Callable[[dict[str, Any]], Path],
) -> Iterator[Scored]:
    """Score a policy at every guidance scale and size; each is a row of the table.

    Args:
        images_of: settings of the row -> the folder into which --save-images writes.
    """
    config = candidate.config
    scales = args.guidance_scales or [config.eval.guidance_scale]
    sizes = sizes_of(args, config)
    guided = any(model.is_guided(scale) for scale in scales)
    encode = partial(model.encode, width=config.text_tokens, guided=guided)
    embed_one = embedding_cache.remembered(lambda prompt: encode([prompt]))
    for scale, size in itertools.product(scales, sizes):
        sampler = evaluation.Sampler(
            model=model,
            velocity=partial(policies.predict, model, config.precision),
            pool=pool,
            bar=partial(progress.shown, say=say if distributed.is_main() else None),
            embed=lambda prompts: Condition.concat([embed_one(prompt) for prompt in prompts]),
            size=size,
            settings=replace(config.eval, guidance_scale=scale),
            vae_batch_size=config.vae_batch_size,
            shortcuts=Shortcuts(config.sample.rollout_weights, config.sample.text_multiple),
        )
        settings = settings_of_row(candidate, scale, size)
        saved = evaluation.images_to_save(images_of(settings), comparison.split, sampler.settings)
        scores = evaluation.score(sampler, comparison.split, comparison.seeds, evaluation.num_shown(size), saved)
        yield Scored(settings, scores)
        if saved and saved.problem:
            print(saved.problem)


def settings_of_row(candidate: Candidate, guidance_scale: float, size: Size) -> dict[str, Any]:
    """Return what a row of the table was scored with."""
    config = candidate.config
    settings: dict[str, Any] = dict(
        policy=candidate.name,
        weights=candidate.weights,
        guidance_scale=guidance_scale,
        size=str(size),
        num_steps=config.eval.num_steps,
        precision=config.precision,
    )
    for key in policies_to_compare.SHORTCUTS:
        if value_of(config, key) != BY_KEY[key].default:
            settings[key] = value_of(config, key)
    return settings


def row_name(row: int, settings: dict[str, Any]) -> str:
    """Return the name of the files of a row of the table."""
    policy = re.sub(r"\W+", "_", f"{settings['policy']}_{settings['weights']}").strip("_")
    return f"{row}_{policy}"


def with_common_scores(scored: list[Scored]) -> list[Scored]:
    """Return the rows with the scores that all of them have: those of single frames depend on how many there are."""
    names = []
    for name in scored[0].scores.values:
        if all(name in scores.values for _, scores in scored):
            names.append(name)
    common = []
    for settings, scores in scored:
        common.append(Scored(settings, scores._replace(values={name: scores.values[name] for name in names})))
    return common


def binary_scores(scored: list[Scored]) -> list[str]:
    """Return the names of the scores that are 0 or 1 in all rows, so that a column has one meaning."""
    binary = []
    for name in scored[0].scores.values:
        values = torch.cat([scores.values[name].flatten() for _, scores in scored])
        if estimates.is_binary(values):
            binary.append(name)
    return binary


def repeats_a_score(scored: list[Scored]) -> bool:
    """Return whether the weighted sum is one and the same score in all rows."""
    for name in scored[0].scores.values:
        if name != "avg" and all(_are_alike(scores.values["avg"], scores.values[name]) for _, scores in scored):
            return True
    return False


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=1e-6, equal_nan=True)


def summarise(scored: list[Scored], unweighted: bool, categories: list[str], best_of: list[int]) -> Table:
    """Estimate every column of the table."""
    scored = with_common_scores(scored)
    binary = binary_scores(scored)
    if binary:
        by = binary[0]
    elif unweighted:
        by = next(iter(scored[0].scores.values))
    else:
        by = "avg"
    rows = []
    for settings, scores in scored:
        by_category = {}
        if any(categories):
            by_category = estimates.by_category(scores.values[by], categories)
        rows.append(Row(settings, scores.values, columns_of(scores, binary, best_of), by_category))
    return Table(rows, by, unweighted or repeats_a_score(scored))


def columns_of(scores: evaluation.Scores, binary: list[str], best_of: list[int]) -> dict[str, Estimate]:
    """Return every estimate of a row of the table, by the column's name."""
    columns = {}
    for name, values in scores.values.items():
        columns[name] = estimates.mean(values)
    columns |= scores.variety
    for name, values in scores.values.items():
        for k in best_of:
            label = f"pass@{k}" if name in binary else f"best of {k}"
            columns[f"{name} {label}"] = estimates.best_of(values, k)
    return columns


def shown_columns(table: Table, row: Row) -> dict[str, Estimate]:
    """Return a row's estimates, without those of the weighted sum where the table hides it."""
    if not table.hides_sum:
        return row.columns
    return {name: estimate for name, estimate in row.columns.items() if name.split(" ")[0] != "avg"}


def markdown(table: Table, comparison: Comparison) -> str:
    """Write the table of all scores, and the one by category."""
    # A setting that is the same in all rows is said once, above the table.
    differing = []
    constant = []
    for key, value in table.rows[0].settings.items():
        if key in ("policy", "weights") or any(row.settings[key] != value for row in table.rows):
            differing.append(key)
        else:
            constant.append(f"{key} {value}")
    split = comparison.split
    noises = ", ".join(map(str, comparison.seeds))
    text = f"{counted(len(split.prompts), 'prompts')} ({split.name}), noises {noises} of each; {', '.join(constant)}.\n"
    text += "Mean ± standard error over prompts.\n\n"
    text += table_of_estimates(table.rows, differing, [shown_columns(table, row) for row in table.rows])
    if table.rows[0].by_category:
        text += f"\n\n{table.by} by category:\n\n"
        text += table_of_estimates(table.rows, differing, [row.by_category for row in table.rows])
    return text + "\n"


def table_of_estimates(rows: list[Row], settings: list[str], columns: list[dict[str, Estimate]]) -> str:
    """Write rows of settings and estimates as a table of Markdown. A row may lack an estimate that others have, such as
    the entropy of an attribute that no two of its images of a prompt show."""
    names = list(max(columns, key=len))
    for estimates_of_row in columns:
        names += [name for name in estimates_of_row if name not in names]
    lines = []
    for row, estimates_of_row in zip(rows, columns, strict=True):
        line = [row.settings[key] for key in settings]
        for name in names:
            estimate = estimates_of_row.get(name)
            line.append(with_error(estimate.mean, estimate.error) if estimate else "")
        lines.append(line)
    return markdown_table([*settings, *map(cell, names)], lines)


def differences(table: Table) -> str:
    """Write a table of every later row against the first, by each score, on the noises and prompts that they share; ""
    of a single row."""
    first, *later = table.rows
    names = [name for name in shown_columns(table, first) if name in first.values]
    lines = []
    for number, row in enumerate(later, start=2):
        settings = row.settings
        label = f"{number}: {settings['policy']}, {settings['weights']}, guidance {settings['guidance_scale']:g}, "
        label += settings["size"]
        for name in names:
            difference, *counts = estimates.paired(row.values[name], first.values[name])
            lines.append([label, cell(name), with_error(difference.mean, difference.error), *counts])
    if not lines:
        return ""
    head = ["less row 1", "score", "difference", "prompts with more", "with less", "alike"]
    return f"\n\n{markdown_table(head, lines)}\n"


def cell(text: str) -> str:
    """Escape a name in a table of Markdown."""
    return html.escape(str(text)).replace("|", "\\|")


def over_seeds(table: Table, compared: list[Candidate]) -> str:
    """Write mean and standard error over runs whose configs differ in the seed alone, as lines; "" where there are
    none."""
    # With several scales or sizes a run has several rows.
    if len(table.rows) != len(compared):
        return ""
    row_of = {}
    runs = {}  # by folder: a run that is named twice, such as by its best/, is one
    for candidate, row in zip(compared, table.rows, strict=True):
        run_folder = folders.find_run(candidate.name)
        if run_folder is None or run_folder.resolve() in runs:
            continue
        row_of[candidate.name] = row
        runs[run_folder.resolve()] = run_history.read_run(run_folder, candidate.name)
    lines = []
    for group in run_history.grouped_by_seed(list(runs.values())):
        if len(group) == 1:
            continue
        names = [run.label for run in group]
        means = torch.tensor([row_of[name].columns[table.by].mean for name in names], dtype=torch.float64)
        estimate = estimates.over_prompts(means)
        value = with_error(estimate.mean, estimate.error)
        lines.append(f"\n\n{table.by} of {', '.join(names)}, which differ in the seed: {value}")
    return "".join(lines) + "\n" if lines else ""


def write_sheet(
    folder: Path, number: int, settings: dict[str, Any], scores: evaluation.Scores, split: prompts.Split
) -> None:
    """Write one picture of a row's first images, with prompts and rewards."""
    numbers = list(scores.images)
    images = torch.stack(list(scores.images.values()))
    shown_prompts = [split.prompts[i] for i in numbers]
    averages = scores.values["avg"][0, numbers].tolist()
    shown = beside_sources(images, shown_prompts)
    captions = captions_of(shown_prompts)
    name = row_name(number, settings)
    with folders.published(folder / f"{name}.png") as scratch:
        contact_sheet(shown, captions, averages).page.save(scratch, "png")
    if shown.ndim == 5:
        write_animation(shown, captions, averages, folder / f"{name}.webp")


def as_json(table: Table, row: Row) -> dict[str, Any]:
    """Return what scores.json has of a row."""
    fields = dict(row.settings)
    fields["all"] = as_dicts(row.columns)
    fields["by_category"] = as_dicts(row.by_category)
    fields["plain_sum"] = table.hides_sum
    fields["scores"] = {}
    for name, values in row.values.items():
        fields["scores"][name] = values.T.tolist()
    return plain(fields)


def as_dicts(named: dict[str, Estimate]) -> dict[str, dict[str, float]]:
    return {name: estimate._asdict() for name, estimate in named.items()}


def score_all(
    args: argparse.Namespace, comparison: Comparison, families: list[type[FlowModel]], pool: Pool, folder: Path
) -> list[Scored]:
    """Score one policy after the other, and write the images of each row."""
    scored = []

    def images_of(settings: dict[str, Any]) -> Path:
        return folder / row_name(len(scored) + 1, settings)

    for candidate, family in zip(comparison.policies, families, strict=True):
        torch.backends.cuda.enable_cudnn_sdp(family.CUDNN_ATTENTION)
        # Two models do not fit on a GPU together.
        model = None
        loading.free_memory()
        model = policies_to_compare.load_candidate(candidate, family, pool.device)
        for settings, scores in score_policy(args, comparison, candidate, model, pool, images_of):
            scored.append(Scored(settings, scores._replace(images={})))
            if distributed.is_main():
                show = partial(write_sheet, folder, len(scored), settings, scores, comparison.split)
                problem = attempt(f"{folder} lacks the images of row {len(scored)}", show)
                if problem:
                    print(problem)
    return scored


def write_table(folder: Path, table: Table, comparison: Comparison) -> None:
    """Print the table, and write table.md and scores.json."""
    text = markdown(table, comparison) + differences(table) + over_seeds(table, comparison.policies)
    stored = dict(
        split=comparison.split.name,
        seeds=comparison.seeds,
        prompts=texts_of(comparison.split.prompts),
        by=table.by,
        categories=comparison.categories,
        rows=[as_json(table, row) for row in table.rows],
    )
    print(text)
    (folder / "scores.json").write_text(json.dumps(stored))
    (folder / "table.md").write_text(text, encoding="utf-8")
    print(f"{folder} holds every score, this table and the images.")


def main(args: argparse.Namespace) -> None:
    """Evaluate each policy with each set of flags, and print and write the table."""
    check_flags(args)
    compared, common = configured(args)
    check_set(args)
    split = chosen_prompts(args, common)
    seeds = args.seeds or list(range(common.eval.noises_per_prompt))
    comparison = Comparison(compared, split, seeds)
    check_common(args, comparison, common)
    families = [checked_family(args, candidate, split) for candidate in compared]
    ranks = distributed.init_distributed()
    for candidate in compared:
        quantisation.check_device(candidate.config, ranks.device)
        # A LoRA file has been compared with its checksums before.
        if candidate.transformer:
            distributed.on_main(checksums.check_files, candidate.transformer.parent)
    shape = families[0].image_shape(sizes_of(args, compared[0].config)[0])
    pool = open_pool(ranks.device, common.reward_fn, common.eval.rewards, common.reward, shape, split.prompts[0])
    folder = distributed.on_main(folders.make_new_folder, Path(args.out).absolute(), "--out")
    scored = score_all(args, comparison, families, pool, folder)
    if distributed.is_main():
        unweighted = bool(args.rewards) and all(weight is None for _, weight in args.rewards)
        table = summarise(scored, unweighted, comparison.categories, args.best_of or [])
        write_table(folder, table, comparison)
    pool.close()
    distributed.close()


if args is not None:
    with command_line.sentences("it has written no table"):
        main(args)
