"""report.html: what is on the page, and that nothing leaves it."""

import base64
import io
import itertools
import json
import re
import shutil
import subprocess
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from small import change_json, config_of, random_images

from flow_grpo.base.errors import UserError
from flow_grpo.base.metric_table import METRICS, explain
from flow_grpo.monitoring import plots, report, run_history
from flow_grpo.monitoring.dashboard import Dashboard

NASTY = '<script>alert("a")</script> & <img src=x onerror=alert(1)>'
PROMPTS = [NASTY, "a red circle", "two blue squares"]
LAST = "data-title"


class Page:
    """A page, which must be well-formed, as a tree of elements, and its tables as rows of cells."""

    def __init__(self, file):
        self.text = file.read_text()
        closed = re.sub(r"<((?:meta|img|input)\b[^>]*)>", r"<\1/>", self.text).replace(" hidden>", ' hidden="">')
        self.tree = ElementTree.fromstring(re.sub(' xmlns="[^"]*"', "", closed))
        self.rows = [list(map(text_of, row)) for row in self.tree.iter("tr")]

    def all(self, tag):
        return [element.attrib for element in self.tree.iter(tag)]

    def texts(self, tag):
        return list(map(text_of, self.tree.iter(tag)))


def text_of(element):
    return "".join(element.itertext())


def record(folder, learning_rate, evaluated):
    """A run's folder as a run of ten epochs leaves it, evaluated before some of them."""
    config = config_of("shapes_qwenimage", folder.parent, logger="none", train__learning_rate=learning_rate)
    config.num_epochs = 10
    folder.mkdir()
    board = Dashboard(folder, config, is_main=True)
    for epoch in range(10):
        if epoch in evaluated:
            board.log("eval", {"eval/avg": epoch / 10, "eval/shapes": epoch / 10}, epoch=epoch, step=epoch)
            board.log_images(random_images(3, 32, epoch), PROMPTS, [0.1, 0.2, 0.3], epoch=epoch, step=epoch)
        board.log("update", {"ratio_std": 2e-4 * epoch, "grad_norm": 0.5, "mine": epoch}, epoch=epoch, step=epoch)
        values = {"reward/avg": learning_rate * epoch, "health/reward_drop": 1.0 * epoch, "time/rollout_s": 2.0 + epoch}
        values |= {"reward/zero_std_share": float(epoch >= 6), "health/limits_exceeded": float(epoch >= 8)}
        values |= {"steps/reward/0": 0.5, "steps/reward/1": learning_rate, "steps/mine": epoch}
        board.log("epoch", values, epoch=epoch, step=epoch)
    board.finish()
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [record(folder / "first", 0.01, [0, 4, 8]), record(folder / "second<b>", 0.02, [0, 8])]


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    """The page that compares them."""
    file = tmp_path_factory.mktemp("page") / "report.html"
    report.main([*map(str, runs), "--out", str(file)])
    return Page(file)


def test_a_run_without_a_tracker_leaves_its_own_page(runs):
    names = {"config.json", "images", "metrics.jsonl", "report.html", "reward.png", "samples.png"}
    assert {path.name for path in runs[0].iterdir()} == names
    page = Page(runs[0] / "report.html")
    assert page.texts("h1") == ["first"]
    # This run has evaluations and no tests.
    assert ["first", "10 of 10", "00:00", "shapes", "0", "0.8", "0.8 (after 8 epochs)", "", "", "", "2"] in page.rows
    assert page.all("input")[0]["max"] == "2"


def test_what_a_user_puts_beside_the_sheets_is_left_out(runs, tmp_path):
    images = shutil.copytree(runs[0], tmp_path / "run") / "images"
    (images / "eval_best.png").write_bytes(b"")
    (images / "eval_000004.json").unlink()
    report.main([str(images.parent)])
    assert Page(images.parent / "report.html").all("input")[0]["max"] == "1"


