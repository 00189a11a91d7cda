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
guidance and LoRA rank, with the prompts and reward of the shapes task, which in train_*_refl is `shapes_proxy`. The
limit holds from the first forward on: the random weights before it come about on the GPU, where those of a real run may
never be. With `--folder` weights are read as in a real run. `first_update_s` counts from the process's start.
`--evaluate N` then draws N prompts as a validation does and as a test does, each twice; the second time counts.
"""

import argparse
import contextlib
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
from functools import partial, update_wrapper
from pathlib import Path

import torch
import yaml
from flops import matrix_rate, row_flops
from ml_collections import ConfigDict

from flow_grpo.base import distributed
from flow_grpo.command_line import command_line
from flow_grpo.data import preferences
from flow_grpo.data.prompts import Split, load_prompts
from flow_grpo.diffusers_patch import loading, model_classes, registry
from flow_grpo.diffusers_patch.condition import Condition
from flow_grpo.diffusers_patch.flow_model import FlowModel
from flow_grpo.diffusers_patch.sampling_params import EXACT, of_validation
from flow_grpo.diffusers_patch.size import Size, training_size
from flow_grpo.evaluation import evaluation
from flow_grpo.monitoring import model_card
from flow_grpo.run import evaluate, loop, reward_gradients, update
from flow_grpo.settings import config_files

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "scripts", "tools"))

from build_random_pipeline import OTHERS
from random_model import full_config, random_folder, random_model, registered

from config import dpo, grpo, nft, refl

# Algorithms by the ends of scripts' names, and the config file of those that have one of their own.
KINDS = ("", "pr", "nft", "dpo", "refl")
OWN_FILE = ("nft", "dpo", "refl")
# Largest difference between rollout and update, of log-probs or of velocities.
GAPS = ("parity/log_prob_abs_diff_max", reward_gradients.PARITY)
KEPT = ("images_per_s", "batch_occupancy")


def config_of(name: str, kind: str = "pr"):
    file = kind if kind in OWN_FILE else "grpo"
    return config_files.load(f"config/{file}.py:{name}")


def one_prompt(dataset: str, folder: Path) -> str:
    """Write a data set of nothing but the longest training prompt of another into a new folder; return its path."""
    longest = max(load_prompts(dataset, "train"), key=lambda prompt: len(prompt.text))
    fields = longest.metadata | {"prompt": longest.text}
    if longest.sources:
        # The folder is another one, from which relative paths would lead elsewhere.
        fields["sources"] = [str(source.resolve()) for source in longest.sources]
    folder.mkdir()
    for split in ("train", "test"):
        path = folder / f"{split}_metadata.jsonl"
        path.write_text(json.dumps(fields) + "\n", encoding="utf-8")
    return str(folder)


def random_pairs(config, shapes: dict, folder: str) -> None:
    """Write pairs of noise to a folder and make it config.preferences.path."""
    config.preferences.path = folder
    count = config.sample.num_prompts_per_epoch
    rows = {}
    for name in preferences.LATENTS:
        rows[name] = torch.randn(count, *shapes["latents"])
    for name, column in preferences.COLUMNS.items():
        if name in shapes:
            rows[column] = torch.randn(count, *shapes[name])
    if "mask" in shapes:
        # Noise is above -9, so no token is padding.
        rows["mask"] = rows["mask"] > -9

    dtype = preferences.dtype_of(config.precision)
    constants = {
        "prompt": "a photo of a red circle",
        "negative_prompt": "",
        "winner_score": 1.0,
        "loser_score": 0.0,
        "model": config.model,
        "height": config.height,
        "width": config.width,
        "dtype": dtype,
    }
    for name, value in constants.items():
        rows[name] = [value] * count
    preferences.write_pairs(Path(folder, "train_00000.parquet"), rows, shapes, dtype)


def shared_folder() -> str:
    """Return a folder that all ranks know, and no other run."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", os.getpid())
    return f"{tempfile.gettempdir()}/bench_{run_id}"


