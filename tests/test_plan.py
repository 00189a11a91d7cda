"""Plans of runs: forwards, arithmetic, and the formula for memory and time."""

import json
from dataclasses import replace

import pytest
import torch
import train_qwenimage
import train_qwenimage_distill
import train_qwenimage_dpo
import train_qwenimage_refl
from huggingface_hub import constants
from small import as_prompts, config_of, lines_of, loaded, size_of, train
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from flow_grpo.algorithms import batch_plan
from flow_grpo.base import locations
from flow_grpo.base.errors import UserError
from flow_grpo.data.prompts import load_prompts
from flow_grpo.diffusers_patch import model_classes, registry
from flow_grpo.diffusers_patch.size import training_size
from flow_grpo.plan import estimate, forwards, measured, row_cost, sketch
from flow_grpo.run import dry_run, startup
from flow_grpo.settings import config_files, table
from flow_grpo.weights import policies

MODELS = [name for name in registry.names() if name != "qwenimage_edit"]


@pytest.mark.parametrize(
    "kind",
    ["window", "branches", "nft", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dpo", "online dpo"))],
)
def test_planned_forwards_are_those_of_a_run(recorded, kind):
    folder = recorded(kind).folder
    config = table.of_stored(json.loads((folder / "config.json").read_text()))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epoch = [line for line in lines if line["kind"] == "epoch"][-1]
    family = model_classes.of_folder(config.model)
    divide = batch_plan.plan_pairs if config.algorithm == table.DPO else batch_plan.plan_batches
    planned = forwards.of_epoch(config, divide(config, 1), family)
    # Rows that fill a forward up are computed, too. Stored pairs have no rollout.
    rollout = planned.rollout / epoch.get("batch_occupancy", 1.0)
    assert epoch["forwards"] == pytest.approx(rollout + planned.update)


def test_a_plan_trains_the_steps_that_timestep_fraction_leaves(shallow, tmp_path):
    how = dict(sample__sde_window_size=0, train__timestep_fraction=0.5, num_epochs=1, eval_freq=0)
    folder = train("shapes_qwenimage", tmp_path, **shallow | how)
    config = table.of_stored(json.loads((folder / "config.json").read_text()))
    planned = forwards.of_epoch(config, batch_plan.plan_batches(config, 1), model_classes.by_name("qwenimage"))
    # Of 4 steps 3 are noisy, and 2 of these are trained.
    num_images = 8
    assert (planned.exact, planned.trained) == (3 * num_images, 2 * num_images)
    (epoch,) = lines_of(folder, "epoch")
    assert epoch["forwards"] == planned.rollout + planned.update


@pytest.mark.parametrize(("solver", "num_asked"), [("dpm", 2), ("extrapolate", 3)])
def test_a_plan_counts_the_forwards_that_the_chosen_solver_asks_for(solver, num_asked, shallow, tmp_path):
    # Of 4 steps 2.8 are asked for, which one solver rounds down, and the other to the nearest number.
    how = dict(sample__flash_ratio=0.7, sample__flash_solver=solver, num_epochs=1, eval_freq=0)
    folder = train("shapes_qwenimage_nft", tmp_path, **shallow | how)
    config = table.of_stored(json.loads((folder / "config.json").read_text()))
    planned = forwards.of_epoch(config, batch_plan.plan_batches(config, 1), model_classes.by_name("qwenimage"))
    num_images = 8
    assert planned.fast == num_asked * num_images
    (epoch,) = lines_of(folder, "epoch")
    assert epoch["forwards"] == planned.rollout + planned.update


COPIES = [  # a run, settings of it by dotted name, and the copies of the trained weights that lie on the GPU
    ("shapes_qwenimage", {"train.beta": 0.1}, 0),
    ("shapes_qwenimage", {"train.beta": 0.1, "train.reference_interval": 2}, 1),
    ("shapes_qwenimage", {"train.beta": 0.1, "lora.path": "a"}, 1),
    ("shapes_qwenimage", {"train.beta": 0.1, "lora.rank": 0}, 1),
    ("shapes_qwenimage", {"train.beta": 0.0, "lora.rank": 0}, 0),
    ("shapes_qwenimage_dpo,online", {"train.reference_interval": 0}, 0),
    ("shapes_qwenimage_dpo,online", {"lora.rank": 0, "train.reference_interval": 0}, 1),
    ("shapes_qwenimage_dpo,online", {"lora.path": "a", "train.reference_interval": 0}, 1),
    ("shapes_qwenimage,distill", {"train.teachers": ("a", "b")}, 2),
]


@pytest.mark.parametrize(("name", "changes", "num_copies"), COPIES)
def test_memory_has_the_copies_that_a_reference_and_teachers_are(name, changes, num_copies):
    config = table.with_values(table.typed(config_of(name)), changes)
    own = estimate.STATE_BYTES + estimate.MOMENT_BYTES
    assert estimate._state_bytes(config) - own == num_copies * estimate.COPY_BYTES
    if config.train.teachers:
        return
    # The reference itself.
    transformer = loaded("qwenimage").transformer
    policies.attach(transformer, config.lora, policies.targets(config.lora, model_classes.by_name("qwenimage")))
    reference = startup._reference(config, transformer) if forwards.has_reference(config) else None
    assert num_copies == (reference is not None and reference.copy is not None)


def test_memory_of_pairs_is_that_of_forwards_without_guidance():
    family = model_classes.by_name("qwenimage")
    works = []
    for scale in (1.0, 2.0):
        config = table.typed(config_of("shapes_qwenimage_dpo,online", sample__guidance_scale=scale))
        works.append(estimate.work_of(config, batch_plan.plan_pairs(config, 1), family))
    unguided, guided = works
    assert guided.forwards.trained == unguided.forwards.trained
    assert guided.guided == unguided.guided is False


def test_a_loss_without_an_old_policy_has_no_forwards_of_one():
    family = model_classes.by_name("qwenimage")
    frozen = []
    for variant in ("", ",ram"):
        config = table.typed(config_files.load(f"{locations.ROOT}/config/nft.py:shapes_qwenimage_nft{variant}"))
        frozen.append(forwards.of_epoch(config, batch_plan.plan_batches(config, 1), family).frozen)
    # The reference is guided: two rows beside the old policy's one.
    assert frozen[1] == frozen[0] * 2 / 3


@pytest.mark.parametrize("name", MODELS)
def test_a_row_has_the_arithmetic_that_pytorch_counts(name):
    size = size_of(name)
    model = loaded(name)
    condition = model.encode(as_prompts(["a red circle"], name), width=24, guided=False)
    latents = torch.randn(1, *model.latent_shape(size))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.forward(latents, torch.full((1,), 500.0), condition, 1.0, size)
    family = type(model)
    folder = registry.tiny_folder(name)
    shapes = {key: tuple(tensor.shape[1:]) for key, tensor in condition.tensors().items()}
    shapes["latents"] = model.latent_shape(size)
    cost, _ = row_cost.count(family.without_weights(folder), family.empty_transformer(folder), size, shapes)
    assert cost.flops == counter.get_total_flops()


# One of each size; the others of PUBLISHED share it.
SIZES = {
    "Qwen/Qwen-Image": 20.4,
    "stabilityai/stable-diffusion-3.5-medium": 2.24,
    "stabilityai/stable-diffusion-3.5-large": 8.06,
    "black-forest-labs/FLUX.1-dev": 11.9,
    "Tongyi-MAI/Z-Image": 6.15,
    "black-forest-labs/FLUX.2-klein-4B": 3.88,
    "black-forest-labs/FLUX.2-klein-9B": 9.08,
    "krea/Krea-2-Raw": 12.8,
    "Qwen/Qwen-Image-2.1": 7.12,
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": 1.42,
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": 14.29,
}


@pytest.mark.parametrize("hub_id", SIZES)
def test_a_published_model_has_its_number_of_weights(hub_id):
    transformer = sketch.family_of(registry.published(hub_id)).empty_transformer(hub_id)
    billions = sum(weight.numel() for weight in transformer.parameters()) / 1e9
    assert billions == pytest.approx(SIZES[hub_id], abs=0.005 * SIZES[hub_id])


def test_every_published_model_has_sizes():
    assert json.loads(sketch.FILE.read_text()).keys() == {published.hub_id for published in registry.PUBLISHED}


@pytest.fixture(scope="module")
def klein():
    """FLUX.2-klein on eight GPUs: typed settings, and the work of an epoch of some that differ from them."""
    settings = table.typed(config_files.load(f"{locations.ROOT}/config/grpo.py:pickscore_flux2_klein"))
    family = sketch.family_of(registry.published(settings.model))

    def work_of(config):
        return estimate.work_of(config, batch_plan.plan_batches(config, config.dry_run), family)

    return replace(settings, dry_run=8), work_of


def figures_of(config, work):
    """Estimated images per second of each GPU, and GiB."""
    rates = estimate.rates()
    return work.num_images / estimate.epoch_s(config, work, rates), estimate.gib(config, work, rates)


def test_the_formula_is_close_to_a_measured_run(klein):
    config, work_of = klein
    row = next(row for row in measured.rows() if row.run == "pickscore_flux2_klein")
    assert row.text_tokens == config.text_tokens
    images_per_s, gib = figures_of(config, work_of(config))
    assert images_per_s == pytest.approx(row.images_per_s, rel=0.1)
    assert gib == pytest.approx(row.gib, rel=0.1)


def test_published_weights_that_edit_are_planned_with_sources_of_their_own_size():
    """A source takes 4,096 tokens of the transformer, an image of 512 x 512 pixels 1,024."""
    row = next(row for row in measured.rows() if row.run == "editreward_qwenimage_edit")
    config = replace(row.config(), text_tokens=row.text_tokens, dry_run=row.gpus)
    (prompt, *_) = load_prompts("dataset/edits", "train")
    for hub_id in (config.model, registry.hub_id("flux_kontext")):
        model = sketch.family_of(registry.published(hub_id)).without_weights(hub_id)
        assert model.row_shapes(training_size(config), config.text_tokens, prompt)["source_1"] == (16, 128, 128)
    plan = batch_plan.plan_batches(config, config.dry_run)
    work = estimate.work_of(config, plan, sketch.family_of(registry.published(config.model)), prompt)
    images_per_s, gib = figures_of(config, work)
    assert images_per_s == pytest.approx(row.images_per_s, rel=0.15)
    assert gib == pytest.approx(row.gib, rel=0.1)


@pytest.mark.parametrize(
    ("run", "variant", "card"),
    [
        ("editreward_qwenimage_edit", "large_gpu", "141 GB"),
        ("editreward_qwenimage_edit_first", "large_gpu", "141 GB"),
        ("editreward_flux_kontext", "large_gpu", "80 GB"),
        ("editreward_qwenimage_edit", "gpu_80gb", "80 GB"),
        ("editreward_qwenimage_edit_first", "gpu_80gb", "80 GB"),
    ],
)
def test_the_variant_of_a_card_leaves_room_for_sources(run, variant, card):
    """With the rows and activations of models that only draw, FLUX.1-Kontext took more than 139 GiB."""
    config = table.typed(config_files.load(f"{locations.ROOT}/config/grpo.py:{run},{variant}"))
    config = replace(config, dry_run=1)
    (prompt, *_) = load_prompts("dataset/edits", "train")
    family = sketch.family_of(registry.published(config.model))
    plan = batch_plan.plan_batches(config, config.dry_run)
    gib = estimate.gib(config, estimate.work_of(config, plan, family, prompt), estimate.rates())
    assert gib * estimate.rates().reserved <= dry_run.CARD_GIB[card]


def test_larger_images_and_full_weights_have_figures_of_their_own(klein):
    config, work_of = klein
    speed, gib = figures_of(config, work_of(config))
    larger = replace(config, height=1024, width=1024)
    larger_speed, larger_gib = figures_of(larger, work_of(larger))
    # Four times the image's tokens beside the text's, and attention that grows faster.
    assert 2.5 < speed / larger_speed < 4.5
    assert larger_gib > gib + 3

    # Sharded weights with their state: a share for each GPU.
    full = replace(config, lora=replace(config.lora, rank=0), fsdp=replace(config.fsdp, mode="shard"))
    work = work_of(full)
    full_speed, full_gib = figures_of(full, work)
    assert full_speed < speed
    two = replace(full, dry_run=2)
    assert figures_of(two, work)[1] - full_gib == pytest.approx(work.model_size.weights * 20 * (1 / 2 - 1 / 8) / 2**30)


@pytest.mark.parametrize(
    ("script", "run"),
    [
        (train_qwenimage_refl, "refl.py:pickscore_qwenimage_refl"),
        (train_qwenimage_distill, "grpo.py:pickscore_qwenimage,distill"),
        (train_qwenimage_dpo, "dpo.py:pickscore_qwenimage_dpo,online"),
    ],
    ids=["reward gradients", "distillation", "online DPO"],
)
def test_a_script_with_checks_of_its_own_is_planned_without_the_model(script, run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    config = config_files.load(f"{locations.ROOT}/config/{run}")
    config.dataset = "dataset/shapes"
    config.dry_run = 8
    if "distill" in run:
        config.train.teachers = ("runs/a/best",)
    with pytest.raises(SystemExit) as ended:
        script.main(config)
    assert ended.value.code == 0
    lines = capsys.readouterr().out
    assert "the plan is that of its published sizes" in lines
    # Rewards with gradients are computed between forwards, in memory that the formula does not know.
    assert ("what decoder and rewards keep" in lines) == ("refl" in run)
    assert ("images/s to be scored" in lines) == ("refl" not in run)


def test_a_plan_without_the_model_is_printed_from_its_published_sizes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    config = config_files.load(f"{locations.ROOT}/config/grpo.py:pickscore_flux2_klein")
    config.text_tokens = 48
    config.dataset = "dataset/shapes"
    config.output_dir = str(tmp_path / "runs")
    config.dry_run = 8
    config.dry_run_format = "json"
    with pytest.raises(SystemExit) as ended:
        train_qwenimage.main(config)
    assert ended.value.code == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["figures"] == "estimated"
    assert 10 < figures["gib"] < 15
    assert figures["weights"] == 3_875_544_576
    images = config.num_epochs * figures["images_per_epoch"]
    assert figures["hours"] == pytest.approx(images / figures["images_per_s"] / 8 / 3600)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("run", "changes", "said"),
    [
        ("pickscore_flux", dict(precompute_modulation=True), "the modulation of flux depends on more"),
        ("pickscore_qwenimage", {"precompute_modulation": True, "lora.targets": ("img_mod.1",)}, "'img_mod.1'"),
        ("pickscore_flux", dict(attention="flash_4"), "config.attention"),
        ("pickscore_flux", {"sample.text_multiple": 16}, "text_multiple"),
        ("pickscore_qwenimage,signal", {}, "'pickscore' has none"),
    ],
)
def test_a_plan_without_the_model_refuses_what_needs_no_file_of_it(run, changes, said, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    config = config_files.load(f"{locations.ROOT}/config/grpo.py:{run}")
    config.update_from_flattened_dict({"dataset": "dataset/shapes", "dry_run": 8} | changes)
    with pytest.raises(UserError, match=said):
        train_qwenimage.main(config)
