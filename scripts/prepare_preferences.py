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
from typing import Any, NamedTuple, Protocol

from ml_collections import ConfigDict

from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import counted
from flow_grpo.command_line import checks, command_line
from flow_grpo.settings import table
from flow_grpo.settings.sections import Config, Lora


class Options(NamedTuple):
    """The flags of this script."""

    source: str = ""
    max_rows: int = 0
    part_size: int = 256
    validation_share: float = 0.1
    max_dropped_share: float = 0.2


DEFAULTS = Options()


def flags(arguments: list[str]) -> tuple[Options, list[str]]:
    """Return the script's own flags, and the remaining arguments of the command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, default in DEFAULTS._asdict().items():
        parser.add_argument(f"--{name}", type=type(default), default=argparse.SUPPRESS)
    known, remaining = parser.parse_known_args(arguments)
    if getattr(known, "source", None) == "":
        parser.error("--source is empty: it names a folder")
    return Options(**vars(known)), remaining


def check_options(options: Options) -> None:
    """Raise UserError for a flag's value that nothing can be made with."""
    if options.max_rows < 0:
        raise UserError(f"--max_rows is {options.max_rows}; it must be 1 or more, or 0 for all rows")
    if options.part_size < 1:
        raise UserError(f"--part_size is {options.part_size}; it must be 1 or more")
    # NaN compares false, too.
    if not 0 <= options.validation_share < 1:
        raise UserError(f"--validation_share is {options.validation_share}; it must be from 0 to below 1")
    if not 0 <= options.max_dropped_share <= 1:
        raise UserError(f"--max_dropped_share is {options.max_dropped_share}; it must be from 0 to 1")


def check_plan(config: Config, world_size: int, options: Options) -> None:
    """Raise UserError for a flag that cannot be meant, a config without a folder to write, or batches that hold no
    whole groups."""
    check_options(options)
    if config.dry_run:
        raise UserError("--dry_run is for training: a folder of pairs is not planned")
    if not config.preferences.path:
        raise UserError("config.preferences.path is empty: it names the folder to write")
    if not options.source and config.sample.batch_size % config.sample.num_images_per_prompt:
        raise UserError("config.sample.batch_size must be a multiple of config.sample.num_images_per_prompt")


def preparing(options: Options) -> checks.Script:
    """Return what this script asks of a config."""
    return checks.Script(
        table.DPO, checks.check_groups, partial(check_plan, options=options), lambda config: not options.source
    )


options = DEFAULTS
config = None
if __name__ == "__main__":  # before torch is imported, so that --help and mistakes are answered at once
    options, arguments = flags(sys.argv[1:])
    config = command_line.parse("config/dpo.py:shapes_qwenimage_dpo", preparing(options), arguments)

import hashlib
import json
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.base import checksums, distributed, folders, rng
from flow_grpo.base.prompt import Prompt, texts_of
from flow_grpo.data import image_pairs, preferences, prompts
from flow_grpo.data.image_pairs import NO_PREFERENCE, Dropped, PickAPic
from flow_grpo.diffusers_patch import model_classes
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.sample_with_logprob import Samples, SamplingJob, sample
from flow_grpo.diffusers_patch.sampling_params import SamplingParams
from flow_grpo.diffusers_patch.size import training_size
from flow_grpo.evaluation import policies_to_compare
from flow_grpo.evaluation.policies_to_compare import Candidate
from flow_grpo.monitoring import progress
from flow_grpo.monitoring.dashboard import say
from flow_grpo.rewards.scores import join_scores
from flow_grpo.run import input_files
from flow_grpo.scoring.pool import open_pool
from flow_grpo.scoring.settings import check_rewards
from flow_grpo.settings import stored_config
from flow_grpo.weights import load_weights, lora_files, model_files, modulation, policies, quantisation

# Settings and sections that decide which pairs are made.
MADE_BY = (
    *("model", "dataset", "height", "width", "frames"),
    *("text_tokens", "precision", "base_precision", "seed"),
    *("lora", "sample", "model_class", "preferences", "options"),
)
# Settings that a run may change when it goes on, but that decide which images are scored.
DRAWN_BY = ("vae_precision",)
NO_SCORE = "the reward failed"  # for all of a prompt's images but one, or for all

# Rows of a source: prompts, objects of pairs.jsonl, or the rows of Pick-a-Pic's files.
Rows = list[Any] | PickAPic


