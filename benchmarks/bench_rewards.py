"""How much of a slow reward's time a rollout hides, against scoring inline; one JSON line.

    python benchmarks/bench_rewards.py --backend http
    python benchmarks/bench_rewards.py --backend process --device cuda:1

It trains the shipped tiny model three times for two epochs of 128 images in 32 batches: with the reward `shapes` alone,
to see how long a rollout takes; then with a reward that is as slow as that rollout, inline; then with the same reward
scored by `--backend`. The slow reward sleeps on a CPU and multiplies matrices on a GPU, until its time per image is
over, and scores what `shapes` scores. Second epochs count.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import torch
from safetensors.torch import load_file

SLOW = '''"""As shapes, but slow."""

import time

import torch

from flow_grpo.rewards import shapes


def load(device, seconds=0.0):
    """seconds: per image."""
    quick, work = shapes.load(device), torch.zeros(4096, 4096, device=device) if "cuda" in str(device) else None

    def score(images, prompts, metadata):
        until = time.perf_counter() + seconds * len(prompts)
        found = quick(images, prompts, metadata)
        while work is not None and time.perf_counter() < until:
            (work @ work).sum().item()
        time.sleep(max(0.0, until - time.perf_counter()))
        return found

    return score
'''


@contextmanager
def server(seconds: float, device: str):
    """The slow reward as a command; yields its address."""
    command = [sys.executable, "scripts/serve_reward.py", "slow", "--port", "0", "--device", device]
    command += ["--batch-size", "4", "--options", json.dumps({"seconds": seconds}), "--parent", str(os.getpid())]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def train(folder: Path, reward_fn: dict, **reward) -> tuple[dict, dict]:
    """The second epoch's line, and the weights that were trained."""
    import train_qwenimage

    from flow_grpo import configs

    config = configs.load("config/grpo.py:shapes_qwenimage")
    config.num_epochs, config.eval_freq, config.save_freq, config.output_dir = 2, 0, 0, str(folder)
    config.sample.batch_size, config.reward_fn = 4, reward_fn
    for key, value in reward.items():
        config.reward[key] = value
    with redirect_stdout(sys.stderr):
        train_qwenimage.main(config)
    run = max(folder.iterdir(), key=lambda path: path.stat().st_mtime)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "epoch"][1], load_file(run / "pytorch_lora_weights.safetensors")


def compare(args, folder: Path) -> dict:
    """The three runs."""
    plain, _ = train(folder, {"shapes": 1.0}, backend="inline")
    seconds = plain["time/rollout_s"] / 128
    options = dict(batch_size=4, device=args.device)
    inline, first = train(folder, {"slow": 1.0}, backend="inline", args={"slow": options | {"seconds": seconds}})
    if args.backend == "http":
        with server(seconds, args.device or "cpu") as url:
            overlapped, second = train(folder, {"slow": 1.0}, args={"slow": dict(batch_size=4, url=url)})
    else:
        overlapped, second = train(
            folder, {"slow": 1.0}, backend=args.backend, args={"slow": options | {"seconds": seconds}}
        )
    waited, hidden = overlapped["time/reward_s"], overlapped["time/reward_hidden_s"]
    return {
        "backend": args.backend,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "rollout_s": overlapped["time/rollout_s"],
        "reward_inline_s": inline["time/reward_s"],
        "reward_waited_s": waited,
        "reward_hidden_s": hidden,
        "hidden_share": hidden / (hidden + waited),
        "epoch_inline_s": inline["time/epoch_s"],
        "epoch_s": overlapped["time/epoch_s"],
        "same_weights": all(torch.equal(values, second[name]) for name, values in first.items()),
    }


def main(args) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rewards = Path(folder, "rewards")
        rewards.mkdir()
        (rewards / "slow.py").write_text(SLOW)
        os.environ["FLOW_GRPO_REWARDS"] = str(rewards)  # read when flow_grpo.rewards is imported, below
        sys.stdout.write(json.dumps(compare(args, Path(folder, "runs"))) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["inline", "thread", "process", "http"], default="http")
    parser.add_argument("--device", default="", help="of the slow reward")
    main(parser.parse_args())
