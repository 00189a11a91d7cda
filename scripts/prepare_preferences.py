"""Make a folder of preference pairs: latents of a better and a worse image, with their prompt's embeddings.

    python scripts/prepare_preferences.py --config config/dpo.py:shapes_qwenimage_dpo
    torchrun --nproc_per_node=8 scripts/prepare_preferences.py --config config/dpo.py:pickscore_sd3_dpo

The folder is config.preferences.path. The source is the config's own model: best and worst of
sample.num_images_per_prompt images of each training prompt, by its reward. Or, with --source=FOLDER, images that are
there, in a form that flow_grpo/data/image_pairs.py describes. Each part makes a file, in one rename: killed and started
again, on any number of ranks, it makes the same files. report.json says what was dropped.

Flags of this script:
--source=FOLDER             with pairs.jsonl, or with Pick-a-Pic's parquet files; without it own rollouts
--max_rows=N                of the source, its first prompts or pairs; 0, the default = all
--part_size=256             prompts or pairs of the source per file
--validation_share=0.1      of the prompts, whose pairs are held out: of a list at least one prompt; 0 = none
--max_dropped_share=0.2     fail at the end if a larger fraction of the source was unusable
"""

import argparse
import sys
from functools import partial
from typing import NamedTuple

from flow_grpo.base.errors import UserError
from flow_grpo.command_line import checks, command_line
from flow_grpo.settings import table


class Options(NamedTuple):
    """The flags of this script."""

    source: str = ""
    max_rows: int = 0
    part_size: int = 256
    validation_share: float = 0.1
    max_dropped_share: float = 0.2


DEFAULTS = Options()


def flags(words: list[str]) -> tuple[Options, list[str]]:
    """The script's own flags, and the other words of the command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, default in DEFAULTS._asdict().items():
        parser.add_argument(f"--{name}", type=type(default), default=argparse.SUPPRESS)
    known, others = parser.parse_known_args(words)
    if getattr(known, "source", None) == "":
        parser.error("--source is empty: it names a folder")
    return Options(**vars(known)), others


def check_options(options: Options) -> None:
    """Raises UserError for a flag's value that nothing can be made with."""
    if options.max_rows < 0:
        raise UserError(f"--max_rows is {options.max_rows}; it must be 1 or more, or 0 for all rows")
    if options.part_size < 1:
        raise UserError(f"--part_size is {options.part_size}; it must be 1 or more")
    if not 0 <= options.validation_share < 1:  # NaN compares false too
        raise UserError(f"--validation_share is {options.validation_share}; it must be from 0 to below 1")
    if not 0 <= options.max_dropped_share <= 1:
        raise UserError(f"--max_dropped_share is {options.max_dropped_share}; it must be from 0 to 1")


def plan(config, world_size: int, options: Options) -> None:
    """Raises UserError for a flag that cannot be meant, a config without a folder to write, or batches that hold no
    whole groups."""
    check_options(options)
    if config.dry_run:
        raise UserError("--dry_run is for training: a folder of pairs is not planned")
    if not config.preferences.path:
        raise UserError("config.preferences.path is empty: it names the folder to write")
    if not options.source and config.sample.batch_size % config.sample.num_images_per_prompt:
        raise UserError("config.sample.batch_size must be a multiple of config.sample.num_images_per_prompt")


def preparing(options: Options) -> checks.Script:
    """What this script asks of a config."""
    return checks.Script(
        table.DPO, checks.check_groups, partial(plan, options=options), lambda config: not options.source
    )


