"""What two files share is a call: no function of one is a copy of another's under other names."""

import ast
import copy
import itertools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [path for folder in ("flow_grpo", "scripts", "tools", "benchmarks") for path in (ROOT / folder).rglob("*.py")]


class WithoutNames(ast.NodeTransformer):
    """Number the names that a function gives to its own values in the order of their first use; drop its prose."""

    def __init__(self, function: ast.FunctionDef):
        arguments = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
        stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        nested = {node.name for node in ast.walk(function) if isinstance(node, ast.FunctionDef)}
        self.own, self.numbers = arguments | stored | nested, {}

    def number(self, name: str) -> str:
        return f"name {self.numbers.setdefault(name, len(self.numbers))}" if name in self.own else name

    def visit_Name(self, node):
        return ast.Name(self.number(node.id), node.ctx)

    def visit_arg(self, node):
        return ast.arg(self.number(node.arg))

    def visit_FunctionDef(self, node):
        has_prose = ast.get_docstring(node) is not None
        node.name, node.body, node.returns = self.number(node.name), node.body[has_prose:], None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node):
        return self.visit(ast.Assign([node.target], node.value)) if node.value else None


def shapes_of(source: str) -> dict[str, str]:
    """What each function computes, whatever it calls its values: its name -> its tree. One statement is a call."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    functions = [node for node in functions if len(node.body) - (ast.get_docstring(node) is not None) > 1]
    return {node.name: ast.dump(WithoutNames(node).visit(copy.deepcopy(node))) for node in functions}


def copies(first: dict[str, str], second: dict[str, str]) -> set[tuple[str, str]]:
    """The functions of two files that are alike up to names."""
    return {(a, b) for (a, one), (b, other) in itertools.product(first.items(), second.items()) if one == other}


def test_no_function_is_a_renamed_copy_of_another_files():
    shapes = {str(path.relative_to(ROOT)): shapes_of(path.read_text()) for path in FILES}
    alike = {pair: copies(*(shapes[name] for name in pair)) for pair in itertools.combinations(shapes, 2)}
    assert "scripts/train_qwenimage.py" in shapes
    assert {pair: names for pair, names in alike.items() if names} == {}


PLANTED = '''
def step(run: "Run", part) -> None:
    """Other prose."""
    now, before = score_rows(run, part)
    weighted: Tensor = part.weights * surrogate(run, now, part)
    run.meter.add(policy_loss=weighted)
    accumulate(run, weighted + kl_penalty(run, now, before), part, now)
'''


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("", "", {("update", "step")}),
        ("part.weights * surrogate", "surrogate", set()),
        ("surrogate(run", "other_surrogate(run", set()),
        ("(run, now, before)", "(run, before, now)", set()),
    ],
    ids=["renamed", "another term", "another function", "values exchanged"],
)
def test_a_planted_copy_is_told_from_a_function_that_computes_something_else(old, new, found):
    assert old in PLANTED
    script = shapes_of((ROOT / "scripts" / "train_qwenimage.py").read_text())
    assert copies(script, shapes_of(PLANTED.replace(old, new))) == found
