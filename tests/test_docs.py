"""Every code block of README and docs/ is run, or its commands are looked up and its Python is read."""

import json
import os
import re
import subprocess
import sys

import commands
import fit_table
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import split_prompts
import torch
import train_qwenimage
import train_qwenimage_nft
from small import ROOT, config_of, lines_of

from flow_grpo import prompts, rewards, settings
from flow_grpo.diffusers_patch import models

PAGES = [ROOT / "README.md", ROOT / "scripts/reproduce/README.md", *sorted((ROOT / "docs").glob("*.md"))]
RECIPES = sorted((ROOT / "scripts/reproduce").glob("*.sh"))
SHELL = [*RECIPES, *sorted((ROOT / "scripts/single_node").glob("*.sh"))]


RUN = {  # Python blocks, and the tests that run them; another one is marked "<!-- not run: why -->"
    "README.md": ["test_the_examples_run"] * 2,  # of test_readme.py
    "docs/own_config.md": ["own_configs"],
    "docs/rewards.md": ["test_the_reward_of_a_notebook_trains"],
    "docs/your_own.md": [f"test_the_{what}_of_ones_own" for what in ("reward", "loss", "model")],
}


@pytest.fixture(scope="module")
def own_configs(tmp_path_factory):
    """docs/own_config.md's file, where its commands are to find it."""
    path = tmp_path_factory.mktemp("experiments") / "mine.py"
    (code,) = python_of("own_config")
    path.write_text(code)
    return {"~/experiments/mine.py": path}


def python_of(page):
    """The Python blocks of a page of docs/."""
    return [code for language, code in commands.blocks((ROOT / f"docs/{page}.md").read_text()) if language == "python"]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_what_the_commands_of_a_page_name_is_there(page, own_configs):
    for language, text in commands.blocks(page.read_text()):
        if language == "python":
            compile(text, page.name, "exec")
            continue
        assert language in ("", "bash"), "another language needs another check"
        for words in commands.commands(text):
            commands.check(words, own_configs)


def test_every_python_block_is_run_by_a_test_or_says_why_not():
    for page in PAGES:
        text = page.read_text()
        unmarked = re.findall(r"(?<!-->\n)^```python$", text, re.MULTILINE)
        assert len(unmarked) == len(RUN.get(str(page.relative_to(ROOT)), [])), page
    tests = "".join((ROOT / "tests" / name).read_text() for name in ("test_docs.py", "test_readme.py"))
    assert all(f"def {name}" in tests for names in RUN.values() for name in names)


def test_shell_scripts_of_several_machines_say_what_they_miss():
    for path in (ROOT / "scripts").glob("*/*.sh"):
        assert subprocess.run(["bash", "-n", path], check=False).returncode == 0, path
    environment = {"PATH": os.environ["PATH"]}
    for missing, given in (("NODES", {}), ("NODE_RANK", {"NODES": "2"}), ("HEAD", {"NODES": "2", "NODE_RANK": "0"})):
        done = subprocess.run(
            ["bash", "scripts/multi_node/torchrun.sh"],
            cwd=ROOT,
            env=environment | given,
            capture_output=True,
            text=True,
        )
        assert done.returncode != 0
        assert f"{missing}: " in done.stderr


def test_shell_scripts_name_settings_that_there_are_and_plan_on_their_gpus():
    assert len(SHELL) >= 11
    for path in SHELL:
        ((program, *arguments),) = commands.of_shell_script(path)
        assert program == "torchrun"
        assert arguments[-1] == "$@", f"{path.name} takes further settings"
        commands.check_python(arguments, {})
        assert path.stat().st_mode & 0o111, f"{path.name} is to be executable"


@pytest.mark.parametrize(
    "command",
    [
        "python scripts/train_sd3.py --config config/grpo.py:pickscore_sd4",
        "python scripts/train_sd3.py --config.train.learning_rat=1",
        "torchrun --nproc_per_node=7 scripts/train_sd3.py",
        "python scripts/evaluate.py runs/x --guidance-scale 1",
        "python scripts/evaluatee.py runs/x",
        "python -m flow_grpo.metricss",
        "make demmo",
        "tochrun scripts/train_sd3.py",
    ],
)
def test_a_command_that_names_what_is_not_there_is_seen(command):
    (words,) = commands.commands(command)
    with pytest.raises((AssertionError, ValueError)):
        commands.check(words, {})


def test_every_recipe_is_in_the_table_with_a_level_and_only_what_was_run_is_claimed():
    rows = re.findall(
        r"^\| `(\w+\.sh)` \| (.+) \| ([\w ]+) \|$", (ROOT / "scripts/reproduce/README.md").read_text(), re.M
    )
    assert len(rows) == len(RECIPES)
    assert {name for name, _, _ in rows} == {path.name for path in RECIPES}
    assert {level for _, _, level in rows} <= {"full size", "tiny"}, "a curve needs a record"
    assert all("arXiv" in result or "not available" in result for _, result, _ in rows)


def test_the_tables_of_what_fits_are_the_programs():
    page = fit_table.PAGE.read_text()
    written = page.split(fit_table.BEGIN)[1].split(fit_table.END)[0]
    assert written == fit_table.tables(fit_table.recorded_lines()), "run python benchmarks/fit_table.py"


