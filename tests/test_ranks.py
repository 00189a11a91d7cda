"""Two ranks do what one does, however the weights are laid out over them."""

import json
import random
import subprocess
import sys

import pytest
import warm
from refused import refusal
from small import CHECKS, ENV, ROOT, command_of, config_of, exported, lines_of, plan, train

from flow_grpo.checkpoints import best
from flow_grpo.command_line import checks

SAME = ("loss", "policy_loss", "grad_norm", "ratio_mean", "ratio_std", "approx_kl", "advantage_abs_mean")
SAME += ("old_distance", "reference_distance", "implicit_accuracy", "winner_error_gap", "loser_error_gap")
HELD_OUT = ("validation/loss", "validation/implicit_accuracy", "validation/winner_error_gap")
# 16 images: two batches of 4 for each rank
HOW = dict(sample__num_images_per_prompt=8, num_epochs=2, eval_freq=2)


def folder_of(name, output_dir, errors):
    folder = output_dir / f"{name.replace(',', '_')}_smoke"
    assert (folder / "reward.png").exists(), errors[-3000:]  # gloo may abort at exit, after all the work
    return folder


def on_two_ranks(name, output_dir, env=None, **how):
    command = command_of(name, output_dir, **HOW | how)
    before = ["tests/without_kernels.py"] if how.get("compile") else []
    before += ["tests/brightness.py"] if "reward_fn__brightness" in how else []
    ranks = warm.torchrun([*before, *command], env)
    return folder_of(name, output_dir, "".join(rank.stderr for rank in ranks))