def limit_memory(gib: float) -> None:
    """Forget the peak so far, and let the allocator have no more than this from now on; 0 = all."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    if gib:
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(gib * 2**30 / total, 1.0))


def process_s() -> float:
    """Return the seconds since this process began."""
    # The second field is the program's name in parentheses, which may hold spaces: the others are counted from its end.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began_s


class Collectives:
    """Count the seconds that this rank spends in the second epoch's collectives, with its waiting for other ranks.

    Collectives of the CPU are timed here, those of the GPU by its own clock, though other kernels may run beside them.
    `close` stands in for the leaving of the process group, which forgets them.
    """

    CALLS = "all_gather", "all_gather_object", "all_reduce", "barrier"  # of flow_grpo.base.distributed

    def __init__(self):
        self.since = 0.0
        self.figures = {}
        self.leave = distributed.close
        self.calls = []  # (start, seconds) of each; those of the GPU return at once
        os.environ["TORCH_NCCL_ENABLE_TIMING"] = "1"
        # One variable by two names: the first is that of releases after torch 2.11.
        os.environ["TORCH_FR_BUFFER_SIZE"] = "200000"
        os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "200000"
        for name in self.CALLS:
            call = getattr(distributed.dist, name)
            setattr(distributed.dist, name, partial(self._timed, call))

    def _timed(self, call, *args):
        started = time.time()
        call(*args)
        self.calls.append((started, time.time() - started))

    def close(self):
        """Add up the seconds and leave the process group."""
        if distributed.dist.is_initialized():
            self.figures["collectives/cpu_s"] = self._cpu_s()
            if torch.cuda.is_available():
                self.figures["collectives/gpu_s"] = self._gpu_s()
        self.leave()

    def _cpu_s(self) -> float:
        return sum(seconds for started, seconds in self.calls if started >= self.since)

    def _gpu_s(self) -> float:
        torch.cuda.synchronize()
        time.sleep(1)  # until NCCL's watchdog has read the clock of the last ones
        trace = pickle.loads(torch._C._distributed_c10d._dump_nccl_trace())
        milliseconds = 0.0
        for entry in trace["entries"]:
            if entry["time_created_ns"] >= 1e9 * self.since:
                milliseconds += entry.get("duration_ms", 0.0)
        return milliseconds / 1000


class Work:
    """Count the FLOP of a run by phase. Stands in for a script's add_gradients and its optimizer's steps."""

    def __init__(self, script, full_weights: bool, limit_gib: float, num_evaluated: int):
        self.phase = "rollout"
        self.num_evaluated = num_evaluated
        self.evaluation_s = {}  # by name
        self.flops = Counter()
        self.sizes = {}  # FLOP of a row by its number of text tokens
        self.limit_gib = limit_gib
        # Forward, gradients of what flows through, and of the weights where they are trained themselves.
        self.trained = 3 if full_weights else 2
        self.add_gradients = script.add_gradients
        self.move_weights = update.move_weights
        self.first_update_s = None
        self.collectives = Collectives()

    def counting(self, family: type[FlowModel]) -> type[FlowModel]:
        """Return the class of a model with forwards that are counted."""
        work = self

        class Counting(family):
            def velocity(self, x, t, condition, guidance_scale, size):
                work.count(self, x, condition, guidance_scale, size)
                return super().velocity(x, t, condition, guidance_scale, size)

        return Counting

    def count(self, model: FlowModel, x, condition: Condition, guidance_scale: float, size: Size) -> None:
        """Count a velocity. Before the first one, the memory that making random weights took is forgotten."""
        if torch.cuda.is_available() and not self.flops:
            limit_memory(self.limit_gib)
        texts = [condition]
        if model.is_guided(guidance_scale):
            texts.append(condition.negative)
        has_backward = self.phase == "update" and torch.is_grad_enabled()
        times = self.trained if has_backward else 1
        for text in texts:
            self.flops[self.phase] += times * len(x) * self.row(model, text, size)

    def row(self, model: FlowModel, text: Condition, size: Size) -> int:
        # Counting takes a forward of its own, so each width of text is counted once.
        if text.num_tokens not in self.sizes:
            self.sizes[text.num_tokens] = row_flops(model, text, size)
        return self.sizes[text.num_tokens]

    def counted_gradients(self, *args):
        self.phase = "update"
        self.add_gradients(*args)
        self.phase = "rollout"

    def time_evaluations(self, run, epoch: int, last: bool):
        """Draw and score prompts as a validation and as a test. Stands in for a run's last evaluation."""
        if not self.num_evaluated:
            return
        self.phase = "evaluation"
        split = Split("test", run.prompts.train[:1] * self.num_evaluated)
        for name, shortcuts in {"exact": EXACT, "fast": of_validation(run.config)}.items():
            sampler = evaluate.sampler_of(run, shortcuts)
            # The first one compiles.
            for _ in range(2):
                started = time.monotonic()
                with run.ema.applied():
                    evaluation.score(sampler, split, range(1))
                self.evaluation_s[name] = time.monotonic() - started

    def timed_step(self, run):
        """Make the optimizer's step; note when the first one ends, and the first epoch's last one."""
        self.move_weights(run)
        if self.first_update_s is None:
            self.first_update_s = process_s()
        if run.epoch == 0:
            self.collectives.since = time.time()


