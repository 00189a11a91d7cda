"""Kills at random moments, during saves and evaluations too: what is resumed ends as the unbroken run, bit for bit."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from faults_commands import ENV, ROOT, Command, Ended
from faults_runs import TRAINED, Bench, differences, free_port, only_folder, prepared, run_whole, said, start_ranks
from faults_tries import Dice, Try, Verdict, descendants, end_all, living

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}
GONE_S = 15.0  # in which all processes of a killed run are gone
LIMIT_S, TORCHRUN_S = 240.0, 400.0
TWO_RANKS = ("grpo", "pr", "nft", "dpo")
SERVED = "jpeg_compressibility"


class Plan(NamedTuple):
    """How a run is killed."""

    algorithm: str
    ranks: int
    victims: str  # "all", "rank 0" or "rank 1"
    signal: str
    moment: str  # of MOMENTS
    times: int


def make(bench: Bench, seed: int, number: int) -> Try:
    """One, two or three kills of a run, then its end."""
    dice = Dice(seed, "kills", number)
    name = dice.pick(("SIGKILL", "SIGKILL", "SIGTERM", "SIGINT"))
    moment, times = dice.pick(("line", "line", "save", "any")), 1 + dice.below(3)
    if number % 16 == 7:
        victim = dice.pick(("torchrun", "rank"))
        algorithm = dice.pick(TWO_RANKS)
        bench.reference(algorithm, ranks=2)
        act = partial(kill_torchrun, bench, algorithm, victim, name, dice)
        return Try("kills", number, f"{algorithm} by torchrun, {name} to {victim}", act, TORCHRUN_S)
    bench.reference("grpo")
    if number % 16 == 3:
        act = partial(kill_server, bench, dice)
        return Try("kills", number, "grpo, SIGKILL to its reward server, which comes back", act, LIMIT_S)
    if number % 16 == 11:
        act = partial(kill_reward_process, bench, dice)
        return Try("kills", number, "grpo, SIGKILL to its reward process", act, LIMIT_S)
    if number % 8 == 1:
        bench.reference("prepare")
        act = partial(kill_preparation, bench, name, times, dice)
        return Try("kills", number, f"prepare_preferences, {name} x {times}", act, LIMIT_S)
    ranks = 2 if dice.share() < 0.3 else 1
    algorithm = dice.pick(TWO_RANKS) if ranks == 2 else TRAINED[number % len(TRAINED)]
    bench.reference(algorithm, ranks=ranks)
    victims = dice.pick(("all", "rank 0", "rank 1")) if ranks == 2 else "all"
    plan = Plan(algorithm, ranks, victims, name, moment, times)
    return Try("kills", number, str(plan), partial(kill_run, bench, plan, dice), LIMIT_S)


def kill_run(bench: Bench, plan: Plan, dice: Dice, folder: Path) -> Verdict:
    """Kill it some times, each time going on with `latest`; then let it end."""
    words = bench.words(plan.algorithm, folder / "runs", resume_from="latest")
    for kill in range(plan.times):
        commands = start_ranks(words, folder, f"killed_{kill}", plan.ranks)
        wait_until(MOMENTS[plan.moment], folder / "runs", commands, dice)
        for rank, command in enumerate(commands):
            if plan.victims in ("all", f"rank {rank}"):
                end_by(command, plan.signal)
        verdict = gone(commands, plan.signal, plan.ranks)
        if not verdict.good:
            return verdict
    ended = run_whole(words, folder, "last", plan.ranks, LIMIT_S / 2)
    return equal(ended, folder / "runs", bench.reference(plan.algorithm, ranks=plan.ranks))


def end_by(command: Command, name: str) -> None:
    """A signal to the process; Ctrl-C goes to all that it has started, too."""
    if name == "SIGINT":
        command.interrupt()
    else:
        command.send(SIGNALS[name])


def wait_until(moment: Callable[[Path, Dice], bool], output_dir: Path, commands: list[Command], dice: Dice) -> None:
    """Look until the moment has come, or the run is over."""
    end = time.monotonic() + LIMIT_S / 3
    while not moment(output_dir, dice) and commands[0].poll() is None and time.monotonic() < end:
        time.sleep(0.002)


def at_a_line(output_dir: Path, dice: Dice) -> bool:
    """Soon after a line of metrics.jsonl: in a rollout, an update, an evaluation, or a save."""
    files = list(output_dir.glob("*/metrics.jsonl"))
    if not files or time.time() - files[0].stat().st_mtime > 0.1 or dice.share() > 0.02:
        return False
    time.sleep(0.3 * dice.share())
    return True


def in_a_save(output_dir: Path, dice: Dice) -> bool:
    """While a checkpoint is written."""
    return any(True for _ in output_dir.glob("*/checkpoints/.tmp-*")) and dice.share() < 0.3


def at_any_time(output_dir: Path, dice: Dice) -> bool:
    """Imports are done, so within four seconds it is loading or training."""
    time.sleep(4 * dice.share() ** 2)
    return True


MOMENTS = {"line": at_a_line, "save": in_a_save, "any": at_any_time}


def gone(commands: list[Command], name: str, ranks: int) -> Verdict:
    """Whether no process is left, and what Ctrl-C makes a run say. Other ranks are asked to end, as by torchrun."""
    ends = time.monotonic() + GONE_S / 3, time.monotonic() + GONE_S
    for end in ends:
        while any(command.poll() is None for command in commands) and time.monotonic() < end:
            time.sleep(0.01)
        if ranks > 1:
            for command in commands:
                command.send(signal.SIGTERM)
    ended = said(commands)
    left = descendants(os.getpid())
    if ended.status is None:
        end_all(left)
        return Verdict(False, f"{len(left)} processes go on after {name}: {ended.last[-200:]}")
    if name == "SIGINT" and ranks == 1 and ended.status and "Traceback" in ended.stderr:
        return Verdict(False, f"a traceback after Ctrl-C: {ended.last[-200:]}")
    return Verdict(True, "")


def equal(ended: Ended, output_dir: Path, reference: Path) -> Verdict:
    """Whether a run that was resumed to its end is the unbroken one."""
    if ended.status != 0:
        return Verdict(False, f"resumed, it ended with {ended.status}: {ended.last[-300:]}")
    differ = differences(only_folder(output_dir), reference)
    return Verdict(not differ, f"silent: {differ}" if differ else "resumed, equal")


def kill_preparation(bench: Bench, name: str, times: int, dice: Dice, folder: Path) -> Verdict:
    """The pairs' files are the same bytes, and so is what was dropped."""
    words = bench.words("prepare", folder / "pairs")
    for kill in range(times):
        command = Command(words, folder, f"killed_{kill}")
        wait_until(at_any_time, folder, [command], dice)
        end_by(command, name)
        verdict = gone([command], name, 1)
        if not verdict.good:
            return verdict
    ended = Command(words, folder, "last").wait(LIMIT_S / 2)
    if ended.status != 0:
        return Verdict(False, f"resumed, it ended with {ended.status}: {ended.last[-300:]}")
    same = prepared(folder / "pairs") == prepared(bench.reference("prepare"))
    return Verdict(same, "resumed, equal" if same else "silent: other pairs")


