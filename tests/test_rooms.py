"""Which room may import which, and how large it may grow. The dict is the architecture: a new edge is a decision."""

import ast
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATCH = "diffusers_patch."
ROOMS = {  # module -> the flow_grpo modules it may import
    "rng": set(),
    "quoting": set(),
    "batching": set(),
    "losses": set(),
    "advantages": set(),
    "setting": set(),
    "settings": {"setting"},
    "shipped": set(),
    "checks": {"settings"},
    "configs": {"rewards", "settings"},
    "command_line": {"configs", "folders", "settings"},
    "parity": set(),
    "shapes": set(),
    "pictures": set(),
    "stochastic_rounding": set(),
    "frozen_linear": {"stochastic_rounding"},
    "quantised": {"frozen_linear"},
    "quantised_files": {"distributed", "folders", "frozen_linear", "quantised", "stored_weights"},
    "stored_weights": {"frozen_linear", "quantised"},
    "adapted_linear": set(),
    "gelu_product": {"frozen_linear", "gelu_kernels", PATCH + "flash_attention"},
    "gelu_kernels": set(),
    "compiled": {"adapted_linear", "frozen_linear", "gelu_product", "stochastic_rounding"},
    "distributed": set(),
    "fsdp_utils": {"distributed", "frozen_linear", "quantised", "stored_weights"},
    "finite": {"distributed", "fsdp_utils"},
    "offload": {"fsdp_utils"},
    "ema": {"offload"},
    "rewards": set(),
    "rewards.shapes": {"shapes"},
    "rewards.clip_model": {"pixels"},
    **{
        f"rewards.{name}": {"rewards.clip_model"}
        for name in ("pickscore", "clipscore", "aesthetic", "imagereward", "hpsv2", "hpsv3", "image_similarity")
    },
    "rewards.ocr": {"pixels"},
    "rewards.jpeg_incompressibility": {"rewards.jpeg_compressibility"},
    "rewards.jpeg_compressibility": {"pixels"},
    "rewards.judge": {"scoring", "scoring.wire", "scoring.client"},
    **{f"rewards.{name}": {"rewards", "rewards.judge"} for name in ("vlm_judge", "unifiedreward")},
    **{f"rewards.{name}": {"scoring.pickled", "scoring.wire"} for name in ("geneval", "deqa")},
    "scoring": set(),
    "scoring.wire": {"pixels"},
    "scoring.threads": set(),
    "scoring.tokens": set(),
    "scoring.client": {"scoring.tokens"},
    "scoring.pickled": {"pixels", "scoring.client", "scoring.wire"},
    "scoring.requests": {"scoring.threads", "scoring.wire"},
    "scoring.listening": set(),
    "scoring.server": {"rewards", "scoring.requests", "scoring.threads"},
    "scoring.serve": {
        *("command_line", "rewards", "scoring.listening", "scoring.requests", "scoring.server", "scoring.tokens"),
    },
    "scoring.processes": {"distributed", "scoring.client"},
    "scoring.settings": {"rewards", "settings", "scoring.client", "scoring.tokens"},
    "scoring.scorers": {
        *("rewards", "scoring", "scoring.client", "scoring.processes", "scoring.settings", "scoring.wire"),
        "scoring.threads",
    },
    "scoring.pool": {"finite", "scoring.client", "scoring.scorers"},
    "health": set(),
    "forward": set(),
    "image_pairs": {"prompts", PATCH + "size"},
    "windows": {"rng"},
    "prompts": {"rng", "shipped"},
    "policies": {
        "finite",
        "quantised",
        "fsdp_utils",
        "offload",
        "rng",
        "stochastic_rounding",
        *(PATCH + n for n in ("condition", "flow_model", "size")),
    },
    "embeddings": {"folders", PATCH + "condition"},
    "preferences": {"prompts", PATCH + "condition", PATCH + "size"},
    "rollout": {"batching", "losses", "rng"},
    "metrics": set(),
    "pixels": set(),
    "trackers": set(),
    "report": {"command_line", "folders", "health", "metrics", "pictures", "settings"},
    "dashboards": {"folders", "metrics", "pictures", "pixels", "report", "trackers"},
    "folders": set(),
    "checksums": set(),
    "shards": {"checksums", "distributed", "fsdp_utils"},
    "exports": {"distributed", "folders", "fsdp_utils", "policies", "quantised", "stored_weights"},
    "checkpoints": {"checksums", "distributed", "folders", "fsdp_utils", "ema", "shards"},
    "best": {"checkpoints", "checksums", "distributed", "folders"},
    "evaluation": {
        *("estimates", "distributed", "prompts", "rng", "scoring.pool", PATCH + "denoise_with_logprob"),
        *(PATCH + name for name in ("flow_model", "sample_with_logprob", "sampling_params", "size")),
    },
    "saving": {
        "best",
        "checkpoints",
        "distributed",
        "exports",
        "finite",
        "folders",
        "fsdp_utils",
        "offload",
        "policies",
    },
    "estimates": set(),
    "candidates": {
        "best",
        "folders",
        "fsdp_utils",
        "policies",
        "quantised",
        "settings",
        "shipped",
        PATCH + "flow_model",
    },
    "measuring": {"best", "evaluation", "saving"},
    "watching": {"distributed", "health", "optimization", "saving"},
    "optimization": {
        "checkpoints",
        "distributed",
        "finite",
        "fsdp_utils",
        "losses",
        "offload",
        "parity",
        "prompts",
        PATCH + "sde_with_logprob",
        "rollout",
    },
    "sampling": {
        *("advantages", "distributed", "fsdp_utils", "health", "policies", "prompts", "rng", "rollout"),
        "scoring.pool",
        *(PATCH + name for name in ("condition", "denoise_with_logprob", "sample_with_logprob")),
    },
    "run": {
        *("batching", "best", "compiled", "dashboards", "ema", "fsdp_utils", "health", "metrics", "parity", "policies"),
        *("prompts", "rollout", "scoring.pool"),
        *(PATCH + name for name in ("condition", "flow_model", "sampling_params", "size")),
    },
    "resuming": {
        *("best", "checkpoints", "dashboards", "evaluation", "folders", "saving", "settings", "watching"),
    },
    "filling": {"fsdp_utils", "policies", "quantised", "quantised_files", PATCH + "flow_model"},
    "startup": {
        *("batching", "checks", "compiled", "dashboards", "distributed", "ema", "embeddings", "evaluation"),
        *("filling", "folders", "fsdp_utils", "gelu_product", "metrics", "parity", "policies", "prompts", "quantised"),
        *("resuming", "rewards", "run"),
        *("scoring.pool", "scoring.settings", "trackers"),
        *(PATCH + name for name in ("condition", "flash_attention", "flow_model", "loading", "models", "size")),
    },
    "publishing": {"best", "folders", "policies", "report", "shipped"},
    "loop": {
        *("checkpoints", "distributed", "evaluation", "folders", "fsdp_utils", "measuring", "policies", "publishing"),
        *("run", "saving", "watching"),
    },
    "diffusers_patch": set(),
    PATCH + "flash_attention": set(),
    PATCH + "joint_kernels": set(),
    PATCH + "joint_attention": {PATCH + "joint_kernels"},
    PATCH + "sde_with_logprob": set(),
    PATCH + "single_frame_vae": set(),
    PATCH + "size": set(),
    PATCH + "condition": set(),
    PATCH + "solvers": set(),
    PATCH + "sampling_params": {PATCH + "sde_with_logprob", PATCH + "solvers"},
    PATCH + "denoise_with_logprob": {
        PATCH + name for name in ("condition", "sampling_params", "sde_with_logprob", "size", "solvers")
    },
    PATCH + "loading": {"shipped", PATCH + "single_frame_vae"},
    PATCH + "flow_model": {"rng", "shipped", PATCH + "loading", PATCH + "condition", PATCH + "size"},
    PATCH + "models": {PATCH + "flow_model", PATCH + "loading"},  # and each model's file, when it is asked for
    PATCH + "sample_with_logprob": {
        *("rng", PATCH + "denoise_with_logprob"),
        *(PATCH + name for name in ("condition", "flow_model", "models", "sampling_params", "size")),
    },
    **{
        f"{PATCH}{model}_pipeline_with_logprob": {
            PATCH + name for name in ("loading", "condition", "flow_model", "sample_with_logprob", "size")
        }
        for model in ("qwenimage", "sd3", "flux")
    },
}
ROOMS[PATCH + "qwenimage_pipeline_with_logprob"] |= {PATCH + "joint_attention", PATCH + "flash_attention"}
ROOMS[PATCH + "qwenimage_pipeline_with_logprob"] |= {"adapted_linear"}
ANYWHERE = "diffusers_patch", "quoting"  # any room may import them: a name alone, and how messages quote values
OUTSIDE = {  # packages that live in one room
    "wandb": {"trackers"},
    "torch.utils.tensorboard": {"trackers"},
    "torch.distributed": {"distributed", "fsdp_utils"},
    "matplotlib": {"pictures"},
    "triton": {PATCH + "joint_kernels"},
    "flash_attn": {PATCH + "flash_attention"},
    "httpx": {"scoring.client", "scoring.settings"},
    "starlette": {"scoring.listening", "scoring.requests", "scoring.server"},
    "uvicorn": {"scoring.listening"},
    "pyarrow": {"preferences", "image_pairs"},
    "jinja2": {"publishing", "report"},
    "scipy": {"rewards.shapes"},
    "rapidocr": {"rewards.ocr"},
}


