"""Seconds per phase, arithmetic rates and peak memory of one epoch of a training script, as one JSON line.

    python benchmarks/bench.py --script train_qwenimage_pr --size tiny
    python benchmarks/bench.py --script train_flux --size full          one GPU of 80 GiB or more, no download
    python benchmarks/bench.py --script train_qwenimage_pr --size full --published --set compile=True
    torchrun --nproc_per_node=4 benchmarks/bench.py --size full --set sample.num_prompts_per_epoch=4
    python benchmarks/bench.py --script train_sd3 --size full --variants ,large_gpu --limit-gib 23      a smaller card
    python benchmarks/scaling.py -h      the same work per GPU on 1, 2, 4 and 8 GPUs of one host

It runs the script's own `main` and reads the epoch's line of metrics.jsonl; the first epoch, which warms up, is not
counted, and nothing is saved. All images are of the data set's longest prompt, so that no rank compiles another width
of text in the second. Rates and memory are one GPU's, images those of all. `full` is the model as published
(transformer, VAE and text encoders of the real sizes, bf16) with random weights, at the config's resolution, steps,
guidance and LoRA rank, with the prompts and reward of the shapes task. The limit holds from the first forward on: the
random weights before it come about on the GPU, where those of a real run may never be. With `--folder` weights are read
as in a real run. `first_update_s` counts from the process's start.
"""

import argparse
import contextlib
import functools
import importlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

import torch
import yaml
from flops import matrix_rate, row_flops
from ml_collections import ConfigDict

from flow_grpo.base import distributed
from flow_grpo.command_line import command_line
from flow_grpo.data import preferences
from flow_grpo.data.prompts import load_prompts
from flow_grpo.diffusers_patch import loading, model_classes, registry
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.size import Size, training_size
from flow_grpo.monitoring import model_card
from flow_grpo.run import loop, update
from flow_grpo.settings import config_files

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "scripts", "tools"))

from build_random_pipeline import OTHERS
from random_model import full_config, random_folder, random_model, registered

from config import dpo, grpo, nft

KEPT = ("images_per_s", "batch_occupancy")


def config_of(name: str, kind: str = "pr"):
    return config_files.load(f"config/{kind if kind in ('nft', 'dpo') else 'grpo'}.py:{name}")


def one_prompt(dataset: str, folder: Path) -> str:
    """Write a data set of nothing but the longest training prompt of another into a new folder; its path."""
    longest = max(load_prompts(dataset, "train"), key=lambda prompt: len(prompt.text))
    folder.mkdir()
    for split in ("train", "test"):
        sources = dict(sources=[str(source.resolve()) for source in longest.sources]) if longest.sources else {}
        line = json.dumps(longest.metadata | dict(prompt=longest.text) | sources) + "\n"
        (folder / f"{split}_metadata.jsonl").write_text(line, encoding="utf-8")
    return str(folder)


def random_pairs(config, shapes: dict, folder: str) -> None:
    """Pairs of noise in the place of config.preferences.path."""
    config.preferences.path, count = folder, config.sample.num_prompts_per_epoch
    draw = {name: torch.randn(count, *shapes["latents"]) for name in preferences.LATENTS}
    draw |= {
        column: torch.randn(count, *shapes[name]) for name, column in preferences.COLUMNS.items() if name in shapes
    }
    draw |= {name: draw[name] > -9 for name in ("mask",) if name in shapes}
    constants = dict(prompt="a photo of a red circle", negative_prompt="", winner_score=1.0, loser_score=0.0)
    constants |= dict(
        model=config.model, height=config.height, width=config.width, dtype=preferences.dtype_of(config.precision)
    )
    rows = draw | {name: [value] * count for name, value in constants.items()}
    preferences.write_pairs(Path(folder, "train_00000.parquet"), rows, shapes, constants["dtype"])


def shared_folder() -> str:
    """One that all ranks know, and no other run."""
    return f"{tempfile.gettempdir()}/bench_{os.environ.get('TORCHELASTIC_RUN_ID', os.getpid())}"


