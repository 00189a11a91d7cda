"""The model card beside a run's weights, which lets others use them. It is made from the run's folder, after training
or later."""

import html
import re
import shutil
from pathlib import Path

import jinja2
from huggingface_hub import ModelCardData
from markupsafe import Markup

from flow_grpo import rewards
from flow_grpo.base import folders, locations
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import counted, in_one_line, with_error
from flow_grpo.checkpoints import best, exports
from flow_grpo.diffusers_patch import model_classes
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.size import training_size
from flow_grpo.monitoring import provenance, run_history
from flow_grpo.settings import table
from flow_grpo.settings.objectives import FORWARD_OBJECTIVES, GRADIENT_PATHS, OBJECTIVES
from flow_grpo.settings.sections import Config

PICTURES = ("samples.png", "reward.png")
# Characters that Markdown would read as more than letters: the end of a link's text only if its address follows, an
# underscore only at the edge of a word, and the beginning of an address that becomes a link by itself.
MARKUP = re.compile(r"[\\`*~$|@]|\](?=[(\[])|(?<![^\W_])_|_(?![^\W_])|(?<=:)/(?=/)|(?<=www)\.", re.IGNORECASE)


def write_cards(run_folder: Path, place: str = "THIS FOLDER OR REPOSITORY") -> list[str]:
    """Write the cards of the last weights and of the best ones, and return a sentence for each that failed.

    Args:
        place: from where the cards' commands load the weights.
    """
    run = run_history.read_run(run_folder, run_folder.resolve().name)
    notices = []
    for folder in (run_folder, best.find_best(run_folder)):
        if folder is None:
            continue
        # A run whose card fails has saved everything that training made.
        try:
            write_card(run, folder, place)
        except (UserError, OSError) as error:
            notices.append(f"{folder} has no model card: {in_one_line(error)}")
    return notices


def _template() -> jinja2.Template:
    """Return the template of a card, in which every value is escaped by `markdown` or `code_span`."""
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        finalize=markdown,
    )
    environment.filters["code"] = code_span
    file = Path(__file__).parents[1] / "assets" / "model_card.md"
    return environment.from_string(file.read_text())


def write_card(run: run_history.RunHistory, folder: Path, place: str) -> None:
    """Write README.md, with the pictures that it shows beside it."""
    pictures = []
    for name in PICTURES:
        if (run.folder / name).is_file() and folder.resolve() != run.folder.resolve():
            shutil.copy(run.folder / name, folder)
        if (folder / name).is_file():
            pictures.append(folder / name)
    config = run.config
    family = _family(config)
    edits = has_sources(family, run.folder)
    task = task_of(family, edits)
    is_hub_id = locations.is_hub_id(config.model)
    # The path of a user's own folder is nobody's business: the card has its name.
    is_shipped = locations.is_shipped(config.model)
    is_public = is_hub_id or is_shipped
    text = _template().render(
        name=run.label,
        place=place,
        kind="A LoRA" if config.lora.rank else "Full weights of the transformer",
        base=config.model if is_public else Path(config.model).name,
        is_hub_id=is_hub_id,
        is_shipped=is_shipped,
        added=Path(config.lora.base).name,
        algorithm=algorithm(config),
        before=before_and_after(run, "test_best/" if folder.name == best.NAME else "test/"),
        config=config,
        pictures=pictures,
        facts=facts(run, folder),
        strength=exports.strength(folder),
        edits=edits,
        in_comfyui=family is None or family.IN_COMFYUI,
        call=Markup(call_of(family, config, edits)) if family else "",
        settings=public_settings(run),
    )
    (folder / "README.md").write_text(f"---\n{front_matter(run, task)}\n---\n\n{text}", encoding="utf-8")


def task_of(family: type[FlowModel] | None, edits: bool) -> str:
    """Return what the hub calls the task of a class of models; None = not known."""
    if edits:
        return "image-to-image"
    if family is not None and family.FRAMES_PER_LATENT:
        return "text-to-video"
    return "text-to-image"


