"""Count what makes lines hard to read and has no rule of the linter, folder by folder, against limits that only fall.

python tools/natural_lines.py           # counts; fails where a folder has more of a kind than its limit
python tools/natural_lines.py FOLDER    # lists every place in one folder, such as flow_grpo/run
python tools/natural_lines.py --lower   # writes today's counts into LIMITS, where they are lower
"""

import argparse
import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flow_grpo.command_line import terminal

ROOT = Path(__file__).resolve().parents[1]
OUTER_FOLDERS = ("config", "scripts", "tools", "benchmarks", "tests")

KINDS = {
    "tuples": "unrelated values in one assignment: give each a line",
    "nested": "a comprehension in a comprehension: write a loop, or a function for the inner one",
    "walruses": "a walrus outside `if (match := ...)`: assign it on a line of its own",
    "lambdas": "a lambda with a name: write a function",
    "docstrings": 'a docstring that begins with "Of", "Raises" or a pronoun: begin with a verb ("Raise") or a noun',
    "padded": "an index into a list that is padded for it: write an `if`",
    "names": "a variable whose name says nothing, such as `found`: name what it holds",
}
# The most that each folder may have of each kind, in the order of KINDS. A folder that is not named may have none.
LIMITS = {
    "config": (0, 0, 0, 0, 0, 0, 0),
    "scripts": (0, 0, 0, 0, 0, 0, 0),
    "tools": (0, 0, 0, 0, 0, 0, 0),
    "benchmarks": (0, 0, 0, 0, 0, 0, 13),
    "tests": (0, 0, 0, 0, 0, 0, 0),
    "flow_grpo/algorithms": (0, 0, 0, 0, 0, 0, 0),
    "flow_grpo/base": (0, 0, 0, 0, 0, 0, 0),
    "flow_grpo/checkpoints": (0, 0, 0, 0, 0, 0, 0),
    "flow_grpo/command_line": (0, 0, 0, 0, 0, 0, 0),
    "flow_grpo/data": (0, 0, 0, 0, 0, 0, 0),
    "flow_grpo/diffusers_patch": (0, 0, 0, 0, 0, 0, 0),
    "flow_grpo/evaluation": (0, 0, 0, 0, 0, 0, 0),
    "flow_grpo/kernels": (0, 0, 0, 0, 0, 0, 0),
    "flow_grpo/monitoring": (0, 0, 0, 0, 0, 0, 0),
    "flow_grpo/plan": (0, 0, 0, 0, 0, 0, 0),
    "flow_grpo/reward_server": (0, 0, 0, 0, 0, 0, 0),
    "flow_grpo/rewards": (0, 0, 0, 0, 0, 0, 0),
    "flow_grpo/run": (0, 0, 0, 0, 0, 0, 0),
    "flow_grpo/scoring": (0, 0, 0, 0, 0, 0, 0),
    "flow_grpo/settings": (0, 0, 0, 0, 0, 0, 0),
    "flow_grpo/weights": (0, 0, 0, 0, 0, 0, 0),
}

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
VAGUE = {"of", "it", "its", "what", "who", "whose", "those", "this", "that", "these", "they", "where", "whether"}
EMPTY_NAMES = {"found", "how", "own", "some", "kept", "where", "given", "others", "words"}
THIRD_PERSON = {"raises", "returns", "says", "yields", "refuses"}


class Place(NamedTuple):
    """Something that is counted."""

    kind: str
    path: Path
    line: int


def names_in(node: ast.AST) -> set[str]:
    """Return the variables that an expression reads or assigns."""
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def is_unrelated_tuple(node: ast.AST) -> bool:
    """Say whether a tuple is assigned to a tuple element by element, and not as in a swap."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    return not names_in(target) & names_in(node.value)


def is_nested(node: ast.AST) -> bool:
    """Say whether a comprehension holds another one."""
    if not isinstance(node, COMPREHENSIONS):
        return False
    comprehensions = [child for child in ast.walk(node) if isinstance(child, COMPREHENSIONS)]
    return len(comprehensions) > 1


def is_named_lambda(node: ast.AST) -> bool:
    """Say whether a lambda is assigned to a name."""
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
        return False
    return isinstance(node.value, ast.Lambda)


def is_vague_docstring(node: ast.AST) -> bool:
    """Say whether a module, class or function has a docstring that begins with a word of VAGUE or THIRD_PERSON."""
    if not isinstance(node, DOCUMENTED):
        return False
    first_word = re.match(r"\S+", ast.get_docstring(node) or "")
    if first_word is None:
        return False
    return first_word[0].strip(".,:;").lower() in VAGUE | THIRD_PERSON


def is_empty_name(node: ast.AST) -> bool:
    """Say whether a variable is assigned, or an argument declared, whose name is one of EMPTY_NAMES."""
    if isinstance(node, ast.arg):
        return node.arg in EMPTY_NAMES
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY_NAMES


def is_padded_index(node: ast.AST) -> bool:
    """Say whether a list is only made of a starred one and further values to take one of these."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.List | ast.Tuple):
        return False
    return len(node.value.elts) > 1 and any(isinstance(value, ast.Starred) for value in node.value.elts)