def by_torchrun(name, output_dir, **how):
    """As a user starts it, with all that a user has beside it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += command_of(name, output_dir, **HOW | how)
    ran = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=300)
    return folder_of(name, output_dir, ran.stderr)


def assert_same(folder, other, tolerance=1e-3):
    """To a part of the largest that was logged; of a loss, a sum that cancels, of the advantages. A gap is what is left
    of two errors near 1, and in float32 that is known to some 1e-6."""
    for kind, keys in {
        "update": SAME,
        "epoch": ("reward/avg", "reward/group_std", "reward/last_step_group_std"),
        "eval": ("eval/avg",),
        "validation": HELD_OUT,
    }.items():
        ours = lines_of(folder, kind)
        theirs = lines_of(other, kind)
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs):
            for key in set(keys) & set(a):
                size = max(abs(row.get(key, 0)) for row in theirs)
                if key in ("loss", "policy_loss"):
                    size = max(size, *(abs(row.get("advantage_abs_mean", 0)) for row in theirs))
                rounding = 1e-5 if key.endswith("_gap") else 0.0
                assert abs(a[key] - b[key]) <= tolerance * size + rounding, f"{key}: {a[key]} {b[key]}"


ONLINE = dict(sample__num_images_per_prompt=4, train__reference_interval=3, preferences__min_margin=0.0)


def offline_wandb(name, output_dir, **how):
    return on_two_ranks(name, output_dir, ENV | {"WANDB_MODE": "offline"}, **how)


@pytest.mark.parametrize(
    ("name", "start", "how"),
    [
        pytest.param("shapes_qwenimage", by_torchrun, {}, marks=pytest.mark.slow),
        ("shapes_qwenimage_pr", offline_wandb, dict(sample__num_branches=6)),  # which leave no slot empty
        pytest.param("shapes_qwenimage_nft", offline_wandb, {}, marks=pytest.mark.slow),
        pytest.param("shapes_qwenimage_dpo,online", offline_wandb, ONLINE, marks=pytest.mark.slow),
    ],
    ids=["window, by torchrun", "branches", "NFT", "online DPO"],
)
def test_two_ranks_equal_one_and_leave_everything(name, start, how, shallow, tmp_path):
    """One of the scripts is started as users start it: that takes 20 s more."""
    how |= shallow if "_pr" in name or "_dpo" in name else {}  # NFT's weights there go apart by as much as is allowed
    one = train(name, tmp_path / "one", **HOW | how)
    two = start(name, tmp_path / "two", **how)
    assert_same(one, two)
    assert forwards_of(one) == forwards_of(two) > [0, 0]
    assert_complete(two, [0, 2])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["shapes_qwenimage_nft,ram", "shapes_qwenimage_nft,crd", "shapes_qwenimage_pr,rsm", "shapes_qwenimage,fdfo"]
)
def test_two_ranks_equal_one_for_other_losses(name, shallow, tmp_path):
    """A group that its loss looks at as a whole is a batch."""
    how = HOW | shallow | dict(eval_freq=0)
    of_groups = any(loss in name for loss in ("crd", "fdfo", "endpoint"))
    how |= dict(sample__batch_size=8) if of_groups else {}
    one = train(name, tmp_path / "one", **how)
    assert_same(one, on_two_ranks(name, tmp_path / "two", **how))


def forwards_of(folder):
    return [line["forwards"] for line in lines_of(folder, "epoch")]


def assert_complete(folder, evaluated):
    """All files of a run of two epochs that was started by a command."""
    for file in ("metrics.jsonl", "config.json", "reward.png", "samples.png"):
        assert (folder / file).stat().st_size > 0
    for place in (folder, folder / "best"):
        assert exported(place).stat().st_size > 0
    config = json.loads((folder / "config.json").read_text())
    stored_lora = folder / "checkpoints" / "epoch_000002" / "pytorch_lora_weights.safetensors"
    assert stored_lora.is_file() == (config["lora"]["rank"] > 0)
    assert config["name"] == folder.name
    assert list(folder.glob("wandb/offline-run-*"))
    assert [row["epoch"] for row in lines_of(folder, "eval")] == evaluated


@pytest.mark.parametrize("variants", [",flash", pytest.param(",fast", marks=pytest.mark.slow)])
def test_sharded_ranks_that_need_unequally_many_forwards_wait_for_each_other(variants, shallow, tmp_path):
    """Windows of their own (a batch is a block) leave one rank more solver steps, or more to share, than the other.
    Groups whose images score alike are left out of the mean over both ranks."""
    how = dict(
        train__filter_groups=True, sample__sde_window_size=1, sample__num_prompts_per_epoch=8, num_epochs=2, eval_freq=0
    )
    how |= dict(sample__num_images_per_prompt=4)
    how |= shallow if variants == ",flash" else {}  # images that share steps are too equally bright
    one = train("shapes_qwenimage" + variants, tmp_path / "one", **HOW | how)
    two = on_two_ranks("shapes_qwenimage" + variants, tmp_path / "two", **how, fsdp__mode="shard")
    assert_same(one, two)
    assert lines_of(one, "update")[0]["parity/log_prob_abs_diff_max"] == 0
    if variants == ",flash":  # in slots, the last forwards of a rank are filled up
        assert forwards_of(one) == forwards_of(two), "what a rank does while it waits is not counted"


@pytest.mark.slow
def test_two_ranks_equal_one_with_everything_that_looks_beyond_a_batch(tmp_path):
    """Moving windows, groups over several batches that share a noise, diversity over all ranks, signs of health."""
    name = "shapes_qwenimage,mixgrpo,flash,fast,guard"
    how = dict(train__reward_aggregation="gdpo", sample__sde_window_interval=2, eval_freq=0)
    how |= dict(train__diversity_weight=0.5, sample__scouts_per_image=2)
    one = train(name, tmp_path / "one", **HOW | how)
    two = on_two_ranks(name, tmp_path / "two", **how)
    assert_same(one, two)
    assert lines_of(one, "update")[0]["parity/log_prob_abs_diff_max"] == 0
    for ours, theirs in zip(lines_of(one, "epoch"), lines_of(two, "epoch")):
        for sign in ("latent_rms", "diversity"):
            assert ours[f"health/{sign}"] == pytest.approx(theirs[f"health/{sign}"], rel=1e-5)


@pytest.mark.slow
def test_two_ranks_agree_on_the_best_policy_by_its_variety(recorded, tmp_path):
    """Rank 0 alone has the lines from before training."""
    run = recorded("nft")
    folder = on_two_ranks(run.name, tmp_path, **run.how | dict(eval__min_variety=0.999))
    first, *others = lines_of(folder, "eval")
    assert best.read_best(folder).epoch == first["epoch"] == 0
    assert all(line["eval/variety"] < 0.999 for line in others)
    assert any(line["eval/jpeg_compressibility"] > first["eval/jpeg_compressibility"] for line in others)


@pytest.mark.slow
def test_a_rank_without_a_score_gathers_the_names_of_the_others(tmp_path):
    """All of its images are masked, in rollouts and evaluations; the reward's side figure is known to rank 1 alone."""
    how = dict(
        reward_fn__shapes=0,
        reward_fn__brightness=1,
        reward__max_masked_share=0.5,  # just what is masked
        eval__best_by="brightness",
    )
    folder = on_two_ranks("shapes_qwenimage", tmp_path, ENV | {"DARK_RANK": "0"}, eval__batch_size=2, **how)
    for kind, prefix in (("epoch", "reward"), ("eval", "eval")):
        for line in lines_of(folder, kind):
            assert line[f"{prefix}/brightness_masked_share"] == 0.5
            assert line[f"{prefix}/brightness_half"] == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("rank", [4, 0], ids=["LoRA", "full weights"])