class Maker(Protocol):
    """Makes pairs of a source's rows, which are prompts (`FromRollouts`) or images (`FromImages`)."""

    def make(self, rows: list[Any], first: int) -> "Made": ...
    def check_scores(self, scores: dict[str, Tensor]) -> None: ...


class Made(NamedTuple):
    """Pairs of some rows of the source."""

    pairs: list[dict[str, Any]]  # as they are stored, see `stored_rows`
    reasons: list[str | None]  # for each row why it has no pair, or None
    scores: dict[str, Tensor]  # of the images that were drawn, by name; {} where none were


def checked_source(editable: ConfigDict, options: Options) -> tuple[Config, FlowModel, Rows]:
    """Return the config, the model, without weights, and the source's rows. Raises UserError, before any weight is
    loaded, for what no pairs can be made of."""
    script = preparing(options)
    config = checks.check(editable, script)
    script.plan(config, 1)
    family = model_classes.resolve(config.model, config.model_class)
    config = model_classes.with_digest(config, family)
    load_weights.check_model(config.model, config.lora, family)
    modulation.check(config, family)
    empty_model = family.without_weights(config.model)
    empty_model.check_size(training_size(config))
    if options.source:
        if config.frames > 1:
            raise UserError(f"--source has pairs of pictures, but config.frames is {config.frames}; set 1")
        rows = image_pairs.open_rows(options.source)
        # All lines are in memory; of parquet files only the first row is read.
        looked_at = rows if isinstance(rows, list) else rows[0:1]
        empty_model.check_sources([prompt_of(row) for row in looked_at])
        return config, empty_model, rows
    return config, empty_model, checked_prompts(config, empty_model)


def checked_prompts(config: Config, empty_model: FlowModel) -> list[Prompt]:
    """Return the prompts that images are drawn for. Raises UserError where these cannot be drawn or scored."""
    if "merged" in config.sample.rollout_weights and not (config.lora.path or config.base_precision):
        raise UserError(
            f"config.sample.rollout_weights is {config.sample.rollout_weights!r}, but without config.lora.path there "
            "is no adapter to merge"
        )
    empty_model.check_steps(config.sample.num_steps, "config.sample.num_steps")
    check_rewards(config.reward_fn, (), config.reward)
    loaded = prompts.load_prompts(config.dataset, "train")
    rewards.check_prompts(config.reward_fn, loaded)
    empty_model.check_sources(loaded)
    empty_model.check_prompts(loaded, config.text_tokens)
    return loaded


class FromRollouts:
    """Makes pairs of prompts: draws a group of images for each, of which the best and the worst are a pair."""

    def __init__(self, config: Config, family: type[FlowModel], device: torch.device, example: Prompt):
        self.config = config
        shape = family.image_shape(training_size(config))
        self.pool = open_pool(device, config.reward_fn, (), config.reward, shape, example)
        lora = Path(config.lora.path) if config.lora.path else None
        policy = Candidate(config.model, "base", config, lora, None)
        self.model = policies_to_compare.load_candidate(policy, family, device)
        self.fast = policies.fast_forwards(config.sample.rollout_weights, self.model.transformer)

    def make(self, rows: list[Prompt], first: int) -> Made:
        """Make pairs of prompts; `first` is the number of the first one in the source."""
        group = self.config.sample.num_images_per_prompt
        asked = []
        for prompt in rows:
            asked += [prompt] * group
        image_numbers = range(first * group, first * group + len(asked))
        guided = self.model.is_guided(self.config.sample.guidance_scale)
        condition = self.model.encode(asked, width=self.config.text_tokens, guided=guided)
        sampled = self._draw(condition, image_numbers)
        scores = self.pool.submit(sampled.images, asked)()
        margin = self.config.preferences.min_margin
        pairs = preferences.best_and_worst(
            sampled.latents, condition, image_numbers, scores, self.pool.weights, group=group, margin=margin
        )
        averages = scores["avg"].double().view(-1, group)
        usable = pairs.loss_weight.bool()
        reasons: list[str | None] = []
        for is_usable, num_scored in zip(usable.tolist(), averages.isfinite().sum(1).tolist(), strict=True):
            if is_usable:
                reasons.append(None)
            else:
                reasons.append(NO_PREFERENCE if num_scored > 1 else NO_SCORE)
        highest = averages.nan_to_num(-torch.inf).amax(1).tolist()
        lowest = averages.nan_to_num(torch.inf).amin(1).tolist()
        return Made(stored_rows(rows, highest, lowest, pairs, usable), reasons, scores)

    def _draw(self, condition: Condition, image_numbers: range) -> Samples:
        config = self.config
        generators = [rng.generator(config.seed, "preferences", number) for number in image_numbers]
        params = SamplingParams.of(config.sample)
        job = SamplingJob(self.model, condition, generators, params, training_size(config))
        return sample(
            job,
            noisy_steps=range(0),
            velocity=partial(policies.predict, self.model, config.precision),
            # A compiled decode is filled up with copies to its batch size.
            vae_batch_size=min(config.vae_batch_size, config.sample.batch_size * config.frames),
            fast=self.fast,
        )

    def check_scores(self, scores: dict[str, Tensor]) -> None:
        """Raise RewardFailed where too many of a part's scores are missing."""
        self.pool.masked_shares(scores)


