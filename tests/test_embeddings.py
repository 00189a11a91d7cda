"""Prompt embeddings are whole, keep all of their fields, and from a disk are the text encoders' bit for bit."""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from refused import assert_refused
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small import MODELS, as_prompts, change_json, lines_of, loaded, train
from transformers import Qwen2_5_VLForConditionalGeneration

from flow_grpo.base import folders
from flow_grpo.data.embedding_cache import Cache, remembered
from flow_grpo.diffusers_patch.condition import TENSORS, Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel

TINY = "flow_grpo/assets/tiny_qwenimage"
CPU = torch.device("cpu")
TEXTS = "a photo of a red circle", "two blue squares"
PROMPTS = as_prompts(TEXTS)


def test_every_field_of_a_condition_is_taken_joined_and_repeated():
    """So that a new one cannot be forgotten."""
    values = torch.arange(3.0).view(3, 1, 1).expand(3, 4, 2)
    names = set(TENSORS) - {"mask"}
    negative = Condition(**dict.fromkeys(names, -values))
    whole = Condition(**dict.fromkeys(names, values), mask=torch.ones(3, 4).bool(), negative=negative)
    again = Condition.concat([whole.take(slice(0, 2)), whole.take(torch.tensor([2]))])
    repeated = whole.take(slice(1, 2)).take(torch.zeros(5, dtype=torch.long))
    assert set(whole.tensors()) == set(TENSORS)
    for name, values in whole.tensors().items():
        assert torch.equal(getattr(again, name), values)
        assert torch.equal(getattr(repeated, name), values[1:2].expand_as(getattr(repeated, name)))
        assert len(getattr(repeated, name)) == 5
    assert again.negative.equals(whole.negative)
    assert torch.equal(repeated.negative.text_embeds, -repeated.text_embeds)
    wider = whole.padded(6)
    assert wider.trimmed(2).text_embeds.shape == whole.text_embeds.shape
    assert torch.equal(wider.pooled, whole.pooled)
    assert wider.mask.sum() == 12


@pytest.mark.parametrize("masked", [(), (0,), (1,), (0, 1)], ids=["no mask", "prompts'", "negatives'", "both"])
@pytest.mark.parametrize("widths", [(3, 5), (5, 3), (4, 4)])
def test_rows_and_their_negatives_are_joined_each_with_its_own_tokens(widths, masked):
    parts = []
    for part, (width, value) in enumerate(zip(widths, (1.0, -1.0))):
        mask = torch.ones(2, width, dtype=torch.bool) if part in masked else None
        parts.append(Condition(torch.full((2, width, 1), value), mask=mask))
    positive, negative = parts
    rows = replace(positive, negative=negative).with_negative_rows()
    assert rows.text_embeds.shape == (4, max(widths), 1)
    assert rows.negative is None
    own_tokens = rows.text_embeds.squeeze(2)
    if rows.mask is None:
        assert not masked
    else:
        own_tokens = own_tokens.where(rows.mask, 0)
        assert rows.mask.sum(1).tolist() == [widths[0]] * 2 + [widths[1]] * 2
    assert own_tokens.sum(1).tolist() == [widths[0]] * 2 + [-widths[1]] * 2


@pytest.mark.parametrize("width", [None, 2048])
def test_a_prompt_that_the_pipeline_would_cut_is_refused(width):
    """Whatever is asked for: two prompts that differ at their ends would have one embedding."""
    model = loaded("qwenimage")
    fits = "red " * 1017 + "circle"
    assert model.encode(as_prompts([fits]), width=width, guided=False).text_embeds.shape[1] == (width or 1024)
    with pytest.raises(ValueError, match="more tokens than the 1024 that its pipeline reads; the longest has 1025"):
        model.encode(as_prompts([f"{fits} red"]), width=width, guided=False)


def assert_same(ours, theirs):
    assert ours.equals(theirs)
    assert (ours.negative is None) == (theirs.negative is None)
    if ours.negative is not None:
        assert_same(ours.negative, theirs.negative)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_read_is_what_was_encoded_by_whoever_the_umask_lets(name, guided, tmp_path):
    model = loaded(name)
    prompts = as_prompts(TEXTS, name)
    cache = Cache(str(tmp_path / "cache"), dict(guided=guided), 32, CPU)
    assert cache.missing([*prompts, prompts[0]]) == prompts

    def encode(prompt):
        return model.encode([prompt], width=32, guided=guided)

    cache.fill(prompts, encode)
    assert cache.missing(prompts) == []
    for prompt in prompts:
        assert_same(cache.read(prompt), encode(prompt))
    plain = tmp_path / "plain"
    plain.touch()
    assert {file.stat().st_mode for file in cache.folder.glob("*.safetensors")} == {plain.stat().st_mode}


