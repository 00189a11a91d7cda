"""Write the parts of docs/ that the program knows: `make docs`. tests/test_docs.py fails where a page has another text.

A page holds the marker `<!-- made: NAME -->` and the end marker `<!-- /made -->`. What lies between them is replaced by
the text of MAKERS[NAME]; words after NAME are its arguments.
"""

import ast
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import noise_levels

from config import dpo, grpo, nft, refl
from flow_grpo import rewards
from flow_grpo.algorithms import batch_plan
from flow_grpo.base import metric_table
from flow_grpo.base.formatting import markdown_table
from flow_grpo.command_line import terminal
from flow_grpo.diffusers_patch import model_classes, registry
from flow_grpo.plan import measured
from flow_grpo.settings import table as settings
from flow_grpo.settings import unknown_names
from flow_grpo.settings.setting import ALL, Setting

BLOCK = re.compile(r"(<!-- made: ([^>]+?) -->\n).*?(<!-- /made -->)", re.DOTALL)
CONFIGS = {"config/grpo.py": grpo, "config/nft.py": nft, "config/dpo.py": dpo, "config/refl.py": refl}
MAX_GPUS = 16


def table(head: list[str], rows: list[list[str]]) -> str:
    return markdown_table(head, rows).replace("|  |", "| |")


def first_paragraph(docstring: str) -> str:
    """Return the first paragraph of a docstring on one line, without its last full stop."""
    return " ".join(docstring.split("\n\n")[0].split()).removesuffix(".")


def every_run() -> Iterator[tuple[str, Callable]]:
    """Yield each run of config/ after its file."""
    for file, module in CONFIGS.items():
        for run in module.RUNS:
            yield file, run


def experiments() -> str:
    """Return a table of all runs of config/: each one's script, its size, and on how many GPUs it divides evenly."""
    rows = []
    for file, run in every_run():
        config = run()
        images, steps = size(config)
        rows.append(
            [
                f"`{file}:{run.__name__}`",
                first_paragraph(run.__doc__),
                f"`{script_of(config)}`",
                images,
                steps,
                gpu_counts(config),
            ]
        )
    return table(["config", "what it is", "script", "epoch", "noisy steps", "GPUs"], rows)


def script_of(config) -> str:
    """Return the script that is named after a config's model, or else the one of Qwen-Image, which takes all models."""
    pattern = settings.SCRIPTS[config.algorithm]
    of_model = pattern.replace("*", family_of(config).NAME)
    if (ROOT / "scripts" / of_model).exists():
        return of_model
    return pattern.replace("*", "qwenimage")


def size(config) -> tuple[str, str]:
    """Return the size of an epoch and its noisy steps, in words.

    The size is prompts x images, or prompts x trunks x branches of a step. Noisy steps have their noise level.
    """
    sample = config.sample
    if config.algorithm == settings.DPO:
        return f"{sample.num_prompts_per_epoch} pairs", ""
    images = f"{sample.num_prompts_per_epoch} x {sample.num_images_per_prompt}"
    if sample.num_branches > 1:
        images += f" x {sample.num_branches}"
    # Neither has a noisy step.
    if config.algorithm in (settings.NFT, settings.REFL):
        return images, ""
    num_trained_steps = batch_plan.num_trained_steps(sample, config.train)
    return images, f"{num_trained_steps} of {sample.num_steps}, level {sample.noise_level:g}"


def family_of(config) -> type:
    """Return the model class of config.model, without a download."""
    return model_classes.of_folder(registry.tiny_like(config.model))


def gpu_counts(config) -> str:
    """Return the numbers of GPUs that a config's epoch divides over, in words."""
    plan = batch_plan.plan_pairs if config.algorithm == settings.DPO else batch_plan.plan_batches
    counts = []
    for count in range(1, MAX_GPUS + 1):
        # A plan that does not divide evenly is refused.
        with suppress(ValueError):
            plan(settings.typed(config), count)
            counts.append(str(count))
    return ", ".join(counts)