class FromImages:
    """Makes pairs of rows that name two images each."""

    def __init__(self, config: Config, family: type[FlowModel], device: torch.device):
        self.config = config
        self.device = device
        self.model = family.load(config.model, device)

    def make(self, rows: list[dict[str, Any]], first: int) -> Made:
        """Make pairs of rows; `first` is the number of the first one in the source."""
        with ThreadPoolExecutor() as threads:
            loaded = list(threads.map(self._load, rows))
        reasons: list[str | None] = []
        usable_rows = []
        winners = []
        losers = []
        for row, pair in zip(rows, loaded, strict=True):
            if isinstance(pair, str):
                reasons.append(pair)
                continue
            reasons.append(None)
            usable_rows.append(row)
            winners.append(pair[0])
            losers.append(pair[1])
        if not usable_rows:
            return Made([], reasons, {})
        return Made(self._stored(usable_rows, winners, losers), reasons, {})

    def _load(self, row: dict[str, Any]) -> tuple[Tensor, Tensor] | str:
        """Return winner and loser of a row, or why it cannot be used."""
        try:
            pair = image_pairs.load_pair(row, training_size(self.config))
            self.model.check_prompts([prompt_of(row)], self.config.text_tokens)
        except Dropped as why:
            return str(why)
        except UserError:
            return "prompt too long"
        return pair

    def _stored(self, rows: list[dict[str, Any]], winners: list[Tensor], losers: list[Tensor]) -> list[dict[str, Any]]:
        asked = [prompt_of(row) for row in rows]
        ones = torch.ones(len(rows))
        pairs = preferences.Pairs(
            winners=self._encode(winners),
            losers=self._encode(losers),
            loss_weight=ones,
            condition=self.model.encode(asked, width=self.config.text_tokens, guided=False),
            numbers=ones,
        )
        winner_scores = [row.get("winner_score") for row in rows]
        loser_scores = [row.get("loser_score") for row in rows]
        return stored_rows(asked, winner_scores, loser_scores, pairs, ones.bool())

    def _encode(self, images: list[Tensor]) -> Tensor:
        return self.model.encode_images(torch.stack(images).to(self.device), self.config.vae_batch_size)

    def check_scores(self, scores: dict[str, Tensor]) -> None:
        """Pass: nothing is scored here."""


def prompt_of(row: Prompt | dict[str, Any]) -> Prompt:
    """Return what the images of a row were made by, or are to be made by."""
    if isinstance(row, Prompt):
        return row
    return Prompt(row["prompt"].strip(), {}, row.get("sources", ()))


def stored_rows(
    asked: list[Prompt],
    winner_scores: list[float | None],
    loser_scores: list[float | None],
    pairs: preferences.Pairs,
    usable: Tensor,
) -> list[dict[str, Any]]:
    """Return the columns that differ from pair to pair, of each pair that is `usable` [P] bool."""
    columns: dict[str, Any] = dict(
        prompt=texts_of(asked),
        winner_score=winner_scores,
        loser_score=loser_scores,
        winner_latents=pairs.winners.cpu(),
        loser_latents=pairs.losers.cpu(),
    )
    for name, part in pairs.condition.tensors().items():
        columns[preferences.COLUMNS[name]] = part.cpu()
    rows = []
    for values, is_usable in zip(zip(*columns.values(), strict=True), usable.tolist(), strict=True):
        if is_usable:
            rows.append(dict(zip(columns, values, strict=True)))
    return rows


