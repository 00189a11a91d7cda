"""Hostile servers against our client: an error names server and prompt in time, memory stays small, no code runs."""

import math
import resource
import socket
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from faults_answers import ANSWERS, COUNT, pickles
from faults_files import FLAG
from faults_runs import Bench
from faults_tries import Dice, Try, Verdict

from flow_grpo import rewards
from flow_grpo.scoring.pool import Pool
from flow_grpo.scoring.scorers import RewardFailed
from flow_grpo.settings import default_config

TIMEOUT_S, RETRY_S, MARGIN_S = 1.0, 0.5, 8.0
MOST_MIB = 400  # that an answer may take: client.MAX_ANSWER_BYTES, as text, as objects and as numbers


def make(bench: Bench, seed: int, number: int) -> Try:
    """One server that always answers alike."""
    dice = Dice(seed, "client", number)
    case = ANSWERS[number % len(ANSWERS)]
    pickled = case is pickles
    act = partial(attempt, case, dice, pickled)
    return Try("client", number, f"{case.__name__}, draw {number}", act, 60.0)


def attempt(case, dice: Dice, pickled: bool, folder: Path) -> Verdict:
    """Ask for scores of some images, and look at what came back, when, and how much memory it took."""
    answer, valid = case(dice, folder)
    with hostile(answer) as url:
        before, started = memory_mib(), time.monotonic()
        try:
            scores, why = (ask_pickle if pickled else ask)(url), ""
        except Exception as error:
            scores, why = None, f"{type(error).__name__}: {error}"
            expected = isinstance(error, RewardFailed)
        seconds, more = time.monotonic() - started, memory_mib() - before
        if (folder / FLAG).exists():
            return Verdict(False, "code that was sent has run")
        if seconds > TIMEOUT_S + RETRY_S + MARGIN_S:
            return Verdict(False, f"{seconds:.1f} s instead of {TIMEOUT_S + RETRY_S}: {why[:200]}")
        if more > MOST_MIB:
            return Verdict(False, f"{more:.0f} MiB of memory: {why[:200]}")
        if scores is None:
            return Verdict(*is_named(why, url, expected or pickled))
    fine = valid is not None and len(scores) == COUNT and all(map(math.isfinite, scores))
    return Verdict(fine, f"scores {scores}" if fine else f"it took {scores} from an answer that is none")


def is_named(why: str, url: str, expected: bool) -> tuple[bool, str]:
    """Whether an error says which server and, of a pool's, which prompt; in few words."""
    if not expected:
        return False, f"not a reward's error: {why[:300]}"
    if "RewardFailed" in why and not (url in why and "prompt 0" in why):
        return False, f"server or prompt is not named: {why[:300]}"
    if len(why) > 2200:
        return False, f"a message of {len(why)} characters: {why[:200]}"
    return True, why[:300]


def memory_mib() -> float:
    """The most that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def ask(url: str) -> list[float]:
    config = default_config().reward
    with config.unlocked():
        config.args = {"served": {"url": url}}
        config.timeout_s, config.retry_s = TIMEOUT_S, RETRY_S
    pool = Pool(torch.device("cpu"), {"served": 1.0}, (), config)
    texts = [f"prompt {number}" for number in range(COUNT)]
    try:
        return pool.submit(torch.zeros(COUNT, 3, 16, 16), texts, [{}] * COUNT).result()["served"].tolist()
    finally:
        pool.close()


def ask_pickle(url: str) -> list[float]:
    options = {"url": url, "allow_pickle": True, "timeout_s": TIMEOUT_S, "retry_s": RETRY_S}
    score = rewards.load("deqa", torch.device("cpu"), options)
    return score(torch.zeros(COUNT, 3, 16, 16), ["prompt 0"] * COUNT, [{}] * COUNT).tolist()


@contextmanager
def hostile(answer):
    """Yields the address of a server that answers each request by `answer(connection)`."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    threading.Thread(target=accept, args=(listener, answer), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def accept(listener: socket.socket, answer) -> None:
    with suppress(OSError):
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=serve, args=(connection, answer), daemon=True).start()


def serve(connection: socket.socket, answer) -> None:
    """Read a request, roughly, and misbehave."""
    with suppress(OSError), connection:
        connection.settimeout(0.3)
        with suppress(TimeoutError):
            while connection.recv(2**20):
                pass
        connection.settimeout(30)
        answer(connection)