def test_nothing_on_the_page_leaves_it_and_prompts_are_text(page):
    num_addresses = 0
    for part in page.tree.iter():
        for key, value in part.attrib.items():
            name = key.rpartition("}")[2]
            assert not name.startswith("on"), "no handler of an event"
            if name in ("src", "href", "action", "data"):
                assert value.startswith(("#", "data:image/webp;base64,"))
                num_addresses += 1
    assert num_addresses > 20
    assert "url(" not in page.text.replace("url(#", "")
    assert "@import" not in page.text
    assert len(page.all("script")) == 1
    assert page.all("link") == page.all("iframe") == []
    assert list(map(str.strip, page.texts("figcaption"))).count(f"{NASTY} 0.100") == 5
    assert page.texts("h1") == ["first · second<b>"]


def test_every_curve_has_what_is_healthy_beside_it_and_lines_that_differ_without_colour(page):
    curves = (*METRICS, "mine")
    titles = [title for title in page.texts("h3") if "/" in title or title in curves]
    assert {"reward/avg", "eval/avg", "ratio_std", "health/reward_drop", "time/rollout_s (s)", "mine"} < set(titles)
    text = " ".join(page.texts("p"))
    assert METRICS["ratio_std"].expect in text
    assert "`" not in text, "a table's marks of code"
    assert "which is 3 (- - -)" in text, "the limit of health/reward_drop"
    assert "Constant, or logged once: grad_norm 0.5" in text
    # Two keys, each with a line for a run, and the overview's curves, whose name is no metric's.
    assert page.texts("h3")[0] == "shapes"
    assert len(page.all("svg")) == len(titles) + 2 * 2 + 1
    assert [title for title in titles if title.startswith("steps/")] == ["steps/reward", "steps/mine"]
    assert "steps/mine over epochs" in page.text, "a fork's own, which has no number of a step"
    panel = page.text.partition("steps/reward over denoising steps")[2].partition("</svg>")[0]
    assert "denoising step" in panel
    panel = page.text.partition("reward/avg over epochs")[2].partition("</svg>")[0]
    blue = [line for line in panel.split("<path ") if "stroke: #2f6db5" in line]
    orange = [line for line in panel.split("<path ") if "stroke: #e07b28" in line]
    assert "stroke-dasharray" not in "".join(blue)
    assert "stroke-dasharray" in "".join(orange)
    for number, label in enumerate(["first", "second<b>"] * 2):
        assert page.texts("span")[number].endswith(label)


def test_the_slider_has_the_panels_of_all_evaluations_with_their_pixels(page):
    first, second = page.all("input")
    assert (first["min"], first["max"], first["value"]) == ("0", "2", "2")
    assert (second["min"], second["max"], second["value"]) == ("0", "1", "1")
    assert page.texts("output") == ["after 8 epochs"] * 2
    shown = [attributes for attributes in page.all("div") if LAST in attributes]
    expected = [(0, True), (4, True), (8, False), (0, True), (8, False)]
    for part, (epochs, is_hidden) in zip(shown, expected, strict=True):
        assert part[LAST] == f"after {epochs} epochs"
        assert ("hidden" in part) == is_hidden
    before = 2 * len(PROMPTS)  # pictures side by side, and the second prompt's after 4 epochs
    picture = page.all("img")[before + 4]["src"].partition("base64,")[2]
    mean = Image.open(io.BytesIO(base64.b64decode(picture))).resize((1, 1), Image.Resampling.BOX).getpixel((0, 0))
    torch.testing.assert_close(torch.tensor(mean) / 255, random_images(3, 32, 4)[1].mean((1, 2)), atol=0.02, rtol=0)


