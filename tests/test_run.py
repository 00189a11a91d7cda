"""A run's record says which functions write each of its fields."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [*(ROOT / "flow_grpo").rglob("*.py"), *(ROOT / "scripts").glob("train_*.py")]
MUTATORS = ("append", "clear", "extend", "pop")


def documented() -> dict[str, set[str]]:
    """Field of Run -> the functions that its comment names."""
    record = (ROOT / "flow_grpo/run/run.py").read_text().partition("class Run:")[2].partition("    @property")[0]
    writers = dict(re.findall(r"^    (\w+): .*#.*<- ([\w, ]+)$", record, re.MULTILINE))
    fields = re.findall(r"^    (\w+): ", record, re.MULTILINE)
    return {name: set(re.findall(r"\w+", writers.get(name, ""))) for name in fields}


def field_of(node: ast.AST, owner: str) -> str | None:
    """The field of a run that an expression reaches into: run.history for run.history[-1]."""
    while isinstance(node, ast.Subscript):
        node = node.value
    is_field = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == owner
    return node.attr if is_field else None


def written(function: ast.FunctionDef, owner: str) -> set[str]:
    """Fields that a function assigns, adds to, or changes in place."""
    fields = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                fields |= {field_of(part, owner) for part in getattr(target, "elts", [target])}
        elif isinstance(node, ast.AugAssign):
            fields.add(field_of(node.target, owner))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            fields.add(field_of(node.func.value, owner))
    return fields - {None}


def actual(sources: dict[str, str]) -> dict[str, set[str]]:
    """Field of Run -> the functions that write it."""
    writers = defaultdict(set)
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                for field in written(node, "self" if name == "run.py" else "run"):
                    writers[field].add(node.name)
    return writers


def test_a_field_is_written_by_those_that_its_comment_names_and_by_nobody_else():
    writers, fields = actual({path.name: path.read_text() for path in FILES}), documented()
    del fields["epoch_figures"], fields["meter"], fields["gaps"]  # collect what anyone adds
    assert {"step", "epoch", "history", "signs"} <= {name for name in fields if fields[name]}
    assert {name: writers[name] for name in fields} == fields


def test_every_way_to_write_a_field_is_seen():
    lines = "run.a, run.b = 1, 2", "run.c += 1", "run.d.append(1)", "run.e[-1] = 0", "run.g == run.h"
    source = "\n    ".join(("def f(run):", *lines))
    assert actual({"x.py": source}) == {name: {"f"} for name in "abcde"}


def test_who_takes_a_run_says_so():
    untyped = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                bare = [arg for arg in node.args.args if arg.arg == "run" and arg.annotation is None]
                untyped += [f"{path.name}:{node.name}" for _ in bare]
    assert untyped == []
