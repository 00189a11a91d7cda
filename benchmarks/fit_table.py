"""The tables of docs/will_it_fit.md: what fits which card, and how long it takes.

    python benchmarks/fit_table.py            writes them into the page, between its two marks

A figure is measured where `RECORDED` or a file benchmarks/memory_*.jsonl (benchmarks/memory_table.py makes them) holds
it for the same script, variants and settings. Others are computed, as `memory_gib` and `image_s` say, and bear a ~.
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from bench import config_of
from memory_table import LIMIT_GIB, OFFLOAD
from ml_collections import ConfigDict

from flow_grpo import batching, settings

PAGE = Path(__file__).parents[1] / "docs" / "will_it_fit.md"
BEGIN, END = "<!-- fit: python benchmarks/fit_table.py -->\n", "<!-- /fit -->"
GPUS = (1, 2, 4, 8)
SCALING = 0.988  # of several GPUs, measured on three: epoch_h200_20261121.md
H200_TFLOPS = 989.0
CARDS = {  # GB -> the card meant, its dense bf16 TFLOP/s and its bus in GB/s, by NVIDIA's data sheets
    24: ("RTX 4090", 165.0, 25.0),
    32: ("RTX 5090", 210.0, 50.0),
    48: ("L40S", 362.0, 25.0),
    80: ("H100 SXM", H200_TFLOPS, 50.0),
    141: ("H200", H200_TFLOPS, 50.0),
}


@dataclass(frozen=True)
class Size:
    """A model at its published size, for 512 px; tests/test_benchmarks.py counts the first three."""

    parameters: float
    trained_per_rank: float  # LoRA parameters for each of its ranks
    row_tflop: float  # a forward of one image with 48 text tokens
    kept_gib: float  # for the backward of a row, checkpointed
    kept_half_gib: float  # the same with activation_memory 0.5
    rollout_tflops: float  # measured, with ,large_gpu
    update_tflops: float


MODELS = {
    "qwenimage": Size(20.430e9, 6.6355e6, 15.43, 0.5, 3.8, 474, 404),
    "sd3": Size(2.2432e9, 0.58675e6, 2.09, 0.15, 0.6, 168, 304),
    "flux": Size(11.901e9, 2.8017e6, 14.65, 0.45, 3.4, 385, 394),
}
TITLES = {"qwenimage": "Qwen-Image (20.4 B)", "flux": "FLUX.1-dev (11.9 B)", "sd3": "SD3.5-medium (2.2 B)"}
CHECKPOINTED = 0.70, 0.90  # rates of the update and of an unmerged rollout, of ,large_gpu's: 281/404, 426/474
BASES = {  # bytes a parameter, speed of products, seconds to unpack all weights on an H200 (4bit: fitted to both)
    "": (2.0, 1.0, 0.0),
    "8bit": (1.03, 1.07, 0.0),
    "4bit": (0.56, 1.0, 0.07),
}
WORKSPACE_GIB = 2.5  # VAE, latents, embeddings, buffers of the libraries


@dataclass(frozen=True)
class Row:
    """A way to run a script on a card."""

    card: int  # GB
    script: str
    variants: str = ""
    settings: str = ""

    @property
    def model(self) -> str:
        return self.script.split("_")[1]

    @property
    def kind(self) -> str:
        return [*self.script.split("_"), "grpo"][2]

    @property
    def key(self) -> tuple[str, str, str]:
        """What a measurement of it has in common with it: all but the images of an epoch."""
        words = [word for word in self.settings.split() if not word.startswith("sample.num_")]
        return self.script, self.variants, " ".join(sorted(words))


ROWS = (
    Row(24, "train_qwenimage", settings=f"{OFFLOAD} sample.batch_size=16"),
    Row(24, "train_qwenimage", ",four_bit_base"),
    Row(24, "train_qwenimage_pr", ",four_bit_base"),
    Row(24, "train_qwenimage_pr", settings=OFFLOAD),
    Row(24, "train_qwenimage_nft", settings=f"{OFFLOAD} sample.batch_size=16"),
    Row(32, "train_qwenimage", settings=f"{OFFLOAD} sample.batch_size=16"),
    Row(48, "train_qwenimage", ",eight_bit_base"),
    Row(48, "train_qwenimage_pr", ",eight_bit_base"),
    Row(48, "train_qwenimage", settings="lora.rank=16 lora.alpha=32 sample.batch_size=2"),
    Row(48, "train_qwenimage", settings=f"{OFFLOAD} sample.batch_size=32"),
    Row(80, "train_qwenimage"),
    Row(80, "train_qwenimage_pr"),
    Row(80, "train_qwenimage_nft"),
    Row(141, "train_qwenimage", ",large_gpu"),
    Row(141, "train_qwenimage_pr", ",large_gpu"),
    Row(141, "train_qwenimage_nft", ",large_gpu"),
    Row(24, "train_flux", settings=OFFLOAD),
    Row(32, "train_flux", settings="sample.batch_size=4"),
    Row(48, "train_flux"),
    Row(48, "train_flux_pr"),
    Row(48, "train_flux_nft"),
    Row(80, "train_flux", ",large_gpu"),
    Row(80, "train_flux_pr", ",large_gpu"),
    Row(80, "train_flux_nft", ",large_gpu"),
    Row(141, "train_flux", ",large_gpu"),
    Row(141, "train_flux_pr", ",large_gpu"),
    Row(24, "train_sd3", ",large_gpu"),
    Row(24, "train_sd3_pr", ",large_gpu"),
    Row(24, "train_sd3_nft", ",large_gpu"),
    Row(48, "train_sd3", ",large_gpu"),
    Row(80, "train_sd3", ",large_gpu"),
    Row(141, "train_sd3", ",large_gpu"),
    Row(141, "train_sd3_pr", ",large_gpu"),
)
RECORDED = {  # GiB and images/s on an H200, from epoch_h200_20261121.md; of quantised bases quantised_h200_20261122.md
    ("train_qwenimage", ",eight_bit_base", ""): (39.0, 0.91),
    ("train_qwenimage_pr", ",eight_bit_base", ""): (38.2, 2.97),
    ("train_qwenimage", ",four_bit_base", ""): (23.0, 0.55),
    ("train_qwenimage_pr", ",four_bit_base", ""): (23.0, 2.23),
    ("train_qwenimage", ",large_gpu", ""): (109.2, 1.07),
    ("train_qwenimage_pr", ",large_gpu", ""): (110.0, 3.04),
    ("train_qwenimage_nft", ",large_gpu", ""): (77.0, 0.51),
    ("train_qwenimage", "", ""): (58.6, 0.88),
    ("train_qwenimage_nft", "", ""): (52.4, 0.40),
    ("train_qwenimage", "", "fsdp.mode=shard fsdp.offload_weights=True sample.batch_size=16"): (15.9, 0.38),
    ("train_sd3", ",large_gpu", ""): (16.7, 1.61),
    ("train_sd3_pr", ",large_gpu", ""): (16.7, 15.5),
    ("train_flux", ",large_gpu", ""): (54.9, 1.67),
    ("train_flux_pr", ",large_gpu", ""): (54.8, 8.88),
}
PUBLISHED_EPOCHS = {  # see docs/will_it_fit.md for their sources
    ("sd3", "grpo"): 2500,
    ("sd3", "nft"): 1000,
    ("sd3", "pr"): 1000,
    ("qwenimage", "grpo"): 250,
    ("qwenimage", "pr"): 250,
    ("flux", "grpo"): 250,
    ("flux", "pr"): 250,
}


@dataclass(frozen=True)
class Measurement:
    """Of one epoch, on an H100 or H200."""

    fits: bool
    gib: float = 0.0
    images_per_s: float = 0.0  # 0 = not known: another run shared the GPU
    limit_gib: float = float("inf")  # of the allocator


def measurements(lines: list[dict]) -> dict[tuple[str, str, str], list[Measurement]]:
    """Those of RECORDED and of memory_table.py's lines, by the key of their row."""
    known = {key: [Measurement(True, *figures)] for key, figures in RECORDED.items()}
    for line in lines:
        if line["outcome"] not in ("fits", "out of memory"):
            continue
        card, script, *words = line["cell"].split(" ")
        variants = words.pop(0) if words and words[0].startswith(",") else ""
        row, limit = Row(int(card), script, variants, " ".join(words)), LIMIT_GIB[int(card)]
        fits = line["outcome"] == "fits"
        speed = line["images_per_s"] if fits and not line["shared"] else 0.0
        one = Measurement(fits, line["memory/peak_gib"] if fits else 0.0, speed, limit)
        known.setdefault(row.key, []).append(one)
    return known


