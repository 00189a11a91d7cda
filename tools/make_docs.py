"""Write the parts of docs/ that the program knows: `make docs`. tests/test_docs.py fails where a page has another text.

A page holds the marker `<!-- made: NAME -->` and the end marker `<!-- /made -->`. What lies between them is replaced by
the text of MAKERS[NAME]; words after NAME are its arguments.
"""

import ast
import re
import sys
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import noise_levels

from config import dpo, grpo, nft
from flow_grpo import rewards
from flow_grpo.algorithms import batch_plan
from flow_grpo.base import metric_table
from flow_grpo.base.formatting import markdown_table
from flow_grpo.command_line import terminal
from flow_grpo.diffusers_patch import model_classes, registry
from flow_grpo.run import measured
from flow_grpo.settings import table as settings
from flow_grpo.settings import unknown_names
from flow_grpo.settings.setting import Setting

BLOCK = re.compile(r"(<!-- made: ([^>]+?) -->\n).*?(<!-- /made -->)", re.DOTALL)
CONFIGS = {"config/grpo.py": grpo, "config/nft.py": nft, "config/dpo.py": dpo}
MAX_GPUS = 16


def table(head: list[str], rows: list[list[str]]) -> str:
    return markdown_table(head, rows).replace("|  |", "| |")


def first_paragraph(docstring: str) -> str:
    """Of a docstring, on one line, without its last full stop."""
    return " ".join(docstring.split("\n\n")[0].split()).removesuffix(".")


def experiments() -> str:
    """Every run of config/: what it is, its script, its size, and on how many GPUs it divides evenly."""
    rows = []
    for file, module in CONFIGS.items():
        for run in module.RUNS:
            config = run()
            names = f"`{file}:{run.__name__}`", first_paragraph(run.__doc__), f"`{script_of(config)}`"
            rows.append([*names, *size(config), gpu_counts(config)])
    return table(["config", "what it is", "script", "epoch", "noisy steps", "GPUs"], rows)


def script_of(config) -> str:
    """The one that is named after its model, else the one that it is an alias of."""
    scripts = [settings.SCRIPTS[config.algorithm].replace("*", name) for name in (family_of(config).NAME, "qwenimage")]
    return next(script for script in scripts if (ROOT / "scripts" / script).exists())


def size(config) -> tuple[str, str]:
    """Of an epoch: prompts x images, or prompts x trunks x branches of a step; noisy steps and their noise level."""
    sample = config.sample
    if config.algorithm == settings.DPO:
        return f"{sample.num_prompts_per_epoch} pairs", ""
    images = f"{sample.num_prompts_per_epoch} x {sample.num_images_per_prompt}"
    images += f" x {sample.num_branches}" if sample.num_branches > 1 else ""
    steps = (
        f"{batch_plan.num_trained_steps(settings.typed(config))} of {sample.num_steps}, level {sample.noise_level:g}"
    )
    return images, "" if config.algorithm == settings.NFT else steps


def family_of(config) -> type:
    """The model class of config.model, without a download."""
    return model_classes.of_folder(registry.tiny_like(config.model))


def gpu_counts(config) -> str:
    plan, counts = batch_plan.plan_pairs if config.algorithm == settings.DPO else batch_plan.plan_batches, []
    for count in range(1, MAX_GPUS + 1):
        with suppress(ValueError):
            plan(settings.typed(config), count)
            counts.append(str(count))
    return ", ".join(counts)


def variants() -> str:
    """Every variant, with the config files that have it."""
    found: dict[tuple[str, str], list[str]] = {}
    for file, module in CONFIGS.items():
        for variant in module.VARIANTS:
            key = variant.__name__, first_paragraph(variant.__doc__)
            found.setdefault(key, []).append(Path(file).stem)
    rows = [[f"`{name}`", meaning, ", ".join(files)] for (name, meaning), files in sorted(found.items())]
    return table(["variant", "what it changes", "config/"], rows)


def reward_files() -> str:
    """Every reward, by the first paragraph of its file, and the bounds of its score."""
    folder, rows = Path(rewards.__file__).parent, []
    for name in sorted(path.stem for path in folder.glob("*.py") if path.stem not in (*rewards.HELPERS, "__init__")):
        docstring = ast.get_docstring(ast.parse((folder / f"{name}.py").read_text()))
        bounds = "{:g} to {:g}".format(*rewards.bounds(name)).replace("inf", "infinity")
        rows.append([f"`{name}`", first_paragraph(docstring), bounds.replace("-infinity to infinity", "unbounded")])
    return table(["reward", "what it scores", "bounds"], rows)


def model_files() -> str:
    rows, configs = [], [run() for module in CONFIGS.values() for run in module.RUNS]
    for name in registry.names():
        family = model_classes.by_name(name)
        used = sorted({config.model for config in configs if family_of(config) is family})
        file, scale = family.__module__.replace(".", "/"), f"{family.GUIDANCE_SCALE:g}"
        rows.append([f"`{family.PIPELINE.__name__}`", "; ".join(map(licensed, used)), f"`{file}.py`", scale])
    head = ["diffusers pipeline", "`config.model` in config/: licence, download", "file", "guidance scale by default"]
    return table(head, rows)


