"""Two processes that want one folder: each gets its own, or one is refused in a sentence. Never a mixed or lost run."""

import time
from functools import partial
from pathlib import Path

from faults_commands import Command, Ended, judge
from faults_runs import Bench, differences, prepared
from faults_tries import Dice, Try, Verdict

ALGORITHMS = ("grpo", "pr", "nft", "dpo")
SEEDS = (42, 43)
REFUSAL = ("runs", "process", "running", "lock")


def make(bench: Bench, seed: int, number: int) -> Try:
    """Two starts, some moments apart."""
    dice = Dice(seed, "twice", number)
    case, algorithm = CASES[number % len(CASES)], dice.pick(ALGORITHMS)
    for each in SEEDS:
        bench.reference(algorithm, seed=each)
    bench.reference("prepare")
    apart_s = 3 * dice.share() ** 3
    act = partial(case, bench, algorithm, apart_s)
    return Try("twice", number, f"{case.__name__}, {algorithm}, {apart_s:.2f} s apart", act, limit_s=400.0)


def both(first: Command, second: Command) -> tuple[Ended, Ended]:
    return first.wait(120), second.wait(120)


def new_and_new(bench: Bench, algorithm: str, apart_s: float, folder: Path) -> Verdict:
    """Two new runs of other seeds and one name."""
    commands = []
    for seed in SEEDS:
        commands.append(Command(bench.words(algorithm, "runs", seed=seed), folder, f"seed_{seed}"))
        time.sleep(apart_s)
    for ended in both(*commands):
        verdict = judge(ended, REFUSAL)
        if not verdict.good:
            return verdict
    runs = sorted(path for path in (folder / "runs").iterdir() if path.is_dir())
    wanted = [bench.reference(algorithm, seed=seed) for seed, command in zip(SEEDS, commands) if command.status == 0]
    if len(runs) != len(wanted):
        return Verdict(False, f"{len(wanted)} runs that ended well left {len(runs)} folders")
    matched = [any(not differences(run, reference) for run in runs) for reference in wanted]
    return Verdict(all(matched), f"{len(runs)} folders, {matched.count(False)} of them with another run's numbers")


def latest_and_latest(bench: Bench, algorithm: str, apart_s: float, folder: Path) -> Verdict:
    """Two that would go on with the same run."""
    words = bench.words(algorithm, "runs", seed=SEEDS[0], resume_from="latest")
    ended = Command([*words, "--config.num_epochs=1"], folder, "before").wait(120)
    if ended.status != 0:
        return Verdict(False, f"the run before ended with {ended.status}: {ended.last[-200:]}")
    return one_of_two(bench, algorithm, [words, words], apart_s, folder)


def running_and_latest(bench: Bench, algorithm: str, apart_s: float, folder: Path) -> Verdict:
    """A run, and while it runs one that would go on with it."""
    words = bench.words(algorithm, "runs", seed=SEEDS[0])
    return one_of_two(bench, algorithm, [words, [*words, "--config.resume_from=latest"]], apart_s, folder)


def one_of_two(bench: Bench, algorithm: str, words: list[list[str]], apart_s: float, folder: Path) -> Verdict:
    """The folder holds the unbroken run, whoever made it; who did not is refused, or has a folder of its own."""
    first = Command(words[0], folder, "first")
    time.sleep(apart_s)
    second = Command(words[1], folder, "second")
    ended = both(first, second)
    for one in ended:
        verdict = judge(one, REFUSAL)
        if not verdict.good:
            return verdict
    if all(one.status for one in ended):
        return Verdict(False, f"both were refused: {ended[0].last[:200]}")
    reference = bench.reference(algorithm, seed=SEEDS[0])
    for run in sorted(path for path in (folder / "runs").iterdir() if path.is_dir()):
        if differ := differences(run, reference):
            return Verdict(False, f"silent: {run.name}: {differ}")
    return Verdict(True, f"exit statuses {ended[0].status} and {ended[1].status}: {ended[1].last[:200]}")


def two_preparations(bench: Bench, algorithm: str, apart_s: float, folder: Path) -> Verdict:
    """Two processes that make the same pairs."""
    words = bench.words("prepare", folder / "pairs")
    first = Command(words, folder, "first")
    time.sleep(apart_s)
    ended = both(first, Command(words, folder, "second"))
    for one in ended:
        verdict = judge(one, ("pairs", *REFUSAL))
        if not verdict.good:
            return verdict
    same = prepared(folder / "pairs") == prepared(bench.reference("prepare"))
    return Verdict(same, f"{ended[1].last[:200]}" if same else "silent: other pairs")


CASES = (new_and_new, latest_and_latest, running_and_latest, new_and_new, running_and_latest, two_preparations)
