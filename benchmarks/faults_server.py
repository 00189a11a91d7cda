"""Hostile clients against a reward server: 4xx, alive, little memory, no code runs, and right scores afterwards."""

import base64
import http.client
import json
import signal
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from faults_attacks import ATTACKS, IMAGE, Attacked
from faults_commands import ROOT, Command
from faults_files import FLAG
from faults_runs import Bench
from faults_tries import Dice, Try, Verdict

from flow_grpo import rewards
from flow_grpo.scoring import wire

REWARD = "jpeg_compressibility"
MOST_MIB = 2048  # more than the server has at its start, twice what it is told to take
HEALTH_S, END_S = 5.0, 15.0


def make(bench: Bench, seed: int, number: int) -> Try:
    """One attack on a server of its own."""
    dice = Dice(seed, "server", number)
    attack = ATTACKS[number % len(ATTACKS)]
    token = "sesame" if dice.share() < 0.3 else ""
    what = f"{attack.__name__}, draw {number}{', with a token' if token else ''}"
    return Try("server", number, what, partial(attempt, attack, token, dice), 120.0)


def attempt(attack, token: str, dice: Dice, folder: Path) -> Verdict:
    """Attack, ask for its health meanwhile and afterwards, ask for a score, end it."""
    words = [ROOT / "scripts" / "serve_reward.py", REWARD, "--port", "0", "--max-memory-gib", "1"]
    server = Command(words, folder, "server", env={"REWARD_TOKEN": token, "FLAG": str(folder / FLAG)}, memory_gib=4)
    port, late = port_of(server)
    before = most_mib(server)
    longest = [0.0]
    watching = threading.Event()
    watcher = threading.Thread(target=watch_health, args=(port, longest, watching))
    watcher.start()
    answers = attack(Attacked(port, token, dice, folder, late))
    watching.set()
    watcher.join()
    verdict = after(server, port, token, folder, longest[0], before, answers)
    server.send(signal.SIGTERM)
    ended = server.wait(END_S)
    if verdict.good and ended.status is None:
        return Verdict(False, f"the server did not end within {END_S:.0f} s")
    if verdict.good and "Traceback" in ended.stderr:
        return Verdict(False, f"a traceback in its log: {ended.last[-200:]}")
    return verdict


def port_of(server: Command) -> tuple[int, bool]:
    """Once it says where it listens and can be reached there; whether that took longer than its word."""
    end, late = time.monotonic() + 30, False
    while "\n" not in server.output()[0]:
        if server.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the server did not start: {server.output()[1][-500:]}")
        time.sleep(0.01)
    port = int(server.output()[0].split()[0].rpartition(":")[2])
    while time.monotonic() < end:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            return port, late
        late = True
        time.sleep(0.02)
    raise RuntimeError("the server does not listen")


def most_mib(server: Command) -> float:
    (line,) = [row for row in Path(f"/proc/{server.pid}/status").read_text().splitlines() if row.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def health(port: int) -> int:
    """Its status; 0 = no answer."""
    with suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/health")
        return connection.getresponse().status
    return 0


def watch_health(port: int, longest: list[float], stop: threading.Event) -> None:
    """Note the longest wait for an answer."""
    while not stop.is_set():
        start = time.monotonic()
        health(port)
        longest[0] = max(longest[0], time.monotonic() - start)
        stop.wait(0.1)


def after(
    server: Command, port: int, token: str, folder: Path, longest_s: float, before_mib: float, answers: list[int]
) -> Verdict:
    """What is left of the server."""
    if server.poll() is not None:
        return Verdict(False, f"the server has ended with {server.status}: {server.output()[1][-200:]}")
    more = most_mib(server) - before_mib
    if (folder / FLAG).exists():
        return Verdict(False, "code that was sent has run")
    if more > MOST_MIB:
        return Verdict(False, f"{more:.0f} MiB of memory, answers {sorted(set(answers))}")
    if longest_s > HEALTH_S:
        return Verdict(False, f"/health took {longest_s:.1f} s, answers {sorted(set(answers))}")
    if any(500 <= status < 600 for status in answers):
        return Verdict(False, f"answers {sorted(set(answers))}")
    if (score := good_score(port, token)) is not None:
        return Verdict(False, f"a good request afterwards: {score}")
    return Verdict(True, f"answers {sorted(set(answers))}, {more:.0f} MiB, /health {longest_s:.2f} s at most")


def good_score(port: int, token: str) -> str | None:
    """None if it is right."""
    body = {"prompts": ["a"], "images": [base64.b64encode(wire.pack_image(IMAGE, "npy")).decode()]}
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("POST", "/score", json.dumps(body), {"Content-Type": "application/json"} | headers)
        score = json.loads(connection.getresponse().read())["scores"]["score"]
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    expected = rewards.load(REWARD, torch.device("cpu"))(IMAGE[None], ["a"], [{}])
    return None if torch.equal(torch.tensor(score), expected) else f"{score} instead of {expected.tolist()}"
