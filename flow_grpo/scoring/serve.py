"""The command line of a reward server."""

import argparse
import asyncio
import json
import os
import sys

import torch

from flow_grpo import rewards
from flow_grpo.scoring.server import Limits, make_app, serve


def parse(args: list[str] | None) -> argparse.Namespace:
    """The arguments."""
    defaults, parser = Limits(), argparse.ArgumentParser(description="Serve a reward file; see docs/reward_servers.md.")
    parser.add_argument("name", help="a file of flow_grpo/rewards, or of a folder in FLOW_GRPO_REWARDS")
    parser.add_argument("--port", type=int, default=18087, help="0 = any that is free")
    parser.add_argument("--host", default="127.0.0.1", help="who may connect; 0.0.0.0 = everyone, then set a token")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--options", type=json.loads, default={}, help="of the reward's load(), as JSON")
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size, help="images scored together")
    parser.add_argument("--max-delay-s", type=float, default=defaults.max_delay_s, help="an image waits for others")
    parser.add_argument("--max-waiting", type=int, default=defaults.max_waiting, help="images in line, then HTTP 429")
    parser.add_argument("--max-body-mib", type=int, default=defaults.max_body_bytes >> 20)
    parser.add_argument("--max-side", type=int, default=defaults.max_side, help="pixels of an image")
    parser.add_argument("--parent", type=int, default=0, help="end when this process is no longer the parent")
    return parser.parse_args(args)


def announce(url: str) -> None:
    """Who started this server reads its address from the first line."""
    sys.stdout.write(url + "\n")
    sys.stdout.flush()


def main(args: list[str] | None = None) -> None:
    """Load the reward, print the server's address, serve until stopped. Its token is the environment's REWARD_TOKEN."""
    parsed = parse(args)
    rewards.check_options(parsed.name, parsed.options)
    score = rewards.load(parsed.name, torch.device(parsed.device), parsed.options)
    limits = Limits(
        parsed.batch_size, parsed.max_delay_s, parsed.max_waiting, parsed.max_body_mib << 20, parsed.max_side
    )
    app = make_app(parsed.name, score, limits, os.environ.get("REWARD_TOKEN", ""))
    asyncio.run(serve(app, parsed.host, parsed.port, announce, parsed.parent))


if __name__ == "__main__":
    main()
