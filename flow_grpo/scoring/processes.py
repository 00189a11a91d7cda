"""Reward servers that a run starts for itself, on a device of their own."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable

from flow_grpo import distributed

START_S = 600  # a large model may be slow to load


def start_server(name: str, device: str, options: dict, batch_size: int) -> tuple[str, Callable[[], None]]:
    """Serve a reward for all ranks, from a process of the main one. It ends when that process ends.

    Returns:
        its address, and what stops it.

    Raises:
        RuntimeError: it did not come up; with what it said.
    """
    process = _start(name, device, options, batch_size) if distributed.is_main() else None
    url = distributed.broadcast_object(_address(process) if process else None)
    if url.startswith("http"):
        return url, (process.terminate if process else lambda: None)
    raise RuntimeError(f"reward {name!r} did not start in a process on {device}: {url}")


def _start(name: str, device: str, options: dict, batch_size: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "flow_grpo.scoring.serve", name, "--device", device, "--port", "0"]
    command += ["--batch-size", str(batch_size), "--options", json.dumps(options), "--parent", str(os.getpid())]
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def _address(process: subprocess.Popen) -> str:
    """The address that it prints, or what went wrong."""
    if not select.select([process.stdout], [], [], START_S)[0]:
        process.kill()
        return f"nothing heard of it for {START_S} s"
    line = process.stdout.readline().strip()
    return line or f"exit status {process.wait()}, see above"