def path_of(room):
    path = ROOT.joinpath("flow_grpo", *room.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports(path):
    """Dotted names of everything a file imports, but for what only its annotations name."""
    names, tree = set(), ast.parse(path.read_text())
    checks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    tree.body = [node for node in tree.body if node not in checks]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def rooms_in(names):
    ours = {name.removeprefix("flow_grpo.") for name in names if name.startswith("flow_grpo.")}
    return {name for name in ours if name in ROOMS and name not in ANYWHERE}


def test_every_module_has_a_room():
    found = {path.relative_to(ROOT / "flow_grpo").with_suffix("") for path in (ROOT / "flow_grpo").rglob("*.py")}
    names = {".".join(path.parts).removesuffix(".__init__") for path in found} - {"__init__"}
    assert names == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_they_may(room):
    assert rooms_in(imports(path_of(room))) <= ROOMS[room]


@pytest.mark.parametrize("package", OUTSIDE)
def test_a_dependency_lives_in_one_room(package):
    users = {room for room in ROOMS if any((n + ".").startswith(package + ".") for n in imports(path_of(room)))}
    assert users == OUTSIDE[package]


def test_no_tracker_is_imported_before_a_run_asks_for_it():
    tree = ast.parse(path_of("trackers").read_text())
    names = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert names
    assert not [name for name in names if "wandb" in name or "tensorboard" in name]


def test_no_module_names_a_model():
    for room in ROOMS:
        if "pipeline_with_logprob" not in room and room != PATCH + "single_frame_vae":
            tree = ast.parse(path_of(room).read_text())
            names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} | imports(path_of(room))
            assert not [name for name in names if re.search("qwen|sd3|flux", name, re.IGNORECASE)], room


def functions(path):
    tree = ast.parse(path.read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def test_functions_are_short():
    files = [*(ROOT / "flow_grpo").rglob("*.py"), *(ROOT / "scripts").glob("*.py"), *(ROOT / "config").glob("*.py")]
    files += [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tools").glob("*.py")]
    lengths = {f"{p.name}:{f.name}": f.end_lineno - f.lineno + 1 for p in files for f in functions(p)}
    assert {name: length for name, length in lengths.items() if length > 40} == {}
    assert statistics.median(lengths.values()) < 15


def test_scripts_are_the_algorithm():
    for script in sorted((ROOT / "scripts").glob("train_*.py")):
        if script.stem.split("_")[1] == "qwenimage":  # the others are twins
            names = {f.name for f in functions(script)} | {name.split(".")[-1] for name in imports(script)}
            assert {"rollout", "update", "main"} <= names
        else:  # a twin: the same algorithm with another model
            assert len(script.read_text().splitlines()) <= 25