if __name__ == "__main__":  # before torch is imported, so that --help and mistakes are answered at once
    options, words = flags(sys.argv[1:])
    config = command_line.parse("config/dpo.py:shapes_qwenimage_dpo", preparing(options), words)

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.base import checksums, distributed, folders, rng
from flow_grpo.base.prompt import Prompt, texts_of
from flow_grpo.data import image_pairs, preferences, prompts
from flow_grpo.data.image_pairs import NO_PREFERENCE, Dropped
from flow_grpo.diffusers_patch import model_classes
from flow_grpo.diffusers_patch.sample_with_logprob import SamplingJob, sample
from flow_grpo.diffusers_patch.sampling_params import SamplingParams
from flow_grpo.diffusers_patch.size import training_size
from flow_grpo.evaluation import policies_to_compare
from flow_grpo.evaluation.policies_to_compare import Candidate
from flow_grpo.monitoring import progress
from flow_grpo.monitoring.dashboard import say
from flow_grpo.scoring.pool import Pool
from flow_grpo.scoring.scorers import join_scores
from flow_grpo.scoring.settings import check_rewards
from flow_grpo.settings import stored_config
from flow_grpo.weights import load_weights, model_files, policies, quantisation

MADE_BY = ("model", "dataset", "reward_fn", "height", "width", "text_tokens", "precision", "base_precision", "seed")
MADE_BY += ("lora", "sample", "model_class", "preferences", "options")
NO_SCORE = "the reward failed"  # for all of a prompt's images but one, or for all


class Made(NamedTuple):
    """What became of some rows of the source."""

    pairs: list[dict]  # as they are stored, see `rows_of`
    reasons: list[str | None]  # for each row why it has no pair, or None
    scores: dict[str, Tensor]  # of the images that were drawn, by name; {} where none were


Make = Callable[[list, int], Made]  # of rows of the source, and the number of the first
Check = Callable[[dict[str, Tensor]], object]  # raises RewardFailed where too many of a part's scores are missing


def check(config, options: Options):
    """Raises UserError, before any weight is loaded; returns the model, without weights, and the source's rows."""
    source, script = options.source, preparing(options)
    checks.check(config, script)
    script.plan(config, 1)
    load_weights.check_model(config, family := model_classes.resolve(config))
    light = family.without_weights(config.model)
    light.check_size(training_size(config))
    if source:
        rows = image_pairs.open_rows(source)
        light.check_sources([prompt_of(row) for row in (rows if isinstance(rows, list) else rows[0:1])])
        return light, rows
    if "merged" in config.sample.rollout_weights and not (config.lora.path or config.base_precision):
        raise UserError(
            f"config.sample.rollout_weights is {config.sample.rollout_weights!r}, but without config.lora.path there "
            "is no adapter to merge"
        )
    light.check_steps(config.sample.num_steps, "config.sample.num_steps")
    check_rewards(config.reward_fn, (), config.reward)
    rows = prompts.load_prompts(config.dataset, "train")
    rewards.check_prompts(config.reward_fn, rows)
    light.check_sources(rows)
    light.check_prompts(rows, config.text_tokens)
    return light, rows


def from_rollouts(config, family, device) -> tuple[Make, Check]:
    """Of prompts, for whose pairs images are drawn."""
    lora = Path(config.lora.path) if config.lora.path else None
    model = policies_to_compare.load_candidate(Candidate(config.model, "base", config, lora, None), family, device)
    group, params = config.sample.num_images_per_prompt, SamplingParams.of(config.sample)
    pool = Pool(device, config.reward_fn, (), config.reward)
    policy = partial(policies.predict, model, config.precision)
    fast = policies.fast_forwards(config, model.transformer)
    decoded_together = min(config.vae_batch_size, config.sample.batch_size)  # compiled decodes are filled with copies

    def make(rows: list[prompts.Prompt], first: int):
        rows = [row for row in rows for _ in range(group)]
        numbers = range(first * group, first * group + len(rows))
        noise = [rng.generator(config.seed, "preferences", number) for number in numbers]
        embeds = model.encode(rows, width=config.text_tokens, guided=model.is_guided(params.guidance_scale))
        start = SamplingJob(model, embeds, noise, params, training_size(config))
        sampled = sample(start, noisy_steps=range(0), velocity=policy, vae_batch_size=decoded_together, fast=fast)
        scores = pool.submit(sampled.images, rows)()
        margin, averages = config.preferences.min_margin, scores["avg"]
        pairs = preferences.best_and_worst(sampled.latents, embeds, numbers, scores, pool.weights, group, margin)
        usable, comparable = pairs.loss_weight.bool(), averages.view(-1, group).isfinite().sum(1) > 1
        why_not = [NO_PREFERENCE if enough else NO_SCORE for enough in comparable.tolist()]
        reasons = [None if keep else why for keep, why in zip(usable.tolist(), why_not)]
        grouped = averages.double().view(-1, group)
        highest, lowest = grouped.nan_to_num(-torch.inf).amax(1), grouped.nan_to_num(torch.inf).amin(1)
        return Made(rows_of(rows[::group], highest.tolist(), lowest.tolist(), pairs, usable), reasons, scores)

    return make, pool.masked_shares