def limit_memory(gib: float) -> None:
    """Forget the peak so far, and let the allocator have no more than this from now on; 0 = all."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if gib:
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(gib * 2**30 / total, 1.0))


def process_s() -> float:
    """Seconds since this process began."""
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")


class Collectives:
    """Seconds that this rank spends in the second epoch's collectives, with its waiting for the other ranks: those of
    the CPU, and those of the GPU by its own clock, though other kernels may run beside them. Stands in for the leaving
    of the process group, which forgets them."""

    CALLS = "all_gather", "all_gather_object", "all_reduce", "barrier"  # of flow_grpo.base.distributed

    def __init__(self):
        self.since, self.figures, self.leave = 0.0, {}, distributed.close
        self.calls = []  # (start, seconds) of each; those of the GPU return at once
        os.environ["TORCH_NCCL_ENABLE_TIMING"] = "1"
        os.environ["TORCH_FR_BUFFER_SIZE"] = os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "200000"  # later, torch 2.11
        for name in self.CALLS:
            setattr(distributed.dist, name, partial(self._timed, getattr(distributed.dist, name)))

    def _timed(self, call, *args):
        started = time.time()
        call(*args)
        self.calls.append((started, time.time() - started))

    def close(self):
        """Count, and leave the process group."""
        if distributed.dist.is_initialized():
            seconds = [length for started, length in self.calls if started >= self.since]
            self.figures["collectives/cpu_s"] = sum(seconds)
            if torch.cuda.is_available():
                self.figures["collectives/gpu_s"] = self._gpu_s()
        self.leave()

    def _gpu_s(self) -> float:
        torch.cuda.synchronize()
        time.sleep(1)  # until NCCL's watchdog has read the clock of the last ones
        entries = pickle.loads(torch._C._distributed_c10d._dump_nccl_trace())["entries"]
        return sum(e.get("duration_ms", 0.0) for e in entries if e["time_created_ns"] >= 1e9 * self.since) / 1000


class Work:
    """FLOP of a run by phase. Stands in for a script's add_gradients and its optimizer's steps."""

    def __init__(self, script, full_weights: bool, limit_gib: float):
        self.phase, self.flops, self.sizes, self.limit_gib = "rollout", Counter(), {}, limit_gib
        self.trained, self.add_gradients = 3 if full_weights else 2, script.add_gradients
        self.first_update_s, self.move_weights, self.collectives = None, update.move_weights, Collectives()

    def counting(self, family: type[FlowModel]) -> type[FlowModel]:
        """The model, whose forwards are counted."""
        work = self

        class Counting(family):
            def velocity(self, x, t, condition, guidance_scale, size):
                work.count(self, x, condition, guidance_scale, size)
                return super().velocity(x, t, condition, guidance_scale, size)

        return Counting

    def count(self, model: FlowModel, x, condition: Condition, guidance_scale: float, size: Size) -> None:
        """A velocity. Before the first one, the memory that making random weights took is forgotten."""
        if torch.cuda.is_available() and not self.flops:
            limit_memory(self.limit_gib)
        texts = [condition, condition.negative] if model.is_guided(guidance_scale) else [condition]
        times = self.trained if self.phase == "update" and torch.is_grad_enabled() else 1
        for text in texts:
            self.flops[self.phase] += times * len(x) * self.row(model, text, size)

    def row(self, model: FlowModel, text: Condition, size: Size) -> int:
        if text.num_tokens not in self.sizes:
            self.sizes[text.num_tokens] = row_flops(model, text, size)
        return self.sizes[text.num_tokens]

    def counted_gradients(self, *args):
        self.phase = "update"
        self.add_gradients(*args)
        self.phase = "rollout"

    def timed_step(self, run):
        """The optimizer's. When the first one and the first epoch's last one end is noted."""
        self.move_weights(run)
        self.first_update_s = self.first_update_s or process_s()
        if run.epoch == 0:
            self.collectives.since = time.time()


def epoch_metrics(script: str, config, family: type[FlowModel], limit_gib: float = 0.0) -> dict:
    """Run two epochs of a model and return the second one's times, rates and memory; {} on all ranks but the first."""
    config.num_epochs, config.eval_freq, config.save_freq = 2, 0, 0
    module = importlib.import_module(script)
    work = Work(module, config.lora.rank == 0, limit_gib)
    update.move_weights, distributed.close = work.timed_step, work.collectives.close
    with tempfile.TemporaryDirectory() as folder:
        config.output_dir, config.dataset = f"{folder}/runs", one_prompt(config.dataset, Path(folder, "prompts"))
        config.cache_dir = shared_folder() if config.cache_dir else ""
        if script.endswith("_dpo") and config.preferences.path:
            light = family.without_weights(config.model)
            random_pairs(config, light.row_shapes(training_size(config), config.text_tokens), folder)
        with registered(work.counting(family), loading.pipeline_name(config.model)):
            counted = functools.update_wrapper(functools.partial(work.counted_gradients), module.add_gradients)
            module.main(config, add_gradients=counted)
        lines = [line for path in Path(folder).glob("runs/*/metrics.jsonl") for line in path.read_text().splitlines()]
    shutil.rmtree(shared_folder(), ignore_errors=True)
    if not lines:
        return {}
    rows = [json.loads(line) for line in lines]
    first, last = [row for row in rows if row["kind"] == "epoch"]
    gaps = [row["parity/log_prob_abs_diff_max"] for row in rows if "parity/log_prob_abs_diff_max" in row]
    figures = {"images": last["images"] - first["images"], "first_epoch_s": first["time/epoch_s"]}
    figures |= {"first_update_s": work.first_update_s} | work.collectives.figures
    figures |= {"parity/log_prob_abs_diff_max": max(gaps)} if gaps else {}
    figures |= {name: last[name] for name in last if name.startswith(("time/", "memory/")) or name in KEPT}
    rates = {f"{phase}_tflops": flops / 2e12 / last[f"time/{phase}_s"] for phase, flops in work.flops.items()}
    return figures | rates