TO_THE_LEFT = """<script>
const slider = document.querySelector("input"), root = document.documentElement;
slider.value = 0;
slider.dispatchEvent(new Event("input"));
const shown = [...document.querySelector(".run").querySelectorAll(".images")].map(part => part.offsetHeight > 0);
const said = [shown, document.querySelector("output").textContent, root.scrollWidth <= innerWidth];
document.querySelector("img").click();
said.push(dialog.open, dialog.firstChild.src === document.querySelector("img").src);
document.querySelector("img").click();
said.push(dialog.open);
document.body.textContent = JSON.stringify(said);
</script></body>"""


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium in the PATH")
@pytest.mark.parametrize("width", [1300, 400])
def test_in_a_browser_the_slider_moves_a_picture_opens_and_nothing_is_wider_than_the_window(width, page, tmp_path):
    """Nor does anything stand on its console."""
    file = tmp_path / "moved.html"
    file.write_text(page.text.replace("</body>", TO_THE_LEFT))
    flags = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={tmp_path}", "--dump-dom"]
    flags += ["--enable-logging=stderr"]
    done = subprocess.run(
        ["chromium", "--headless=new", f"--window-size={width},900", *flags, file.as_uri()],
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    assert '[[true,false,false],"after 0 epochs",true,true,true,false]' in done.stdout
    assert "CONSOLE" not in done.stderr


def test_tables_say_settings_and_alarms(page):
    labels = [caption.split()[0] for caption in page.texts("figcaption")]
    assert labels[:4] == ["first", "second<b>"] * 2, "pictures of a prompt side by side"
    assert ["setting", "default", "first", "second<b>"] in page.rows
    assert ["train.learning_rate", "0.0003", "0.01", "0.02"] in page.rows
    for row in page.rows:
        assert row[0] not in ("seed", "output_dir", "train.beta")
    sentence, other = page.texts("li")
    assert other.startswith("second<b>, epochs 9 to 10: ")
    assert sentence.startswith("first, epochs 9 to 10: ")
    assert "config.health" in sentence


def test_alarms_are_those_that_the_run_itself_raised(runs, tmp_path):
    """Whatever its figures and the limits of today say: it did not compare all of its evaluations."""
    folder = shutil.copytree(runs[0], tmp_path / "run")
    change_json(folder / "config.json", health={"reward_drop": 100.0})
    board = Dashboard(folder, run_history.read_run(folder, "run").config, is_main=True)
    board.truncate(8)
    said = ["the evaluation has fallen", "grad_norm is nan, no finite number"]
    for epoch, evaluation in ((8, 0.9), (9, 0.1)):
        board.log("eval", {"eval/avg": evaluation, "eval/std_error": 0.01}, epoch=epoch, step=epoch)
        board.log("epoch", {"health/limits_exceeded": 2.0}, epoch=epoch, step=epoch, alarms=said)
    assert report.alarms(run_history.read_run(folder, "run")) == [
        "run, epochs 9 to 10: the evaluation has fallen",
        "run, epochs 9 to 10: grad_norm is nan, no finite number",
    ]


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"reward_drop": 9.0, "eval_drop": 1.0}, "reward_drop is 9 (limit 3, config.health.reward_drop)"),
        ({}, "a limit of config.health was exceeded, or a figure was no finite number"),
    ],
)
def test_alarms_of_before_sentences_were_kept_have_their_figures(figures, said, runs, tmp_path):
    folder = shutil.copytree(runs[0], tmp_path / "run")
    board = Dashboard(folder, run_history.read_run(folder, "run").config, is_main=True)
    board.truncate(0)
    values = {f"health/{name}": value for name, value in figures.items()}
    board.log("epoch", {"health/limits_exceeded": 1.0, **values}, epoch=0, step=0)
    assert report.alarms(run_history.read_run(folder, "run")) == [f"run, epoch 1: {said}"]


CELL = dict(caption="a", reward="0.1", box=[14, 14, 142, 142])


@pytest.mark.parametrize(
    ("cells", "problem"),
    [
        (3, "cells is 3"),
        ([3], "cells is"),
        ([{}], "missing 3 required"),
        ([CELL | {"caption": 3}], "caption is 3"),
        ([CELL | {"box": "all"}], "box is 'all'"),
        ([CELL | {"box": [0, 0, 1]}], "box is .* on a page of"),
        ([CELL | {"box": [9, 0, 3, 3]}], "box is .* on a page of"),
        ([CELL | {"box": [0, 0, 3, 10**6]}], "box is .* on a page of"),
    ],
)
def test_a_damaged_sheet_is_one_sentence(cells, problem, runs, tmp_path):
    folder = shutil.copytree(runs[0], tmp_path / "run")
    file = folder / "images" / "eval_000004.json"
    change_json(file, cells=[CELL])
    report.main([str(folder)])
    change_json(file, cells=cells)
    with pytest.raises(UserError, match=f"{file} is damaged: .*{problem}"):
        report.main([str(folder)])