def config_for(row: Row) -> ConfigDict:
    """The run's config with the row's variants and settings."""
    config = config_of(f"pickscore_{row.script.removeprefix('train_')}{row.variants}", row.kind)
    changes = dict(word.split("=") for word in row.settings.split())
    config.update_from_flattened_dict({key: json.loads(_as_json(value)) for key, value in changes.items()})
    return config


def _as_json(value: str) -> str:
    if value in ("True", "False"):
        return value.lower()
    return value if re.fullmatch(r"[\d.]+", value) else json.dumps(value)


def graphs(model: str, config: ConfigDict) -> int:
    """Forwards of a velocity: 2 with guidance, where it is not the model's input."""
    return 2 if config.sample.guidance_scale > 1 and model != "flux" else 1


def memory_gib(model: str, config: ConfigDict) -> float:
    """Weights in bf16 or quantised; a LoRA with its average, gradient and two moments in float32 (DiffusionNFT's old
    policy, too); what a minibatch keeps for its backward. Offloaded weights: three blocks of sixty; moments: none."""
    size, sample = MODELS[model], config.sample
    trained_bytes = (24 if config.algorithm == settings.NFT else 20) - (8 if config.fsdp.offload_optimizer else 0)
    trained = config.lora.rank * size.trained_per_rank * trained_bytes / 2**30
    weights = BASES[config.base_precision][0] * size.parameters / 2**30
    kept = size.kept_gib if config.fsdp.activation_checkpointing else size.kept_half_gib
    rows = sample.batch_size * graphs(model, config) * kept
    resident = weights / 20 if config.fsdp.offload_weights else weights + trained
    return resident + rows + WORKSPACE_GIB


