"""A data set whose epochs all take as long, and as much memory, as its longest prompt does."""

import json
from pathlib import Path

from flow_grpo.prompts import load_prompts


def one_prompt(dataset: str, folder: Path) -> str:
    """Write a data set of nothing but the longest training prompt of another into a new folder; its path."""
    longest = max(load_prompts(dataset, "train"), key=lambda prompt: len(prompt.text))
    folder.mkdir()
    for split in ("train", "test"):
        line = json.dumps(longest.metadata | dict(prompt=longest.text)) + "\n"
        (folder / f"{split}_metadata.jsonl").write_text(line, encoding="utf-8")
    return str(folder)
