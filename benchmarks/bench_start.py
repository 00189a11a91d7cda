"""Seconds from a training script's start to its first optimizer step, with empty caches and once more, as a JSON line.

    python benchmarks/bench_start.py scripts/train_qwenimage.py --config config/grpo.py:shapes_qwenimage,smoke
    python benchmarks/bench_start.py scripts/train_qwenimage.py --config config/grpo.py:pickscore_qwenimage \\
        --config.model=runs/random_qwenimage --config.sample.num_prompts_per_epoch=1

The caches are those of compiled graphs and of embeddings. The rollout that comes before the step is part of it, so take
few prompts. What follows the step is not awaited.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def first_update_s(command: list[str], environment: dict[str, str], folder: Path, limit: float = 1800) -> float:
    """Start a run that writes into `folder`, and end it with its first line about an update.

    Raises:
        RuntimeError: it ends, or `limit` seconds pass, before there is one.
    """
    start = time.perf_counter()
    run = subprocess.Popen(
        [sys.executable, *command, f"--config.output_dir={folder}"], env=environment, stdout=sys.stderr
    )
    try:
        while run.poll() is None and time.perf_counter() - start < limit:
            if any('"kind": "update"' in path.read_text() for path in folder.glob("*/metrics.jsonl")):
                return time.perf_counter() - start
            time.sleep(0.1)
    finally:
        run.kill()
        run.wait()
    raise RuntimeError(f"{' '.join(command)} made no optimizer step; its status was {run.returncode}")


def main(command: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/graphs", "WANDB_MODE": "disabled"}
        command = [*command, f"--config.embeddings_cache={folder}/embeddings"]
        seconds = [first_update_s(command, environment, Path(folder, name)) for name in ("cold", "warm")]
    print(json.dumps(dict(command=command[:-1], first_start_s=seconds[0], second_start_s=seconds[1])))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1:])
