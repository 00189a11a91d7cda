"""The policies that share a transformer: each is what it was when one comes back to it."""

import copy
import json
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from refused import assert_refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small import move, train

from flow_grpo.base import checksums
from flow_grpo.checkpoints import exports
from flow_grpo.diffusers_patch.models.qwenimage import QwenImage
from flow_grpo.evaluation import policies_to_compare
from flow_grpo.settings.sections import Config, Lora
from flow_grpo.weights import fsdp_utils, load_weights, lora_files, policies

ALONE = dict.fromkeys(["vae", "text_encoder", "tokenizer"])  # the transformer
TINY = Path(__file__).parents[1] / "flow_grpo" / "assets" / "tiny_qwenimage"


def lora(rank=4, alpha=8, path=""):
    return Lora(rank=rank, alpha=alpha, path=str(path))


def pipeline_with(adapter, seed=0):
    """The tiny pipeline as a run trains it."""
    pipeline = QwenImagePipeline.from_pretrained(TINY, **ALONE)
    policies.attach(pipeline.transformer, adapter, QwenImage.LORA_TARGETS)
    init = policies.adapter_init(adapter, seed) if adapter.rank else None
    how = dict(units=QwenImage.SHARD_UNITS, device=torch.device("cpu"), precision="fp32", weights=None, init=init)
    fsdp_utils.prepare(QwenImage(pipeline, torch.device("cpu")).network, None, **how)
    return pipeline


@torch.no_grad()
def velocity(transformer):
    x, text = torch.randn(2, 2, 16, 64, generator=torch.Generator().manual_seed(0))
    how = dict(encoder_hidden_states=text, encoder_hidden_states_mask=None, img_shapes=[[(1, 4, 4)]] * 2)
    return transformer(x, timestep=torch.tensor([0.9, 0.3]), return_dict=False, **how)[0]


def flags(transformer):
    return {name: p.requires_grad for name, p in transformer.named_parameters()}


def adapted_layers(transformer):
    """Names of the layers that have an adapter."""
    return {name for name, layer in transformer.named_modules() if hasattr(layer, "lora_A")}


@pytest.fixture(scope="module")
def base():
    return velocity(QwenImagePipeline.from_pretrained(TINY, **ALONE).transformer)


@pytest.mark.parametrize("rank", [4, 0])
def test_a_fresh_adapter_is_the_base_and_alone_is_trained_but_with_rank_0_everything_is(rank, base):
    transformer = pipeline_with(lora(rank)).transformer
    assert torch.equal(velocity(transformer), base)
    assert ("lora_" in " ".join(flags(transformer))) == (rank > 0)
    for name, is_trained in flags(transformer).items():
        assert is_trained == ("lora_" in name or rank == 0), name


def test_a_blocks_twelve_linear_layers_are_adapted():
    transformer = pipeline_with(lora(0)).transformer
    expected = set()
    for name, layer in transformer.named_modules():
        is_of_block = name.startswith("transformer_blocks.") and "_mod." not in name
        if isinstance(layer, torch.nn.Linear) and is_of_block:
            expected.add(name)
    assert adapted_layers(pipeline_with(lora(4)).transformer) == expected
    assert len(expected) == 12 * len(transformer.transformer_blocks)


@pytest.mark.parametrize(("fp8", "bound"), [(False, 1e-5), (True, 0.1)])
def test_merged_is_the_policy_but_for_rounding_and_leaves_every_bit_as_it_was(fp8, bound, base):
    transformer = pipeline_with(lora()).transformer
    move(fsdp_utils.trainable_parameters(transformer).values())
    before = velocity(transformer)
    weights = copy.deepcopy(transformer.state_dict())
    trained = flags(transformer)
    inside = policies.MergedWeights(transformer, fp8).applied
    for _ in range(2):
        with inside():
            fast = velocity(transformer)
        assert 0 < (fast - before).norm() < bound * before.norm()
        assert torch.equal(velocity(transformer), before)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in transformer.state_dict().items())
    assert flags(transformer) == trained