def make_part(maker: Maker, rows: Rows, part: range, batch_size: int, bar) -> Made:
    """Make the pairs of a part of the source, in batches of `batch_size` rows.

    Raises:
        RewardFailed: a reward failed for too many of the part's images. Nothing of the part is written.
    """
    pairs = []
    reasons = []
    scores = []
    for start in range(part.start, part.stop, batch_size):
        batch = rows[start : min(start + batch_size, part.stop)]
        made = maker.make(batch, start)
        pairs += made.pairs
        reasons += made.reasons
        if made.scores:
            scores.append(made.scores)
        bar.update(len(batch))
    joined = join_scores(scores)
    maker.check_scores(joined)
    return Made(pairs, reasons, joined)


def write_part(
    config: Config,
    shapes: dict[str, tuple[int, ...]],
    pairs: list[dict[str, Any]],
    held_out: float,
    folder: Path,
    number: int,
) -> None:
    """Write a file for each split that has a pair. Prompts whose hash is below `held_out` are for validation."""
    constants = dict(model=config.model, height=config.height, width=config.width, negative_prompt="")
    constants["dtype"] = preferences.dtype_of(config.precision)
    of_split: dict[str, list[dict[str, Any]]] = {split: [] for split in preferences.SPLITS}
    for pair in pairs:
        split = "validation" if hash_of(pair["prompt"]) < held_out else "train"
        of_split[split].append(constants | pair)
    for split, rows in of_split.items():
        if not rows:
            continue
        columns = {}
        for name in rows[0]:
            columns[name] = [row[name] for row in rows]
        preferences.write_pairs(file_of(folder, split, number), columns, shapes, constants["dtype"])


def hash_of(prompt: str) -> float:
    """Return a number in [0, 1) that is the prompt's own: all its pairs lie in one split, in any folder."""
    return int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=4).digest(), "big") / 2**32


def held_out_below(options: Options, rows: Rows, num_used: int) -> float:
    """Return the hash below which prompts are held out; of several in a list at least the one of the lowest hash."""
    hashes = set()
    for row in rows[:num_used] if isinstance(rows, list) else ():
        hashes.add(hash_of(prompt_of(row).text))
    # One prompt alone is trained on.
    if options.validation_share and len(hashes) > 1:
        return max(options.validation_share, min(hashes) + 2**-32)
    return options.validation_share


def origin_of(config: Config, options: Options, rows: Rows, digests_file: Path | None = None) -> dict[str, Any]:
    """Return what a folder is made by and of, as its report has it: "made_by" are the settings, the others digests.

    Args:
        digests_file: remembers digests of files, see `checksums.file_digests`.
    """
    origin: dict[str, Any] = {}
    origin["made_by"] = config.to_dict() | {"options": options._replace(max_dropped_share=None)._asdict()}
    origin |= digests_of(rows, options.max_rows)
    origin["model"] = input_files.model_digests(config, digests_file)
    if not options.source:
        origin["loras"] = lora_digest(config.lora)
        # Those of eval.rewards score no pair, and may not be on this machine.
        origin["rewards"] = input_files.reward_digests(config.reward_fn, config.reward, digests_file)
    return origin


def lora_digest(lora: Lora) -> str:
    """Return a digest of the files of lora.base and lora.path."""
    files = {}
    for name, path in (("base", lora.base), ("path", lora.path)):
        for file in lora_files.files_of(path) if path else ():
            files[f"{name} {file.name}"] = file
    return digest_of(checksums.file_digests(files))


def digests_of(rows: Rows, max_rows: int) -> dict[str, str]:
    """Return digests of what a folder is made of: "rows" are prompts and their metadata, or the
    lines of pairs.jsonl, or of parquet files their number of rows; "sources" are the bytes of pictures to be edited."""
    # Parquet files may be large: their rows are counted, not read.
    listed = rows if isinstance(rows, list) else []
    paths = []
    for row in listed[: max_rows or None]:
        paths += row.sources if isinstance(row, Prompt) else row.get("sources", ())
    by_path = checksums.file_digests({str(path): path for path in paths})
    parts = {"rows": listed or len(rows), "sources": [by_path[str(path)] for path in paths]}
    return {name: digest_of(part) for name, part in parts.items()}


def digest_of(part: Any) -> str:
    """Return a digest of what a value's repr says."""
    return hashlib.blake2b(repr(part).encode(), digest_size=8).hexdigest()


