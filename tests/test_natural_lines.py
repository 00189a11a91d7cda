"""tools/natural_lines.py and tools/signatures.py count what they say, and limits can only be lowered."""

from pathlib import Path

import natural_lines
import pytest
import signatures

COUNTED = {
    "tuples": "a, b = f(x), g(y)",
    "nested": "rows = [[x for x in row] for row in table]",
    "walruses": "print(x := 3)",
    "lambdas": "double = lambda x: 2 * x",
    "docstrings": 'def f():\n    """Of the run."""',
    "padded": "option = [*key.split('.'), ''][3]",
    "names": "found = f(x)",
}
NATURAL = [
    "a, b = b, a + b",
    "a, b = f(x)",
    "rows = [x for x in row]\ncells = [y for y in row]",
    "if (match := f(x)):\n    pass",
    "if not (match := f(x)) or g(match):\n    pass",
    "if (count := f(x)) > 3:\n    pass",
    "f(key=lambda x: 2 * x)",
    "rest = [*f(x)][1:]",
    'def f():\n    """Return the run of it."""',
]


def kinds_in(source):
    return [place.kind for place in natural_lines.places_in(source, Path("a.py"))]


@pytest.mark.parametrize(("kind", "source"), COUNTED.items())
def test_a_line_of_each_kind_is_counted_once(kind, source):
    assert kinds_in(source) == [kind]


def test_a_docstring_is_counted_that_begins_in_the_third_person():
    assert kinds_in('def f():\n    """Raises UserError for nothing."""') == ["docstrings"]


def test_a_walrus_is_counted_in_a_comprehension_and_a_loop_and_where_an_if_does_not_begin_with_it():
    sources = ("[y for x in row if (y := f(x))]", "while x := f():\n    pass", "if a and (b := a.b):\n    pass")
    assert [kinds_in(source) for source in sources] == [["walruses"]] * 3


@pytest.mark.parametrize("source", NATURAL)
def test_a_natural_line_is_not_counted(source):
    assert kinds_in(source) == []


def test_a_folder_above_a_limit_fails_and_one_below_is_told_to_lower_it(monkeypatch, capsys):
    monkeypatch.setattr(natural_lines, "LIMITS", {"tools": (1, 2, 0, 0, 0, 0, 0)})
    assert not natural_lines.report({"tools": (1, 1, 0, 0, 0, 0, 0)})
    assert "tools: 1 nested, lower the limit from 2" in capsys.readouterr().out
    assert natural_lines.report({"tools": (1, 3, 0, 0, 0, 0, 0)})
    assert natural_lines.report({"new": (1, 0, 0, 0, 0, 0, 0)}), "a folder that is not named has limits of 0"


def test_lowering_writes_the_lower_of_count_and_limit(monkeypatch):
    monkeypatch.setattr(natural_lines, "LIMITS", {"tools": (1, 2, 0, 0, 4, 0, 0)})
    stored = '    "tools": (1, 2, 0, 0, 4, 0, 0),\n    "gone": (1, 1, 1, 1, 1, 1, 0),\n'
    source = f"KINDS = {{\n}}\nLIMITS = {{\n{stored}}}\nrest = {{}}\n"
    written = natural_lines.lowered(source, {"tools": (3, 0, 0, 0, 4, 0, 0)})
    assert written == 'KINDS = {\n}\nLIMITS = {\n    "tools": (1, 0, 0, 0, 4, 0, 0),\n}\nrest = {}\n'


def test_every_package_has_limits():
    assert {"config", "tests", "flow_grpo/run"} <= {*natural_lines.limited_folders()}
    assert all(len(limits) == len(natural_lines.KINDS) for limits in natural_lines.LIMITS.values())


SIGNATURES = [  # a function, and the figures of tools/signatures.py that count it
    ("def f(self, config: Config): pass", ["take the whole Config"]),
    ('def f(config: "Config | None" = None): pass', ["take the whole Config"]),
    ("def f(values: ConfigDict | Config): pass", ["take the whole Config", "take a ConfigDict"]),
    ("def f(config): pass", ["take a config without a type"]),
    ("async def f(*, run: Run): pass", ["take the whole Run"]),
    ("def f(runs: list[Run], main: Callable[[ConfigDict], None]): pass", []),
    ("def f(self, a, b, c, d, *, e, g): pass", []),
    ("def f(self, a, b, c, d, *, e, g, h): pass", ["have more than 6 parameters"]),
]


@pytest.mark.parametrize(("source", "figures"), SIGNATURES)
def test_a_signature_is_counted_by_what_its_parameters_are(source, figures):
    (signature,) = signatures.signatures_in(source, "a.py")
    assert [figure for figure, counts in signatures.FIGURES.items() if counts(signature)] == figures
