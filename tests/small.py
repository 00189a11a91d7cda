"""Make runs small enough for tests, and read what they logged."""

import ctypes
import itertools
import json
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import evaluate
import prepare_preferences
import torch
import train_qwenimage
import train_qwenimage_dpo
import train_qwenimage_nft
import train_qwenimage_pr
import train_qwenimage_refl
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from flow_grpo.base import rng
from flow_grpo.base.metric_table import explain
from flow_grpo.base.prompt import Prompt
from flow_grpo.checkpoints import best
from flow_grpo.command_line import checks
from flow_grpo.diffusers_patch import model_classes, registry
from flow_grpo.diffusers_patch.size import Size
from flow_grpo.monitoring.plots import TEXTS
from flow_grpo.settings import config_files, table

ROOT = Path(__file__).parents[1]
SCRIPT_CHECKS = (checks.GRPO, checks.PR, checks.NFT, checks.DPO, checks.DISTILL, checks.REFL)
CHECKS = {check.algorithm: check for check in SCRIPT_CHECKS}
SCRIPTS = {  # by a name's last word
    "pr": train_qwenimage_pr,
    "nft": train_qwenimage_nft,
    "dpo": train_qwenimage_dpo,
    "refl": train_qwenimage_refl,
}
SOURCES = sorted((ROOT / "dataset/edits/sources").glob("test_*.png"))
MODELS = {name: model_classes.by_name(name) for name in registry.names()}
ENV = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}  # no part in this process's run
# of `config_of`: it evaluates little, writes little, and saves at the end alone
FEW = dict(eval__num_prompts=4, lora__rank=4, lora__alpha=8, save_freq=0)
CLOCKS = ("written_at", "time/", "images_per_s", "memory/")  # figures that no two runs share


def as_prompts(texts, name="qwenimage"):
    """Prompts of these texts, each with a source image where the model takes some."""
    if not MODELS[name].MOST_SOURCES:
        return [Prompt(text) for text in texts]
    return [Prompt(text, {}, (source,)) for text, source in zip(texts, itertools.cycle(SOURCES))]


def size_of(name, height=64, width=64):
    """Size of what a model's tests draw: a video of two latents where the model draws videos, else an image."""
    return Size(height, width, 1 + MODELS[name].FRAMES_PER_LATENT)


def random_images(count, side=64, seed=0):
    """[count, 3, side, side] in [0, 1], of noise."""
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def generators(count):
    """Generators of the noise of `count` images."""
    return [rng.generator(0, "noise", number) for number in range(count)]


def plan(config, world_size=1):
    """How the images or the pairs of a config divide over ranks."""
    divided = CHECKS[config.algorithm].plan(table.typed(config), world_size)
    assert divided is not None
    return divided


def file_of(name):
    """The config file of a run."""
    kind = name.split(",")[0].split("_")[-1]
    file = kind if kind in ("nft", "dpo", "refl") else "grpo"
    return f"config/{file}.py"


def remembered(call):
    """A tokenizer's answers: each run has over 3,000 prompts checked, which are the same for all runs of a process."""
    answers = {}

    def called(self, *args, **options):
        if options or len(args) != 1 or not isinstance(args[0], str):
            return call(self, *args, **options)
        key = (type(self), self.name_or_path, args[0])
        if key not in answers:
            answers[key] = call(self, *args)
        return answers[key]

    return called


PreTrainedTokenizerBase.__call__ = remembered(PreTrainedTokenizerBase.__call__)


def few(overrides):
    """FEW with a test's own settings."""
    settings = FEW | overrides
    if settings["lora__rank"] == 0 and "lora__alpha" not in overrides:
        # Without an adapter nothing reads it, and a flag that nothing reads is refused.
        del settings["lora__alpha"]
    return settings


def config_of(name, output_dir=None, **overrides):
    """The `,smoke` variant of a run or of its variants, with FEW, fewer branches, and settings by dotted name ("."
    written as "__")."""
    config = config_files.load(f"{ROOT / file_of(name)}:{name},smoke")
    config.sample.num_branches = min(config.sample.num_branches, 3)
    if output_dir is not None:
        config.output_dir = str(output_dir)
    settings = {key.replace("__", "."): value for key, value in few(overrides).items()}
    config.update_from_flattened_dict(settings)
    if config.lora.rank == 0 and "sample__rollout_weights" not in overrides:
        config.sample.rollout_weights = "exact"  # there is no adapter to merge
    return config


def train(name, output_dir, **overrides):
    """Run a script's main in this process; its run folder."""
    config = config_of(name, output_dir, **overrides)
    SCRIPTS.get(name.split(",")[0].split("_")[-1], train_qwenimage).main(config)
    return max(Path(output_dir).iterdir(), key=lambda folder: folder.stat().st_mtime)


def command_of(name, output_dir, **overrides):
    """The command of a run like `train`'s, for a process of its own."""
    script = name.split(",")[0].replace("_proxy", "").replace("shapes", "scripts/train") + ".py"
    branches = dict(sample__num_branches=3) if name.split(",")[0].endswith("_pr") else {}
    how = dict(output_dir=output_dir) | branches | few(overrides)
    command = [script, f"--config={file_of(name)}:{name},smoke"]
    for key, value in how.items():
        command.append(f"--config.{key.replace('__', '.')}={value}")
    return command