def variants() -> str:
    """Return a table of all variants, with the config files that have each."""
    files_of: dict[tuple[str, str], list[str]] = {}
    for file, module in CONFIGS.items():
        for variant in module.VARIANTS:
            key = variant.__name__, first_paragraph(variant.__doc__)
            files_of.setdefault(key, []).append(Path(file).stem)
    rows = []
    for (name, meaning), files in sorted(files_of.items()):
        rows.append([f"`{name}`", meaning, ", ".join(files)])
    return table(["variant", "what it changes", "config/"], rows)


def reward_files() -> str:
    """Return a table of all rewards, by the first paragraph of their files: bounds of scores, and their gradients."""
    rows = []
    for path in sorted(Path(rewards.__file__).parent.glob("*.py")):
        name = path.stem
        if name in rewards.HELPERS or name == "__init__":
            continue
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        gradient = "yes" if rewards.has_gradient(name) else ""
        rows.append([f"`{name}`", first_paragraph(docstring), bounds_in_words(name), gradient])
    return table(["reward", "what it scores", "bounds", "gradient"], rows)


def bounds_in_words(reward: str) -> str:
    """Return the lowest and the highest score of a reward."""
    lowest, highest = rewards.bounds(reward)
    if math.isinf(lowest) and math.isinf(highest):
        return "unbounded"
    return f"{lowest:g} to {highest:g}".replace("inf", "infinity")


def model_files() -> str:
    """Return a table of all models, with the configs' names of their weights."""
    configs = [run() for _, run in every_run()]
    rows = []
    for name in registry.names():
        family = model_classes.by_name(name)
        used_models = {config.model for config in configs if family_of(config) is family}
        file = family.__module__.replace(".", "/")
        rows.append(
            [
                f"`{family.PIPELINE.__name__}`",
                "; ".join(map(licensed, sorted(used_models))),
                f"`{file}.py`",
                f"{family.GUIDANCE_SCALE:g}",
            ]
        )
    head = ["diffusers pipeline", "`config.model` in config/: licence, download", "file", "guidance scale by default"]
    return table(head, rows)


def licensed(model: str) -> str:
    """Return a model with the licence and the size of its weights, if they are published."""
    weights = registry.published(model)
    if not weights:
        return f"`{model}`"
    return f"`{model}`: {weights.licence}, {weights.download_gb} GB"


def measured_runs() -> str:
    """Return a table of the rows of assets/measured.json, with the images of each run's epoch."""
    rows = []
    for row in measured.rows():
        name = f"`train_{row.run.partition('_')[2]}`"
        if row.settings:
            changes = " ".join(f"{key}={value}" for key, value in row.settings.items())
            name += f" `{changes}`"
        if not row.gib and not row.out_of_memory:
            continue
        figures = ["out of memory", "", ""]
        if row.gib:
            figures = [f"{row.gib:g}", f"{row.images_per_s:g}", f"{images_per_epoch(row.config().sample):,}"]
        rows.append([row.card, name, *figures])
    head = ["smallest card", "run", "GiB of each", "images/s of each, on an H200 or H100", "images per epoch"]
    return table(head, rows)


def images_per_epoch(sample) -> int:
    """Return the images that config.sample asks for; branches leave a trunk at every step but the last."""
    trunks = sample.num_prompts_per_epoch * sample.num_images_per_prompt
    if sample.num_branches == 1:
        return trunks
    return trunks * sample.num_branches * (sample.num_steps - 1)


def dpo_noise_levels() -> str:
    """Return a table of the noise levels that DPO draws and the sigmas that are sampled.

    Models that share them share a row.
    """
    models: dict[tuple, list[str]] = {}
    for row in noise_levels.of_published_models():
        trained = " / ".join(f"{sigma:.2f}" for sigma in row.trained)
        sampled = " ".join(f"{sigma:.2f}" for sigma in row.sampled)
        key = (str(row.size), row.shift, trained, sampled)
        models.setdefault(key, []).append(f"`{row.model}`")
    rows = [[", ".join(hub_ids), *figures] for figures, hub_ids in models.items()]
    return table(["model", "size", "shift", "DPO trains at: 5 % / median / 95 %", "sampled steps"], rows)