@pytest.mark.parametrize("name", MODELS)
def test_prompts_that_come_one_at_a_time_share_the_negative_that_is_encoded_for_the_first(name):
    prompts = as_prompts(TEXTS, name)
    expected = [loaded(name).encode([prompt], width=32) for prompt in prompts]
    model = loaded(name)
    encoded = []
    encode_one = model.encode_one

    def note_and_encode(prompt, width):
        encoded.append(prompt.text)
        return encode_one(prompt, width)

    model.encode_one = note_and_encode
    for prompt, condition in zip(prompts, expected):
        assert_same(model.encode([prompt], width=32), condition)
    negatives = [text for text in encoded if text == model.NEGATIVE_PROMPT]
    has_negatives = model.NEGATIVE_PROMPT is not None
    pictures = {prompt.sources for prompt in prompts}
    assert len(negatives) == (len(pictures) if has_negatives else 0)
    assert_same(model.encode(prompts[:1], width=40), loaded(name).encode(prompts[:1], width=40))


def test_a_second_run_loads_no_text_encoder_and_logs_the_same(shallow, tmp_path, monkeypatch):
    """Window runs that fill a cache: test_models.py."""
    name = "shapes_qwenimage_nft"
    how = shallow | dict(num_epochs=1, sample__guidance_scale=2.0)
    cached = how | dict(cache_dir=str(tmp_path / "cache"))
    plain = lines_of(train(name, tmp_path / "plain", **how))
    assert lines_of(train(name, tmp_path / "first", **cached)) == plain

    compare_names = Qwen2_5_VLForConditionalGeneration.from_pretrained

    def refused(folder, **options):
        # Without a folder it compares the stored names with the class's, and reads no weight.
        if folder is not None:
            raise AssertionError("a text encoder was loaded")
        return compare_names(folder, **options)

    monkeypatch.setattr(Qwen2_5_VLForConditionalGeneration, "from_pretrained", refused)
    with pytest.raises(AssertionError, match="a text encoder"):
        train(name, tmp_path / "plain", **how)
    assert lines_of(train(name, tmp_path / "second", **cached)) == plain


def test_sources_of_another_size_have_a_folder_of_their_own(tmp_path):
    other = tmp_path / "model"
    other.mkdir()
    versions = []
    for pixels in (1024, 4096):
        (other / "model_index.json").write_text(json.dumps({"vae": ["diffusers", "Vae"], "source_pixels": pixels}))
        versions.append(FlowModel.text_version(str(other)))
    assert versions == [{"source_pixels": "1024"}, {"source_pixels": "4096"}]


def test_another_pipeline_has_a_folder_of_its_own_with_the_same_text_encoder(tmp_path):
    """Since its template is another one, as of the two generations of Qwen-Image-Edit."""
    other = shutil.copytree(TINY, tmp_path / "model")
    change_json(other / "model_index.json", _class_name="QwenImageEditPipeline")
    before = FlowModel.text_version(TINY)
    after = FlowModel.text_version(str(other))
    assert before != after
    assert before.keys() == after.keys()


def test_another_text_encoder_has_a_folder_of_its_own(tmp_path):
    """One of as many bytes, too, as old as the one whose place it takes."""
    other = tmp_path / "model"
    cache = str(tmp_path / "cache")
    shutil.copytree(TINY, other)
    first = FlowModel.text_version(str(other), tmp_path / "digests.json")
    assert first == FlowModel.text_version(TINY)
    (file,) = (other / "text_encoder").glob("*.safetensors")
    status = file.stat()
    save_file({name: weight * 1.5 for name, weight in load_file(file).items()}, file, {"format": "pt"})
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size
    second = FlowModel.text_version(str(other), tmp_path / "digests.json")
    (other / "tokenizer" / "added.json").write_text("{}")
    versions = [first, second, FlowModel.text_version(str(other), tmp_path / "digests.json")]
    places = set()
    for version in versions:
        for width in (24, 32):
            places.add(Cache(cache, version, width, CPU).folder)
    assert len(places) == 6


def changed(path, change):
    with safe_open(path, "pt") as file:
        header = file.metadata()
    save_file(change(load_file(path)), path, header)