def has_sources(family: type[FlowModel] | None, run_folder: Path) -> bool:
    """Return whether the prompts of a run have images to be edited. A model that takes them, and need not, has them
    unless the run's record of its data set says otherwise."""
    if family is None or not family.MOST_SOURCES:
        return False
    file = run_folder / folders.INPUTS
    if family.NEEDS_SOURCE or not file.exists():
        return True
    inputs = folders.read_json(file)
    # A run on stored pairs may have opened no data set.
    return not inputs.get("dataset") or inputs.get("sources") != {}


def _family(config: Config) -> type[FlowModel] | None:
    """Return the class of a run's model; None where neither the model nor a copy of it is on this machine."""
    try:
        return model_classes.resolve(config.model, config.model_class)
    except UserError:
        return None


def call_of(family: type[FlowModel], config: Config, edits: bool) -> str:
    """Return a line of Python that draws an image, or the frames of a video, as the run's evaluations do.

    Args:
        edits: whether prompts have an image to be edited. The line calls it `source`, and the pipeline `pipeline`.
    """
    settings = family.call_arguments(training_size(config), config.eval.num_steps, config.eval.guidance_scale)
    arguments = ['"YOUR PROMPT"']
    if edits:
        arguments.append("image=source")
    for name, value in settings.items():
        arguments.append(f"{name}={value!r}")
    call = f"pipeline({', '.join(arguments)})"
    return f"frames = {call}.frames[0]" if family.FRAMES_PER_LATENT else f"image = {call}.images[0]"


def markdown(value: object) -> str:
    """Return a value as Markdown that shows its letters in one line, without HTML, links or headings in it: a run's
    folder may be somebody else's. A value that a filter has marked as safe stays."""
    if isinstance(value, Markup):
        return value
    text = html.escape(in_one_line(value), quote=False)
    return MARKUP.sub(lambda match: "\\" + match[0], text)


def code_span(value: object) -> Markup:
    """Return a value as code in a cell of a table, where a backslash escapes only a vertical line."""
    text = in_one_line(value).replace("`", "'").replace("|", "\\|")
    return Markup(f"`{text}`")


def algorithm(config: Config) -> str:
    """Return the loss and its paper. A loss of a fork is called by its name, or by what its functions say."""
    if config.method:
        return config.method
    if config.algorithm == table.DPO:
        return "Diffusion-DPO (arXiv:2311.12908)"
    if config.algorithm == table.DISTILL:
        return "on-policy distillation (arXiv:2306.13649)"
    if config.algorithm == table.REFL:
        return GRADIENT_PATHS[config.train.gradient_path].card
    name = config.train.objective
    loss = OBJECTIVES.get(name)
    if config.algorithm == table.NFT:
        name = config.train.forward_objective
        loss = FORWARD_OBJECTIVES.get(name)
    description = loss.card if loss else name
    if config.algorithm == table.PR:
        description += " with per-step branches (TempFlow-GRPO, arXiv:2508.04324)"
    return description


def before_and_after(run: run_history.RunHistory, prefix: str) -> list[tuple[str, str, str]]:
    """Return name, figure before training and figure of these weights of each score of the test prompts.

    Args:
        prefix: of the names of these weights' figures, "test/" or "test_best/".
    """
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for record in run.lines("test"):
        # The first test counts only if later ones were made in the same way.
        if record["epoch"] == 0 and not first and not run.evaluations_since:
            first = record
        if any(name.startswith(prefix) for name in record):
            last = record
    chosen_by = rewards.display_name(run.config.eval.best_by, run.config.reward_fn)
    rows = []
    for key, value in last.items():
        name = key.removeprefix(prefix)
        is_score = key.startswith(prefix) and key.count("/") == 1 and not name.endswith("std_error")
        if not is_score or rewards.display_name(name, run.config.reward_fn) != name:
            continue
        # Only the score that chooses has standard errors.
        error_before = None
        error_after = None
        if name == chosen_by:
            error_before = first.get("test/std_error")
            error_after = last.get(f"{prefix}std_error")
        before = ""
        if f"test/{name}" in first:
            before = with_error(first[f"test/{name}"], error_before)
        rows.append((name, before, with_error(value, error_after)))
    return rows


