"""The commands in pages and shell scripts: what they name is there, without running them."""

import ast
import importlib.util
import itertools
import math
import re
import shlex

from small import ROOT, plan

from flow_grpo.command_line import command_line
from flow_grpo.settings import table

PROGRAMS = {"python", "torchrun", "make", "pip", "source", "export", "git", "cd", "hf", "cp", "mkdir", "sbatch", "kill"}
TRAINING = re.compile(r"scripts/(train_\w+|prepare_preferences)\.py$")
DEFAULT = re.compile(r'command_line\.parse\(\s*"([^"]+)"')


def blocks(page):
    """(language, text) of each fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def commands(text):
    """Lists of words. Where lines begin with "$ ", the others are output."""
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    typed = [line[2:] for line in lines if line.startswith("$ ")] or lines
    words = [shlex.split(line, comments=True) for line in typed]
    return [line for line in words if line]


def check(words, own_configs):
    """Raise AssertionError or ValueError for a command that names what is not there.

    Args:
        own_configs: name of a config file that a page makes -> where the test has put it.
    """
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    program = words[0]
    arguments = words[1:]
    if program.endswith((".sh", ".py")):
        assert (ROOT / program).is_file(), words
        program, arguments = ("torchrun", arguments) if arguments else ("", [])
    assert program in PROGRAMS or not program, words
    if program == "sbatch":
        script = next(word for word in arguments if not word.startswith("-"))
        return check(arguments[arguments.index(script) :], own_configs)
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in arguments if "=" not in word} <= set(targets), words
    if program in ("python", "torchrun"):
        check_python(arguments, own_configs)
    return None


def check_python(words, own_configs):
    """Look up the words that stand behind `python` or `torchrun`."""
    words = [word.removeprefix("$ROOT/") for word in by_path(words)]
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]), words
        return
    if words[0] == "-c":
        ast.parse(words[1])
        return
    options = list(itertools.takewhile(lambda word: word.startswith("-"), words))
    if options == words:  # torchrun's options alone
        return
    script, *arguments = words[len(options) :]
    assert (ROOT / script).is_file(), words
    source = (ROOT / script).read_text()
    if not TRAINING.search(script):
        check_flags(arguments, source)
        return
    own = [with_own_config(word, own_configs) for word in arguments if word != "$@"]
    config = command_line.config_of(own, DEFAULT.search(source)[1])
    assert config.algorithm in table.SCRIPTS
    if "prepare_preferences" not in script:
        plan(config, gpus(options))


def check_flags(arguments, source):
    """Look flags up in a script's text."""
    for word in arguments:
        if word.startswith("--") and not word.startswith("--config"):
            flag = word.partition("=")[0]
            assert f'"{flag}"' in source, (flag, arguments)


def with_own_config(word, own_configs):
    for written, path in own_configs.items():
        word = word.replace(written, str(path))
    return word


def by_path(words):
    """`-m flow_grpo SCRIPT`, by the path of the script that it runs."""
    if "flow_grpo" not in words:
        return words
    place = words.index("flow_grpo")
    assert words[place - 1] == "-m", words
    return [*words[: place - 1], f"scripts/{words[place + 1]}.py", *words[place + 2 :]]


def gpus(options):
    """World size that torchrun's options say; 1 without it."""
    numbers = re.findall(r"--(?:nnodes|nproc_per_node)=(\d+)", " ".join(options))
    return math.prod(map(int, numbers))