DAMAGE = dict(
    half=lambda path: path.write_bytes(path.read_bytes()[:-100]),
    zeros=lambda path: changed(path, lambda tensors: {name: part * 0 for name, part in tensors.items()}),
    one_bit=lambda path: path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1])),
    more_tokens=lambda path: changed(path, lambda tensors: dict(text_embeds=tensors["text_embeds"].repeat(1, 9, 1))),
    another_type=lambda path: changed(path, lambda tensors: dict(text_embeds=tensors["text_embeds"].double())),
    other_tensors=lambda path: changed(path, lambda tensors: dict(words=tensors["text_embeds"])),
    no_header=lambda path: save_file(load_file(path), path),
    a_folder=lambda path: (path.unlink(), path.mkdir()),
    another_prompts=lambda path: shutil.copy(path.parent / "other.safetensors", path),
    another_encoders=lambda path: shutil.copy(path.parents[1] / "other.safetensors", path),
)


def test_what_was_not_written_for_a_prompt_is_refused(tmp_path):
    model = loaded("qwenimage")
    rows = []
    for kind, damage in DAMAGE.items():
        cache = Cache(str(tmp_path / kind), dict(encoder="a"), 24, CPU)
        other = Cache(str(tmp_path / kind), dict(encoder="b"), 24, CPU)
        for each in (cache, other):
            each.fill(PROMPTS, lambda prompt: model.encode([prompt], width=24, guided=False))
        path = cache._path(PROMPTS[0].digest)
        shutil.copy(cache._path(PROMPTS[1].digest), path.parent / "other.safetensors")
        shutil.copy(other._path(PROMPTS[0].digest), path.parents[1] / "other.safetensors")
        damage(path)
        rows.append((kind, lambda cache=cache: cache.read(PROMPTS[0]), [path]))
    assert_refused(rows)


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name].NEGATIVE_PROMPT is not None])
def test_the_negative_prompt_is_looked_for_read_once_and_kept_once(name, tmp_path):
    model = loaded(name)
    asked = []
    prompts = as_prompts(TEXTS, name)
    prompts = [replace(prompt, sources=prompts[0].sources) for prompt in prompts]  # the encoder of texts sees them, too

    def encode(prompt):
        asked.append(prompt)
        return model.encode([prompt], width=32, guided=True)

    cache = Cache(str(tmp_path / "cache"), {}, 32, CPU)
    cache.fill(prompts, encode)
    assert cache.missing(prompts) == []
    (negative,) = cache.folder.glob("negative_*")
    negative.unlink()
    assert cache.missing(prompts) == prompts[:1]
    cache.fill(prompts[:1], encode)
    for embed in (remembered(cache.read), remembered(encode)):
        one, two = (embed(prompt) for prompt in prompts)
        assert one.negative is two.negative
        assert_same(one, encode(prompts[0]))
        assert embed(prompts[0]) is one


def test_the_negative_of_any_picture_to_be_edited_is_looked_for(tmp_path):
    model = loaded("qwenimage_edit")
    prompts = as_prompts(TEXTS, "qwenimage_edit")

    def encode(prompt):
        return model.encode([prompt], width=32, guided=True)

    cache = Cache(str(tmp_path / "cache"), {}, 32, CPU)
    cache.fill(prompts, encode)
    before = set(cache.folder.glob("negative_*"))
    assert len(before) == len(prompts) == 2
    for path in before:
        path.unlink()
        (lacking,) = cache.missing(prompts)
        cache.fill([lacking], encode)
        assert cache.missing(prompts) == []
    # Beside a prompt that is new, too.
    for path in before:
        path.unlink()
    cache._path(prompts[0].digest).unlink()
    assert cache.missing(prompts) == prompts
    cache.fill(prompts, encode)
    assert set(cache.folder.glob("negative_*")) == before


def test_a_cache_stays_where_it_is_while_a_reward_changes_the_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = Cache("cache", {}, 24, CPU)
    monkeypatch.chdir("/")
    cache.check_writable()
    assert cache.folder.parent == tmp_path / "cache"
    assert cache.folder.is_dir()


def test_what_a_kill_left_behind_is_no_embedding_and_goes_an_hour_later(tmp_path):
    cache = Cache(str(tmp_path), {}, 24, CPU)
    cache.folder.mkdir()
    old, young = (folders.scratch_beside(cache._path(prompt.digest)) for prompt in PROMPTS)
    for scratch in (old, young):
        scratch.write_bytes(b"half of a file")
    os.utime(old, (0, 0))
    assert cache.missing(PROMPTS) == PROMPTS
    cache.fill([], None)
    assert [path.name for path in cache.folder.iterdir()] == [young.name]
