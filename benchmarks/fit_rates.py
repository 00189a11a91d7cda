"""Fit the constants of flow_grpo/plan/estimate.py to the runs of assets/measured.json, and say how far off it is.

    python benchmarks/fit_rates.py           write assets/rates.json and print the table of planned against measured
    python benchmarks/fit_rates.py --check   print the table alone

The error of a row is that of the constants fitted to all rows. In brackets is that of constants fitted to all others,
which is what a run that nobody has measured may expect.
"""

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("", "tools"))

from random_model import random_model

from flow_grpo.algorithms.batch_plan import plan_batches
from flow_grpo.command_line import command_line
from flow_grpo.data.prompts import load_prompts
from flow_grpo.plan import estimate, measured
from flow_grpo.settings.sections import Config

# Where a fit begins, and what it is drawn to where no row says otherwise.
PRIOR = estimate.Rates(
    tflops=700,
    half_width=800,
    exact=1.2,
    frozen=1.3,
    trained=1.2,
    recomputed=0.4,
    adapter=1.2,
    fp8=0.75,
    flash_4=0.9,
    eager=1.6,
    full_weights=1.1,
    offloaded=2.3,
    ms_bf16=0.5,
    ms_fp8_weights=1,
    ms_nf4=4,
    s_decode=0.025,
    kept_half=0.9,
    kept_all=1.2,
    kept_block=1.5,
    gib_fixed=2.5,
    reserved=1.13,
)
# An error of this much weighs as much as a constant that is off its prior by PRIOR_WIDTH.
ERROR_WIDTH = 0.07
PRIOR_WIDTH = 0.4
NUM_STEPS = 40
SUFFIXES = "_pr", "_nft"


class Planned(NamedTuple):
    """A measured run with what its formula needs."""

    row: measured.Row
    config: Config
    work: estimate.Work

    def images_per_s(self, rates: estimate.Rates) -> float:
        return self.work.num_images / estimate.epoch_s(self.config, self.work, rates)

    def gib(self, rates: estimate.Rates) -> float:
        used = estimate.gib(self.config, self.work, rates)
        return used * rates.reserved if self.row.reserved else used

    def errors(self, rates: estimate.Rates) -> list[float]:
        """Logarithms of planned over measured: rate, then memory, as far as they were measured."""
        errors = []
        if self.row.images_per_s:
            errors.append(math.log(self.images_per_s(rates) / self.row.images_per_s))
        if self.row.gib:
            errors.append(math.log(self.gib(rates) / self.row.gib))
        return errors


def planned(row: measured.Row) -> Planned:
    """Count the forwards of a measured run, and the cost of one."""
    config = replace(row.config(), text_tokens=row.text_tokens, dry_run=row.gpus)
    name = row.run.partition(",")[0].split("_", 1)[1]
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    family = random_model(name)
    prompt = load_prompts("dataset/edits", "train")[0] if family.MOST_SOURCES else None
    return Planned(row, config, estimate.work_of(config, plan_batches(config, row.gpus), family, prompt))


def fit(runs: list[Planned]) -> estimate.Rates:
    """Fit the constants' logarithms by damped least squares."""
    prior = np.log(PRIOR)
    position = prior.copy()

    def residuals(position: np.ndarray) -> np.ndarray:
        rates = estimate.Rates(*np.exp(position))
        errors = []
        for run in runs:
            errors += run.errors(rates)
        return np.concatenate([np.array(errors) / ERROR_WIDTH, (position - prior) / PRIOR_WIDTH])

    for _ in range(NUM_STEPS):
        now = residuals(position)
        columns = []
        for index in range(len(position)):
            moved = position.copy()
            moved[index] += 1e-4
            columns.append((residuals(moved) - now) / 1e-4)
        step = np.linalg.lstsq(np.stack(columns, axis=1), -now, rcond=None)[0]
        share = 1.0
        while share > 1e-3 and np.sum(residuals(position + share * step) ** 2) > np.sum(now**2):
            share /= 2
        position = position + share * step
    return estimate.Rates(*(float(f"{value:.3g}") for value in np.exp(position)))


def table(runs: list[Planned], rates: estimate.Rates) -> list[str]:
    """Lines of a Markdown table: each run, planned and measured, with both errors."""
    lines = [
        "| run | images/s planned, measured | off | GiB planned, measured | off |",
        "|---|---|---|---|---|",
    ]
    for number, run in enumerate(runs):
        others = fit(runs[:number] + runs[number + 1 :])
        settings = " ".join(f"{key}={value}" for key, value in run.row.settings.items())
        cells = [f"`{run.row.run}`" + (f" `{settings}`" if settings else "")]
        cells += _cells(run.images_per_s(rates), run.images_per_s(others), run.row.images_per_s)
        cells += _cells(run.gib(rates), run.gib(others), run.row.gib)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cells(value: float, of_others: float, known: float | None) -> list[str]:
    if not known:
        return [f"{value:.3g}", ""]
    return [f"{value:.3g}, {known:g}", f"{value / known - 1:+.0%} ({of_others / known - 1:+.0%})"]


def main(args: argparse.Namespace) -> None:
    runs = [planned(row) for row in measured.rows() if not row.out_of_memory]
    rates = estimate.rates() if args.check else fit(runs)
    if not args.check:
        estimate.FILE.write_text(json.dumps({"rates": rates._asdict()}, indent=1) + "\n")
    print("\n".join(table(runs, rates)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="with the constants that are stored")
    main(command_line.arguments(parser))
