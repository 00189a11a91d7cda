"""Which package may import which, how large folders and functions may grow, what a script is, and what `pip install .`
installs."""

import ast
import functools
import graphlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from email.parser import Parser
from pathlib import Path

import pytest
import yaml
from small import ENV, ROOT

import flow_grpo
from flow_grpo.base import locations
from flow_grpo.diffusers_patch import registry

PACKAGE = ROOT / "flow_grpo"
MAY_IMPORT = {  # package -> the packages it may import; a new arrow is a decision
    "base": set(),
    "kernels": {"base"},
    "settings": {"base"},
    "diffusers_patch": {"base", "kernels", "settings"},
    "algorithms": {"base", "diffusers_patch", "settings"},
    "data": {"algorithms", "base", "diffusers_patch"},
    "weights": {"base", "diffusers_patch", "kernels", "settings"},
    "checkpoints": {"base", "weights"},
    "rewards": {"base", "data"},
    "command_line": {"algorithms", "base", "diffusers_patch", "rewards", "settings"},
    "scoring": {"base", "rewards", "settings"},
    "reward_server": {"rewards"},
    "monitoring": {"base", "checkpoints", "command_line", "diffusers_patch", "rewards", "settings"},
    "evaluation": {"base", "checkpoints", "data", "diffusers_patch", "rewards", "scoring", "settings", "weights"},
    "plan": {"algorithms", "base", "diffusers_patch", "settings", "weights"},
    "run": {
        *("algorithms", "base", "checkpoints", "command_line", "data", "diffusers_patch", "evaluation", "kernels"),
        *("monitoring", "plan", "rewards", "scoring", "settings", "weights"),
    },
}
ONE_PER_FILE = ("rewards", "diffusers_patch/models")  # a reward or a model family in each, so that they may be many
OUTSIDE = {  # a dependency -> the only modules that import it
    "wandb": {"monitoring/trackers"},
    "torch.utils.tensorboard": {"monitoring/trackers"},
    "torch.distributed": {"base/distributed", "weights/fsdp_utils"},
    "matplotlib": {"monitoring/plots"},
    "triton": {"kernels/qk_norm_rope_triton"},
    "flash_attn": {"kernels/flash_attention"},
    "httpx": {"rewards/clients/client", "scoring/settings"},
    "starlette": {"reward_server/requests", "reward_server/server"},
    "uvicorn": {"reward_server/server"},
    "pyarrow": {"data/image_pairs", "data/parquet", "data/preferences"},
    "jinja2": {"monitoring/model_card", "monitoring/report"},
    "scipy": {"rewards/detection"},
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
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_packages_import_only_what_they_may_and_stand_on_floors_without_a_circle():
    for package, may in MAY_IMPORT.items():
        used = set()
        for path in PACKAGE.joinpath(package).rglob("*.py"):
            ours = [name for name in imports(path) if name.startswith("flow_grpo.")]
            used.update(name.split(".")[1] for name in ours)
        assert used - {package} == may, package  # an arrow that nothing needs goes, too
    graphlib.TopologicalSorter(MAY_IMPORT).prepare()


def test_the_floors_of_the_code_map_are_those_of_the_imports():
    page = (ROOT / "docs/reference/code_map.md").read_text()
    floors = {package: int(floor) for floor, package in re.findall(r"^\| (\d+) \| `(\w+)/`", page, re.MULTILINE)}
    assert floors.keys() == MAY_IMPORT.keys()
    for package, may in MAY_IMPORT.items():
        assert all(floors[imported] < floors[package] for imported in may), package
    assert [*floors.values()] == sorted(floors.values(), reverse=True)


def test_what_scripts_of_ones_own_import_from_where_it_was_is_what_is_there_now():
    from flow_grpo.algorithms import objectives
    from flow_grpo.command_line import checks, command_line
    from flow_grpo.settings import checks as checks_before
    from flow_grpo.settings import command_line as command_line_before
    from flow_grpo.settings import objectives as objectives_now

    assert (checks_before, command_line_before) == (checks, command_line)
    assert objectives.FORWARD_OBJECTIVES is objectives_now.FORWARD_OBJECTIVES


def test_folders_are_small_enough_to_choose_from():
    entries = [entry for entry in PACKAGE.iterdir() if entry.name != "__pycache__"]
    assert {entry.name for entry in entries if entry.is_dir()} == {*MAY_IMPORT, "assets"}
    assert len(entries) <= 20
    modules = [path for path in MODULES.values() if path.name != "__init__.py"]
    sizes = Counter(path.parent.relative_to(PACKAGE).as_posix() for path in modules)
    large = {folder for folder, size in sizes.items() if size > 12}
    assert large - set(ONE_PER_FILE) == set()


def test_a_dependency_is_imported_in_one_place_and_a_tracker_when_a_run_asks_for_it():
    for package, where in OUTSIDE.items():
        users = {module for module, path in MODULES.items() if is_imported(package, path)}
        assert users == where, package
    trackers = MODULES["monitoring/trackers"].read_text()
    assert not re.search("^(import|from) .*(wandb|tensorboard)", trackers, re.MULTILINE)


def is_imported(package, path):
    """Say whether a file imports a package or something of it."""
    return any(f"{name}.".startswith(f"{package}.") for name in imports(path))


def test_only_a_models_own_file_names_it():
    families = {path.stem for path in PACKAGE.glob("diffusers_patch/models/*.py")} - {"__init__"}
    assert len(families) >= 3
    for module, path in MODULES.items():
        if not module.startswith("diffusers_patch/models/") and module != "kernels/single_frame_vae":
            names = set(imports(path))
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Name):
                    names.add(node.id)
                if isinstance(node, ast.Attribute):
                    names.add(node.attr)
            # What is wanted, and wandb, name no model.
            others = [re.sub("want|wandb", "", name.lower()) for name in names]
            assert not [name for name in others if re.search("|".join(families), name)], module


