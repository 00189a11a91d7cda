"""The model card beside a run's weights, which lets others use them. It is made from the run's folder, after training
or later."""

import html
import re
import shutil
from pathlib import Path

import jinja2
from huggingface_hub import ModelCardData
from markupsafe import Markup
from ml_collections import ConfigDict

from flow_grpo import rewards
from flow_grpo.base import locations
from flow_grpo.base.errors import UserError
from flow_grpo.base.formatting import in_one_line, with_error
from flow_grpo.checkpoints import best
from flow_grpo.monitoring import provenance, run_history
from flow_grpo.settings import table

PICTURES = ("samples.png", "reward.png")
# What Markdown would read as more than letters: an end of a link's text only where its address follows, an underscore
# only at the edge of a word, and what begins an address that becomes a link by itself.
MARKUP = re.compile(r"[\\`*~$|@]|\](?=[(\[])|(?<![^\W_])_|_(?![^\W_])|(?<=:)/(?=/)|(?<=www)\.", re.IGNORECASE)


def complete(run_folder: Path, place: str = "THIS FOLDER OR REPOSITORY") -> list[str]:
    """Write the cards of the last weights and of the best ones, whose commands load them from a place; what there is to
    tell the user."""
    run, notices = run_history.read_run(run_folder, run_folder.resolve().name), []
    for folder in filter(None, [run_folder, best.find_best(run_folder)]):
        try:
            write_card(run, folder, place)
        except (UserError, OSError) as error:  # all that training made is saved by now
            notices.append(f"{folder} has no model card: {in_one_line(error)}")
    return notices


def write_card(run: run_history.RunHistory, folder: Path, place: str) -> None:
    """Write README.md, with the pictures that it shows beside it."""
    for name in PICTURES:
        if (run.folder / name).is_file() and folder.resolve() != run.folder.resolve():
            shutil.copy(run.folder / name, folder)
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        finalize=markdown,
    )
    environment.filters["code"] = code_span
    template = Path(__file__).parents[1] / "assets" / "model_card.md"
    config, is_hub_id = run.config, locations.is_hub_id(run.config.model)
    keeps_path = is_hub_id or config.model.startswith("flow_grpo/assets/")  # of any other folder the card has the name
    base = config.model if keeps_path else Path(config.model).name
    text = environment.from_string(template.read_text()).render(
        name=run.label,
        place=place,
        kind="A LoRA" if config.lora.rank else "Full weights of the transformer",
        base=base,
        is_hub_id=is_hub_id,
        algorithm=algorithm(config),
        before=before_and_after(run, "test_best/" if folder.name == best.NAME else "test/"),
        config=config,
        pictures=[folder / name for name in PICTURES if (folder / name).is_file()],
        facts=facts(run, folder),
        settings=public_settings(run),
    )
    (folder / "README.md").write_text(f"---\n{front_matter(run)}\n---\n\n{text}", encoding="utf-8")


def markdown(value: object) -> str:
    """A value as Markdown that shows its letters in one line, with no HTML, link or heading of its own; what a filter
    has already marked as safe stays. A run's folder may be somebody else's."""
    if isinstance(value, Markup):
        return value
    text = html.escape(in_one_line(value), quote=False)
    return MARKUP.sub(lambda match: "\\" + match[0], text)


def code_span(value: object) -> Markup:
    """A value as code in a cell of a table, where a backslash hides a vertical line alone."""
    text = in_one_line(value).replace("`", "'").replace("|", "\\|")
    return Markup(f"`{text}`")


def algorithm(config: ConfigDict) -> str:
    """The loss that trained it, and its paper; one that only a fork has, by its name or by what its functions say."""
    if config.method:
        return config.method
    if config.algorithm == table.DPO:
        return "Diffusion-DPO (arXiv:2311.12908)"
    if config.algorithm == table.DISTILL:
        return "on-policy distillation (arXiv:2306.13649)"
    key = "forward_objective" if config.algorithm == table.NFT else "objective"
    loss = table.BY_KEY[f"train.{key}"].choices.get(config.train[key])
    branches = " with per-step branches (TempFlow-GRPO, arXiv:2508.04324)" if config.algorithm == table.PR else ""
    return (loss.card if loss else config.train[key]) + branches