def facts(run: run_history.RunHistory, folder: Path) -> list[tuple[str, str]]:
    """Return rows about what was trained, on what, and for how long."""
    config = run.config
    epochs = run.lines("epoch")
    last = epochs[-1] if epochs else {}
    updates = int(last.get("step", 0))
    images = int(last.get("images", 0))
    return [
        ("prompts", Path(config.dataset).name),
        ("rewards and weights", ", ".join(f"{name} {weight}" for name, weight in config.reward_fn.items())),
        (f"epochs, updates, {config.drawn}", f"{len(epochs)}, {updates}, {images}"),
        ("weights", _averaging(config, updates)),
        ("chosen", _choice(run, folder)),
        ("seed", str(config.seed)),
        ("size", _size(config)),
        *_branch(run),
        *_made_by(run),
    ]


def _averaging(config: Config, updates: int) -> str:
    """Return how the weights were averaged after so many updates, in words."""
    train = config.train
    if updates < train.ema_interval:
        return "as trained: no averaging had begun"
    return f"averaged (EMA, decay up to {train.ema_decay}, every {counted(train.ema_interval, 'updates')})"


def _choice(run: run_history.RunHistory, folder: Path) -> str:
    """Return which of a run's weights a folder has, in words."""
    if folder.name != best.NAME:
        return "the last"
    evaluation = best.read_best(run.folder)
    if evaluation is None:
        return "the last"
    score = rewards.display_name(evaluation.best_by, run.config.reward_fn)
    return f"best {score}, after {counted(evaluation.epoch, 'epochs')}"


def _size(config: Config) -> str:
    """Return the size of a run's images or videos."""
    sides = f"{config.height} x {config.width} pixels, height first"
    return sides if config.frames == 1 else f"{config.frames} frames of {sides}"


def _branch(run: run_history.RunHistory) -> list[tuple[str, str]]:
    """Return a row about the epochs of a branch that are its parent's, with other settings than the card's."""
    parent = provenance.parent(run.folder)
    if parent is None:
        return []
    return [("branch", f"begins with {counted(parent.epoch, 'epochs')} of {Path(parent.folder).name}")]


def _made_by(run: run_history.RunHistory) -> list[tuple[str, str]]:
    """Return rows about commit, versions, kind of GPU and duration, and nothing else of run.json."""
    start = provenance.last_start(run.folder)
    if start is None:
        return []
    code = f"flow_grpo {start.commit or 'of an unknown commit'}"
    if start.changed_files:
        code += ", with changes"
    for name, number in start.versions.items():
        code += f"; {name} {number}"
    device = ", ".join(sorted(set(start.gpus))) or "CPU"
    return [("code", code), ("made on", f"{start.ranks} x {device}, {run.seconds() / 3600:.3g} hours")]


def public_settings(run: run_history.RunHistory) -> list[tuple[str, str]]:
    """Return the settings that differ from the defaults, as far as they are numbers, names or choices.

    Any other text may be a path, an address or a secret, and so may all that a user's own config file adds.
    """
    rows = []
    for key, _, value in run_history.changed_settings([run]).rows:
        if value and key in table.BY_KEY and not table.BY_KEY[key].is_any_text:
            rows.append((key, value))
    return rows


def front_matter(run: run_history.RunHistory, task: str) -> str:
    """Return the card's data for the hub, as YAML."""
    tags = [task, "diffusers", "reinforcement-learning", f"flow-grpo-{in_one_line(run.config.algorithm)}"]
    if run.config.lora.rank:
        tags.append("lora")
    return ModelCardData(
        base_model=run.config.model if locations.is_hub_id(run.config.model) else None,
        library_name="diffusers",
        pipeline_tag=task,
        tags=tags,
    ).to_yaml()