def test_two_sharded_ranks_read_the_pairs_of_one(rank, pairs, tmp_path):
    """Replicated references, of LoRA and of full weights, are online DPO's and DiffusionNFT's, above."""
    name = "shapes_qwenimage_dpo"
    how = HOW | pairs | dict(lora__rank=rank, train__learning_rate=1e-4)
    one = train(name, tmp_path / "one", **how)
    assert len(lines_of(one, "validation")) == 2
    assert_same(one, on_two_ranks(name, tmp_path / "shard", fsdp__mode="shard", **how))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("shapes_qwenimage_pr", dict(compile=True, sample__text_multiple=8)),
        ("shapes_qwenimage_nft", dict(fsdp__offload="weights")),
    ],
    ids=["compiled", "with an old policy, in host memory"],
)
def test_sharded_full_weights_equal_replicated_ones_and_resume_on_one_rank(name, layout, shallow, tmp_path):
    """LoRA: above, and in test_checkpoints.py."""
    how = dict(lora__rank=0, train__learning_rate=1e-4, sample__rollout_weights="exact")
    how |= dict(sample__num_images_per_prompt=4, num_epochs=1, eval_freq=0)
    how |= dict(sample__guidance_scale=2.0) if "compile" in layout else {}
    how |= shallow if "_pr" in name else {}  # see above
    one = train(name, tmp_path / "one", **HOW | how | dict(num_epochs=2))
    shard = on_two_ranks(name, tmp_path / "shard", fsdp__mode="shard", **layout, **how)
    train(name, tmp_path / "shard", resume_from="latest", **HOW | how | dict(num_epochs=2))
    assert_same(one, shard)


OWN = {  # settings that only one run reads, and their values
    "shapes_qwenimage": dict(sample__sde_window_size=(1, 2), sample__sde_window_range=((0, 2), (1, 3))),
    "shapes_qwenimage_pr": dict(sample__num_branches=(2, 3)),
    "shapes_qwenimage_nft": dict(train__reference_guidance_scale=(0.0,), train__beta=(0.0, 0.1)),
    "shapes_qwenimage_dpo,online": dict(preferences__min_margin=(0.0,)),
}
ALL = dict(
    seed=range(1000),
    vae_batch_size=(1, 3, 8),
    sample__num_prompts_per_epoch=(1, 2, 4),
    sample__num_images_per_prompt=(2, 3, 4),
    sample__batch_size=(1, 2, 3, 4, 6),
    sample__flash_ratio=(0.0, 0.6),
    train__updates_per_epoch=(1, 2, 3),
    train__inner_epochs=(1, 2),
    train__ema_decay=(0.0, 0.9),
    lora__rank=(4, 0),
)


def drawn(seed):
    """A run and settings that fit one rank and two."""
    draw = random.Random(seed)
    while True:
        name = draw.choice(tuple(OWN))
        how = {key: draw.choice(values) for key, values in (ALL | OWN[name]).items()}
        # Without an adapter there is nothing to merge.
        if how["lora__rank"] == 0:
            how["sample__rollout_weights"] = "exact"
        if not refusal(checks_of, config_of(name, **how)):
            return name, how


def checks_of(config):
    """Raise UserError unless a config fits one rank and two."""
    checks.check(config, CHECKS[config.algorithm])
    for num_ranks in (1, 2):
        plan(config, num_ranks)


@pytest.mark.parametrize("seed", [1, pytest.param(16, marks=pytest.mark.slow)])
def test_two_ranks_equal_one_for_settings_that_are_drawn(seed, shallow, tmp_path):
    name, how = drawn(seed)
    how |= shallow | dict(num_epochs=1, eval_freq=0)
    one = train(name, tmp_path / "one", **how)
    ranks = warm.torchrun(["tests/brightness.py", *command_of(name, tmp_path / "two", **how)])
    two = folder_of(name, tmp_path / "two", "".join(rank.stderr for rank in ranks))
    assert lines_of(two, "update")
    assert_same(one, two)
