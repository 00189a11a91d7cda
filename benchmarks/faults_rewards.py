"""Rewards that misbehave: an error with the reward's name, or no effect on the other rewards; never a hang."""

import re
from functools import partial
from pathlib import Path

from faults_commands import LONGEST_SENTENCE, Command, Ended
from faults_runs import Bench, lines_of
from faults_tries import Dice, Try, Verdict

TIME_LIMIT_S, LIMIT_S, PROCESS_S = 2.0, 25.0, 60.0  # a process of its own imports everything anew
ENDLESS = "time.sleep(1e6)"
SCORES = {  # what `score` returns; images [B, 3, H, W]
    "nan": "images.mean((1, 2, 3)) * float('nan')",
    "one nan": "torch.where(torch.arange(len(images)) == 0, torch.nan, 1.0)",
    "inf": "images.mean((1, 2, 3)) * float('inf')",
    "huge": "images.mean((1, 2, 3)) * 1e300",
    "all float32": "images.mean((1, 2, 3)) * 3e38",
    "strings": "['x'] * len(images)",
    "numbers as strings": "['1'] * len(images)",
    "nothing": "None",
    "a number": "1.0",
    "too few": "torch.ones(len(images) - 1)",
    "too many": "torch.ones(len(images) + 1)",
    "a column": "torch.ones(len(images), 1)",
    "complex": "torch.ones(len(images)) + 1j",
    "no score": "{'other': torch.ones(len(images))}",
    "empty dict": "{}",
    "odd names": "{'score': torch.ones(len(images)), 'a/b c': torch.ones(len(images)), 5: torch.ones(len(images))}",
    "other is nan": "{'score': torch.ones(len(images)), 'other': torch.ones(len(images)) * float('nan')}",
    "bools": "torch.ones(len(images)) > 0",
    "integers": "torch.ones(len(images)).long() * 2**62",
    "list": "[1.0] * len(images)",
    "numpy": "images.mean((1, 2, 3)).numpy()",
    "float64": "images.mean((1, 2, 3)).double()",
    "bfloat16": "images.mean((1, 2, 3)).bfloat16()",
    "with gradient": "images.mean((1, 2, 3)) * torch.ones((), requires_grad=True)",
    "sparse": "torch.ones(len(images)).to_sparse()",
    "on meta": "torch.ones(len(images), device='meta')",
    "object": "object()",
    "generator": "(1.0 for _ in images)",
    "itself": "score",
    "equal": "torch.zeros(len(images))",
    "nested": "[[1.0]] * len(images)",
    "empty": "torch.ones(0)",
}
ACTS = {  # what `score` does before it returns its ones
    "raises": "raise KeyError('word')",
    "raises without words": "raise Exception",
    "raises a group": "raise ExceptionGroup('g', [ValueError('a'), TypeError('b')])",
    "exits": "raise SystemExit(3)",
    "exits as if all were well": "sys.exit()",
    "interrupts": "raise KeyboardInterrupt",
    "asserts": "assert False",
    "stops": "raise StopIteration",
    "divides by zero": "1 / 0",
    "recurses": "score(images, prompts, metadata)",
    "fills memory": "list(torch.zeros(2**40))",
    "sleeps": ENDLESS,
    "third call raises": "raise ValueError('third') if next(calls) == 2 else None",
    "third call sleeps": f"{ENDLESS} if next(calls) == 2 else None",
    "writes into images": "images.zero_()",
    "writes into prompts": "prompts.clear()",
    "writes into metadata": "[m.clear() for m in metadata]",
    "turns gradients off": "torch.set_grad_enabled(False)",
    "sets the seed": "torch.manual_seed(0)",
    "sets the precision": "torch.set_default_dtype(torch.float64)",
    "sets threads": "torch.set_num_threads(2)",
    "changes folder": "os.chdir('/')",
    "prints": "print('x' * 10**6)",
    "warns": "warnings.warn('odd')",
    "closes its output": "sys.stdout.close()",
    "starts a thread": f"threading.Thread(target=lambda: {ENDLESS}, daemon=True).start()",
}
LOADS = {  # what the file is instead
    "syntax": "def load(device:\n",
    "no load": "x = 1\n",
    "load is no function": "load = 5\n",
    "load takes nothing": "def load():\n    return None\n",
    "load returns nothing": "def load(device):\n    return None\n",
    "load raises": "def load(device):\n    raise OSError('no weights')\n",
    "load exits": "def load(device):\n    raise SystemExit(3)\n",
    "import exits": "raise SystemExit(3)\n",
    "import is missing": "import nowhere_at_all\n",
    "score takes nothing": "def load(device):\n    return lambda: 1\n",
    "null byte": "x = '\0'\n",
    "range is no pair": "RANGE = 5\ndef load(device):\n    return lambda images, *_: images.mean((1, 2, 3))\n",
    "check raises": "def check_prompts(a, b):\n    raise KeyError('c')\ndef load(device):\n    return None\n",
}
FILE = """import itertools, os, sys, threading, time, warnings
import torch
calls = itertools.count()


def load(device):
    def score(images, prompts, metadata):
        {act}
        return {scores}

    return score
"""
ERROR = r"^[\w.]+(Error|Failed|Exit|Interrupt|Exception|Iteration|Group)\b"  # the first line of an error's message
CASES = [*(("score", name) for name in SCORES), *(("act", name) for name in ACTS), *(("load", name) for name in LOADS)]
FINE = ("integers", "list", "numpy", "float64", "bfloat16", "with gradient", "equal", "bools")  # must run to the end
SLEEPERS = ("sleeps", "third call sleeps")


