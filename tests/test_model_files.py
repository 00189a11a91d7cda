"""Models as they lie on people's disks: what is said of each before any weight is loaded."""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from refused import assert_refused
from safetensors.torch import load_file, save_file
from small import ROOT, as_prompts

from flow_grpo.diffusers_patch import loading, model_classes, registry
from flow_grpo.weights import model_files

TINY = ROOT / registry.tiny_folder("qwenimage")
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"


def look(model):
    """As training, evaluate.py and prepare_preferences.py look at a model before they load its weights."""
    family = model_classes.of_folder(str(model))
    model_files.check_parts(str(model), family)
    family.without_weights(str(model)).check_prompts(as_prompts(["a circle"]), None)
    model_files.check_weights(str(model), family)


def copy_of(folder):
    """A copy of the tiny model whose files are links, as in the hub's cache, for a test to replace some."""
    return shutil.copytree(TINY, folder, copy_function=os.symlink)


def put(name, content=POINTER):
    """A change of a model: a file's content."""

    def change(folder):
        (folder / name).unlink(missing_ok=True)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def scheduler(kind="FlowMatchEulerDiscreteScheduler", **settings):
    """A change of a model: its scheduler's class, and settings beside those that it has."""

    def change(folder):
        for name, changed in (
            ("scheduler/scheduler_config.json", dict(settings, _class_name=kind)),
            ("model_index.json", dict(scheduler=["diffusers", kind])),
        ):
            put(name, json.dumps(json.loads((TINY / name).read_text()) | changed))(folder)

    return change


def weights(name, change_all):
    """A change of a model: the tensors of a file of weights."""

    def change(folder):
        (folder / name).unlink()
        save_file(change_all(load_file(TINY / name)), folder / name)

    return change


def device(name):
    """A change of a model: a link to a device in the place of a file."""

    def change(folder):
        (folder / name).unlink()
        (folder / name).symlink_to("/dev/zero")

    return change


def loop(name):
    """A change of a model: a link to itself in the place of a part."""

    def change(folder):
        shutil.rmtree(folder / name)
        (folder / name).symlink_to(name)

    return change


def part(name, library, kind):
    """A change of a model: an entry of its index."""
    index = json.loads((TINY / "model_index.json").read_text())
    return put("model_index.json", json.dumps(index | {name: [library, kind]}))


def in_two_files(folder):
    """A change of a model: weights in two files, of which the second was not fetched."""
    (folder / WEIGHTS).unlink()
    names = sorted(load_file(TINY / WEIGHTS))
    file_of = {}
    for number, some in enumerate((names[::2], names[1::2]), start=1):
        file_of |= dict.fromkeys(some, f"diffusion_pytorch_model-0000{number}-of-00002.safetensors")
    index = Path(WEIGHTS + ".index.json")
    (folder / index).write_text(json.dumps({"weight_map": file_of}))
    (folder / "transformer" / file_of[names[0]]).touch()


def without_two(tensors):
    return dict(sorted(tensors.items())[2:])


def as_integers(tensors):
    matrices = [name for name, tensor in tensors.items() if tensor.ndim == 2]
    return tensors | {name: tensors[name].to(torch.int8) for name in matrices}


def one_narrower(tensors):
    last = max(tensors)
    return tensors | {last: tensors[last][:1].clone()}


FLUX_TEXT = ROOT / registry.tiny_folder("flux") / "text_encoder"

