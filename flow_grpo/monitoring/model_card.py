"""What lets others use a run's weights: a model card, the files by which peft loads a LoRA, and links to the pipeline
around full weights. All of it is made from the run's folder, after training or later."""

import json
import math
import re
import shutil
from pathlib import Path

import huggingface_hub
import jinja2
from huggingface_hub import ModelCardData
from ml_collections import ConfigDict
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from flow_grpo import rewards
from flow_grpo.base import folders, shipped
from flow_grpo.base.errors import UserError
from flow_grpo.base.quoting import in_one_line, with_error
from flow_grpo.checkpoints import best
from flow_grpo.monitoring import provenance, recorded
from flow_grpo.settings import table
from flow_grpo.weights import lora_files

PEFT_PREFIX, OUR_PREFIX = "base_model.model.", "transformer."
PICTURES = ("samples.png", "reward.png")


def complete(run_folder: Path, place: str = "THIS FOLDER OR REPOSITORY") -> list[str]:
    """Add to the last weights and to the best ones what others need; what there is to tell the user.

    Args:
        place: where a card's commands load them from.
    """
    run, notices = recorded.read(run_folder, run_folder.resolve().name), []
    for folder in filter(None, [run_folder, best.find(run_folder)]):
        try:
            if run.config.lora.rank:
                add_peft_files(folder, run.config.model)
                notices += [f"{folder}: {reason}" for reason in [changes_nothing(folder)] if reason]
            else:
                link_pipeline(folder, run.config.model)
            write_card(run, folder, place)
        except (UserError, OSError) as error:  # all that training made is saved by now
            notices.append(f"not everything that others need was added to {folder}: {in_one_line(error)}")
    return notices


def changes_nothing(folder: Path) -> str:
    """Why a LoRA leaves its base as it is; "" where it does not."""
    if any(weight.any() for name, weight in lora_files.weights(folder).items() if ".lora_B." in name):
        return ""
    evaluation = best.read(folder.parent) if folder.name == best.NAME else None
    if evaluation and evaluation.epoch == 0:
        return "the LoRA changes nothing, since no evaluation was better than the one before training"
    return "the LoRA changes nothing: all of its B weights are 0, as before the first update that had a gradient"


