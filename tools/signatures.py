"""Count the functions whose signature says little about what they read.

python tools/signatures.py           # the figures of FOLDERS
python tools/signatures.py --list    # and the functions behind each

A function that takes the whole config or the whole run may read anything of it, and a call of many parameters is hard
to check by eye. None of these is wrong as such: the list says where to look.
"""

import argparse
import ast
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from flow_grpo.command_line import terminal

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("flow_grpo", "scripts", "config")
MOST_PARAMETERS = 6


class Signature(NamedTuple):
    """Name and parameters of a function."""

    place: str  # PATH:LINE
    name: str
    parameters: list[ast.arg]  # without `self` and `cls`

    def __str__(self) -> str:
        return f"{self.place} {self.name}({', '.join(map(ast.unparse, self.parameters))})"

    def takes(self, kind: str) -> bool:
        """Return whether a parameter is of a type, or of a union with it."""
        return any(kind in kinds_of(parameter) for parameter in self.parameters)


def kinds_of(parameter: ast.arg) -> list[str]:
    """Return the types of a parameter's annotation, [] without one."""
    if parameter.annotation is None:
        return []
    # A type that is imported for the type checker alone is quoted.
    text = ast.unparse(parameter.annotation).strip("'\"")
    return [kind.strip() for kind in text.split("|")]


def has_untyped_config(signature: Signature) -> bool:
    """Return whether a parameter that is called config has no type."""
    return any(parameter.arg == "config" and not parameter.annotation for parameter in signature.parameters)


def has_many_parameters(signature: Signature) -> bool:
    return len(signature.parameters) > MOST_PARAMETERS


FIGURES = {
    "take the whole Config": partial(Signature.takes, kind="Config"),
    "take a ConfigDict": partial(Signature.takes, kind="ConfigDict"),
    "take a config without a type": has_untyped_config,
    "take the whole Run": partial(Signature.takes, kind="Run"),
    f"have more than {MOST_PARAMETERS} parameters": has_many_parameters,
}


def signatures_in(source: str, path: str) -> Iterator[Signature]:
    """Yield the signature of every function and method in one file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            parameters = [argument for argument in arguments if argument.arg not in ("self", "cls")]
            yield Signature(f"{path}:{node.lineno}", node.name, parameters)


def all_signatures() -> list[Signature]:
    """Return the signatures of FOLDERS."""
    signatures = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            signatures += signatures_in(path.read_text(), str(path.relative_to(ROOT)))
    return signatures


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the functions, too")
    options = parser.parse_args(arguments)
    signatures = all_signatures()
    for figure, counts in FIGURES.items():
        counted = [signature for signature in signatures if counts(signature)]
        print(f"{len(counted):4} functions {figure}")
        if options.list:
            for signature in counted:
                print(f"       {signature}")


if __name__ == "__main__":
    terminal.protect()
    main(sys.argv[1:])
