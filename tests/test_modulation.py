"""precompute_modulation: tables of the modulation compute what its weights do, bit for bit, and need less memory."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import train_qwenimage_nft
from recorded import assert_same, go_on, redness
from safetensors.torch import save_file
from small import MODELS, as_prompts, config_of, exported, generators, lines_of, loaded, move, size_of, train
from test_models import assert_begins_exact
from test_ranks import HOW, on_two_ranks
from test_ranks import assert_same as assert_runs_alike

import flow_grpo
from flow_grpo import rewards
from flow_grpo.base.errors import UserError
from flow_grpo.command_line import checks
from flow_grpo.diffusers_patch import loading, registry
from flow_grpo.diffusers_patch.size import training_size
from flow_grpo.plan import estimate
from flow_grpo.run import startup
from flow_grpo.settings import table
from flow_grpo.weights import fsdp_utils, modulation, policies

TABLES = dict(precompute_modulation=True)
PRECOMPUTED = [name for name, family in MODELS.items() if family.MODULATION]


def settings_of(name="qwenimage", run="shapes_qwenimage", **how):
    return table.typed(config_of(run, model=registry.tiny_folder(name), **how))


def laid_out(config, name="qwenimage"):
    """A model as a run has it, with an adapter that leads somewhere."""
    model = MODELS[name].load(config.model, torch.device("cpu"))
    startup.lay_out(config, model, None)
    move(fsdp_utils.trainable_parameters(model.transformer).values())
    return model


def velocities(model, config, num_rows, timesteps, scale=2.0):
    name = model.NAME
    size = size_of(name)
    x = model.noise(size, generators(num_rows))
    condition = model.encode(as_prompts(["a red circle"] * num_rows, name))
    t = timesteps[torch.arange(num_rows) % len(timesteps)]
    return policies.predict(model, config.precision, x, t, condition, scale, size)


WRONG = {  # what a class of one's own may name by mistake -> what is said of it
    "embedding": (
        dict(embedding="time_embed"),
        "'time_embed', and QwenImageTransformer2DModel has no such module",
    ),
    "activation": (dict(layers=(("img_modd.0", "img_mod.1"),)), "names 'img_modd.0', and no module of"),
    "layer": (dict(layers=(("img_mod.0", "img_mod.7"),)), "img_mod.7', and QwenImageTransformer2DModel has no such"),
    "no linear layer": (dict(layers=(("img_mod.0", "img_mod.0"),)), "has a SiLU there"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_model_class_that_names_other_parts_than_its_transformer_has_is_refused(mistake):
    changed, said = WRONG[mistake]
    family = MODELS["qwenimage"]

    class Own(family):
        MODULATION = family.MODULATION._replace(**changed)

    with pytest.raises(UserError, match="precompute_modulation is True, but MODULATION of Own names") as caught:
        modulation.check(settings_of(**TABLES), Own)
    assert said in str(caught.value)


@torch.no_grad()
@pytest.mark.parametrize("name", PRECOMPUTED)
@pytest.mark.parametrize(
    "how",
    [{}, dict(precision="bf16"), dict(base_precision="fp8_weights"), dict(base_precision="nf4", precision="bf16")],
    ids=["float32", "bf16", "8 bits", "4 bits"],
)
def test_tables_compute_what_the_weights_do(name, how):
    """In each forward of as many rows as the tables' own, or more; which steps share it does not matter."""
    config = settings_of(name, sample__num_steps=5, **how)
    weights = laid_out(config, name)
    tables = laid_out(replace(config, **TABLES), name)
    timesteps = weights.schedule(5, size_of(name)).timesteps
    for num_rows in (4, 8, 12):
        expected = velocities(weights, config, num_rows, timesteps)
        assert torch.equal(velocities(tables, config, num_rows, timesteps), expected)