def loaded(name, folder="", **parts):
    """A tiny model with its weights, on the CPU."""
    pipeline = MODELS[name].PIPELINE.from_pretrained(folder or registry.tiny_folder(name), **parts)
    pipeline.set_progress_bar_config(disable=True)
    return MODELS[name](pipeline, torch.device("cpu"))


def make_shallow(folder):
    """A model of half the time in folder/model, the tiny Qwen-Image's first and last block, which draw no shapes to
    score, and few prompts in folder/prompts."""
    pipeline = MODELS["qwenimage"].PIPELINE.from_pretrained(registry.tiny_folder("qwenimage"))
    blocks = pipeline.transformer.transformer_blocks
    del blocks[1:-1]
    pipeline.transformer.register_to_config(num_layers=len(blocks))
    pipeline.save_pretrained(folder / "model")
    few_prompts(folder / "prompts", splits=("train", "test", "validation"))


def few_prompts(folder, count=24, splits=("train", "test"), name="qwenimage"):
    """A dataset of some prompts of shapes, spread over its files, with source images where the model takes some; for a
    model of videos, of motions."""
    folder.mkdir()
    data = "motions" if MODELS[name].FRAMES_PER_LATENT else "shapes"
    for split in splits:
        lines = (ROOT / f"dataset/{data}/{split}_metadata.jsonl").read_text().splitlines()
        chosen = lines[:: len(lines) // count][:count]
        with (folder / f"{split}_metadata.jsonl").open("w") as file:
            for line, source in zip(chosen, itertools.cycle(SOURCES)):
                row = json.loads(line)
                if MODELS[name].MOST_SOURCES:
                    row["sources"] = [str(source)]
                file.write(json.dumps(row) + "\n")
    return str(folder)


def evaluated(folder, *arguments):
    """Run evaluate.py on folder/out; return what it writes there, and the means of each row."""
    evaluate.main(evaluate.parser().parse_args(["--out", str(folder / "out"), *map(str, arguments)]))
    newest = max(folder.glob("out*"), key=lambda path: path.stat().st_mtime_ns)
    found = json.loads((newest / "scores.json").read_text())
    means = []
    for row in found["rows"]:
        means.append({name: part["mean"] for name, part in row["all"].items()})
    return found, means


def prepare(name, folder, **overrides):
    """Run prepare_preferences.py's main in this process; the folder of pairs."""
    how = dict(sample__batch_size=8, preferences__path=str(folder), max_rows=48, part_size=8, validation_share=0.15)
    how |= overrides
    options = {key: how.pop(key) for key in prepare_preferences.Options._fields if key in how}
    prepare_preferences.main(config_of(name, **how), prepare_preferences.Options(**options))
    return folder


def record(epoch, value=0.5, **how):
    """The record of an evaluation, as best/ is given it."""
    how = dict(split="validation", num_prompts=8, noises_per_prompt=1, num_steps=4, guidance_scale=1.0) | how
    how = dict(best_by="avg", height=64, width=64, vae_precision="fp32") | how
    return best.Evaluation(epoch=epoch, step=2 * epoch, value=value, figures={"avg": value}, **how)


def exported(folder):
    """The file of weights in the folder of a run, or in its best/: a LoRA's, or the whole transformer's."""
    lora = folder / "pytorch_lora_weights.safetensors"
    whole = folder / "transformer/diffusion_pytorch_model.safetensors"
    assert lora.is_file() != whole.is_file()
    return lora if lora.is_file() else whole


def stored(folder, epoch):
    """All tensors of a checkpoint that one rank wrote."""
    tensors = {}
    for file in (folder / "checkpoints" / f"epoch_{epoch:06d}" / "state").iterdir():
        tensors |= load_file(file)
    return tensors


def lines_of(folder, kind=None):
    """The lines of metrics.jsonl without clocks."""
    found = []
    for line in Path(folder, "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert all(explain(name) or name in TEXTS for name in row), row
        if kind in (None, row["kind"]):
            found.append(without_clocks(row))
    return found


def without_clocks(row):
    return {name: value for name, value in row.items() if not name.startswith(CLOCKS)}


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


@contextmanager
def no_file_above(size):
    """The system refuses to write more bytes into a file, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def permissions_hold():
    """A folder that its mode makes read-only is so for root, too, who lays down the right to override modes."""
    libc = ctypes.CDLL(None)
    override = 1 << 1  # CAP_DAC_OVERRIDE
    header = (ctypes.c_uint32 * 2)(0x20080522)  # the interface's version; of this thread
    rights = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable ones, twice 32 of them
    assert libc.capget(header, rights) == 0
    before, rights[0] = rights[0], rights[0] & ~override
    assert libc.capset(header, rights) == 0
    try:
        yield
    finally:
        rights[0] = before
        assert libc.capset(header, rights) == 0


@torch.no_grad()
def move(parameters):
    """As training would, but all at once."""
    stream = torch.Generator().manual_seed(1)
    for weight in parameters:
        weight.add_(0.02 * torch.randn(weight.shape, generator=stream))
