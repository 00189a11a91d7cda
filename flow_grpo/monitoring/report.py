"""What a run has come to, or what several have, on one page: report.html needs no server and no network.

    python -m flow_grpo.monitoring.report RUN [RUN ...] [--out report.html]

Everything is read from the runs' folders. One run's page is written into its folder.
"""

import argparse
import base64
import io
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import jinja2
from ml_collections import ConfigDict

from flow_grpo.base import folders
from flow_grpo.base.quoting import with_error
from flow_grpo.monitoring import health, metrics, plots
from flow_grpo.settings import command_line, older, table

GROUPS = {  # title -> what the names of its curves look like
    "Reward and evaluation": rf"(reward|eval|test|validation)/(?!.*{plots.SPREADS})[^/]+$",
    "Signal within groups": rf"(reward|eval)/.*{plots.SPREADS}",
    "Update": "policy_loss|ratio_|clip_fraction_|approx_kl|kl_reference|(old|reference)_distance|"
    "relative_velocity_norm|implicit_accuracy|winner_|loser_|grad_norm|weight_norm|learning_rate|advantage_",
    "Health": "health/|parity/log_prob_abs_diff_max$",
    "Speed and memory": "time/|images_per_s|memory/|batch_occupancy",
}
NOT_SHOWN = ("name", "run_name", "output_dir", "resume_from", "algorithm", "alert")  # they say nothing, or too much
MOST_EVALUATIONS = 12  # whose images are on the page
NUM_PROMPTS = 5  # best ones, and worst ones


@dataclass(frozen=True)
class Recorded:
    """A run as its folder tells it."""

    label: str
    folder: Path
    config: ConfigDict  # settings that are younger than the run have their defaults
    records: list[dict[str, float]]

    def lines(self, kind: str) -> list[dict[str, float]]:
        """The records of a kind."""
        return [record for record in self.records if record["kind"] == kind]


class Panel(NamedTuple):
    """A curve of every run."""

    name: str
    metric: metrics.Metric
    svg: str


class Table(NamedTuple):
    head: list[str]
    rows: list[list[str]]


def read(folder: Path, label: str) -> Recorded:
    """Raises UserError for what is no run's folder."""
    path = folder / "config.json"
    config = ConfigDict(older.with_defaults(folders.read_json(path), path))
    return Recorded(label, folder, config, plots.read_metrics(folder))


def panels(runs: Sequence[Recorded]) -> dict[str, list[Panel]]:
    """The curves of each group, and those of names that METRICS does not explain."""
    logged = {name: None for run in runs for record in run.records for name in record if name != "kind"}
    chosen = {title: sorted(filter(re.compile(form).match, logged)) for title, form in GROUPS.items()}
    records = [record for run in runs for record in run.records]
    chosen = {title: plots.rewards_alone(records, names) for title, names in chosen.items()}
    chosen["Without a row in metrics.py"] = [name for name in logged if not metrics.explain(name)]
    return {title: [panel(runs, name) for name in names] for title, names in chosen.items() if names}


def panel(runs: Sequence[Recorded], name: str) -> Panel:
    """One figure of all runs, and what the table of metrics says of it."""
    key, metric = metrics.explain(name) or (name, metrics.Metric("logged by a script of your own", ""))
    lines = [plots.curve(run.records, name, run.label, run.config.eval.best_by) for run in runs]
    limit = runs[0].config.health.get(name.removeprefix("health/")) if key == "health/<limit>" else None
    expect = f"{metric.expect}, which is {limit:g} (- - -)" if limit else metric.expect
    return Panel(name, metric._replace(expect=expect), plots.svg_panel(lines, limit))


def summary(runs: Sequence[Recorded]) -> Table:
    """A row per run: how far it is, and the score that chooses, before training, last and of the best policy."""
    head = ["run", "epochs", "hours", "score", "evaluation: before", "last", "best", "test: before", "last", "best"]
    return Table([*head, "epochs with an alarm"], [_summary_row(run) for run in runs])


def _summary_row(run: Recorded) -> list[str]:
    epochs = run.lines("epoch")
    hours = sum(record.get("time/epoch_s", 0.0) for record in epochs) / 3600
    score, alarmed = run.config.eval.best_by, sum(record.get("health/limits_exceeded", 0) > 0 for record in epochs)
    evaluations, tests, of_best = (_scores(run, kind) for kind in ("eval", "test", "test_best"))
    best = max((one for one in evaluations if math.isfinite(one[0])), default=None)
    chosen = [f"{with_error(*best[:2])} (after {best[2]} epochs)" if best else ""]
    ends = [with_error(*scores[i][:2]) if scores else "" for scores in (evaluations, tests) for i in (0, -1)]
    last = [with_error(*of_best[-1][:2]) if of_best else ""]
    columns = [*ends[:2], *chosen, *ends[2:], *last]
    return [run.label, f"{len(epochs)} of {run.config.num_epochs}", f"{hours:.3g}", score, *columns, str(alarmed)]


