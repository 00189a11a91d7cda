"""Diffusers' context parallelism: refused, since a rank would attend to its own tokens alone."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import ContextParallelConfig
from diffusers.utils import logging
from refused import refusal
from small import generators, loaded
from two_ranks import done, launch

from flow_grpo.base import distributed
from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch import model_classes
from flow_grpo.diffusers_patch.models.qwenimage import join_attention
from flow_grpo.diffusers_patch.size import Size

SIZE = Size(64, 64, 1)


def enable(transformer):
    """Do what a user does. Diffusers divides by the number of the machine's accelerators, of which a CPU has none."""
    torch.accelerator.device_count = partial(int, 1)
    logging.set_verbosity_error()
    transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))


@torch.no_grad()
def velocity(model):
    """The policy's velocity at noise, without what refuses it."""
    condition = model.encode([Prompt("a red circle")], guided=False)
    return model.forward(model.noise(SIZE, generators(1)), torch.tensor([500.0]), condition, 1.0, SIZE)


def main(folder):
    """On each of two ranks: the velocity of one rank, of both with our attention, and what is said instead."""
    distributed.init_distributed()
    model = loaded("qwenimage")
    model.transformer.requires_grad_(False)
    alone = velocity(model)
    join_attention(model.transformer)
    joined = velocity(model)
    enable(model.transformer)
    condition = model.encode([Prompt("a red circle")], guided=False)
    x = model.noise(SIZE, generators(1))
    said = {
        "forward": refusal(model.network, x, torch.tensor([500.0]), condition, 1.0, SIZE),
        "pipeline": refusal(model_classes.of_pipeline, model.pipeline),
    }
    done(folder, dict(alone=alone, joined=joined, split=velocity(model), said=said))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch(__file__, tmp_path_factory.mktemp("ranks"))


def test_a_transformer_that_is_split_over_ranks_is_refused_when_it_comes_and_in_every_forward(ranks):
    for rank in ranks:
        for place, sentence in rank["said"].items():
            assert "has diffusers' context parallelism (enable_parallelism)" in sentence, place
            assert "config.fsdp.mode 'shard'" in sentence


def test_with_our_attention_its_velocities_would_be_wrong(ranks):
    for rank in ranks:
        torch.testing.assert_close(rank["joined"], rank["alone"], atol=1e-5, rtol=1e-4)
        error = (rank["split"] - rank["alone"]).norm() / rank["alone"].norm()
        assert error > 0.05


if __name__ == "__main__":
    main(Path(sys.argv[1]))