def from_images(config, family, device) -> tuple[Make, Check]:
    """Of rows that name two images each."""
    model = family.load(config.model, device)

    def load_row(row: dict):
        try:
            pair = image_pairs.load_pair(row, training_size(config))
            model.check_prompts([prompt_of(row)], config.text_tokens)
        except Dropped as why:
            return str(why)
        except UserError:
            return "prompt too long"
        return pair

    def make(rows: list[dict], first: int):
        with ThreadPoolExecutor() as pool:
            loaded = list(pool.map(load_row, rows))
        reasons = [pair if isinstance(pair, str) else None for pair in loaded]
        rows = [row for row, reason in zip(rows, reasons) if reason is None]
        if not rows:
            return Made([], reasons, {})
        images = [torch.stack(side).to(device) for side in zip(*(p for p in loaded if not isinstance(p, str)))]
        texts = [prompt_of(row) for row in rows]
        embeds = model.encode(texts, width=config.text_tokens, guided=False)
        winners, losers = (model.encode_images(side, config.vae_batch_size) for side in images)
        ones = torch.ones(len(rows))
        scores = ([row.get(f"{side}_score") for row in rows] for side in ("winner", "loser"))
        pairs = preferences.Pairs(winners, losers, ones, embeds, ones)
        return Made(rows_of(texts, *scores, pairs, ones.bool()), reasons, {})

    return make, lambda scores: None


def prompt_of(row: dict) -> Prompt:
    """What the images of a row were made by."""
    return Prompt(row["prompt"].strip(), {}, row.get("sources", ()))


def rows_of(asked, winner_scores, loser_scores, pairs, usable) -> list[dict]:
    """What is stored of each pair that is `usable` [P] bool, and differs from pair to pair."""
    columns = dict(prompt=texts_of(asked), winner_score=winner_scores, loser_score=loser_scores)
    columns |= dict(winner_latents=pairs.winners.cpu(), loser_latents=pairs.losers.cpu())
    columns |= {preferences.COLUMNS[name]: part.cpu() for name, part in pairs.condition.tensors().items()}
    rows = [dict(zip(columns, values)) for values in zip(*columns.values(), strict=True)]
    return [row for row, keep in zip(rows, usable.tolist()) if keep]


def make_part(make: Make, check: Check, rows, part: range, size: int, bar) -> tuple[list[dict], list[str | None]]:
    """Pairs of a part of the source, in batches of `size` rows, and for each row why it has no pair, or None.

    Raises:
        RewardFailed: a reward failed for too many of the part's images. Nothing of the part is written.
    """
    made = []
    for start in range(part.start, part.stop, size):
        batch = rows[start : min(start + size, part.stop)]
        made.append(make(batch, start))
        bar.update(len(batch))
    check(join_scores([batch.scores for batch in made if batch.scores]))
    return [pair for batch in made for pair in batch.pairs], [why for batch in made for why in batch.reasons]


def write_part(config, shapes: dict, pairs: list[dict], held_out: float, folder: Path, number: int) -> None:
    """A file for each split that has a pair. Prompts whose hash is below `held_out` are for validation."""
    constants = dict(model=config.model, height=config.height, width=config.width, negative_prompt="")
    constants["dtype"] = preferences.dtype_of(config.precision)
    for split in preferences.SPLITS:
        rows = [constants | row for row in pairs if (hash_of(row["prompt"]) < held_out) == (split == "validation")]
        if rows:
            columns = {name: [row[name] for row in rows] for name in rows[0]}
            preferences.write_pairs(file_of(folder, split, number), columns, shapes, constants["dtype"])