def forwards(model: str, config: ConfigDict) -> tuple[float, float]:
    """Of an image: those of the rollout, and those that the update's work is worth (forward and backward through a
    LoRA: 2; the reference and the old policy: 1 each)."""
    sample, steps = config.sample, batching.num_trained_steps(config)
    held = int(config.train.beta > 0)
    if config.algorithm == settings.PR:
        completions = sum(sample.num_steps - 1 - step for step in range(steps)) * sample.num_branches
        images = steps * sample.num_branches
        rollout, update = (steps + completions) / images, steps * (2 + held) / images
    else:
        old = int(config.algorithm == settings.NFT)
        rollout, update = sample.num_steps, steps * (2 + held + old)
    return graphs(model, config) * rollout, graphs(model, config) * update


def image_s(row: Row, config: ConfigDict) -> float:
    """Seconds of an image on the row's card: its arithmetic, and the unpacking of 4 bits, at the rates that the H200
    reached, in proportion to the cards' peaks; offloaded weights also pass over the bus, once a forward and three times
    a forward with backward."""
    size, (_, tflops, bus) = MODELS[row.model], CARDS[row.card]
    rollout, update = forwards(row.model, config)
    slower = CHECKPOINTED if config.fsdp.activation_checkpointing else (1.0, 1.0)
    seconds = size.row_tflop * (rollout / (size.rollout_tflops * slower[1]) + update / (size.update_tflops * slower[0]))
    _, speed, unpack_s = BASES[config.base_precision]
    together = config.sample.completion_batch_size or config.sample.batch_size
    passes = rollout / together + 1.5 * update / config.sample.batch_size  # a forward with backward is worth 2
    bus_s = 2e-9 * size.parameters / bus if config.fsdp.offload_weights else 0.0
    return (seconds / speed + passes * unpack_s) * H200_TFLOPS / tflops + passes * bus_s


