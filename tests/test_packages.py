"""Which package may import which, how large folders and functions may grow, and what a script is."""

import ast
import functools
import graphlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "flow_grpo"
MAY_IMPORT = {  # package -> the packages it may import; a new arrow is a decision
    "base": set(),
    "kernels": {"base"},
    "diffusers_patch": {"base", "kernels"},
    "algorithms": {"base", "diffusers_patch"},
    "data": {"base", "diffusers_patch"},
    "weights": {"base", "diffusers_patch", "kernels"},
    "checkpoints": {"base", "weights"},
    "rewards": {"base", "data"},
    "settings": {"algorithms", "base", "diffusers_patch", "rewards"},
    "scoring": {"base", "diffusers_patch", "rewards", "settings", "weights"},
    "reward_server": {"base", "rewards"},
    "monitoring": {"base", "checkpoints", "rewards", "settings", "weights"},
    "evaluation": {"base", "checkpoints", "data", "diffusers_patch", "rewards", "scoring", "settings", "weights"},
    "run": {
        *("algorithms", "base", "checkpoints", "data", "diffusers_patch", "evaluation", "kernels", "monitoring"),
        *("rewards", "scoring", "settings", "weights"),
    },
}
ONE_PER_FILE = "rewards", "diffusers_patch/models"  # a reward or a model family in each, so that they may be many
OUTSIDE = {  # a dependency -> the only modules that import it
    "wandb": {"monitoring/trackers"},
    "torch.utils.tensorboard": {"monitoring/trackers"},
    "torch.distributed": {"base/distributed", "weights/fsdp_utils"},
    "matplotlib": {"monitoring/plots"},
    "triton": {"kernels/qk_norm_rope_triton"},
    "flash_attn": {"kernels/flash_attention"},
    "httpx": {"rewards/clients/client", "scoring/settings"},
    "starlette": {"reward_server/serve", "reward_server/requests", "reward_server/server"},
    "uvicorn": {"reward_server/serve"},
    "pyarrow": {"data/preferences"},
    "jinja2": {"monitoring/model_card", "monitoring/report"},
    "scipy": {"rewards/shapes"},
    "rapidocr": {"rewards/ocr"},
}
MODULES = {path.relative_to(PACKAGE).with_suffix("").as_posix(): path for path in PACKAGE.rglob("*.py")}


@functools.cache
def imports(path):
    """Dotted names of everything a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_packages_import_only_what_they_may_and_stand_on_floors_without_a_circle():
    for package, may in MAY_IMPORT.items():
        names = {name for path in PACKAGE.joinpath(package).rglob("*.py") for name in imports(path)}
        ours = {name.split(".")[1] for name in names if name.startswith("flow_grpo.")}
        assert ours - {package} == may, package  # an arrow that nothing needs goes, too
    graphlib.TopologicalSorter(MAY_IMPORT).prepare()


def test_folders_are_small_enough_to_choose_from():
    entries = [entry for entry in PACKAGE.iterdir() if entry.name != "__pycache__"]
    assert {entry.name for entry in entries if entry.is_dir()} == {*MAY_IMPORT, "assets"}
    assert len(entries) <= 16
    sizes = {path.parent.relative_to(PACKAGE).as_posix(): 0 for path in MODULES.values()}
    for path in MODULES.values():
        sizes[path.parent.relative_to(PACKAGE).as_posix()] += path.name != "__init__.py"
    assert {folder: size for folder, size in sizes.items() if size > 12 and folder not in ONE_PER_FILE} == {}


def test_a_dependency_is_imported_in_one_place_and_a_tracker_when_a_run_asks_for_it():
    for package, where in OUTSIDE.items():
        prefix = f"{package}."
        users = {name for name, path in MODULES.items() if any(f"{n}.".startswith(prefix) for n in imports(path))}
        assert users == where, package
    assert not re.search(
        "^(import|from) .*(wandb|tensorboard)", MODULES["monitoring/trackers"].read_text(), re.MULTILINE
    )


def test_only_a_models_own_file_names_it():
    families = {path.stem for path in PACKAGE.glob("diffusers_patch/models/*.py")} - {"__init__"}
    assert len(families) >= 3
    for module, path in MODULES.items():
        if not module.startswith("diffusers_patch/models/") and module != "kernels/single_frame_vae":
            tree = ast.parse(path.read_text())
            names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | imports(path)
            names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            assert not [name for name in names if re.search("|".join(families), name, re.IGNORECASE)], module


def functions(path):
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def test_functions_are_short():
    files = [*PACKAGE.rglob("*.py")]
    files += [path for folder in ("scripts", "config", "benchmarks", "tools") for path in ROOT.glob(f"{folder}/*.py")]
    lengths = {f"{p.name}:{f.name}": f.end_lineno - f.lineno + 1 for p in files for f in functions(p)}
    assert {name: length for name, length in lengths.items() if length > 40} == {}


def test_scripts_are_the_algorithm():
    for script in sorted((ROOT / "scripts").glob("train_*.py")):
        if script.stem.split("_")[1] == "qwenimage":  # the others are twins
            names = {f.name for f in functions(script)} | {name.split(".")[-1] for name in imports(script)}
            assert {"rollout", "add_gradients", "main"} <= names
        else:  # a twin: the same algorithm with another model
            assert len(script.read_text().splitlines()) <= 25