def hash_of(prompt: str) -> float:
    """A number in [0, 1) that is the prompt's own: all its pairs lie in one split, in any folder."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=4).digest(), "big") / 2**32


def held_out_below(options: Options, rows, num_used: int) -> float:
    """The hash below which prompts are held out; of several in a list at least the one of the lowest hash."""
    listed = rows[:num_used] if isinstance(rows, list) else []
    hashes = {hash_of(row.text if isinstance(row, Prompt) else prompt_of(row).text) for row in listed}
    if options.validation_share and len(hashes) > 1:
        return max(options.validation_share, min(hashes) + 2**-32)
    return options.validation_share


def made_by(config, options: Options) -> dict:
    return config.to_dict() | {"options": options._replace(max_dropped_share=None)._asdict()}


def digests_of(rows, max_rows: int) -> dict[str, str]:
    """Digests of what a folder is made of, as its report has them: "rows" are prompts and their metadata, or the lines
    of pairs.jsonl, or of parquet files their number of rows; "sources" are the bytes of pictures to be edited."""
    listed = rows if isinstance(rows, list) else []
    paths = []
    for row in listed[: max_rows or None]:
        paths += row.sources if isinstance(row, Prompt) else row.get("sources", ())
    by_path = checksums.file_digests({str(path): path for path in paths})
    parts = {"rows": listed or len(rows), "sources": [by_path[str(path)] for path in paths]}
    return {name: hashlib.blake2b(repr(part).encode(), digest_size=8).hexdigest() for name, part in parts.items()}


def is_load_option(key: str) -> bool:
    """Whether a dotted key is an option of a reward's load(), which decides scores, and no setting of its requests."""
    section, _, name = key.rpartition(".")
    return section.startswith("reward.args.") and f"reward.{name}" not in table.BY_KEY


def claim(config, options: Options, folder: Path, digests: dict[str, str]) -> bool:
    """Begin or go on with `folder`, locked; False if it is complete.

    Raises UserError if it was made with other settings or of other rows, or if another process is at work there.
    """
    unfinished, report = folder / "unfinished", folder / "report.json"
    if not folders.make_folder(folder, "config.preferences.path") and not folder.is_dir():
        raise UserError(f"config.preferences.path: {folder} is no folder")
    complete = report.exists() and not unfinished.exists()
    if not complete and not unfinished.exists() and {path.name for path in folder.iterdir()} - {folders.LOCK}:
        raise UserError(f"{folder} is not empty, and not made by this script")
    if not complete and (notice := folders.lock(folder)):
        print(notice)
    source, current = report if report.exists() else unfinished / "settings.json", made_by(config, options)
    if source.exists():
        before = folders.read_json(source)
        differ = stored_config.changes(before["made_by"], current, source)
        if differ := [key for key in differ if key.split(".")[0] in MADE_BY or is_load_option(key)]:
            raise UserError(f"{folder} was begun with other settings ({', '.join(differ)}); choose another folder")
        names = {"rows": "pairs" if options.source else "prompts", "sources": "pictures to be edited"}
        for part, digest in digests.items():
            if before.get(part, digest) != digest:
                raise UserError(f"{folder} was begun with other {names[part]}; choose another folder")
    else:
        unfinished.mkdir(exist_ok=True)
        folders.write_text(source, json.dumps({"made_by": current} | digests))
    return not complete


def is_made(folder: Path, number: int) -> bool:
    """Whether a part is done. One that lost rows to a reward that failed is taken away, so that it is made anew."""
    state = folder / "unfinished" / f"part_{number:05d}.json"
    if not state.exists():
        return False
    if all(row["why"] != NO_SCORE for row in folders.read_json(state)["dropped"]):
        return True
    state.unlink()
    for split in preferences.SPLITS:  # the new part may have no pair for one of them
        file_of(folder, split, number).unlink(missing_ok=True)
    return False


