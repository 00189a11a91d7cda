"""Evaluate policies without training, several in one table: base models, LoRA folders, runs.

    python scripts/evaluate.py flow_grpo/assets/tiny_qwenimage runs/shapes_qwenimage_pr
    torchrun --nproc_per_node=8 scripts/evaluate.py runs/pickscore_sd3 --guidance-scales 1 4.5 --seeds 0 1 2 3

A policy is a run's folder (its best weights, or --weights last), a folder with a LoRA file (of --model), or a diffusers
model. A run is evaluated with the settings of its config.json; what is no run, with those of the first run, or else the
defaults. Prompts, rewards and seeds are the first run's for all. Flags override each of them. Without flags a run
scores what its own test scored, to the last digit on a CPU. The output folder holds scores.json, table.md and a contact
sheet for each row of the table. docs/design/evaluation.md has examples.
"""

import argparse
import html
import itertools
import json
import re
from functools import partial
from pathlib import Path

import yaml
from ml_collections import ConfigDict

from flow_grpo import rewards
from flow_grpo.base import locations
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import quoted
from flow_grpo.command_line import command_line
from flow_grpo.diffusers_patch.size import Size, training_size
from flow_grpo.settings import unknown_names
from flow_grpo.settings.table import BY_KEY, check_values, default_config, flat, value_of


def parser():
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
    add("--sizes", type=size, nargs="+", help="768x512, height first, or 512; a row of the table for each")
    add("--best-of", type=int, nargs="+", help="k of pass@k and of best of k; at most the number of seeds")
    add("--set", nargs="*", default=[], help="settings of the config, such as eval.num_steps=20 or precision=bf16")
    add("--out", default="runs/evaluation", help="output folder; one that is there is left alone: -2 is appended")
    return parser


def reward_and_weight(text):
    """Of NAME=WEIGHT, or of NAME, whose weight is None."""
    name, _, weight = text.partition("=")
    try:
        return name, float(weight) if weight else None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"the weight of {quoted(text)} is no number") from error


