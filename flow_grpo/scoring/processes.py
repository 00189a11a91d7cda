"""Reward servers that a run starts for itself, on a device of their own."""

import json
import os
import select
import subprocess
import sys
import time
from typing import NamedTuple

from flow_grpo.base import distributed
from flow_grpo.rewards.clients.client import SIGN_OF_LIFE_S, notice

START_S = 600  # a large model may be slow to load


class ServerProcess(NamedTuple):
    """A server of this run."""

    url: str
    process: subprocess.Popen | None  # None on the ranks that did not start it

    def ending(self) -> str:
        """How the process has ended; "" while it runs, or is another rank's."""
        status = self.process.poll() if self.process else None
        return "" if status is None else f"its process has ended with status {status}"

    def stop(self) -> None:
        """End it."""
        if self.process:
            self.process.terminate()


def start_server(name: str, device: str, options: dict, batch_size: int, token_file: str = "") -> ServerProcess:
    """Serve a reward for all ranks of a machine, on loopback, from a process of its first one. It ends with that rank.

    Raises:
        RuntimeError: on some machine it did not come up; with what it said.
    """
    starts = distributed.is_first_on_node()
    process = _start(name, device, options, batch_size, token_file) if starts else None
    addresses = dict(distributed.gather_objects([(distributed.node(), _address(name, process))] if process else []))
    for node, url in addresses.items():
        if not url.startswith("http"):
            raise RuntimeError(f"reward {name!r} did not start in a process on {device} of machine {node}: {url}")
    return ServerProcess(addresses[distributed.node()], process)


def _start(name: str, device: str, options: dict, batch_size: int, token_file: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "flow_grpo.reward_server.serve", name, "--device", device, "--port", "0"]
    command += ["--batch-size", str(batch_size), "--options", json.dumps(options), "--parent", str(os.getpid())]
    command += ["--token-file", token_file] if token_file else []
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def _address(name: str, process: subprocess.Popen) -> str:
    """The address that it prints, or what went wrong."""
    end = time.monotonic() + START_S
    while not select.select([process.stdout], [], [], SIGN_OF_LIFE_S)[0]:
        if time.monotonic() > end:
            process.kill()
            return f"nothing heard of it for {START_S} s"
        notice(f"reward {name!r}: its process is still loading")
    line = process.stdout.readline().strip()
    return line or f"exit status {process.wait()}, see above"