def licensed(model: str) -> str:
    known = registry.published(model)
    return f"`{model}`" + (f": {known.licence}, {known.download_gb} GB" if known else "")


def measured_runs() -> str:
    """Every row of assets/measured.json, with the images of the run's epoch."""
    rows = []
    for row in measured.rows():
        sample = row.config().sample
        steps = sample.num_steps - 1 if sample.num_branches > 1 else 1
        images = sample.num_prompts_per_epoch * sample.num_images_per_prompt * sample.num_branches * steps
        changes = " ".join(f"{key}={value}" for key, value in row.settings.items())
        name = f"`train_{row.run.partition('_')[2]}`" + (f" `{changes}`" if changes else "")
        figures = [f"{row.gib:g}", f"{row.images_per_s:g}", f"{images:,}"] if row.gib else ["out of memory", "", ""]
        rows.append([row.card, name, *figures])
    head = ["smallest card", "run", "GiB of each", "images/s of each, on an H200 or H100", "images per epoch"]
    return table(head, rows)


def dpo_noise_levels() -> str:
    """Noise levels that DPO draws and the sigmas that are sampled; models that share them share a row."""
    models: dict[tuple, list[str]] = {}
    for row in noise_levels.of_published_models():
        trained = " / ".join(f"{sigma:.2f}" for sigma in row.trained)
        sampled = " ".join(f"{sigma:.2f}" for sigma in row.sampled)
        key = (str(row.size), row.shift, trained, sampled)
        models.setdefault(key, []).append(f"`{row.model}`")
    rows = [[", ".join(hub_ids), *figures] for figures, hub_ids in models.items()]
    return table(["model", "size", "shift", "DPO trains at: 5 % / median / 95 %", "sampled steps"], rows)


def settings_tables() -> str:
    head, parts = ["setting", "default", "meaning", "scripts", "resume"], []
    for section, title in settings.SECTIONS.items():
        rows = [setting_row(setting) for setting in settings.SETTINGS if setting.section == section]
        parts.append(f"## {section or 'config'}: {title}\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def setting_row(setting: Setting) -> list[str]:
    scripts = [f"`{settings.SCRIPTS[name]}`" for name in setting.used_by]
    resume = "yes" if setting.resumable else ""
    return [
        f"`{setting.key}`",
        f"`{setting.default!r}`",
        setting.description(),
        "all" if len(scripts) == 4 else ", ".join(scripts),
        resume,
    ]


def code(file: str, *names: str) -> str:
    """Functions and assignments of a Python file, as a block of code."""
    text = (ROOT / file).read_text()
    lines, parts = text.splitlines(), []
    for node in ast.parse(text).body:
        targets = [t.id for target in getattr(node, "targets", []) for t in ast.walk(target) if isinstance(t, ast.Name)]
        if {getattr(node, "name", ""), *targets} & set(names):
            decorators = [decorator.lineno for decorator in getattr(node, "decorator_list", [])]
            first = min([node.lineno, *decorators])
            parts.append("\n".join(lines[first - 1 : node.end_lineno]))
    assert parts, (file, names)
    return "```python\n" + "\n".join(parts) + "\n```"


def interface(file: str, *names: str) -> str:
    """Functions and records of a Python file as a block of code: their signatures, docstrings and fields."""
    text = (ROOT / file).read_text()
    nodes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    lines = text.splitlines()
    parts = [declaration(nodes[name], lines) for name in names]
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"`{module}`\n\n<!-- not run: declarations -->\n```python\n" + "\n\n\n".join(parts) + "\n```"


def declaration(node: ast.FunctionDef | ast.ClassDef, lines: list[str]) -> str:
    """The lines of a function up to the end of its docstring, or of a class up to its first method."""
    if isinstance(node, ast.ClassDef):
        methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
        end = first_line(methods[0]) - 1 if methods else node.end_lineno
        return "\n".join(lines[first_line(node) - 1 : end]).rstrip()
    if ast.get_docstring(node):
        return "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])
    return "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1]) + " ..."


def first_line(node: ast.FunctionDef | ast.ClassDef) -> int:
    """Where a function or a class begins, with its decorators."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


MAKERS = {
    "settings": settings_tables,
    "measured": measured_runs,
    "metrics": lambda: metric_table.TABLE.read_text().rstrip(),
    "other_programs": lambda: unknown_names.TABLE.read_text().rstrip(),
    "experiments": experiments,
    "variants": variants,
    "rewards": reward_files,
    "models": model_files,
    "noise_levels": dpo_noise_levels,
    "code": code,
    "interface": interface,
}


def made(text: str) -> str:
    """A page with all of its blocks written anew."""

    def block(found: re.Match) -> str:
        name, *arguments = found[2].split()
        return found[1] + MAKERS[name](*arguments) + "\n" + found[3]

    return BLOCK.sub(block, text)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


if __name__ == "__main__":
    terminal.protect()
    for page in pages():
        old = page.read_text()
        if (new := made(old)) != old:
            page.write_text(new)
            print(page.relative_to(ROOT))