def add_peft_files(folder: Path, base: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors, by which peft loads what LORA_FILE holds."""
    adapter = lora_files.read(folder)
    config = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=list(adapter.layers))
    config.base_model_name_or_path, config.inference_mode = base, True
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    (folder / "adapter_config.json").write_text(json.dumps(plain, indent=2, sort_keys=True))
    weights = load_file(folder / lora_files.FILE)
    renamed = {PEFT_PREFIX + name.removeprefix(OUR_PREFIX): weight for name, weight in weights.items()}
    save_file(renamed, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    folders.as_any_new_file(folder / "adapter_model.safetensors")


def link_pipeline(folder: Path, model: str) -> None:
    """Put the base's other parts beside transformer/, as links, so that diffusers loads the folder as a pipeline."""
    base = Path(shipped.find(model)).resolve()
    if not base.is_dir():
        try:
            base = Path(huggingface_hub.snapshot_download(model, local_files_only=True))
        except (huggingface_hub.errors.LocalEntryNotFoundError, huggingface_hub.errors.HFValidationError):
            return  # it was trained on another machine
    if not (base / "model_index.json").is_file():
        return
    for part in base.iterdir():
        link = folder / part.name
        if part.is_dir() and part.name != "transformer" and not link.exists():
            link.unlink(missing_ok=True)  # one that leads nowhere any more
            link.symlink_to(part, target_is_directory=True)
    shutil.copy(base / "model_index.json", folder)


def write_card(run: recorded.Recorded, folder: Path, place: str) -> None:
    """Write README.md, with the pictures that it shows beside it."""
    for name in PICTURES:
        if (run.folder / name).is_file() and folder.resolve() != run.folder.resolve():
            shutil.copy(run.folder / name, folder)
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["cell"] = lambda value: re.sub(r"\s+", " ", str(value)).replace("|", "\\|")
    template = Path(__file__).parents[1] / "assets" / "model_card.md"
    config, base = run.config, run.config.model
    is_hub_id, package = not Path(shipped.find(base)).exists(), shipped.PACKAGE.resolve()
    if not is_hub_id:  # a folder's name; of what is shipped the path in a checkout
        base = Path(shipped.find(base)).resolve()
        base = str(base.relative_to(package.parent)) if base.is_relative_to(package) else base.name
    text = environment.from_string(template.read_text()).render(
        name=run.label,
        place=place,
        kind="A LoRA" if config.lora.rank else "Full weights of the transformer",
        base=base,
        base_address=f"https://huggingface.co/{base}" if is_hub_id else None,
        algorithm=algorithm(config),
        before=before_and_after(run, "test_best/" if folder.name == best.NAME else "test/"),
        config=config,
        num_tested=num_tested(run),
        pictures=[folder / name for name in PICTURES if (folder / name).is_file()],
        facts=facts(run, folder),
        settings=public_settings(run),
    )
    (folder / "README.md").write_text(f"---\n{front_matter(run)}\n---\n\n{text}", encoding="utf-8")


def algorithm(config: ConfigDict) -> str:
    """The loss that trained it, and its paper; one that only a fork has, by its name."""
    if config.algorithm == table.DPO:
        return "Diffusion-DPO (arXiv:2311.12908)"
    if config.algorithm == table.DISTILL:
        return "on-policy distillation (arXiv:2306.13649)"
    key = "forward_objective" if config.algorithm == table.NFT else "objective"
    loss = table.BY_KEY[f"train.{key}"].choices.get(config.train[key])
    branches = " with per-step branches (TempFlow-GRPO, arXiv:2508.04324)" if config.algorithm == table.PR else ""
    return (loss.card if loss else config.train[key]) + branches


def before_and_after(run: recorded.Recorded, prefix: str) -> list[tuple[str, str, str]]:
    """Name, figure before training, figure of these weights; on the test prompts."""
    tests = run.lines("test")
    first = next((record for record in tests if record["epoch"] == 0), {})
    last = next((record for record in reversed(tests) if any(name.startswith(prefix) for name in record)), {})
    names = [name.removeprefix(prefix) for name in last if name.startswith(prefix) and name.count("/") == 1]
    names = [name for name in names if name != "std_error" and rewards.called(name, run.config.reward_fn) == name]
    chosen_by = rewards.called(run.config.eval.best_by, run.config.reward_fn)
    errors = {chosen_by: (first.get("test/std_error"), last.get(f"{prefix}std_error"))}
    rows = []
    for name in names:
        before, after = errors.get(name, (None, None))
        values = first.get(f"test/{name}", math.nan), last[prefix + name]
        rows.append((name, with_error(values[0], before), with_error(values[1], after)))
    return rows


def num_tested(run: recorded.Recorded) -> str:
    """How many test prompts the run was evaluated on; the most there can be where it is older than run.json."""
    counts = [start["num_tested"] for start in provenance.starts(run.folder) if "num_tested" in start]
    return str(counts[-1]) if counts else f"at most {run.config.eval.num_prompts}"


def facts(run: recorded.Recorded, folder: Path) -> list[tuple[str, str]]:
    """What was trained, on what, for how long."""
    config, lines = run.config, run.lines("epoch")
    steps, images = (int(lines[-1].get(name, 0)) if lines else 0 for name in ("step", "images"))
    averaged = f"averaged (EMA, decay up to {config.train.ema_decay}, every {config.train.ema_interval} updates)"
    chosen = best.read(run.folder) if folder.name == best.NAME else None
    by = rewards.called(chosen.best_by, config.reward_fn) if chosen else ""
    return [
        ("prompts", Path(config.dataset).name),
        ("rewards and weights", ", ".join(f"{name} {weight}" for name, weight in config.reward_fn.items())),
        ("epochs, updates, images", f"{len(lines)}, {steps}, {images}"),
        ("weights", averaged if steps >= config.train.ema_interval else "as trained: no averaging had begun"),
        ("chosen", f"best {by}, after {chosen.epoch} epochs" if chosen else "the last"),
        ("seed", str(config.seed)),
        ("size", f"{config.height} x {config.width} pixels, height first"),
        *_branch(run),
        *_made_by(run),
    ]


def _branch(run: recorded.Recorded) -> list[tuple[str, str]]:
    """How a branch's first epochs differ from what its settings say, in settings that a card may show."""
    if not (run.folder / folders.PARENT).is_file():
        return []
    parent = folders.read_json(run.folder / folders.PARENT)
    changed = {key: before for key, (before, _) in parent["changed"].items() if _is_public(key)}
    of_parent = "".join(f", {key} {before}" for key, before in changed.items())
    return [("branch", f"the first {parent['epoch']} epochs are those of {Path(parent['folder']).name}{of_parent}")]


def _made_by(run: recorded.Recorded) -> list[tuple[str, str]]:
    """Commit, versions, kind of GPU and duration of what made it, and no more of run.json."""
    starts = provenance.starts(run.folder)
    if not starts:
        return []
    versions = ", ".join(f"{name} {number}" for name, number in starts[-1]["versions"].items())
    changed = ", with changes" if starts[-1]["changed_files"] else ""
    hours = sum(line.get("time/epoch_s", 0.0) for line in run.lines("epoch")) / 3600
    return [
        ("code", f"flow_grpo {starts[-1]['commit'] or 'of an unknown commit'}{changed}; {versions}"),
        ("made on", f"{starts[-1]['ranks']} x {', '.join(set(starts[-1]['gpus'])) or 'CPU'}, {hours:.3g} hours"),
    ]


def public_settings(run: recorded.Recorded) -> list[tuple[str, str]]:
    """Settings that differ from the defaults: those of the table that are numbers, names or choices. Any other text may
    be a path, an address or a secret, and so may all that a config file of a user's own adds."""
    rows = [(key, value) for key, _, value in recorded.changed_settings([run]).rows if value]
    return [(key, value) for key, value in rows if _is_public(key)]


def _is_public(key: str) -> bool:
    return key in table.BY_KEY and not table.BY_KEY[key].is_any_text


def front_matter(run: recorded.Recorded) -> str:
    """The card's data for the hub, as YAML."""
    tags = ["text-to-image", "diffusers", "reinforcement-learning", f"flow-grpo-{run.config.algorithm}"]
    return ModelCardData(
        base_model=None if Path(shipped.find(run.config.model)).exists() else run.config.model,
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=tags + (["lora", "peft"] if run.config.lora.rank else []),
    ).to_yaml()