def kill_torchrun(bench: Bench, algorithm: str, victim: str, name: str, dice: Dice, folder: Path) -> Verdict:
    """The real command: a signal to torchrun, or a SIGKILL to one of its ranks; all end, and `latest` goes on."""
    words = bench.words(algorithm, folder / "runs", resume_from="latest")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=2",
        f"--master_port={free_port()}",
        *words,
    ]
    with (folder / "torchrun.log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | ENV, stdout=log, stderr=log)
    end = time.monotonic() + TORCHRUN_S / 3
    while process.poll() is None and not list((folder / "runs").glob("*/metrics.jsonl")):
        if time.monotonic() > end:
            raise RuntimeError(f"no epoch within {TORCHRUN_S / 3:.0f} s")
        time.sleep(0.02)
    time.sleep(2 * dice.share())
    ranks = descendants(process.pid)
    target = process.pid if victim == "torchrun" or not ranks else dice.pick(sorted(ranks))
    with suppress(ProcessLookupError):
        os.kill(target, SIGNALS[name] if victim == "torchrun" else signal.SIGKILL)
    end = time.monotonic() + 2 * GONE_S
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    if left := living(os.getpid(), GONE_S):
        end_all(left)
        return Verdict(False, f"{len(left)} processes go on {GONE_S:.0f} s after {victim} was ended")
    ended = run_whole(words, folder, "last", 2, LIMIT_S / 2)
    return equal(ended, folder / "runs", bench.reference(algorithm, ranks=2))


def kill_server(bench: Bench, dice: Dice, folder: Path) -> Verdict:
    """The run waits for its reward server; when it is back, all goes on and ends as if nothing had happened."""
    server, url = start_server(folder, "0")
    args = {SERVED: {"url": url, "retry_s": 60.0, "timeout_s": 10.0}}
    words = bench.words("grpo", folder / "runs", reward__args=args)
    run = Command(words, folder)
    wait_until(MOMENTS[dice.pick(("line", "any"))], folder / "runs", [run], dice)
    server.kill()
    time.sleep(2 * dice.share())
    server, _ = start_server(folder, url.rpartition(":")[2])
    ended = run.wait(LIMIT_S / 2)
    if ended.status == 2 and f"no answer from {url}" in ended.last:  # killed before the run had looked for it
        ended = Command(words, folder, "again").wait(LIMIT_S / 2)
    server.kill()
    return equal(ended, folder / "runs", bench.reference("grpo"))


def start_server(folder: Path, port: str) -> tuple[Command, str]:
    """A reward server and its address."""
    server = Command([ROOT / "scripts" / "serve_reward.py", SERVED, "--port", port], folder, f"server_{port}")
    end = time.monotonic() + 20
    while "\n" not in server.output()[0]:
        if server.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the reward server did not start: {server.output()[1][-500:]}")
        time.sleep(0.01)
    return server, server.output()[0].split()[0]


def kill_reward_process(bench: Bench, dice: Dice, folder: Path) -> Verdict:
    """An error that names the reward; `latest` goes on with a new process."""
    flags = {"reward__backend": "process", "reward__retry_s": 2.0, "resume_from": "latest"}
    words = bench.words("grpo", folder / "runs", **flags)
    run = Command(words, folder)
    wait_until(at_a_line, folder / "runs", [run], dice)
    for child in descendants(run.pid):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    ended = run.wait(LIMIT_S / 3)
    if ended.status is None:
        return Verdict(False, "hang without its reward process")
    if ended.status and SERVED not in ended.last:
        return Verdict(False, f"the reward is not named: {ended.last[-300:]}")
    ended = Command(words, folder, "last").wait(LIMIT_S / 2)
    return equal(ended, folder / "runs", bench.reference("grpo"))
