"""Models as they lie on people's disks: what is said of each before any weight is loaded."""

import os
import shutil

from refused import assert_refused
from small import ROOT, as_prompts

from flow_grpo.diffusers_patch import model_classes, registry
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
    family.without_weights(str(model)).check(as_prompts(["a circle"]), None)
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


REFUSED = [  # a name, the change, and words of the sentence
    ("a pointer in place of the transformer", put(WEIGHTS), WEIGHTS, "git lfs pull"),
    ("a pointer in place of the tokenizer", put("tokenizer/tokenizer.json"), "tokenizer.json", "git lfs pull"),
    ("an empty VAE", put(VAE, ""), VAE, "empty"),
    ("a text encoder that is cut off", put(TEXT, (TINY / TEXT).read_bytes()[:-40]), TEXT, "831,800 of 831,840"),
    ("broken settings of the VAE", put("vae/config.json", "{"), "vae/config.json", "JSON"),
    ("no VAE", lambda folder: shutil.rmtree(folder / "vae"), "vae", "model_index.json"),
    ("a variant", lambda folder: (folder / VAE).rename(folder / VAE.replace(".s", ".fp16.s")), "variant", "rename"),
]


def test_a_model_that_is_not_whole_is_refused_by_its_file_and_a_copy_of_links_is_not(tmp_path):
    look(copy_of(tmp_path / "whole"))
    rows = []
    for name, change, *words in REFUSED:
        change(folder := copy_of(tmp_path / name))
        rows.append((name, lambda folder=folder: look(folder), words))
    assert_refused(rows)