def make(bench: Bench, seed: int, number: int) -> Try:
    """All cases in turn, each time with another backend and another answer to failures."""
    bench.reference("grpo", num_epochs=2)
    dice = Dice(seed, "rewards", number)
    kind, name = CASES[(number + Dice(seed, "rewards", -1).below(len(CASES))) % len(CASES)]
    backend = dice.pick(("thread", "thread", "inline", "process" if dice.share() < 0.2 else "thread"))
    on_failure = dice.pick(("fail", "fail", "mask"))
    backend = "thread" if name in SLEEPERS and backend == "inline" else backend  # which nobody can interrupt but Ctrl-C
    act = partial(attempt, bench, kind, name, {"backend": backend, "on_failure": on_failure})
    return Try("rewards", number, f"{name}, {backend}, {on_failure}", act)


def source_of(kind: str, name: str) -> str:
    if kind == "load":
        return LOADS[name]
    ones = "torch.linspace(0, 1, len(images))"
    return FILE.format(act=ACTS[name] if kind == "act" else "pass", scores=SCORES[name] if kind == "score" else ones)


def attempt(bench: Bench, kind: str, name: str, how: dict[str, str], folder: Path) -> Verdict:
    """Train with it and with the usual reward."""
    (folder / "odd").mkdir()
    (folder / "odd" / "misbehaved.py").write_text(source_of(kind, name))
    flags = {f"reward__{key}": value for key, value in how.items()} | {"reward__timeout_s": TIME_LIMIT_S}
    flags |= {"reward_fn__misbehaved": 1.0, "num_epochs": 2, "reward__retry_s": TIME_LIMIT_S}
    words = bench.words("grpo", folder / "runs", **flags)
    limit_s = PROCESS_S if how["backend"] == "process" else LIMIT_S
    ended = Command(words, folder, env={"FLOW_GRPO_REWARDS": str(folder / "odd")}).wait(limit_s)
    if ended.status == 0:
        return others_are_right(bench, folder)
    return named(ended, name)


def others_are_right(bench: Bench, folder: Path) -> Verdict:
    """The usual reward of the first evaluation, before the odd one has trained anything."""
    key = "eval/jpeg_compressibility"
    (run,) = (folder / "runs").iterdir()
    first, expected = (
        next(line for line in lines_of(place) if line["kind"] == "eval")
        for place in (run, bench.reference("grpo", num_epochs=2))
    )
    if first[key] != expected[key]:
        return Verdict(False, f"another reward has {first[key]} instead of {expected[key]}")
    return Verdict(True, "ran to its end")


def named(ended: Ended, name: str) -> Verdict:
    """A reward's own error may have a traceback, which its author needs; the message at its end says whose it is."""
    if ended.status is None:
        return Verdict(False, f"hang; it said: {ended.last[-200:]}")
    if name in FINE:
        return Verdict(False, f"refused: {ended.last[:300]}")
    starts = [0, *(match.start() for match in re.finditer(ERROR, ended.stderr, re.MULTILINE))]
    message = ended.stderr[starts[-1] :] if len(starts) > 1 else ended.last
    nameless = name == "all float32" and "nan" in message  # each score is finite, and so is no loss of them
    nameless |= name == "interrupts" and "Ctrl-C" in message
    if ended.status < 0 or not ("misbehaved" in message or nameless) or len(message) > LONGEST_SENTENCE:
        return Verdict(False, f"status {ended.status}, the reward is not named: {message[:300]}")
    return Verdict(True, f"refused: {message[:300]}")