def functions(path):
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def test_functions_are_short():
    files = [*PACKAGE.rglob("*.py")]
    for folder in ("scripts", "config", "benchmarks", "tools"):
        files += (ROOT / folder).glob("*.py")
    long = []
    for path in files:
        for function in functions(path):
            if function.end_lineno - function.lineno + 1 > 40:
                long.append(f"{path.name}:{function.name}")
    assert long == []


def types_named(path):
    """Names of a file's public classes and of its aliases of types."""
    names = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names.append(node.name)
        if isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [name for name in names if re.fullmatch("[A-Z][a-z]+[A-Za-z]*", name)]


def test_a_type_that_a_training_script_may_name_has_a_name_of_its_own():
    files = [path for module, path in MODULES.items() if module.startswith(("base/", "algorithms/", "run/"))]
    files += (ROOT / "scripts").glob("train_*.py")
    counts = Counter()
    for path in files:
        counts.update(types_named(path))
    assert len(counts) > 40
    assert [name for name, count in counts.items() if count > 1] == []


def test_scripts_are_the_algorithm():
    for script in sorted((ROOT / "scripts").glob("train_*.py")):
        if script.stem.split("_")[1] == "qwenimage":  # the others are twins
            names = {function.name for function in functions(script)}
            names |= {name.split(".")[-1] for name in imports(script)}
            assert {"rollout", "add_gradients", "main"} <= names
        else:  # a twin: the same algorithm with another model
            assert len(script.read_text().splitlines()) <= 25


SOURCES = ("pyproject.toml", "MANIFEST.in", "requirements.txt", "README.md", "LICENSE", "NOTICE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of a copy of the checkout, without its tests and docs."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    for name in ("flow_grpo", "dataset/shapes", "dataset/edits", "scripts", "tools", "config"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, folder]
    subprocess.run(command, check=True, env=ENV, capture_output=True, timeout=300)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.slow
def test_a_wheel_holds_every_module_the_tiny_model_and_the_shapes(wheel):
    names = set(wheel.namelist())
    for path in (*PACKAGE.rglob("*.py"), *PACKAGE.glob("assets/tiny_qwenimage/**/*.*")):
        assert str(path.relative_to(ROOT)) in names
    for model in registry.names():
        assert f"{registry.tiny_folder(model)}/model_index.json" in names
    for split in ("train", "validation", "test"):
        data = wheel.read(f"flow_grpo/assets/dataset/shapes/{split}_metadata.jsonl")
        assert data == (ROOT / f"dataset/shapes/{split}_metadata.jsonl").read_bytes()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"flow_grpo"}


ONE_EPOCH = """
import sys
from flow_grpo.base import locations

sys.path.insert(0, str(locations.ROOT / "scripts"))
import minimal_grpo

minimal_grpo.train("shapes", num_epochs=1, num_prompts=1, group_size=2)
"""


@pytest.mark.slow
def test_an_installed_package_runs_the_scripts_and_configs_that_it_carries(wheel, tmp_path):
    wheel.extractall(tmp_path / "site")
    run_folder = tmp_path / "runs"
    flags = [
        f"--config.output_dir={run_folder}",
        "--config.num_epochs=1",
        "--config.logger=none",
        "--config.eval_freq=0",
    ]
    name = "config/nft.py:shapes_qwenimage_nft,smoke"
    command = [sys.executable, "-m", "flow_grpo", "train_qwenimage_nft", "--config", name, *flags]
    env = ENV | dict(PYTHONPATH=str(tmp_path / "site"))
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (folder,) = run_folder.glob("*/")
    assert (folder / "transformer" / "diffusion_pytorch_model.safetensors").is_file()
    listed = subprocess.run([*command[:3], "--help"], env=env, cwd=tmp_path, capture_output=True, text=True).stdout
    names = [path.stem for path in (ROOT / "scripts").glob("*.py")]
    for script in (*names, *locations.TOOLS):
        assert f"\n  {script} " in listed
    unknown = subprocess.run([*command[:3], "train_qwen"], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (unknown.returncode, "nearest: train_qwenimage" in unknown.stderr) == (1, True)

    def answer(*words):
        done = subprocess.run([sys.executable, *words], env=env, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "prompts.txt").write_text("a fox\nan owl\na bear\n")
    split = ("split_prompts", "prompts.txt", "--out", "mine", "--test=1", "--validation=1")
    assert "train.txt: 1 prompt" in answer("-m", "flow_grpo", *split)
    sweep = ("sweep", "--slurm", "--out", "rates", "--vary", "seed=1,2", "train_qwenimage")
    job, script = re.findall(r"\S+/scripts/\S+", answer("-m", "flow_grpo", *sweep))
    assert Path(job).is_file()
    assert Path(script).is_file()
    answer("-m", "flow_grpo", "check_parity", "--help")
    answer("-c", ONE_EPOCH)


@pytest.mark.slow
def test_a_wheel_names_its_requirements_and_pythons_and_holds_its_licence_which_the_citation_names(wheel):
    files = {}
    for name in wheel.namelist():
        if ".dist-info/" in name:
            files[name.rpartition("/")[2]] = wheel.read(name)
    metadata = Parser().parsestr(files["METADATA"].decode())
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert len(needed) == len([line for line in lines if line and line[0] != "#"])
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Version"] == flow_grpo.__version__
    for name in ("LICENSE", "NOTICE"):
        assert files[name] == (ROOT / name).read_bytes()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["license"], citation["version"]) == ("Apache-2.0", metadata["Version"])
    assert metadata["Version"] == flow_grpo.__version__