def epoch_metrics(script: str, config, family: type[FlowModel], limit_gib: float = 0.0, num_evaluated: int = 0) -> dict:
    """Run two epochs of a model and return the second one's times, rates and memory; {} on all ranks but the first.

    Args:
        num_evaluated: prompts of an evaluation after them, drawn as a validation and as a test; 0 = none.
    """
    config.num_epochs = 2
    config.logger = "none"  # no account is needed to measure
    config.eval_freq = 0
    config.save_freq = 0
    module = importlib.import_module(script)
    work = Work(module, config.lora.rank == 0, limit_gib, num_evaluated)
    evaluate.evaluate = work.time_evaluations
    update.move_weights = work.timed_step
    distributed.close = work.collectives.close
    with tempfile.TemporaryDirectory() as folder:
        config.output_dir = f"{folder}/runs"
        config.dataset = one_prompt(config.dataset, Path(folder, "prompts"))
        config.cache_dir = shared_folder() if config.cache_dir else ""
        if script.endswith("_dpo") and config.preferences.path:
            light = family.without_weights(config.model)
            random_pairs(config, light.row_shapes(training_size(config), config.text_tokens), folder)
        with registered(work.counting(family), loading.pipeline_name(config.model)):
            counted = update_wrapper(partial(work.counted_gradients), module.add_gradients)
            module.main(config, add_gradients=counted)
        rows = metric_rows(Path(config.output_dir))
    shutil.rmtree(shared_folder(), ignore_errors=True)
    return figures_of(rows, work) if rows else {}


def metric_rows(runs: Path) -> list[dict]:
    """Return the lines of metrics.jsonl of the runs in a folder."""
    rows = []
    for path in runs.glob("*/metrics.jsonl"):
        for line in path.read_text().splitlines():
            rows.append(json.loads(line))
    return rows


def figures_of(rows: list[dict], work: Work) -> dict:
    """Return the second epoch's times, memory and rates, and what both epochs' work says."""
    first, last = [row for row in rows if row["kind"] == "epoch"]
    figures = {
        "images": last["images"] - first["images"],
        "first_epoch_s": first["time/epoch_s"],
        "first_update_s": work.first_update_s,
    }
    for name, seconds in work.evaluation_s.items():
        figures[f"evaluation/{name}_s"] = seconds
    figures |= work.collectives.figures
    for gap in GAPS:
        gaps = [row[gap] for row in rows if gap in row]
        if gaps:
            figures[gap] = max(gaps)
    for name, value in last.items():
        if name.startswith(("time/", "memory/")) or name in KEPT:
            figures[name] = value
    # Both epochs do the same work, and all of it has been counted.
    for phase in ("rollout", "update"):
        if phase in work.flops:
            figures[f"{phase}_tflops"] = work.flops[phase] / 2e12 / last[f"time/{phase}_s"]
    return figures