def test_the_reward_of_ones_own_scores(tmp_path, monkeypatch):
    reward, *_ = python_of("your_own")
    (tmp_path / "brightness.py").write_text(reward)
    monkeypatch.setattr(rewards, "__path__", [*rewards.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "flow_grpo.rewards.brightness", raising=False)  # of another test
    try:
        score = rewards.load("brightness", torch.device("cpu"), {"gamma": 2.0})
        images = torch.stack([torch.zeros(3, 8, 8), torch.full((3, 8, 8), 0.5)])
        assert score(images, ["", ""], [{}, {}]).tolist() == [0.0, 0.25]
        assert "brightness" in rewards.known()
        assert rewards.bounds("brightness") == (0.0, 1.0)
    finally:
        sys.modules.pop("flow_grpo.rewards.brightness", None)


def test_the_reward_of_a_notebook_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(rewards, "REGISTERED", {})
    for name in ("config", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    (code,) = python_of("rewards")
    exec(code.replace("train_qwenimage.main(", "config.num_epochs, config.eval_freq = 1, 0\ntrain_qwenimage.main("), {})
    assert "reward/redness" in lines_of(tmp_path / "runs/shapes_qwenimage_smoke", "epoch")[0]


def test_the_loss_of_ones_own_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(train_qwenimage_nft, "update", train_qwenimage_nft.update)  # to be put back
    _, loss, _ = python_of("your_own")
    exec(loss, {"__name__": "train_awfm"})
    how = dict(num_epochs=1, eval_freq=0, train__beta=0.0, train__reference_guidance_scale=0.0)
    train_qwenimage_nft.main(config_of("shapes_qwenimage_nft", tmp_path, **how))
    (update,) = lines_of(tmp_path / "shapes_qwenimage_nft_smoke", "update")[:1]
    assert update["grad_norm"] > 0
    assert "old_distance" not in update, "DiffusionNFT's own update logs it"


def test_the_model_of_ones_own_trains_with_its_own_guidance(tmp_path, monkeypatch):
    monkeypatch.setitem(models.MODELS, "QwenImagePipeline", models.MODELS["QwenImagePipeline"])
    how = dict(num_epochs=1, eval_freq=0, sample__guidance_scale=3.0)
    train_qwenimage.main(config_of("shapes_qwenimage", tmp_path / "theirs", **how))
    *_, model = python_of("your_own")
    exec(model, {"__name__": "train_plain_guidance"})
    train_qwenimage.main(config_of("shapes_qwenimage", tmp_path / "own", **how))
    theirs, own = (lines_of(tmp_path / name / "shapes_qwenimage_smoke", "epoch")[0] for name in ("theirs", "own"))
    assert own["health/latent_rms"] > theirs["health/latent_rms"], "which is rescaled"
    update = lines_of(tmp_path / "own" / "shapes_qwenimage_smoke", "update")[0]
    assert update["parity/log_prob_abs_diff_max"] == 0
    assert update["ratio_std"] == 0


def test_prompts_are_split_by_their_own_text(tmp_path, capsys):
    lines = [f"a photo of number {i}" for i in range(40)]
    (tmp_path / "a.txt").write_text("\n".join([*lines, "", lines[0], "x" * 99]))
    pq.write_table(pa.table({"caption": [f"  {line} " for line in lines], "id": range(40)}), tmp_path / "a.parquet")
    folders = []
    for name, more in (("a.txt", []), ("a.parquet", ["--column", "caption"])):
        folders.append(tmp_path / name.replace(".", "_"))
        words = [str(tmp_path / name), "--out", str(folders[-1]), "--test", "8", "--validation", "4", "--longest", "50"]
        split_prompts.main(split_prompts.parser().parse_args([*words, *more]))
    loaded = {split: [p.text for p in prompts.load_prompts(str(folders[0]), split)] for split in split_prompts.SPLITS}
    assert {split: len(texts) for split, texts in loaded.items()} == {"test": 8, "validation": 4, "train": 28}
    assert sorted(text for texts in loaded.values() for text in texts) == sorted(lines)
    assert all((folders[0] / f"{s}.txt").read_bytes() == (folders[1] / f"{s}.txt").read_bytes() for s in loaded)
    with pytest.raises(ValueError, match="no column 'prompt'; it has caption, id"):
        list(split_prompts.rows(tmp_path / "a.parquet", "prompt"))
    with pytest.raises(ValueError, match="40 prompts are too few for 40 test"):
        split_prompts.split(split_prompts.rows(tmp_path / "a.parquet", "caption"), 40, 0, 0)


def test_prompts_with_metadata_keep_it(tmp_path):
    rows = [{"prompt": f"say {i}", "target": str(i)} for i in range(10)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    split_prompts.write(split_prompts.split(split_prompts.rows(tmp_path / "a.jsonl", ""), 2, 2, 0), tmp_path / "out")
    found = [p for split in split_prompts.SPLITS for p in prompts.load_prompts(str(tmp_path / "out"), split)]
    assert sorted(p.metadata["target"] for p in found) == [str(i) for i in range(10)]


def test_the_settings_that_other_code_bases_name_are_settings_here():
    rows = [
        line.split(" | ") for line in (ROOT / "docs/coming_from.md").read_text().splitlines() if line.startswith("| ")
    ]
    ours = " ".join(row[1] for row in rows if len(row) >= 3)
    named = set(re.findall(r"`((?:train|sample|eval|lora|fsdp|reward|health|preferences)\.\w+)`", ours))
    assert len(named) > 20
    assert {name for name in named if name not in settings.BY_KEY} == set()