def images_per_epoch(config: ConfigDict) -> int:
    """Of all GPUs."""
    plan = batching.plan_batches(config, 1)
    outcomes = plan.num_trained_steps * plan.num_branches if config.algorithm == settings.PR else 1
    return plan.num_groups * plan.group_size * outcomes


def divides(config: ConfigDict, gpus: int) -> bool:
    """Whether an epoch does over so many GPUs."""
    try:
        return bool(batching.plan_batches(config, gpus))
    except ValueError:
        return False


def cells(row: Row, known: list[Measurement]) -> list[str]:
    """The row of the table."""
    config, card = config_for(row), CARDS[row.card]
    rate, measured = images_per_s(row, config, known)
    rates = [rate * gpus * (SCALING if gpus > 1 else 1) if divides(config, gpus) else None for gpus in GPUS]
    minutes = [images_per_epoch(config) / one / 60 if one else None for one in rates]
    epochs = PUBLISHED_EPOCHS.get((row.model, row.kind), 0)
    hours = [one and one * epochs / 60 for one in minutes]
    what = f"`{row.script}{row.variants}`" + (f" `{row.settings}`" if row.settings else "")
    speed = f"{'' if measured else '~'}{rate:.2f}"
    card = f"{row.card} GB, {card[0]}"
    return [card, what, _gib(row, config, known), speed, _numbers(minutes), _numbers(hours) if epochs else ""]


def images_per_s(row: Row, config: ConfigDict, known: list[Measurement]) -> tuple[float, bool]:
    """On one GPU, and whether that was measured on this card: else a large card's, in proportion to what is computed
    for both, or what is computed."""
    timed = [one.images_per_s for one in known if one.images_per_s]
    computed = 1 / image_s(row, config)
    if not timed:
        return computed, False
    large = replace(row, card=141)
    return timed[0] * computed * image_s(large, config), row.card == large.card


def _gib(row: Row, config: ConfigDict, known: list[Measurement]) -> str:
    limit, computed = LIMIT_GIB[row.card], memory_gib(row.model, config)
    if any(not one.fits and one.limit_gib >= limit for one in known):
        return "out of memory"
    fitting = [one.gib for one in known if one.fits and one.gib <= limit]
    return f"{fitting[0]:.1f}" if fitting else f"~{computed:.0f}" + (" (not tried)" if computed > 0.9 * limit else "")


def _numbers(values: list[float | None]) -> str:
    return " / ".join("no" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.1f}" for value in values)


def tables(lines: list[dict]) -> str:
    """One for each model."""
    known, text = measurements(lines), []
    for model, title in TITLES.items():
        text += [f"### {title}\n", "| card | run | GiB | images/s | minutes per epoch | hours, published run |"]
        text += ["|---|---|---|---|---|---|"]
        text += [f"| {' | '.join(cells(row, known.get(row.key, [])))} |" for row in ROWS if row.model == model]
        text += [""]
    return "\n".join(text)


def recorded_lines() -> list[dict]:
    """Of all records that memory_table.py made."""
    files = sorted(Path(__file__).parent.glob("memory_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


if __name__ == "__main__":
    before, _, after = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + tables(recorded_lines()) + END + after.partition(END)[2])