def published() -> dict[str, float]:
    """Run bench_published.py in a process of its own, which gives all memory back; return what it measures."""
    done = subprocess.run([sys.executable, "benchmarks/bench_published.py"], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def changes_of(args) -> dict[str, str]:
    """Return the settings of --set by name, as text."""
    return dict(text.split("=", 1) for text in args.set)


def setup(args) -> tuple[str, type[FlowModel], ConfigDict]:
    """Return the script that is run, the model, and the config with its changes."""
    run = args.script.removeprefix("train_")
    last_word = run.rpartition("_")[2]
    kind = last_word if last_word in KINDS else ""
    name = run.removesuffix(f"_{kind}")
    if args.size == "full":
        family, config = full_setup(args, name, run, kind)
    elif name == "qwenimage":
        family = model_classes.by_name(name)
        task = "shapes_proxy" if kind == "refl" else "shapes"
        config = config_of(f"{task}_{run}{args.variants}", kind)
    else:
        config = config_of(f"{run_name(run)}{args.variants},smoke", kind)
        family = model_classes.of_folder(config.model)
    changes = {key: yaml.safe_load(value) for key, value in changes_of(args).items()}
    config.update_from_flattened_dict(changes)
    return f"train_qwenimage_{kind}".rstrip("_"), family, config


def full_setup(args, name: str, run: str, kind: str) -> tuple[type[FlowModel], ConfigDict]:
    """Return a model of the published sizes, with random weights unless there is a folder of them, and its config."""
    if args.folder:
        family = model_classes.by_name(name)
        folder = args.folder
    else:
        sizes = {name: {"num_layers": args.layers}} if args.layers else {}
        family = random_model(name, sizes)
        folder = random_folder(Path(tempfile.mkdtemp(), "model"))
    published_config = config_of(f"{run_name(run)}{args.variants}", kind)
    config = full_config(published_config, kind, edits=family.MOST_SOURCES > 0)
    config.model = folder
    return family, config


def save_nothing(*_) -> None:
    """Stand in for the saving of weights: full ones with their moments are hundreds of GB."""


def write_no_cards(_) -> list:
    """Stand in for the model cards: without weights there is nothing to describe."""
    return []


def main(args):
    script, family, config = setup(args)
    has_gpu = torch.cuda.is_available()
    what = {
        "script": args.script,
        "size": args.size,
        "device": torch.cuda.get_device_name() if has_gpu else "cpu",
        "torch": torch.__version__,
        "config": config.name,
        "gpus": int(os.environ.get("WORLD_SIZE", 1)),
    }
    command_line.collect_rarely()  # as a real run does
    loop.save = save_nothing
    loop.export = save_nothing
    model_card.write_cards = write_no_cards
    with contextlib.redirect_stdout(sys.stderr):  # the run's own lines
        theirs = published() if args.published else {}
        figures = epoch_metrics(script, config, family, args.limit_gib, args.evaluate) | theirs
    # Only the first rank has figures.
    if not figures:
        return
    if has_gpu:
        figures["memory/reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        figures["matrix_tflops"] = matrix_rate(torch.device("cuda")) / 1e12
    if theirs:
        trunks = config.sample.num_prompts_per_epoch * config.sample.num_images_per_prompt
        figures["prompt_s"] = figures["time/epoch_s"] / trunks
        figures["published/ratio"] = figures["published/prompt_s"] / figures["prompt_s"]
    print(json.dumps(what | changes_of(args) | figures))


def run_name(run: str) -> str:
    """Return the published run of a model and algorithm, such as pickscore_sd3_nft; "" = there is none."""
    names = []
    for module in (grpo, nft, dpo, refl):
        names += [known.__name__ for known in module.RUNS]
    for name in (f"pickscore_{run}", f"editreward_{run}"):
        if name in names:
            return name
    return ""


def script_names() -> list[str]:
    """Return the choices of --script: each model with each algorithm that has a published run."""
    scripts = []
    for model in (*registry.names(), *OTHERS):
        for kind in KINDS:
            name = "_".join(filter(None, [model, kind]))
            if run_name(name):
                scripts.append(f"train_{name}")
    return scripts


def check_flags(args: argparse.Namespace) -> None:
    """Raise UserError for a setting that is changed twice, or has no value."""
    command_line.check_set(args.set)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", choices=script_names(), default="train_qwenimage_pr")
    parser.add_argument("--size", choices=["tiny", "full"], default="tiny", help="tiny: a smoke run, but of Qwen-Image")
    parser.add_argument("--variants", default="", help="of the config, for instance ,guard,flash")
    parser.add_argument("--published", action="store_true", help="with the published per-step loop's time per trunk")
    parser.add_argument("--set", nargs="*", default=[], help="settings of the config, such as sample.batch_size=2")
    parser.add_argument("--evaluate", type=int, default=0, metavar="N", help="time an evaluation of N prompts, too")
    parser.add_argument("--layers", type=int, help="blocks of a smaller transformer, of Qwen-Image's classes")
    parser.add_argument("--folder", help="with weights of --size full, see tools/build_random_pipeline.py --published")
    parser.add_argument("--limit-gib", type=float, default=0.0, help="of the allocator, as on a smaller card; 0 = none")
    return parser


if __name__ == "__main__":
    main(command_line.arguments(parser(), check_flags))
