"""What the base model does without training, as lines of a metrics.jsonl, through the functions of evaluate.py.

    python benchmarks/baselines.py --out runs/learn/base --noises 4 --pass-at 64

On the test prompts: without guidance; with the guidance scale that is best on the validation prompts; and pass@k
without guidance. Files appear whole: a kill leaves none.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from flow_grpo import candidates, distributed, estimates
from flow_grpo.scoring.pool import Pool

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

import evaluate

MODEL, FIGURE = "flow_grpo/assets/tiny_qwenimage", "shapes_accuracy"
SCALES = (1.5, 2.0, 3.0, 4.0, 5.0, 6.0)


def scored(split, scales, num_noises, settings):
    """(guidance scale, scores [noises, prompts], tags) of the base, for each scale."""
    words = [MODEL, "--split", split, "--seeds", *range(num_noises), "--guidance-scales", *scales, "--set", *settings]
    args = evaluate.parser().parse_args([str(word) for word in words])
    policies, common = evaluate.configured(args)
    chosen, seeds = evaluate.chosen_prompts(args, common), evaluate.seeds_of(args, common)
    (family,) = evaluate.check(args, policies, common, chosen)
    ranks = distributed.init_distributed()
    pool = Pool(ranks.device, common.reward_fn, common.eval.rewards, common.reward)
    torch.backends.cuda.enable_cudnn_sdp(family.CUDNN_ATTENTION)
    model = candidates.load(policies[0], family, ranks.device)
    tags = [prompt.metadata.get("tag", "") for prompt in chosen.prompts]
    rows = evaluate.rows_of(policies[0], model, pool, ranks, args, chosen, seeds)
    results = [(row["guidance_scale"], scores.values[FIGURE], tags) for row, scores in rows]
    pool.close()
    return results


def line(kind, values, tags, **fields):
    """One line: the accuracy over all prompts, and over those of each category."""
    named = {f"{kind}/{FIGURE}": estimates.mean(values).mean}
    named |= {f"{kind}/{FIGURE}/{tag}": part.mean for tag, part in estimates.by_category(values, tags).items()}
    return dict(kind=kind, epoch=0, step=0) | fields | named


def pass_line(values, tags, k):
    """One line: pass@k in the place of the accuracy."""
    by_tag = {tag: values[:, [i for i, other in enumerate(tags) if other == tag]] for tag in dict.fromkeys(tags)}
    pass_by_tag = {f"test/{FIGURE}/{tag}": estimates.pass_at(scores, k).mean for tag, scores in by_tag.items()}
    pass_all = {f"test/{FIGURE}": estimates.pass_at(values, k).mean}
    return dict(kind="test", epoch=0, step=0, guidance_scale=1.0, pass_at=k) | pass_all | pass_by_tag


def measure(num_noises, k, settings):
    """Every line."""
    chosen = scored("validation", SCALES, num_noises, settings)
    best = max(chosen, key=lambda result: result[1].nanmean())[0]  # the lowest of equals
    tested = scored("test", [1.0, best], num_noises, settings)
    ((_, values, tags),) = scored("test", [1.0], k, settings)
    lines = [line("eval", accuracy, names, guidance_scale=scale) for scale, accuracy, names in chosen]
    lines += [line("test", accuracy, names, guidance_scale=scale) for scale, accuracy, names in tested]
    return [*lines, pass_line(values, tags, k)]


def main(args):
    args.out.mkdir(parents=True, exist_ok=True)
    scratch = args.out / "metrics.jsonl.tmp"
    lines = measure(args.noises, args.pass_at, args.set)
    scratch.write_text("".join(json.dumps(record) + "\n" for record in lines))
    scratch.replace(args.out / "metrics.jsonl")


def parser():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of metrics.jsonl")
    parser.add_argument("--noises", type=int, default=4, help="of each prompt; of pass@k: k")
    parser.add_argument("--pass-at", type=int, default=64, help="k of pass@k")
    parser.add_argument("--set", nargs="*", default=[], help="settings of the config, such as eval.batch_size=544")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