def check_place(folder: Path) -> None:
    """Make `folder`. Raise UserError if it is no folder, or holds files of something else."""
    folders.ensure_folder(folder, "config.preferences.path")
    if (folder / "unfinished").exists() or (folder / "report.json").exists():
        return
    for path in folder.iterdir():
        # Another start, which was killed or is at work, may have left its lock and its digests, or a part of these.
        is_ours = path.name in (folders.LOCK, folders.DIGESTS) or folders.SCRATCH in path.name
        if not is_ours:
            raise UserError(f"{folder} is not empty, and not made by this script")


def claim(folder: Path, origin: dict[str, Any]) -> bool:
    """Lock `folder`, to begin it or to go on with it; return False, and leave it, if it is complete.

    It is begun while it holds unfinished/, which has the settings, and complete once report.json is there and
    unfinished/ is removed. Called on the main rank.

    Raises UserError if it was begun with other settings, rows or files, holds files of something else, or if another
    process is at work there.
    """
    unfinished = folder / "unfinished"
    report = folder / "report.json"
    check_place(folder)
    is_complete = report.exists() and not unfinished.exists()
    if not is_complete:
        notice = folders.lock(folder)
        if notice:
            print(notice)
        # Until the lock was ours, another process may have completed it.
        is_complete = report.exists() and not unfinished.exists()
    begun_with = report if report.exists() else unfinished / "settings.json"
    if begun_with.exists():
        check_unchanged(folder, origin, begun_with)
    else:
        unfinished.mkdir(exist_ok=True)
        folders.write_text(begun_with, json.dumps(origin))
    if is_complete:
        folders.release(folder)
    return not is_complete


def check_unchanged(folder: Path, origin: dict[str, Any], begun_with: Path) -> None:
    """Raise UserError if a folder was begun with other settings, rows or files, as the file `begun_with` says."""
    before = folders.read_json(begun_with)
    made_by = origin["made_by"]
    differing = []
    for key in stored_config.changes(before["made_by"], made_by, begun_with):
        if key.split(".")[0] in MADE_BY or table.decides_scores(key):
            differing.append(key)
    # Images that are there are encoded, not decoded.
    if not made_by["options"]["source"]:
        differing += [key for key in DRAWN_BY if before["made_by"][key] != made_by[key]]
    if differing:
        raise UserError(f"{folder} was begun with other settings ({', '.join(differing)}); choose another folder")
    names = {
        "rows": "pairs" if made_by["options"]["source"] else "prompts",
        "sources": "pictures to be edited",
        "loras": "files of a LoRA",
    }
    for part, name in names.items():
        digest = origin.get(part)
        # Older folders lack the digests of sources and LoRAs.
        if before.get(part, digest) != digest:
            raise UserError(f"{folder} was begun with other {name}; choose another folder")
    check_same_files(folder, origin, before)


def check_same_files(folder: Path, origin: dict[str, Any], before: dict[str, Any]) -> None:
    """Raise UserError if a folder was begun with other files of its model or its rewards. Older folders lack their
    digests."""
    changed = {
        "files of the model": input_files.differing(before.get("model"), origin["model"]),
        "files of rewards": input_files.differing_rewards(before.get("rewards", {}), origin.get("rewards", {})),
    }
    for kind, names in changed.items():
        if names:
            listed = ", ".join(names[:3])
            raise UserError(f"{folder} was begun with other {kind} ({listed}): restore them, or choose another folder")


def is_made(folder: Path, number: int) -> bool:
    """Return whether a part is done. One that lost rows to a reward that failed is removed, so that it is made anew."""
    state = state_of(folder, number)
    if not state.exists():
        return False
    if all(row["why"] != NO_SCORE for row in folders.read_json(state)["dropped"]):
        return True
    state.unlink()
    # The new part may have no pair for one of the splits.
    for split in preferences.SPLITS:
        file_of(folder, split, number).unlink(missing_ok=True)
    return False


def state_of(folder: Path, number: int) -> Path:
    """Return the file that says that a part is done, and which rows it dropped."""
    return folder / "unfinished" / f"part_{number:05d}.json"


def file_of(folder: Path, split: str, number: int) -> Path:
    """Return the file of a part's pairs."""
    return folder / f"{split}_{number:05d}.parquet"