@torch.no_grad()
@pytest.mark.parametrize("batched", [False, True], ids=["two forwards", "one forward"])
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_table_has_the_bits_of_forwards_of_the_runs_own_rows(scale, batch_size, batched):
    """In float32 a CPU multiplies one or two rows otherwise than many."""
    config = settings_of(sample__batch_size=batch_size, sample__guidance_scale=scale, batched_guidance=batched)
    timesteps = loaded("qwenimage").schedule(config.sample.num_steps, size_of("qwenimage")).timesteps
    expected = velocities(laid_out(config), config, batch_size, timesteps[1:], scale)
    tables = laid_out(replace(config, **TABLES))
    assert torch.equal(velocities(tables, config, batch_size, timesteps[1:], scale), expected)


def num_bytes(transformer):
    tensors = [*transformer.parameters(), *transformer.buffers()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_weights_are_freed_and_the_plan_knows_how_many(precision):
    config = settings_of(precision=precision, sample__num_steps=6, eval__num_steps=4)
    with_tables = replace(config, **TABLES)
    weights = laid_out(config).transformer
    tables = laid_out(with_tables).transformer
    model = MODELS["qwenimage"].without_weights(config.model)
    saving = modulation.saving(with_tables, model, MODELS["qwenimage"].empty_transformer(config.model))
    assert saving.weights > 0.3 * sum(weight.numel() for weight in weights.parameters() if not weight.requires_grad)
    number_bytes = weights.img_in.weight.element_size()
    times = tables.time_text_embed.times
    difference = num_bytes(weights) - num_bytes(tables) + times.numel() * times.element_size()
    assert difference == (saving.weights - saving.numbers) * number_bytes
    # 6 + 4 timesteps, of which both schedules have the first and the last.
    assert len(times) == 8
    assert not [name for name, _ in tables.named_parameters() if "_mod." in name or "time_text" in name]


def test_a_plan_and_a_dry_run_say_what_is_saved(tmp_path, capsys):
    gib = {}
    for on in (False, True):
        config = settings_of(precompute_modulation=on)
        family = MODELS["qwenimage"]
        work = estimate.work_of(config, checks.GRPO.plan(config, 1), family)
        gib[on] = estimate.gib(config, work, estimate.rates())
        saved = estimate.freed_gib(config, work.model_size)
    assert gib[False] - gib[True] == pytest.approx(saved)
    with pytest.raises(SystemExit):
        train("shapes_qwenimage", tmp_path, dry_run=1, precompute_modulation=True)
    assert "modulation: tables in the place of 0.000" in capsys.readouterr().out


@torch.no_grad()
def test_a_timestep_that_is_in_no_schedule_is_never_approximated():
    config = settings_of(precompute_modulation=True)
    model = laid_out(config)
    known = model.schedule(config.sample.num_steps, training_size(config)).timesteps
    between = torch.tensor([known[1].item(), (known[1] + known[2]).item() / 2])
    first, second = velocities(model, config, 2, between)
    assert first.isfinite().all()
    assert second.isnan().all()
    with pytest.raises(UserError, match="7 steps at 64x64 have timesteps"):
        model.schedule(7, training_size(config))
    with pytest.raises(UserError, match="precompute_modulation"):
        model.schedule(config.sample.num_steps, training_size(replace(config, height=512, width=512)))


def test_an_update_at_other_timesteps_ends_the_run_and_says_why(shallow, tmp_path):
    def rollout(run, epoch):
        stored, submitted = train_qwenimage_nft.rollout(run, epoch)
        stored.timesteps += 0.5
        return stored, submitted

    config = config_of("shapes_qwenimage_nft", tmp_path, **shallow, eval_freq=0, **TABLES)
    with pytest.raises(
        FloatingPointError, match="precompute_modulation gives NaN at a timestep that is in no schedule"
    ):
        train_qwenimage_nft.main(config, rollout=rollout)


def test_a_notebooks_policies_of_a_run_with_tables_take_any_number_of_steps(shallow, tmp_path):
    run = train("shapes_qwenimage", tmp_path, **shallow, num_epochs=1, eval_freq=0, **TABLES)
    for weights in ("last", "base"):
        model = flow_grpo.load_run(run, weights, "cpu").model
        assert len(model.schedule(7, size_of("qwenimage")).timesteps) == 7


@torch.no_grad()
def test_tables_are_made_of_weights_that_are_on_no_disk():
    """bench.py draws them."""

    class Drawn(MODELS["qwenimage"]):
        ON_DISK = False

    config = settings_of(**TABLES)
    drawn = Drawn(loaded("qwenimage").pipeline, torch.device("cpu"))
    startup.lay_out(config, drawn, None)
    move(fsdp_utils.trainable_parameters(drawn.transformer).values())
    model = laid_out(config)
    timesteps = model.schedule(config.sample.num_steps, size_of("qwenimage")).timesteps
    assert torch.equal(velocities(drawn, config, 4, timesteps), velocities(model, config, 4, timesteps))
    assert num_bytes(drawn.transformer) == num_bytes(model.transformer)


@pytest.mark.parametrize("kind", ["window", "branches", "nft", "online dpo"])
def test_a_run_goes_on_with_tables_as_if_nothing_had_changed(kind, recorded, tmp_path, monkeypatch):
    """Rollouts, updates, references, evaluations and checkpoints, bit for bit."""
    monkeypatch.setattr(rewards, "REGISTERED", {})
    rewards.register("redness", redness)
    run = recorded(kind)
    folder = go_on(run, tmp_path, **TABLES)
    assert exported(folder).read_bytes() == exported(run.folder).read_bytes()
    if kind == "nft":
        # Its evaluations have a batch of one row, whose products a CPU computes otherwise.
        for part in ("update", "epoch"):
            assert lines_of(folder, part) == lines_of(run.folder, part)
    else:
        assert_same(folder, run.folder)


@pytest.mark.parametrize("name", ["shapes_qwenimage", pytest.param("shapes_qwenimage_nft", marks=pytest.mark.slow)])
def test_tables_beside_sharded_weights_are_whole_on_every_rank(name, tmp_path):
    how = dict(eval_freq=0, sample__num_images_per_prompt=4)
    one = train(name, tmp_path / "one", **HOW | how)
    two = on_two_ranks(name, tmp_path / "two", fsdp__mode="shard", **TABLES, **how)
    assert_runs_alike(one, two)
    if name == "shapes_qwenimage":
        assert lines_of(two, "update")[0]["parity/log_prob_abs_diff_max"] == 0


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(dict(compile=True), id="compiled"),
        pytest.param(dict(fsdp__activation_checkpointing=1.0), id="recomputed"),
        pytest.param(dict(base_precision="fp8_weights", sample__rollout_weights="merged_fp8"), id="merged in 8 bits"),
    ],
)
def test_a_first_update_with_tables_has_the_rollouts_log_probs(how, shallow, tmp_path, monkeypatch):
    """Nothing breaks the graph of a block that is traced."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    monkeypatch.setattr(loading, "compile_decoder", lambda pipeline: None)
    how = shallow | dict(eval_freq=0, num_epochs=1, sample__num_images_per_prompt=8) | TABLES | how
    assert_begins_exact(train("shapes_qwenimage", tmp_path, **how))


def test_a_table_has_what_a_lora_changes_of_the_base(tmp_path):
    """A few-step model's may change the modulation, too."""
    shape = (768, 128)
    generator = torch.Generator().manual_seed(0)
    layer = "transformer.transformer_blocks.1.img_mod.1"
    down = torch.randn(4, shape[1], generator=generator)
    up = torch.randn(shape[0], 4, generator=generator) / 16
    save_file({f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}, tmp_path / "base.safetensors")
    config = settings_of(lora__base=str(tmp_path / "base.safetensors"))
    timesteps = loaded("qwenimage").schedule(config.sample.num_steps, size_of("qwenimage")).timesteps
    with torch.no_grad():
        expected = velocities(laid_out(config), config, 4, timesteps)
        assert torch.equal(velocities(laid_out(replace(config, **TABLES)), config, 4, timesteps), expected)
        without = replace(config, lora=replace(config.lora, base=""))
        assert not torch.equal(velocities(laid_out(without), config, 4, timesteps), expected)