@pytest.mark.parametrize("rank", [4, 0], ids=["LoRA", "full weights"])
def test_the_reference_is_the_first_policy_and_the_present_one_returns_after_an_exception_too(rank, base):
    transformer = pipeline_with(lora(rank)).transformer
    reference = policies.Reference(transformer).applied
    move(fsdp_utils.trainable_parameters(transformer).values())
    present = velocity(transformer)
    trained = flags(transformer)
    assert not torch.equal(present, base)
    for error in (None, KeyboardInterrupt, None):
        with pytest.raises(error) if error else nullcontext(), reference():
            assert torch.equal(velocity(transformer), base)
            assert flags(transformer) == trained
            if error:
                raise error
        assert torch.equal(velocity(transformer), present)
    assert flags(transformer) == trained


def test_a_moving_reference_is_the_policy_of_the_last_interval_and_guided_only_at_first(base):
    transformer = pipeline_with(lora(4)).transformer
    reference = policies.Reference(transformer, interval=2, guidance_scale=3.0)
    seen = []
    for step in range(1, 5):
        move(fsdp_utils.trainable_parameters(transformer).values())
        seen.append(velocity(transformer))
        reference.follow(step, distance=1.0)
        with reference.applied():
            assert torch.equal(velocity(transformer), base if step < 2 else seen[1] if step < 4 else seen[3])
        assert torch.equal(velocity(transformer), seen[-1])
        assert reference.guidance(1.5) == (3.0 if step < 2 else 1.5)


def test_a_reference_with_a_limit_moves_after_steps_that_were_further_away(base):
    transformer = pipeline_with(lora(4)).transformer
    reference = policies.Reference(transformer, kl_limit=0.5)
    assert reference.state_dict()
    for distance, num_moves in ((0.5, 0), (0.6, 1), (0.1, 1), (0.7, 2)):
        move(fsdp_utils.trainable_parameters(transformer).values())
        reference.follow(4, distance)
        assert reference.num_moves == num_moves
        with reference.applied():
            of_reference = velocity(transformer)
        assert torch.equal(of_reference, velocity(transformer)) == (distance > 0.5)


def test_an_adapters_first_weights_follow_from_seed_and_name():
    init = policies.adapter_init(lora(), seed=0)
    shape = torch.Size((4, 32))
    a, b = (f"transformer_blocks.0.attn.to_q.lora_{part}.default.weight" for part in "AB")
    first = init(a, shape)
    init("something else", shape)
    assert torch.equal(init(a, shape), first)
    assert not torch.equal(init(a.replace("to_q", "to_k"), shape), first)
    assert not torch.equal(policies.adapter_init(lora(), seed=1)(a, shape), first)
    assert torch.equal(init(b, shape), torch.zeros(shape))
    assert first.std().item() == pytest.approx(1 / 4, rel=0.5)


def with_header(**changes):
    """Changes the settings in a LoRA file's header."""

    def change(tensors, header):
        table = json.loads(header)
        for key, value in changes.items():
            table[f"transformer.{key}"] = value
        return tensors, json.dumps(table)

    return change


def with_names(change):
    return lambda tensors, header: ({change(name): tensor for name, tensor in tensors.items()}, header)


def with_tensors(change):
    return lambda tensors, header: ({name: change(name, tensor) for name, tensor in tensors.items()}, header)


def of_layers(keep):
    def change(tensors, header):
        return {name: tensor for name, tensor in tensors.items() if keep(name)}, header

    return change


def with_more(layer, width, height, rank=4):
    more = {f"transformer.{layer}.lora_A.weight": torch.ones(rank, width) / 50}
    more[f"transformer.{layer}.lora_B.weight"] = torch.ones(height, rank) / 50
    return lambda tensors, header: (tensors | more, header)


