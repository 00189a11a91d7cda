"""Every prompt has its turn, on any number of ranks, and a bad prompt file says where it is bad."""

import json
from dataclasses import replace

import pytest

from flow_grpo.algorithms.batch_plan import BatchPlan
from flow_grpo.base.prompt import Prompt
from flow_grpo.data.prompts import epoch_batches, epoch_prompts, load_prompts

DATASET = [Prompt(f"prompt {i}", {"id": i}) for i in range(11)]
PLAN = BatchPlan(
    num_groups=8,
    group_size=6,
    batch_size=4,
    batches_per_epoch=12,
    num_trained_steps=2,
    num_branches=1,
    updates_per_epoch=2,
)


def picks(num_prompts, per_epoch, epochs, seed=0):
    return [pick for epoch in range(epochs) for pick in epoch_prompts(num_prompts, per_epoch, seed, epoch)]


@pytest.mark.parametrize("per_epoch", [4, 10, 25])
def test_epochs_go_on_through_shuffled_passes_over_all_prompts(per_epoch):
    drawn = picks(10, per_epoch, 10)
    passes = [drawn[i : i + 10] for i in range(0, len(drawn), 10)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert len({tuple(one) for one in passes}) == len(passes)


def test_prompts_follow_from_the_seed():
    assert picks(10, 4, 3) == picks(10, 4, 3)
    assert picks(10, 4, 3) != picks(10, 4, 3, seed=1)


@pytest.mark.parametrize("batch_size", [3, 4, 12])
def test_ranks_share_the_batches_of_one_rank(batch_size):
    def dealt(world_size):
        rounds = 48 // batch_size // world_size
        plan = replace(PLAN, batch_size=batch_size, batches_per_epoch=rounds)
        ranks = [list(epoch_batches(DATASET, plan, 0, 3, rank, world_size)) for rank in range(world_size)]
        for rank, batches in enumerate(ranks):
            numbers = range(rank, rounds * world_size, world_size)
            assert [batch.images[0] for batch in batches] == [batch_size * number for number in numbers]
        return sorted((batch for rank in ranks for batch in rank), key=lambda batch: batch.images[0])

    one = dealt(1)
    assert [image for batch in one for image in batch.images] == list(range(48))
    assert dealt(2) == one
    assert dealt(4) == one


@pytest.mark.parametrize(("batch_size", "images_per_block"), [(2, 6), (4, 12), (6, 6), (12, 12)])
def test_a_block_is_the_smallest_run_of_whole_batches_that_holds_whole_groups(batch_size, images_per_block):
    plan = replace(PLAN, batch_size=batch_size, batches_per_epoch=48 // batch_size)
    for batch in epoch_batches(DATASET, plan, 0, 0, 0, 1):
        assert {image // images_per_block for image in batch.images} == {batch.block}


@pytest.mark.parametrize(
    ("file", "stored", "texts"),
    [
        ("train.txt", b"\xef\xbb\xbfa\r\n  b \n", ["a", "b"]),
        ("train.txt", "a\u2028b\nc\u0085d\ne\x0bf\ng\x1ch\x0ci\n\U0001f600".encode(), None),
        ("train_metadata.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}', ["a", "b"]),
        ("train_metadata.jsonl", '{"prompt": "a\u2028b\u0085c"}\n{"prompt": "\\ud83d\\ude00"}'.encode(), None),
    ],
)
def test_only_line_feeds_end_lines_and_a_byte_order_mark_is_no_text(file, stored, texts, tmp_path):
    (tmp_path / file).write_bytes(stored)
    if texts is None:
        lines = stored.decode().split("\n")
        texts = [json.loads(line)["prompt"] for line in lines] if file.endswith("jsonl") else lines
    prompts = load_prompts(str(tmp_path), "train")
    assert [prompt.text for prompt in prompts] == texts
    assert prompts[0].metadata == ({"prompt": texts[0]} if file.endswith("jsonl") else {})