def size(text):
    try:
        return Size.parse(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def check_flags(args):
    """Raises UserError for a flag that is empty, or says something twice."""
    for name in ("model", "prompts", "out"):
        if getattr(args, name) == "":
            raise UserError(f"--{name} is empty")
    names = [name for name, _ in args.rewards or ()]
    keys = [text.partition("=")[0] for text in args.set]
    listed = {"--rewards": names, "--set": keys, "--seeds": args.seeds, "--guidance-scales": args.guidance_scales}
    listed |= {"--sizes": args.sizes, "--best-of": args.best_of}
    for flag, values in listed.items():
        if values and len(set(values)) < len(values):
            raise UserError(f"{flag} names a value twice: {', '.join(map(str, values))}")


def set_value(config, text):
    """Put the KEY=VALUE of --set into a config. Raises UserError for what is no setting, or no value of its type."""
    key, has_value, value = text.partition("=")
    if not has_value:
        raise UserError(f"--set {quoted(text)} has no value: write KEY=VALUE")
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


def override(config, args):
    config.eval.num_prompts = config.eval.num_prompts if args.num_prompts is None else args.num_prompts
    for text in args.set:
        set_value(config, text)
    if args.rewards:
        for name, _ in args.rewards:
            if "." in name:  # which a ConfigDict does not take as a key
                rewards.check_reward_name(name, "--rewards")
        with config.unlocked():
            config.reward_fn = {name: 1.0 if weight is None else weight for name, weight in args.rewards}
            config.eval.rewards = ()


def check_words(args):
    """Raises UserError for a misspelt policy, setting or reward, as far as no run has to be read for it."""
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
    if args.rewards and not any((Path(name) / "config.json").is_file() for name in args.policies):
        rewards.check_rewards({name: weight or 0.0 for name, weight in args.rewards})


if __name__ == "__main__":  # before torch is imported, so that --help and mistakes are answered at once
    args = command_line.arguments(parser(), check_words)

import torch

from flow_grpo.base import checksums, distributed, folders
from flow_grpo.base.formatting import markdown_table, with_error
from flow_grpo.base.pixels import beside_sources
from flow_grpo.base.prompt import captions_of
from flow_grpo.command_line import checks
from flow_grpo.data import embedding_cache, prompt_files, prompts
from flow_grpo.diffusers_patch import loading, model_classes
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.evaluation import estimates, evaluation, policies_to_compare
from flow_grpo.monitoring import progress, run_history
from flow_grpo.monitoring.dashboard import plain, problem_of, say
from flow_grpo.monitoring.plots import contact_sheet
from flow_grpo.scoring.pool import Pool
from flow_grpo.scoring.settings import check_rewards
from flow_grpo.weights import policies, quantisation


def configured(args):
    """The policies, each with its settings, and the settings that all share, the first one's."""
    runs = [Path(name) for name in args.policies if policies_to_compare.is_run(Path(name))]
    common = policies_to_compare.run_config(runs[0]) if runs else default_config()
    common.model = args.model or common.model
    compared = [policies_to_compare.find_candidate(name, common, args.weights) for name in args.policies]
    for config in {id(config): config for config in [common, *(candidate.config for candidate in compared)]}.values():
        override(config, args)
    return compared, common


def chosen_prompts(args, config):
    """The prompts of --prompts, a data set's folder or a file, or of the run's data set."""
    path = Path(args.prompts or config.dataset)
    if path.is_file() or (prompt_files.is_prompt_file(path) and not path.is_dir()):
        split = prompts.Split(path.name, prompts.with_absolute_sources(prompts.load_file(path)))
    else:
        loaded = prompts.load_prompts(str(path), args.split)
        split = prompts.Split(args.split, prompts.with_absolute_sources(loaded))
    if args.prompts and args.num_prompts is None:
        return split
    return evaluation.part_of(split, config)


def check(args, compared, config, split, seeds):
    """The policies' model classes. Raises UserError, before any weight is loaded, for what is wrong or not there."""
    if not split.prompts:
        raise UserError(
            "there is no prompt to evaluate: --num-prompts, or the run's eval.num_prompts, must be 1 or more"
        )
    if args.best_of and not 1 <= min(args.best_of) <= max(args.best_of) <= len(seeds):
        raise UserError(f"--best-of {args.best_of}: of {len(seeds)} seeds at most {len(seeds)} can be taken; --seeds")
    checks.drop_unused_rewards(config)
    check_rewards(config.reward_fn, config.eval.rewards, config.reward)
    rewards.check_prompts(config.reward_fn, split.prompts, config.eval.rewards)
    for scale in args.guidance_scales or ():
        BY_KEY["eval.guidance_scale"].check(scale, "eval.guidance_scale (--guidance-scales)")
    if args.model and all(candidate.weights != "LoRA" for candidate in compared):
        raise UserError(f"--model {quoted(args.model)} is the base of LoRA folders, and none of the policies is one")
    families = []
    for candidate in compared:
        check_values(candidate.config)
        families.append(model_classes.resolve(candidate.config))
        policies_to_compare.check_candidate(candidate, families[-1])
        light = families[-1].without_weights(candidate.config.model)
        light.check(split.prompts, candidate.config.text_tokens)
        light.check_sources(split.prompts)
        light.check_steps(candidate.config.eval.num_steps, "eval.num_steps (--set)")
        for size in sizes_of(args, candidate.config):
            BY_KEY["height"].check(size.height, "the height (--sizes)")
            BY_KEY["width"].check(size.width, "the width (--sizes)")
            light.check_size(size)
    return families


def sizes_of(args, config):
    return args.sizes or [training_size(config)]


def rows_of(candidate, model, pool, args, split, seeds):
    """Score a policy at every guidance scale and size; yields the row's settings and its scores."""
    config = candidate.config
    scales, sizes = args.guidance_scales or [config.eval.guidance_scale], sizes_of(args, config)
    guided = any(model.is_guided(scale) for scale in scales)
    encode = partial(model.encode, width=config.text_tokens, guided=guided)
    embed_one = embedding_cache.remembered(lambda prompt: encode([prompt]))
    velocity = partial(policies.predict, model, config.precision)
    bar = partial(progress.shown, say=say if distributed.is_main() else None)
    sampler = evaluation.Sampler(
        model=model,
        velocity=velocity,
        pool=pool,
        bar=bar,
        embed=lambda prompts: Condition.concat([embed_one(prompt) for prompt in prompts]),
        config=config,
    )
    for scale, size in itertools.product(scales, sizes):
        config.eval.guidance_scale, config.height, config.width = scale, size.height, size.width
        settings = dict(policy=candidate.name, weights=candidate.weights, guidance_scale=scale, size=str(size))
        scores = evaluation.score(sampler, split, seeds, evaluation.NUM_SHOWN)
        yield settings | dict(num_steps=config.eval.num_steps, precision=config.precision), scores


def binary_scores(values):
    """Return the names of the scores that are 0 or 1 in all rows, so that a column has one meaning."""
    return [name for name in values[0] if estimates.is_binary(torch.cat([row[name].flatten() for row in values]))]


def repeats_a_score(values):
    """Whether the weighted sum is one and the same score in all rows."""
    for name in values[0].keys() - {"avg"}:
        if all(torch.allclose(row["avg"].double(), row[name].double(), rtol=1e-6, equal_nan=True) for row in values):
            return True
    return False


def summary(scores, by, categories, best_of, binary):
    """Every estimate of a row of the table."""
    values = scores.values
    columns = {name: estimates.mean(column) for name, column in values.items()} | scores.variety
    for name, k in itertools.product(values, best_of):
        label = f"pass@{k}" if name in binary else f"best of {k}"
        columns[f"{name} {label}"] = estimates.best_of(values[name], k)
    return dict(all=columns, by_category=estimates.by_category(values[by], categories) if any(categories) else {})


def summaries(scored, values, unweighted, categories, best_of):
    """The rows of the table, and the score that is shown by category; what a column is, all rows decide together."""
    binary = binary_scores(values)
    default = next(iter(values[0])) if unweighted else "avg"
    by = binary[0] if binary else default
    shared = dict(plain_sum=unweighted or repeats_a_score(values))
    return [row | summary(scores, by, categories, best_of, binary) | shared for row, scores in scored], by


def markdown(rows, by, split, seeds):
    """The table of all scores, and the one by category."""
    setting = ("policy", "weights", "guidance_scale", "size", "num_steps", "precision")
    differing = [key for key in setting if key in ("policy", "weights") or len({row[key] for row in rows}) > 1]

    def table(estimates_of):
        lines = [[row[key] for key in differing] + [shown(e) for e in estimates_of(row).values()] for row in rows]
        return markdown_table([*differing, *map(cell, estimates_of(rows[0]))], lines)

    constant = ", ".join(f"{key} {rows[0][key]}" for key in setting if key not in differing)
    text = f"{len(split.prompts)} prompts ({split.name}), noises {', '.join(map(str, seeds))} of each; {constant}.\n"
    text += "Mean ± standard error over prompts.\n\n" + table(without_repeated_sum)
    if rows[0]["by_category"]:
        text += f"\n\n{by} by category:\n\n" + table(lambda row: row["by_category"])
    return text + "\n"


def without_repeated_sum(row):
    """A row's estimates, without the weighted sum where it is a single reward, or where nobody has given weights."""
    hidden = row["plain_sum"]
    return {name: other for name, other in row["all"].items() if not hidden or name.split(" ")[0] != "avg"}


def differences(rows, values):
    """A table of every later row against the first, by each score, on the noises and prompts that they share; "" of a
    single row."""
    lines, names = [], [name for name in without_repeated_sum(rows[0]) if name in values[0]]
    for number, (row, scores) in enumerate(zip(rows[1:], values[1:]), start=2):
        name = f"{number}: {row['policy']}, {row['weights']}, guidance {row['guidance_scale']:g}, {row['size']}"
        for score in names:
            difference, *counts = estimates.paired(scores[score], values[0][score])
            lines.append([name, cell(score), shown(difference), *counts])
    head = ["less row 1", "score", "difference", "prompts with more", "with less", "alike"]
    return f"\n\n{markdown_table(head, lines)}\n" if lines else ""


def cell(text):
    """A name in a table of Markdown."""
    return html.escape(str(text)).replace("|", "\\|")


def over_seeds(rows, compared, by):
    """Mean and standard error over runs whose configs differ in the seed alone, as lines; "" where there are none."""
    row_of = {c.name: row for c, row in zip(compared, rows)} if len(rows) == len(compared) else {}
    runs = [run_history.read_run(Path(name), name) for name in row_of if policies_to_compare.is_run(Path(name))]
    lines = []
    for group in run_history.differing_in_seed(runs):
        names = [run.label for run in group]
        means = torch.tensor([row_of[name]["all"][by].mean for name in names], dtype=torch.float64)
        lines.append(f"{by} of {', '.join(names)}, which differ in the seed: {shown(estimates.over_prompts(means))}")
    return "\n\n".join(["", *lines]) + "\n" if lines else ""


def shown(estimate):
    return with_error(estimate.mean, estimate.error)


def write_sheet(folder, number, row, scores, split):
    """One picture of a row's first images, with prompts and rewards."""
    numbers = list(scores.images)
    images, prompts = torch.stack([*scores.images.values()]), [split.prompts[i] for i in numbers]
    sheet = contact_sheet(beside_sources(images, prompts), captions_of(prompts), scores.values["avg"][0, numbers])
    name = re.sub(r"\W+", "_", f"{row['policy']}_{row['weights']}").strip("_")
    with folders.published(folder / f"{number}_{name}.png") as scratch:
        sheet.page.save(scratch, "png")


def as_json(row, scores):
    parts = {kind: {name: e._asdict() for name, e in row[kind].items()} for kind in ("all", "by_category")}
    return plain(row | parts | {"scores": {name: column.T.tolist() for name, column in scores.values.items()}})


def main(args):
    check_flags(args)
    compared, common = configured(args)
    split, seeds = chosen_prompts(args, common), args.seeds or list(range(common.eval.noises_per_prompt))
    families = check(args, compared, common, split, seeds)
    ranks = distributed.init_distributed()
    for candidate in compared:
        quantisation.check_device(candidate.config, ranks.device)
        if candidate.transformer:  # a LoRA file has been compared with its checksums before
            distributed.on_main(checksums.check_files, candidate.transformer.parent)
    folder = distributed.on_main(folders.make_new_folder, Path(args.out).absolute(), "--out")
    pool = Pool(ranks.device, common.reward_fn, common.eval.rewards, common.reward)
    categories = [prompt.metadata.get("tag", "") for prompt in split.prompts]
    scored = []  # (settings of a row, its scores without images)
    unweighted = bool(args.rewards) and all(weight is None for _, weight in args.rewards)
    for candidate, family in zip(compared, families):
        torch.backends.cuda.enable_cudnn_sdp(family.CUDNN_ATTENTION)
        model = None  # two do not fit on a GPU together
        loading.free_memory()
        model = policies_to_compare.load_candidate(candidate, family, ranks.device)
        for row, scores in rows_of(candidate, model, pool, args, split, seeds):
            scored.append((row, scores._replace(images={})))
            if distributed.is_main():
                show = partial(write_sheet, folder, len(scored), row, scores, split)
                if problem := problem_of(f"{folder} lacks the images of row {len(scored)}", show):
                    print(problem)
    if distributed.is_main():
        values = [scores.values for _, scores in scored]
        rows, by = summaries(scored, values, unweighted, categories, args.best_of or ())
        texts = [as_json(row, scores) for row, (_, scores) in zip(rows, scored, strict=True)]
        table = markdown(rows, by, split, seeds) + differences(rows, values) + over_seeds(rows, compared, by)
        common_fields = dict(split=split.name, seeds=seeds, prompts=[prompt.text for prompt in split.prompts], by=by)
        print(table)
        (folder / "scores.json").write_text(json.dumps(common_fields | dict(categories=categories, rows=texts)))
        (folder / "table.md").write_text(table, encoding="utf-8")
        print(f"{folder} holds every score, this table and the images.")
    pool.close()
    distributed.close()


if __name__ == "__main__":
    with command_line.sentences("it has written no table"):
        main(args)