def no_header_of_rank_2(tensors, header):
    cut = {}
    for name, tensor in tensors.items():
        cut[name] = tensor[:2].clone() if ".lora_A" in name else tensor[:, :2].clone()
    return cut, None


A = "0.attn.to_q.lora_A.weight"
B = "0.attn.to_q.lora_B.weight"
RIGHT = dict(
    saved=with_header(),
    dropout=with_header(lora_dropout=0.5),
    another_alpha=with_header(lora_alpha=6),
    no_header_of_rank_2=no_header_of_rank_2,
    without_one_layer=of_layers(lambda name: "0.attn.to_q." not in name),
    in_half_precision=with_tensors(lambda name, tensor: tensor.half()),
)
RIGHT_BUT_NOT_TRAINED = dict(
    output=with_more("proj_out", 128, 64),
    time=with_more("time_text_embed.timestep_embedder.linear_1", 256, 128),
)
WRONG = dict(
    rslora=with_header(use_rslora=True),
    what_peft_has_not=with_header(scale_of_the_future=2.0),
    header_of_rank_32=with_header(r=32),
    alpha_in_words=with_header(lora_alpha="8"),
    alpha_of_0=with_header(lora_alpha=0),
    alpha_of_nan=with_header(lora_alpha=float("nan")),
    header_of_a_list=lambda tensors, header: (tensors, "[1]"),
    header_cut=lambda tensors, header: (tensors, header[:-9]),
    header_of_a_text_encoder=lambda tensors, header: (tensors, header.replace("transformer.", "text_encoder.")),
    names_of_kohya=with_names(lambda name: name.replace("lora_A", "lora_down").replace("lora_B", "lora_up")),
    no_tensors=lambda tensors, header: ({}, header),
    without_a_B=of_layers(lambda name: not name.endswith(B)),
    one_layer_of_rank_2=with_tensors(lambda name, tensor: tensor[:2].clone() if name.endswith(A) else tensor),
    a_column_short=with_tensors(lambda name, tensor: tensor[:, 1:].clone() if name.endswith(A) else tensor),
    a_row_short=with_tensors(lambda name, tensor: tensor[1:].clone() if name.endswith(B) else tensor),
    a_vector=with_tensors(lambda name, tensor: tensor[0].clone() if name.endswith(A) else tensor),
    rank_0=with_tensors(lambda name, tensor: tensor[:0] if ".lora_A" in name else tensor[:, :0]),
    too_deep=with_more("transformer_blocks.90.attn.to_q", 32, 32),
    not_finite=with_tensors(lambda name, tensor: tensor / 0 if name.endswith(B) else tensor),
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """(tensors, header) of an adapter."""
    folder = tmp_path_factory.mktemp("lora")
    pipeline = pipeline_with(lora())
    move(fsdp_utils.trainable_parameters(pipeline.transformer).values())
    exports.save_lora(pipeline, folder)
    with safe_open(folder / lora_files.FILE, "pt") as file:
        return load_file(folder / lora_files.FILE), file.metadata()[lora_files.METADATA]


def written(folder, stored, change):
    """A folder with a changed copy of a LoRA file."""
    tensors, header = change(*stored)
    save_file(tensors, folder / lora_files.FILE, {"format": "pt"} | ({lora_files.METADATA: header} if header else {}))
    return folder


def by_evaluate(folder):
    """The transformer as scripts/evaluate.py loads it."""
    config = Config()
    candidate = policies_to_compare.find_candidate(str(folder), config, "best")
    policies_to_compare.check_candidate(candidate, QwenImage)
    return policies_to_compare.load_candidate(candidate, QwenImage, torch.device("cpu")).transformer


def by_a_run(folder):
    """As a run of its rank and alpha begins with it."""
    adapter = lora_files.read_adapter(folder)
    config = Config(lora=Lora(rank=adapter.rank, alpha=adapter.alpha, path=str(folder)))
    load_weights.check_model(config.model, config.lora, QwenImage)
    model = QwenImage.load(config.model, torch.device("cpu"))
    policies.attach(model.transformer, config.lora, model.LORA_TARGETS)
    load_weights.fill_model(config, model)
    return model.transformer


@pytest.mark.parametrize("kind", RIGHT | RIGHT_BUT_NOT_TRAINED)
def test_a_lora_file_computes_what_it_does_in_diffusers(kind, stored, base, tmp_path):
    folder = written(tmp_path, stored, (RIGHT | RIGHT_BUT_NOT_TRAINED)[kind])
    pipeline = QwenImagePipeline.from_pretrained(TINY, **ALONE)
    pipeline.load_lora_weights(folder)
    expected = velocity(pipeline.transformer.eval())  # diffusers leaves an adapter's dropout on
    assert (expected - base).abs().max() > 0.01
    assert torch.allclose(velocity(by_evaluate(folder)), expected, rtol=0, atol=1e-4)
    if kind in RIGHT:
        transformer = by_a_run(folder)
        assert torch.allclose(velocity(transformer), expected, rtol=0, atol=1e-4)
        trained = fsdp_utils.trainable_parameters(transformer)
        for name, weight in load_file(folder / lora_files.FILE).items():
            of_peft = name.removeprefix("transformer.").replace(".weight", ".default.weight")
            assert torch.equal(trained[of_peft], weight.float())
    else:
        with pytest.raises(ValueError, match=lora_files.FILE):
            by_a_run(folder)


@pytest.mark.parametrize("kind", WRONG)
def test_a_lora_file_that_diffusers_would_compute_otherwise_is_refused_first(kind, stored, tmp_path, monkeypatch):
    monkeypatch.setattr(QwenImage, "load", None)  # which loads weights
    folder = written(tmp_path, stored, WRONG[kind])
    for load in (by_evaluate, by_a_run):
        with pytest.raises(ValueError, match=str(folder)):
            load(folder)


PEFT_CONFIG = dict(peft_type="LORA", r=4, lora_alpha=8, target_modules=["to_q"], init_lora_weights="gaussian")


def written_by_peft(folder, stored, name=lora_files.PEFT_FILE, **settings):
    """The adapter as peft's save_pretrained writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for key, tensor in stored[0].items():
        tensors[key.replace("transformer.", "base_model.model.", 1)] = tensor
    save_file(tensors, folder / name)
    (folder / lora_files.PEFT_CONFIG).write_text(json.dumps(PEFT_CONFIG | settings))
    return folder


def test_a_lora_of_peft_starts_a_run_and_is_evaluated_as_diffusers_file_of_the_same_weights(stored, tmp_path):
    folder = written_by_peft(tmp_path / "peft", stored, later_key=None, use_qalora=False)
    expected = velocity(by_evaluate(written(tmp_path, stored, with_header(lora_alpha=8))))
    for load in (by_evaluate, by_a_run):
        assert torch.equal(velocity(load(folder)), expected)
    stronger = written_by_peft(tmp_path / "peft", stored, lora_alpha=16)
    assert lora_files.read_adapter(stronger).alpha == 16
    assert (velocity(by_evaluate(stronger)) - expected).abs().max() > 1e-3


def test_a_lora_may_be_a_file_or_the_only_one_of_a_folder_by_any_name(stored, tmp_path):
    named = written(tmp_path, stored, RIGHT["saved"]).joinpath(lora_files.FILE).rename(tmp_path / "style.safetensors")
    save_file({"text": torch.zeros(2)}, tmp_path / "embedding.safetensors")
    assert lora_files.find_file(tmp_path) == lora_files.find_file(named) == named
    peft = written_by_peft(tmp_path / "peft", stored, name="mine.safetensors", lora_alpha=6)
    files = [peft / "mine.safetensors", peft / lora_files.PEFT_CONFIG]
    assert lora_files.files_of(peft) == lora_files.files_of(files[0]) == files
    for path, alpha in ((tmp_path, 4), (named, 4), (files[0], 6)):
        assert lora_files.check_adapter(path).alpha == alpha
    for path in (named, tmp_path, peft):
        assert policies_to_compare.find_candidate(str(path), Config(), "best").weights == "LoRA"


def found_by_evaluate(path):
    return policies_to_compare.find_candidate(str(path), Config(), "best")


def test_what_is_no_lora_that_can_be_read_is_one_sentence_with_what_is_there(stored, tmp_path):
    def folder(name, change=lambda folder: None, **settings):
        made = written_by_peft(tmp_path / name, stored, **settings)
        change(made)
        return made

    two = written_by_peft(tmp_path / "two", stored, name="a.safetensors")
    written_by_peft(two, stored, name="b.safetensors")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    rows = {
        "rslora": (folder("rslora", use_rslora=True), "use_rslora", "merge_and_unload"),
        "dora": (folder("dora", use_dora=True), "use_dora", "merge_and_unload"),
        "lokr": (folder("lokr", peft_type="LOKR"), "LOKR"),
        "pissa": (folder("pissa", init_lora_weights="pissa"), "pissa"),
        "rank": (folder("rank", r=8), lora_files.PEFT_CONFIG, "'r': 8", "rank 4"),
        "alone": (folder("alone", lambda made: (made / lora_files.PEFT_CONFIG).unlink()), "alpha", "does not exist"),
        "pointer": (folder("pointer", lambda made: (made / lora_files.PEFT_FILE).write_text(pointer)), "git lfs pull"),
        "config": (folder("config", lambda made: (made / lora_files.PEFT_CONFIG).write_text(pointer)), "git lfs pull"),
        "above": (folder("above/lora").parent, f"there is {tmp_path}/above/lora/{lora_files.PEFT_FILE}"),
        "two": (two, "a.safetensors, b.safetensors"),
        "hub id": ("someone/style", "hf download someone/style --local-dir"),
        "nothing": (tmp_path / "nothing", "does not exist"),
    }
    for name, (path, *words) in rows.items():
        assert_refused([(name, partial(lora_files.check_adapter, path), words)])
    above, words = rows["above"]
    assert_refused([("by evaluate", lambda: found_by_evaluate(above), [words])])


def test_a_folder_that_nobody_may_look_into_is_one_sentence(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    if os.access(closed, os.X_OK):
        pytest.skip("root may look into every folder")
    rows = [("find", lambda: lora_files.find_file(closed), [closed])]
    rows.append(("evaluate", lambda: found_by_evaluate(closed), [closed]))
    assert_refused(rows)


def test_a_lora_file_that_is_damaged_or_of_another_rank_is_refused(stored, tmp_path):
    path = written(tmp_path, stored, RIGHT["saved"]) / lora_files.FILE
    checksums.write_checksums(tmp_path)
    whole = path.read_bytes()
    policies.check_lora(lora(path=tmp_path))
    with pytest.raises(ValueError, match=r"has rank 4; set lora\.rank to it"):
        policies.check_lora(lora(rank=8, path=tmp_path))
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-4], b"", b"no safetensors"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=lora_files.FILE):
            lora_files.check_adapter(tmp_path)


def test_a_run_adapts_the_layers_that_its_config_names_and_its_file_and_its_card_say_which(shallow, tmp_path):
    targets = "attn.to_q", "img_in"  # in the blocks, and before them
    folder = train("shapes_qwenimage", tmp_path, **shallow, lora__targets=targets, num_epochs=1, eval_freq=0)
    adapted = {"transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_q", "img_in"}
    assert {*lora_files.read_adapter(folder).layers} == adapted
    for word in ("lora.targets", *targets):
        assert word in (folder / "README.md").read_text()
    pipeline = QwenImagePipeline.from_pretrained(shallow["model"], **ALONE)
    pipeline.load_lora_weights(folder)
    assert adapted_layers(pipeline.transformer) == adapted