def finish(folder: Path, origin: dict[str, Any], max_dropped_share: float) -> None:
    """Write report.json. Raises UserError, and leaves the folder unfinished, if too much was unusable."""
    pairs = {split: preferences.num_rows(folder, split) for split in preferences.SPLITS}
    num_rows = 0
    dropped = []
    for path in sorted((folder / "unfinished").glob("part_*.json")):
        part = folders.read_json(path)
        num_rows += part["rows"]
        dropped += part["dropped"]
    reasons = Counter(row["why"] for row in dropped)
    counts = dict(reasons)
    trained = counted(pairs["train"], "pairs")
    print(f"{folder}: {trained} and {pairs['validation']} held out, of {num_rows}; dropped: {counts}")
    # Images that score alike are no fault of the source.
    num_unusable = len(dropped) - reasons[NO_PREFERENCE]
    if num_unusable > max_dropped_share * num_rows or not pairs["train"]:
        way_out = "; the same command makes the parts anew whose reward failed" if reasons[NO_SCORE] else ""
        raise UserError(
            f"{num_unusable} of {counted(num_rows, 'rows')} cannot be used ({counts}), {trained} left to train on; "
            f"allowed is a share of --max_dropped_share={max_dropped_share}{way_out}"
        )
    report = origin | dict(pairs=pairs, reasons=counts, dropped=dropped)
    folders.write_text(folder / "report.json", json.dumps(report, indent=1))
    shutil.rmtree(folder / "unfinished")


def make_parts(
    config: Config, options: Options, folder: Path, empty_model: FlowModel, rows: Rows, ranks: distributed.Ranks
) -> None:
    """Make and write this rank's parts, but for those that are made already."""
    num_used = min(len(rows), options.max_rows or len(rows))
    if distributed.is_main() and num_used > options.part_size and not options.max_rows:
        take_less = f"--max_rows={options.part_size} takes the first {options.part_size} alone"
        say(f"{counted(num_used, 'rows')} of the source are used; {take_less}")
    parts = {}
    for number, start in enumerate(range(0, num_used, options.part_size)):
        if number % ranks.world_size == ranks.rank and not is_made(folder, number):
            parts[number] = range(start, min(start + options.part_size, num_used))

    (first,) = rows[0:1]
    example = prompt_of(first)
    if options.source:
        maker = FromImages(config, type(empty_model), ranks.device)
        batch_size = config.vae_batch_size
    else:
        maker = FromRollouts(config, type(empty_model), ranks.device, example)
        batch_size = config.sample.batch_size // config.sample.num_images_per_prompt
    shapes = empty_model.row_shapes(training_size(config), config.text_tokens, example)
    held_out = held_out_below(options, rows, num_used)
    total = sum(map(len, parts.values()))
    bar = progress.counter("rows of the source", total, say if distributed.is_main() else None)
    for number, part in parts.items():
        made = make_part(maker, rows, part, batch_size, bar)
        write_part(config, shapes, made.pairs, held_out, folder, number)
        dropped = [dict(row=row, why=why) for row, why in zip(part, made.reasons, strict=True) if why]
        folders.write_text(state_of(folder, number), json.dumps(dict(rows=len(made.reasons), dropped=dropped)))
    bar.close()


def main(config: ConfigDict, options: Options = DEFAULTS) -> None:
    """Make the folder of pairs, on all ranks; goes on with one that was begun, and leaves one that is complete."""
    settings, empty_model, rows = checked_source(config, options)
    ranks = distributed.init_distributed()
    folder = Path(settings.preferences.path).absolute()
    quantisation.check_device(settings, ranks.device)
    model_files.check_weights(settings.model, type(empty_model))
    origin = {}
    if distributed.is_main():
        check_place(folder)
        origin = origin_of(settings, options, rows, input_files.digests_file_of(settings, folder))
    if isinstance(rows, list) and not options.source:
        # The prompts of the data set. Rewards of one's own may change the working directory.
        rows = prompts.with_absolute_sources(rows)
    # The main rank's answer counts; it is False for a folder that is complete.
    is_claimed = claim(folder, origin) if distributed.is_main() else None
    if not distributed.broadcast_object(is_claimed):
        print(f"{folder} is complete")
        return
    make_parts(settings, options, folder, empty_model, rows, ranks)
    distributed.barrier()
    distributed.on_main(finish, folder, origin, options.max_dropped_share)
    distributed.close()
    folders.release(folder)


if config is not None:
    command_line.run(partial(main, options=options), config, after_stop="the same command goes on with it")
