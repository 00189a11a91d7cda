"""How good the policy is: deterministic images of fixed prompts from fixed noise, with EMA weights."""

from functools import partial

import torch

from flow_grpo import fsdp_utils, rng


@torch.no_grad()
def evaluate(run, epoch: int) -> dict[str, float]:
    """Score `eval.num_prompts` test prompts, log the means and a panel of images; the means by reward name.

    The noise is the same in every run, whatever its seed, and batches are the same on any number of ranks.
    """
    settings = run.config.eval
    prompts = spread(run.test_prompts, settings.num_prompts)
    starts = range(0, len(prompts), settings.batch_size)
    shown = set(spread(range(len(prompts)), settings.num_panel_images))
    found = []
    with run.ema.applied(), run.board.timed("eval"):
        for number, counts in turns(len(starts), run):
            start = starts[number]
            images, pending = _sample(run, prompts[start : start + settings.batch_size], start)
            panel = {start + i: image.cpu() for i, image in enumerate(images) if start + i in shown}
            found += [(start, pending, panel)] if counts else []
        found = [(start, pending.result(), panel) for start, pending, panel in found]
        run.pool.clock.pop()
    found = sorted(fsdp_utils.gather_objects(found), key=lambda part: part[0])
    scores = {name: torch.cat([part[1][name] for part in found]) for name in found[0][1]}
    means = {f"eval/{name}": values.nanmean().item() for name, values in scores.items()}
    judged = scores[settings.get("best_by", "avg")]
    judged = judged[~judged.isnan()].double()
    error = {"eval/std_error": judged.std().item() / len(judged) ** 0.5} if len(judged) > 1 else {}
    panel = {number: image for part in found for number, image in part[2].items()}
    where = dict(epoch=epoch, step=run.step)
    run.board.log("eval", means | error, **where)
    texts, rewards = [prompts[i].text for i in panel], scores["avg"][list(panel)]
    run.board.log_images("eval", torch.stack(list(panel.values())), texts, rewards, **where)
    return means


def spread(items, count: int) -> list:
    """`count` items at equal distances, all of them if there are fewer: test sets are often sorted by kind."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def turns(count: int, run):
    """This rank's numbers below `count`, under a progress bar, and whether each counts: every rank makes equally many,
    so that sharded forwards meet."""
    for turn in run.board.bar(range(0, count, run.world_size), "evaluation"):
        yield min(turn + run.rank, count - 1), turn + run.rank < count


def _sample(run, prompts, start: int):
    config = run.config
    texts = [prompt.text for prompt in prompts]
    sampled = run.model.pipeline_with_logprob(
        run.pipeline,
        run.embed(texts),
        [rng.generator(0, "eval", start + i) for i in range(len(prompts))],
        window=range(0),
        noise_level=0.0,
        velocity=partial(run.velocity, guidance_scale=config.eval.guidance_scale),
        num_steps=config.eval.num_steps,
        resolution=config.resolution,
        vae_batch_size=config.vae_batch_size,
    )
    metadata = [prompt.metadata for prompt in prompts]
    return sampled.images, run.pool.submit(sampled.images, texts, metadata, everything=True)