def _scores(run: Recorded, kind: str) -> list[tuple[float, float | None, int]]:
    """The score that chooses, its standard error and the epoch of each evaluation of a kind."""
    name = f"{kind}/{run.config.eval.best_by}"
    lines = [line for line in run.records if name in line]
    return [(line[name], line.get(f"{kind}/std_error"), int(line["epoch"])) for line in lines]


def alarms(run: Recorded) -> list[str]:
    """One sentence per alarm and stretch of epochs, as it was at the end of the stretch."""
    exceeded = {record["epoch"] for record in run.records if record.get("health/limits_exceeded")}
    epochs, sentences, count = health.by_epoch(run.records, run.config), [], 0
    for is_alarmed, group in groupby(epochs, key=lambda epoch: epoch.number in exceeded):
        stretch = [epoch.number + 1 for epoch in group]
        count += len(stretch)
        if is_alarmed:
            when = f"epoch {stretch[0]}" if len(stretch) == 1 else f"epochs {stretch[0]} to {stretch[-1]}"
            verdict = health.judge(epochs[:count], run.config.health)
            sentences += [f"{run.label}, {when}: {alarm.sentence}" for alarm in verdict.alarms]
    return sentences


def moments(run: Recorded) -> dict[str, list[tuple[str, str, str]]]:
    """Picture, prompt and reward of the panel's images at evenly spread evaluations, the first and the last among them,
    by the title of each."""
    sheets = list(plots.evaluations(run.folder).items())
    count = min(len(sheets), MOST_EVALUATIONS)
    sheets = [sheets[round(i * (len(sheets) - 1) / max(count - 1, 1))] for i in range(count)]
    return {
        f"after {epochs} epochs": [(data_address(image), *rest) for image, *rest in plots.panel_pictures(sheet)]
        for epochs, sheet in sheets
    }


def data_address(picture: plots.Image.Image) -> str:
    """A picture as the address of itself."""
    stream = io.BytesIO()
    picture.save(stream, format="webp", quality=80)
    return "data:image/webp;base64," + base64.b64encode(stream.getvalue()).decode()


def prompts(run: Recorded) -> dict[str, Table]:
    """The best and the worst of the last evaluation's prompts, with their reward before training."""
    files = sorted((run.folder / "images").glob("eval_*.json"))
    if not files:
        return {}
    first, last = ({k: float(v) for k, v in json.loads(files[i].read_text())["scores"].items()} for i in (0, -1))
    order = sorted((prompt for prompt in last if math.isfinite(last[prompt])), key=last.get)
    chosen = {"Best prompts": order[::-1][:NUM_PROMPTS], "Worst prompts": order[:NUM_PROMPTS]}
    head = ["prompt", "before", "last"]
    return {
        title: Table(head, [[p, f"{first.get(p, math.nan):.3f}", f"{last[p]:.3f}"] for p in names])
        for title, names in chosen.items()
        if names
    }


def changed_settings(runs: Sequence[Recorded]) -> Table:
    """Settings in which a run differs from the defaults; no secret among them."""
    defaults = table.flat(ConfigDict(json.loads(json.dumps(table.default_config().to_dict()))))
    columns = defaults, *(table.flat(run.config) for run in runs)
    keys = sorted({key for column in columns for key in column})
    keys = [key for key in keys if key not in NOT_SHOWN and not key.endswith("token")]
    rows = [[key, *("" if (value := values.get(key)) is None else str(value) for values in columns)] for key in keys]
    rows = [row for row in rows if any(value != row[1] for value in row[2:])]
    return Table(["setting", "default", *(run.label for run in runs)], rows)


def page(runs: Sequence[Recorded]) -> str:
    """The whole page. Everything that comes from a run is escaped."""
    template = Path(__file__).parents[1] / "assets" / "report.html"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(template.read_text()).render(
        title=" · ".join(run.label for run in runs),
        summary=summary(runs),
        groups=panels(runs),
        alarms=[sentence for run in runs for sentence in alarms(run)],
        runs=[(run, moments(run), prompts(run)) for run in runs],
        settings=changed_settings(runs),
    )


def write(runs: Sequence[Path], file: Path) -> None:
    """Draw the page of some runs by their names, or by their paths where two have the same; whoever looks at it
    meanwhile sees the old one, or the new one."""
    names = [folder.resolve().name for folder in runs]
    labels = [str(folder) if names.count(name) > 1 else name for folder, name in zip(runs, names)]
    folders.write_text(file, page(list(map(read, runs, labels))))


def write_own(run_folder: Path) -> None:
    """Write the page of one run into its folder."""
    write([run_folder], run_folder / "report.html")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--out", type=Path, help="default: report.html in the folder of one run, or in this directory")
    args = parser.parse_args(arguments)
    out = args.out or (args.runs[0] if len(args.runs) == 1 else Path()) / "report.html"
    write(args.runs, out)
    sys.stdout.write(f"{out}\n")


if __name__ == "__main__":
    with command_line.sentences():
        main()