REFUSED = [  # a name, the change, and words of the sentence
    ("a pointer in place of the transformer", put(WEIGHTS), WEIGHTS, "git lfs pull"),
    ("a pointer in place of the tokenizer", put("tokenizer/tokenizer.json"), "tokenizer.json", "git lfs pull"),
    ("an empty VAE", put(VAE, ""), VAE, "empty"),
    ("a text encoder that is cut off", put(TEXT, (TINY / TEXT).read_bytes()[:-40]), TEXT, "831,800 of 831,840"),
    ("broken settings of the VAE", put("vae/config.json", "{"), "vae/config.json", "JSON"),
    ("a byte order mark", put("transformer/config.json", b"\xef\xbb\xbf{}"), "transformer/config.json", "JSON"),
    ("a billion layers", put("transformer/config.json", '{"num_layers": 1000000000}'), "config.json", "num_layers"),
    ("UTF-16", put("vae/config.json", "{}".encode("utf-16")), "vae/config.json", "JSON"),
    ("GGUF", put(WEIGHTS, b"GGUF\3\0\0\0" + bytes(99)), WEIGHTS, "a GGUF file"),
    ("a zip of torch", put(VAE, b"PK\3\4" + bytes(99)), VAE, "torch.save"),
    ("a pickle", put(TEXT, b"\x80\2" + bytes(99)), TEXT, "torch.save"),
    ("a page", put(WEIGHTS, "<!DOCTYPE html><html>"), WEIGHTS, "HTML"),
    ("a device in place of weights", device(WEIGHTS), WEIGHTS, "device"),
    ("a device in place of the VAE", device(VAE), VAE, "device"),
    ("a device in place of the index", device("model_index.json"), "model_index.json", "device"),
    ("a device in place of a tokenizer", device("tokenizer/tokenizer.json"), "tokenizer.json", "device"),
    ("a loop in place of the VAE", loop("vae"), "/vae", "no folder"),
    ("a part of someone's own", part("vae", "my_vae", "MyVae"), "vae", "'my_vae'", "not installed"),
    ("a part that diffusers lacks", part("vae", "diffusers", "AutoencoderKLMine"), "vae", "AutoencoderKLMine"),
    ("a missing shard", in_two_files, "-00002-of-00002", "of the 2 files"),
    ("no VAE", lambda folder: shutil.rmtree(folder / "vae"), "vae", "model_index.json"),
    ("a list in place of the index", put("model_index.json", "[1]"), "model_index.json", "object"),
    ("a VAE without two weights", weights(VAE, without_two), "vae", "AutoencoderKLQwenImage", "missing"),
    ("a narrower VAE", weights(VAE, one_narrower), "vae", "another shape"),
    ("a text encoder without two weights", weights(TEXT, without_two), "text_encoder", "missing"),
    ("a narrower text encoder", weights(TEXT, one_narrower), "text_encoder", "another shape"),
    (
        "another text encoder's weights",
        put(TEXT, (FLUX_TEXT / Path(TEXT).name).read_bytes()),
        "text_encoder",
        "missing",
    ),
    ("integers", weights(WEIGHTS, as_integers), WEIGHTS, "I8", "base_precision"),
    ("a variant", lambda folder: (folder / VAE).rename(folder / VAE.replace(".s", ".fp16.s")), "variant", "rename"),
    ("Heun steps", scheduler("FlowMatchHeunDiscreteScheduler"), "FlowMatchHeun", "FlowMatchEulerDiscreteScheduler"),
    (
        "UniPC steps of no flow",
        scheduler("UniPCMultistepScheduler", prediction_type="flow_prediction", shift_terminal=None),
        "UniPCMultistepScheduler with use_flow_sigmas = False",
    ),
    ("stochastic steps", scheduler(stochastic_sampling=True), "stochastic_sampling"),
    ("sigmas turned round", scheduler(invert_sigmas=True), "invert_sigmas"),
    ("other timesteps", scheduler(num_train_timesteps=500), "num_train_timesteps is 500"),
    ("another class's shift", scheduler(flow_shift=5.0), "flow_shift = 5.0", "use_dynamic_shifting"),
    ("an end of sigmas that are not spaced by ends", scheduler(sigma_min=0.1), "sigma_min = 0.1"),
]


def test_a_model_that_is_not_whole_is_refused_by_its_file_and_a_copy_of_links_is_not(tmp_path):
    look(copy_of(tmp_path / "whole"))
    # Qwen's vocabulary has such a token.
    with_vocabulary = copy_of(tmp_path / "vocabulary")
    put("tokenizer/vocab.json", '{"_layers": 26091}')(with_vocabulary)
    look(with_vocabulary)
    rows = []
    for name, change, *words in REFUSED:
        folder = copy_of(tmp_path / name)
        change(folder)
        rows.append((name, lambda folder=folder: look(folder), words))
    assert_refused(rows)


@pytest.mark.parametrize("name", registry.names())
def test_each_model_has_the_names_and_shapes_that_its_classes_have(name):
    look(ROOT / registry.tiny_folder(name))


def test_a_schedulers_settings_that_say_what_eulers_steps_do_are_taken(tmp_path):
    flow = dict(use_flow_sigmas=True, final_sigmas_type="zero", flow_shift=None)
    karras = dict(use_karras_sigmas=True, sigma_min=0.1)
    for name, settings in (("flow", flow), ("karras", karras)):
        folder = copy_of(tmp_path / name)
        scheduler(**settings)(folder)
        look(folder)


def test_a_pipelines_scheduler_is_checked_when_its_timesteps_are_set():
    sampler = FlowMatchEulerDiscreteScheduler(stochastic_sampling=True)
    set_timesteps = partial(loading.schedule, sampler, 4, 64, torch.device("cpu"), sigmas=True)
    assert_refused([("stochastic steps", set_timesteps, ["this model", "stochastic_sampling"])])
