"""Prompt embeddings from a disk are those of the text encoders, bit for bit, and a second run needs no encoder."""

import shutil
from dataclasses import fields

import pytest
import torch
from small import MODELS, lines_of, loaded, train

from flow_grpo.diffusers_patch import loading
from flow_grpo.embeddings import Cache

TINY, CPU = "flow_grpo/assets/tiny_qwenimage", torch.device("cpu")
TEXTS = ["a photo of a red circle", "two blue squares"]


def assert_same(ours, theirs):
    for field in fields(ours):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if field.name == "negative":
            assert (a is None) == (b is None)
            if a is not None:
                assert_same(a, b)
        else:
            assert a is b is None or (a.dtype == b.dtype and torch.equal(a, b))


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_read_is_what_was_encoded(name, guided, tmp_path):
    model = loaded(name, tmp_path)
    cache = Cache(str(tmp_path / "cache"), dict(guided=guided), 24, CPU)
    assert cache.missing([*TEXTS, TEXTS[0]]) == TEXTS

    def encode(text):
        return model.encode([text], width=24, guided=guided)

    cache.fill(TEXTS, encode)
    assert cache.missing(TEXTS) == []
    for text in TEXTS:
        assert_same(cache.read(text), encode(text))


@pytest.mark.parametrize("name", ["shapes_qwenimage", "shapes_qwenimage_nft"])
def test_a_second_run_loads_no_text_encoder_and_logs_the_same(name, tmp_path, monkeypatch):
    how = dict(num_epochs=1, sample__guidance_scale=2.0)
    cached = how | dict(embeddings_cache=str(tmp_path / "cache"))
    plain = lines_of(train(name, tmp_path / "plain", **how))
    assert lines_of(train(name, tmp_path / "first", **cached)) == plain

    def refused(*_, **__):
        raise AssertionError("encoded twice")

    parts_loaded = []
    load = loading.DiffusionPipeline.from_pretrained.__func__
    monkeypatch.setattr(MODELS["qwenimage"], "encode", refused)
    monkeypatch.setattr(
        loading.DiffusionPipeline,
        "from_pretrained",
        classmethod(lambda cls, folder, **parts: (parts_loaded.append(parts), load(cls, folder, **parts))[1]),
    )
    assert lines_of(train(name, tmp_path / "second", **cached)) == plain
    assert parts_loaded[-1]["text_encoder"] is None


def test_another_user_may_read_what_the_umask_lets_others_read(tmp_path):
    model, plain = loaded("qwenimage", tmp_path), tmp_path / "plain"
    cache = Cache(str(tmp_path / "cache"), {}, 24, CPU)
    cache.fill(TEXTS[:1], lambda text: model.encode([text], width=24, guided=False))
    plain.touch()
    assert {file.stat().st_mode for file in cache.folder.glob("*.safetensors")} == {plain.stat().st_mode}


def test_another_text_encoder_has_a_folder_of_its_own(tmp_path):
    other = tmp_path / "model"
    shutil.copytree(TINY, other)
    assert loading.text_version(str(other)) == loading.text_version(TINY)
    (other / "tokenizer" / "added.json").write_text("{}")
    versions = [loading.text_version(folder) for folder in (TINY, str(other))]
    one, two = (Cache(str(tmp_path / "cache"), version, 24, CPU).folder for version in versions)
    assert one != two
    assert Cache(str(tmp_path / "cache"), versions[0], 32, CPU).folder != one


def test_what_a_kill_left_behind_is_no_embedding(tmp_path):
    cache = Cache(str(tmp_path), {}, 24, CPU)
    cache.folder.mkdir()
    cache._path(TEXTS[0]).with_suffix(".123").write_bytes(b"half of a file")
    assert cache.missing(TEXTS) == TEXTS
    cache._path(TEXTS[0]).write_bytes(b"half of a file")
    with pytest.raises(ValueError, match=r"safetensors is damaged .*; delete it"):
        cache.read(TEXTS[0])
