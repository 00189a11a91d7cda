"""Write the prompts of the `shapes` task: GenEval metadata, one JSON object a line.

python tools/make_shapes_dataset.py --out dataset/shapes
"""

import argparse
import json
from pathlib import Path

from flow_grpo.data.shapes import all_prompts, split, validation


def main(out: Path):
    out.mkdir(parents=True, exist_ok=True)
    train, test = split(all_prompts())
    for name, prompts in (("train", train), ("validation", validation(all_prompts())), ("test", test)):
        (out / f"{name}_metadata.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("dataset/shapes"))
    main(parser.parse_args().out)