def test_a_picture_that_is_none_and_figures_that_no_axis_holds(runs, tmp_path):
    folder = shutil.copytree(runs[0], tmp_path / "run")
    lines = [dict(kind="epoch", epoch=epoch, step=0) | {"reward/avg": 0.5} for epoch in range(3)]
    lines[0]["reward/avg"] = -1e308
    lines[1]["reward/avg"] = 1e308
    lines.append(dict(kind="epoch", epoch=10**25))
    lines.append(dict(kind="epoch", epoch=3, step=10**400))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(run_history.read_run(folder, "run").records) == 3
    report.main([str(folder)])
    sheet = folder / "images" / "eval_000004.png"
    sheet.write_bytes(b"damaged")
    with pytest.raises(UserError, match=f"{sheet} is no picture of a format"):
        report.main([str(folder)])


def test_a_second_run_of_one_seed_is_no_run_of_another_seed(runs, tmp_path):
    histories = []
    for name, seed in (("first", 1), ("again", 1), ("other", 2)):
        folder = shutil.copytree(runs[0], tmp_path / name)
        change_json(folder / "config.json", seed=seed, run_name=name)
        histories.append(run_history.read_run(folder, name))
    groups = run_history.grouped_by_seed(histories)
    assert list(map(run_history.group_label, groups)) == ["mean of first, other", "again"]
    assert [row[0] for row in run_history.summary(histories[:2]).rows] == ["first", "again"]


def test_runs_that_differ_in_their_seed_alone_have_a_mean_of_the_seeds_and_curves_are_drawn_for_print(runs, tmp_path):
    for seed in (1, 2):
        folder = shutil.copytree(runs[0], tmp_path / f"seed{seed}")
        change_json(folder / "config.json", seed=seed)
        text = (folder / "metrics.jsonl").read_text()
        (folder / "metrics.jsonl").write_text(text.replace('"eval/avg": 0.8', f'"eval/avg": 0.{seed}'))
    report.main([*map(str, (tmp_path / "seed1", tmp_path / "seed2", runs[1])), "--out", str(tmp_path / "all.html")])
    page = Page(tmp_path / "all.html")
    rows = page.rows
    labels = [text.split("\n")[-1].strip() for text in page.texts("span")]
    assert labels == ["mean of seed1, seed2", "second<b>", "seed1", "seed2", "second<b>"]
    assert rows[4][:6] == ["mean of seed1, seed2", "", "", "shapes", "0", "0.15 ± 0.05"]
    report.main([str(runs[0]), "--out", str(tmp_path / "reward.pdf")])
    assert (tmp_path / "reward.pdf").read_bytes().startswith(b"%PDF")
    for out in ([], ["--out", str(tmp_path / "reward.svg")]):
        with pytest.raises(UserError, match="several runs need a page, such as --out"):
            report.main([*map(str, runs), *out])


def test_the_folder_of_a_page_is_made_and_a_folder_in_the_place_of_the_page_is_refused(runs, tmp_path):
    file = tmp_path / "new" / "folder" / "reward.svg"
    report.main([str(runs[0]), "--out", str(file)])
    assert "<svg" in file.read_text()
    for out, words in ((tmp_path, "is a folder; name a file in it"), (file / "all.html", "is no folder")):
        with pytest.raises(UserError, match=f"--out: .* {words}"):
            report.main([str(runs[0]), "--out", str(out)])


def test_a_mean_of_curves_is_at_the_epochs_that_all_have_with_its_standard_error():
    errors = np.full(3, np.nan)
    first = plots.Line("a", np.array([0.0, 4, 8]), np.array([0.1, 0.2, 0.5]), errors)
    second = plots.Line("b", np.array([0.0, 6, 8]), np.array([0.3, 0.9, 0.1]), errors)
    mean = plots.mean_curve([first, second], "both")
    assert mean.epochs.tolist() == [0, 8]
    np.testing.assert_allclose(mean.values, [0.2, 0.3])
    np.testing.assert_allclose(mean.errors, [0.1, 0.2])
    assert plots.mean_curve([first, second._replace(epochs=second.epochs + 1)], "both") is None


