"""Many images are drawn cheaply, and of each prompt the best and the worst are drawn again and trained."""

import pytest
import torch
from small import config_of, lines_of, train
from train_qwenimage import window_at

from flow_grpo.command_line import checks
from flow_grpo.run import rewards, sampling, startup

SCOUTS = dict(sample__scouts_per_image=3)


def by_number(samples):
    """Latents of each image of some draws, in the order of their numbers."""
    latents = {}
    for batch, drawn in samples:
        latents |= zip(batch.image_numbers, drawn.latents)
    return torch.stack([latents[image] for image in range(len(latents))])


@pytest.mark.slow
def test_the_best_and_the_worst_scouts_of_each_prompt_are_drawn_again_from_their_own_noises(tmp_path):
    """With a random window for every batch, whose groups are two batches each; by scouts that are as exact as they."""
    how = SCOUTS | dict(sample__batch_size=2, sample__num_prompts_per_epoch=3, sample__scout_ratio=0.0)
    run = startup.start(config_of("shapes_qwenimage", tmp_path, **how), checks.GRPO)

    def window_of(batch):
        return window_at(run.config.sample, run.config.seed, 0, batch.block, num_updates=0)

    picked = torch.tensor(rewards.scout(run, 0, window_of)).view(3, 4)
    scouts = list(sampling.sample_epoch(run, 0, window_of, scouts_per_image=run.config.sample.scouts_per_image))
    scores = rewards.gather(run, [rewards.submit(run, samples, batch) for batch, samples in scouts]).scores["avg"]
    for group, numbers in enumerate(picked):
        of_group = scores.view(3, 12)[group]
        assert set(numbers.tolist()) <= set(range(12 * group, 12 * group + 12))
        ends = of_group.sort(descending=True).values[[0, 1, -2, -1]]
        assert torch.equal(scores[numbers], ends)
    again = by_number(sampling.sample_epoch(run, 0, window_of, noise_indices=picked.flatten().tolist()))
    torch.testing.assert_close(again, by_number(scouts)[picked.flatten()], rtol=1e-5, atol=1e-5)
    run.board.finish()


@pytest.mark.parametrize("name", ["shapes_qwenimage", pytest.param("shapes_qwenimage_nft", marks=pytest.mark.slow)])
def test_a_run_with_cheap_scouts_trains_what_it_draws_again(name, shallow, tmp_path):
    how = SCOUTS | dict(sample__rollout_weights="merged", sample__num_steps=6, num_epochs=1, eval_freq=0)
    folder = train(name, tmp_path, lora__rank=4, **how | shallow)
    (epoch,) = lines_of(folder, "epoch")
    updates = lines_of(folder, "update")
    assert epoch["images"] == 8
    assert epoch["reward/scouts"] != epoch["reward/avg"]
    assert updates[0].get("parity/log_prob_abs_diff_max", 0) == 0 < updates[0]["grad_norm"]
    exact = lines_of(
        train(name, tmp_path / "exact", lora__rank=4, **how | shallow | dict(sample__scout_ratio=0.0)), "epoch"
    )
    assert exact[0]["forwards"] > epoch["forwards"]