def settings_tables() -> str:
    head = ["setting", "default", "meaning", "scripts", "resume"]
    parts = []
    for section, title in settings.SECTIONS.items():
        rows = [setting_row(setting) for setting in settings.SETTINGS if setting.section == section]
        parts.append(f"## {section or 'config'}: {title}\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def setting_row(setting: Setting) -> list[str]:
    """Return the row of a setting: key, default, meaning, scripts that read it, whether a resumed run may change it."""
    scripts = [f"`{settings.SCRIPTS[name]}`" for name in setting.used_by]
    resume = "yes" if setting.resumable else ""
    return [
        f"`{setting.key}`",
        f"`{setting.default!r}`",
        setting.description(),
        "all" if setting.used_by == ALL else ", ".join(scripts),
        resume,
    ]


def code(file: str, *names: str) -> str:
    """Return functions and assignments of a Python file as a block of code."""
    text = (ROOT / file).read_text()
    lines = text.splitlines()
    parts = []
    for node in ast.parse(text).body:
        if defined_names(node) & set(names):
            parts.append(excerpt(lines, first_line(node), node.end_lineno))
    assert parts, (file, names)
    return "```python\n" + "\n".join(parts) + "\n```"


def defined_names(node: ast.stmt) -> set[str]:
    """Return the name of a function or class, or the names that an assignment binds."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if not isinstance(node, ast.Assign):
        return set()
    names = set()
    for target in node.targets:
        for part in ast.walk(target):
            if isinstance(part, ast.Name):
                names.add(part.id)
    return names


def excerpt(lines: list[str], first: int, last: int | None) -> str:
    """Return the lines of a file from one number to another, as the syntax tree counts them: from 1."""
    return "\n".join(lines[first - 1 : last])


def interface(file: str, *names: str) -> str:
    """Return functions and records of a Python file as a block of code: their signatures, docstrings and fields. Names
    such as Run.plan are members of a class: alone or, where the class is named too, after its fields."""
    text = (ROOT / file).read_text()
    nodes = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            nodes[node.name] = node
    lines = text.splitlines()
    members = defaultdict(list)
    for name in names:
        owner, _, member = name.partition(".")
        members[owner].append(member)
    parts = []
    for name, chosen in members.items():
        node = nodes[name]
        if "" in chosen:
            part = declaration(node, lines)
        else:
            part = excerpt(lines, first_line(node), node.body[0].end_lineno) + "\n"
        for member in filter(None, chosen):
            part += "\n" + member_of(node, member, lines)
        parts.append(part)
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"`{module}`\n\n<!-- not run: declarations -->\n```python\n" + "\n\n\n".join(parts) + "\n```"


def declaration(node: ast.FunctionDef | ast.ClassDef, lines: list[str]) -> str:
    """Return the lines of a function up to the end of its docstring, or of a class up to its first method."""
    if isinstance(node, ast.ClassDef):
        last = node.end_lineno
        methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
        if methods:
            last = first_line(methods[0]) - 1
        return excerpt(lines, first_line(node), last).rstrip()
    first_statement = node.body[0]
    if ast.get_docstring(node):
        return excerpt(lines, node.lineno, first_statement.end_lineno)
    return excerpt(lines, node.lineno, first_statement.lineno - 1) + " ..."


def member_of(node: ast.ClassDef, name: str, lines: list[str]) -> str:
    """Return the lines of a field of a class, or a method after an empty line."""
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.target.id == name:
            return excerpt(lines, part.lineno, part.end_lineno)
        if isinstance(part, ast.FunctionDef) and part.name == name:
            decorators = lines[first_line(part) - 1 : part.lineno - 1]
            return "\n".join(["", *decorators, declaration(part, lines)])
    raise AssertionError(f"{node.name} has no {name}")


def first_line(node: ast.stmt) -> int:
    """Return the line where a statement begins, with its decorators if it has any."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.decorator_list:
        return node.decorator_list[0].lineno
    return node.lineno


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
    """Return a page with all of its blocks written anew."""

    def written_anew(block: re.Match) -> str:
        begin, name_and_arguments, end = block.groups()
        name, *arguments = name_and_arguments.split()
        return begin + MAKERS[name](*arguments) + "\n" + end

    return BLOCK.sub(written_anew, text)


def pages() -> list[Path]:
    """Return the files that may have blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


if __name__ == "__main__":
    terminal.protect()
    for page in pages():
        old = page.read_text()
        new = made(old)
        if new != old:
            page.write_text(new)
            print(page.relative_to(ROOT))