def test_the_page_of_one_run_begins_with_its_pictures_before_and_after_and_its_rewards(runs):
    page = Page(runs[0] / "report.html")
    assert "<body>" in page.text
    assert 'DiffusionPipeline.from_pretrained(resolve("flow_grpo/assets/' in page.text
    order = [page.text.index(part) for part in ("Before and after", ">Rewards<", "<nav>")]
    assert order[2] < order[0] < order[1]
    history = run_history.read_run(runs[0], "first")
    evaluated = report.moments(history)
    pairs = report.before_and_after(evaluated)
    assert [prompt for prompt, _, _ in pairs] == PROMPTS
    for row, (_, before, after) in enumerate(pairs):
        assert before == evaluated["after 0 epochs"][row]
        assert after == evaluated["after 8 epochs"][row]
    assert report.before_and_after({"after 0 epochs": evaluated["after 0 epochs"]}) == []
    overview = report.overview([history])
    assert [label for _, label in overview.key] == ["training", "evaluation", "test"]
    assert [name for name, _ in overview.panels] == ["shapes"]


def test_of_equal_evaluations_the_first_one_is_the_best_as_in_best(runs, tmp_path):
    folder = shutil.copytree(runs[0], tmp_path / "run")
    metrics = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(metrics.replace('"eval/avg": 0.4', '"eval/avg": 0.8'))
    run = run_history.read_run(folder, "run")
    assert "0.8 (after 4 epochs)" in run_history.summary([run]).rows[0]


def test_a_token_is_no_setting_to_be_shown_and_what_is_no_run_is_refused(runs, tmp_path):
    folder = shutil.copytree(runs[0], tmp_path / "first")
    secret = dict(token="secret-word", a=1)
    change_json(folder / "config.json", reward={"args": {"judge": secret}}, custom=secret)
    report.main([str(folder)])
    text = (folder / "report.html").read_text()
    assert "custom.a" in text
    assert "secret-word" not in text
    with pytest.raises(ValueError, match=f"{tmp_path}/config.json cannot be read"):
        report.main([str(tmp_path)])


def test_a_name_has_the_row_that_fits_it_best():
    rows = {
        "reward/avg": "reward/avg",
        "reward/ocr": "reward/<name>",
        "reward/ocr_group_std": "reward/<name>_group_std",
        "health/reward_drop": "health/reward_drop",
        "test/shapes_accuracy/colors": "test/<name>/<tag>",
    }
    for name, row in rows.items():
        assert explain(name) is METRICS[row], name
    assert explain("rewards") is None
    assert explain("eval/ocr_masked_share").expect == "0"


def test_a_name_of_ones_own_or_misspelt_has_no_row():
    """Whatever it begins with: a row with <name> is about the rewards that were measured, and no other has a gap."""
    measured = ["shapes", "ocr"]
    scores = "shapes", "ocr", "shapes_accuracy", "avg"
    kinds = "reward", "eval", "test", "test_best"
    for kind, score in itertools.product(kinds, scores):
        assert explain(f"{kind}/{score}", measured), (kind, score)
    for kind, name in itertools.product(kinds, ("mine", "shaped", "group_sdt", "mine_group_std", "mine/x")):
        assert explain(f"{kind}/{name}", measured) is None, (kind, name)
    for name in ("health/mine", "health/reward_dorp", "validation/mine", "time/mine", "parity/mine", "mine"):
        assert explain(name, measured) is None, name
    assert explain("validation/implicit_accuracy")
    assert explain("health/mine") is explain("validation/mine") is None, "of any rewards"


def test_a_curve_over_whole_numbers_is_drawn_as_over_the_same_floats():
    values = np.array([0.5, 0.25, 0.125])
    steps = np.arange(3)
    panels = []
    for positions in (steps, steps.astype(np.float64)):
        line = plots.Line("a", positions, values, np.zeros(3))
        panels.append(plots.svg_panel([line], axis="denoising step"))
    assert panels[0] == panels[1]
    moved = plots.Line("a", 2.0 * steps, values, np.zeros(3))
    assert plots.svg_panel([moved], axis="denoising step") != panels[0]


def test_every_metric_has_a_meaning_and_what_to_expect():
    for name, metric in METRICS.items():
        assert metric.meaning, name
        assert metric.expect, name