def file_of(folder: Path, split: str, number: int) -> Path:
    """Where the pairs of a part lie."""
    return folder / f"{split}_{number:05d}.parquet"


def finish(config, options: Options, folder: Path, digests: dict[str, str]) -> None:
    """Write report.json. Raises UserError, and leaves the folder unfinished, if too much was unusable."""
    part_reports = [folders.read_json(path) for path in sorted((folder / "unfinished").glob("part_*.json"))]
    pairs = {split: preferences.num_rows(folder, split) for split in preferences.SPLITS}
    dropped = [row for part in part_reports for row in part["dropped"]]
    reasons = Counter(row["why"] for row in dropped)
    total, bad = sum(part["rows"] for part in part_reports), len(dropped) - reasons[NO_PREFERENCE]
    print(f"{folder}: {pairs['train']} pairs and {pairs['validation']} held out, of {total}; dropped: {dict(reasons)}")
    if bad > options.max_dropped_share * total or not pairs["train"]:
        raise UserError(
            f"{bad} of {total} rows are unusable ({dict(reasons)}), {pairs['train']} pairs are left to train on; "
            f"allowed is a share of --max_dropped_share={options.max_dropped_share}"
            + ("; the same command makes the parts anew whose reward failed" if reasons[NO_SCORE] else "")
        )
    report = dict(made_by=made_by(config, options)) | digests
    report |= dict(pairs=pairs, reasons=dict(reasons), dropped=dropped)
    folders.write_text(folder / "report.json", json.dumps(report, indent=1))
    shutil.rmtree(folder / "unfinished")


def main(config, options: Options = DEFAULTS):
    light, rows = check(config, options)
    ranks, folder = distributed.init_distributed(), Path(config.preferences.path).absolute()
    quantisation.check_device(config, ranks.device)
    model_files.check_weights(config.model, type(light))
    digests = digests_of(rows, options.max_rows) if distributed.is_main() else {}
    if not options.source:
        rows = prompts.with_absolute_sources(rows)
    if not distributed.broadcast_object(claim(config, options, folder, digests) if distributed.is_main() else None):
        print(f"{folder} is complete")
        return
    source, part_size = options.source, options.part_size
    make, check_scores = (from_images if source else from_rollouts)(config, type(light), ranks.device)
    size = config.vae_batch_size if source else config.sample.batch_size // config.sample.num_images_per_prompt
    first = prompt_of(rows[0:1][0]) if source else rows[0]
    shapes = light.row_shapes(training_size(config), config.text_tokens, first)
    used = range(min(len(rows), options.max_rows or len(rows)))
    if distributed.is_main() and len(used) > part_size and not options.max_rows:
        say(f"{len(used)} rows of the source are used; --max_rows={part_size} takes the first {part_size} alone")
    held_out = held_out_below(options, rows, len(used))
    part_rows = [used[first : first + part_size] for first in range(0, len(used), part_size)]
    mine = range(ranks.rank, len(part_rows), ranks.world_size)
    mine = [number for number in mine if not is_made(folder, number)]
    total = sum(len(part_rows[number]) for number in mine)
    bar = progress.counter("rows of the source", total, say if distributed.is_main() else None)
    for number in mine:
        pairs, reasons = make_part(make, check_scores, rows, part_rows[number], size, bar)
        write_part(config, shapes, pairs, held_out, folder, number)
        dropped = [dict(row=row, why=why) for row, why in zip(part_rows[number], reasons) if why]
        state = folder / "unfinished" / f"part_{number:05d}.json"
        folders.write_text(state, json.dumps(dict(rows=len(reasons), dropped=dropped)))
    bar.close()
    distributed.barrier()
    distributed.on_main(finish, config, options, folder, digests)
    distributed.close()
    folders.release(folder)


if __name__ == "__main__":
    command_line.run(partial(main, options=options), config, after_stop="the same command goes on with it")