def before_and_after(run: run_history.RunHistory, prefix: str) -> list[tuple[str, str, str]]:
    """Name, figure before training, figure of these weights; on the test prompts."""
    tests = run.lines("test")
    first = next((record for record in tests if record["epoch"] == 0 and not run.evaluations_since), {})
    last = next((record for record in reversed(tests) if any(name.startswith(prefix) for name in record)), {})
    names = [name.removeprefix(prefix) for name in last if name.startswith(prefix) and name.count("/") == 1]
    names = [name for name in names if name != "std_error" and rewards.display_name(name, run.config.reward_fn) == name]
    chosen_by = rewards.display_name(run.config.eval.best_by, run.config.reward_fn)
    errors = {chosen_by: (first.get("test/std_error"), last.get(f"{prefix}std_error"))}
    rows = []
    for name in names:
        before, after = errors.get(name, (None, None))
        value = first.get(f"test/{name}")
        rows.append((name, "" if value is None else with_error(value, before), with_error(last[prefix + name], after)))
    return rows


def facts(run: run_history.RunHistory, folder: Path) -> list[tuple[str, str]]:
    """What was trained, on what, for how long."""
    config, lines = run.config, run.lines("epoch")
    steps, images = (int(lines[-1].get(name, 0)) if lines else 0 for name in ("step", "images"))
    averaged = f"averaged (EMA, decay up to {config.train.ema_decay}, every {config.train.ema_interval} updates)"
    chosen = best.read_best(run.folder) if folder.name == best.NAME else None
    by = rewards.display_name(chosen.best_by, config.reward_fn) if chosen else ""
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


def _branch(run: run_history.RunHistory) -> list[tuple[str, str]]:
    """Which epochs of a branch are its parent's, with other settings than the card's."""
    parent = provenance.parent(run.folder)
    if parent is None:
        return []
    return [("branch", f"the first {parent.epoch} epochs are those of {Path(parent.folder).name}")]


def _made_by(run: run_history.RunHistory) -> list[tuple[str, str]]:
    """Commit, versions, kind of GPU and duration of what made it, and no more of run.json."""
    start = provenance.last_start(run.folder)
    if start is None:
        return []
    changed = ", with changes" if start.changed_files else ""
    versions = "".join(f"; {name} {number}" for name, number in start.versions.items())
    hours = sum(line.get("time/epoch_s", 0.0) for line in run.lines("epoch")) / 3600
    return [
        ("code", f"flow_grpo {start.commit or 'of an unknown commit'}{changed}{versions}"),
        ("made on", f"{start.ranks} x {', '.join(sorted(set(start.gpus))) or 'CPU'}, {hours:.3g} hours"),
    ]


def public_settings(run: run_history.RunHistory) -> list[tuple[str, str]]:
    """Settings that differ from the defaults: those of the table that are numbers, names or choices. Any other text may
    be a path, an address or a secret, and so may all that a config file of a user's own adds."""
    rows = [(key, value) for key, _, value in run_history.changed_settings([run]).rows if value]
    return [(key, value) for key, value in rows if key in table.BY_KEY and not table.BY_KEY[key].is_any_text]


def front_matter(run: run_history.RunHistory) -> str:
    """The card's data for the hub, as YAML."""
    tags = ["text-to-image", "diffusers", "reinforcement-learning", f"flow-grpo-{in_one_line(run.config.algorithm)}"]
    return ModelCardData(
        base_model=run.config.model if locations.is_hub_id(run.config.model) else None,
        library_name="diffusers",
        pipeline_tag="text-to-image",
        tags=tags + (["lora"] if run.config.lora.rank else []),
    ).to_yaml()