def leftmost(test: ast.expr) -> ast.expr:
    """Return the part of a condition that is evaluated first."""
    if isinstance(test, ast.UnaryOp):
        return leftmost(test.operand)
    if isinstance(test, ast.Compare):
        return leftmost(test.left)
    if isinstance(test, ast.BoolOp):
        return leftmost(test.values[0])
    return test


def stray_walruses(tree: ast.Module) -> list[ast.NamedExpr]:
    """Return all walruses but those that an `if` statement begins with."""
    allowed = [leftmost(node.test) for node in ast.walk(tree) if isinstance(node, ast.If)]
    walruses = [node for node in ast.walk(tree) if isinstance(node, ast.NamedExpr)]
    return [walrus for walrus in walruses if walrus not in allowed]


def places_in(source: str, path: Path) -> Iterator[Place]:
    """Yield everything that is counted in one file."""
    tree = ast.parse(source)
    checks = {
        "tuples": is_unrelated_tuple,
        "nested": is_nested,
        "lambdas": is_named_lambda,
        "docstrings": is_vague_docstring,
        "padded": is_padded_index,
        "names": is_empty_name,
    }
    for node in ast.walk(tree):
        for kind, check in checks.items():
            if check(node):
                # A module has no line of its own: its docstring is in the first one.
                yield Place(kind, path, getattr(node, "lineno", 1))
    for walrus in stray_walruses(tree):
        yield Place("walruses", path, walrus.lineno)


def places_of(folder: str) -> list[Place]:
    """Return everything that is counted in a folder, by kind, file and line."""
    places = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        places += places_in(path.read_text(), path.relative_to(ROOT))

    # In a test `found` is short for the result of the call in the line above.
    if folder == "tests":
        places = [place for place in places if place.kind != "names"]
    return sorted(places)


def limited_folders() -> list[str]:
    """Return the folders that have limits: some of the root, and each package of flow_grpo."""
    packages = sorted(path.parent.name for path in (ROOT / "flow_grpo").glob("*/__init__.py"))
    return [*OUTER_FOLDERS, *(f"flow_grpo/{package}" for package in packages)]


def counts_of(folder: str) -> tuple[int, ...]:
    """Return how many places a folder has, in the order of KINDS."""
    counted = Counter(place.kind for place in places_of(folder))
    return tuple(counted[kind] for kind in KINDS)


def limit_of(folder: str) -> tuple[int, ...]:
    return LIMITS.get(folder, (0,) * len(KINDS))


def report(counts: dict[str, tuple[int, ...]]) -> bool:
    """Print a line for each folder that is not at its limits; return whether one is above."""
    is_above = False
    for folder, counted in counts.items():
        for kind, count, limit in zip(KINDS, counted, limit_of(folder), strict=True):
            if count > limit:
                is_above = True
                print(f"{folder}: {count} {kind}, {limit} at most: {KINDS[kind]}")
                print(f"    python tools/natural_lines.py {folder}")
            elif count < limit:
                print(f"{folder}: {count} {kind}, lower the limit from {limit}: python tools/natural_lines.py --lower")
    return is_above


def lowered(source: str, counts: dict[str, tuple[int, ...]]) -> str:
    """Return the text of this file with the lower of each limit and count."""
    rows = []
    for folder, counted in counts.items():
        limits = tuple(min(pair) for pair in zip(counted, limit_of(folder), strict=True))
        rows.append(f'    "{folder}": {limits},\n')
    return re.sub(r"(?<=^LIMITS = \{\n)(?:    .*\n)*", "".join(rows), source, count=1, flags=re.MULTILINE)


def main(arguments: list[str]) -> int:
    """Return 1 if a folder is above a limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="list the places in this folder")
    parser.add_argument("--lower", action="store_true", help="write lower limits into this file")
    options = parser.parse_args(arguments)
    if options.folder:
        for place in places_of(options.folder):
            print(f"{place.path}:{place.line}: {KINDS[place.kind]}")
        return 0

    counts = {folder: counts_of(folder) for folder in limited_folders()}
    if options.lower:
        path = Path(__file__)
        path.write_text(lowered(path.read_text(), counts))
    return int(report(counts))


if __name__ == "__main__":
    terminal.protect()
    sys.exit(main(sys.argv[1:]))
