"""The script that is read first learns."""

import re

import minimal_grpo
import torch
from small import as_prompts, loaded


def test_the_printed_reward_rises_by_updates_of_an_epochs_gradients_alone(capsys, monkeypatch):
    """-1.32 to -1.04 in 4 epochs; with the advantages' sign turned round it falls."""
    add_gradients, without = minimal_grpo.add_gradients, []

    def noting(model, *batch):
        without.append(all(p.grad is None for p in model.transformer.parameters()))
        add_gradients(model, *batch)

    monkeypatch.setattr(minimal_grpo, "add_gradients", noting)
    minimal_grpo.train("jpeg_compressibility", num_epochs=4, num_prompts=2, group_size=8)
    printed = [float(number) for number in re.findall(r"reward (-?[0-9.]+)", capsys.readouterr().out)]
    assert without == [True] * 4 * minimal_grpo.NUM_UPDATES
    assert len(printed) == 4
    assert sum(printed[-2:]) / 2 > sum(printed[:2]) / 2 + 0.1


def test_a_ratio_to_the_rollouts_log_prob_is_clipped():
    model = loaded("qwenimage")
    condition = model.encode(as_prompts(["a photo of a red circle"]))
    sampled = minimal_grpo.sample(model, condition, epoch=0)
    for traced in sampled.trace:
        traced.step.log_prob.sub_(1)
    for advantage, clipped in ((1.0, True), (-1.0, False)):  # a ratio of e is clipped where it would grow
        model.transformer.zero_grad()
        minimal_grpo.add_gradients(model, condition, sampled, torch.tensor([advantage]))
        assert model.transformer.proj_out.weight.grad.any() != clipped