def published() -> dict[str, float]:
    """What bench_published.py measures, in a process of its own, which gives all memory back."""
    done = subprocess.run([sys.executable, "benchmarks/bench_published.py"], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def setup(args) -> tuple[str, type[FlowModel], ConfigDict]:
    """The script that is run, the model, and the config with its changes."""
    run = args.script.removeprefix("train_")
    kind = last if (last := run.rpartition("_")[2]) in ("pr", "nft", "dpo") else ""
    name, suffix = run.removesuffix(f"_{kind}"), run + args.variants
    if args.size == "full":
        sizes, reward = {name: {"num_layers": args.layers}} if args.layers else {}, run_name(run).removesuffix(run)
        family = model_classes.by_name(name) if args.folder else random_model(name, sizes)
        config = full_config(config_of(f"{reward}{suffix}", kind), kind, edits=family.MOST_SOURCES > 0)
        config.model = args.folder or random_folder(Path(tempfile.mkdtemp(), "model"))
    else:
        family, config = model_classes.by_name(name), config_of(f"shapes_{suffix}", kind)
    changes = dict(text.split("=", 1) for text in args.set)
    config.update_from_flattened_dict({key: yaml.safe_load(value) for key, value in changes.items()})
    return f"train_qwenimage_{kind}".rstrip("_"), family, config


def main(args):
    script, family, config = setup(args)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    what = dict(script=args.script, size=args.size, device=device, torch=torch.__version__, config=config.name)
    what |= dict(gpus=int(os.environ.get("WORLD_SIZE", 1)))
    changes = dict(text.split("=", 1) for text in args.set)
    loop.save = loop.export = lambda *_: None  # full weights with their moments are hundreds of GB
    model_card.write_cards = lambda _: []  # and without weights there is nothing to describe
    with contextlib.redirect_stdout(sys.stderr):  # the run's own lines
        theirs = published() if args.published else {}
        figures = epoch_metrics(script, config, family, args.limit_gib) | theirs
    if not figures:
        return
    if torch.cuda.is_available():
        figures["memory/reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        figures["matrix_tflops"] = matrix_rate(torch.device("cuda")) / 1e12
    if theirs:
        trunks = config.sample.num_prompts_per_epoch * config.sample.num_images_per_prompt
        figures["prompt_s"] = figures["time/epoch_s"] / trunks
        figures["published/ratio"] = figures["published/prompt_s"] / figures["prompt_s"]
    print(json.dumps(what | changes | figures))


def run_name(run: str) -> str:
    """The published run of a model and algorithm, such as pickscore_sd3_nft; "" = there is none."""
    names = {known.__name__ for module in (grpo, nft, dpo) for known in module.RUNS}
    return next((name for name in (f"pickscore_{run}", f"editreward_{run}") if name in names), "")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = [f"{model}{kind}" for model in (*registry.names(), *OTHERS) for kind in ("", "_pr", "_nft", "_dpo")]
    scripts = [f"train_{kind}" for kind in kinds if run_name(kind)]
    parser.add_argument("--script", choices=scripts, default="train_qwenimage_pr")
    parser.add_argument("--size", choices=["tiny", "full"], default="tiny", help="tiny: Qwen-Image only")
    parser.add_argument("--variants", default="", help="of the config, for instance ,guard,flash")
    parser.add_argument("--published", action="store_true", help="with the published per-step loop's time per trunk")
    parser.add_argument("--set", nargs="*", default=[], help="settings of the config, such as sample.batch_size=2")
    parser.add_argument("--layers", type=int, help="blocks of a smaller transformer, of Qwen-Image's classes")
    parser.add_argument("--folder", help="with weights of --size full, see tools/build_random_pipeline.py --published")
    parser.add_argument("--limit-gib", type=float, default=0.0, help="of the allocator, as on a smaller card; 0 = none")
    return parser


if __name__ == "__main__":
    main(command_line.arguments(parser()))
