"""Every code block of README and docs/ is run, or its commands are looked up and its Python is read."""

import ast
import importlib
import itertools
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from types import FunctionType, SimpleNamespace

import commands
import make_docs
import page_names
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import split_prompts
import torch
import train_qwenimage_nft
import yaml
from diffusers import FlowMatchEulerDiscreteScheduler
from refused import assert_refused, refusal
from safetensors.torch import load_file
from small import ROOT, config_of, evaluated, lines_of, train

import flow_grpo
from config import grpo
from flow_grpo import rewards
from flow_grpo.algorithms import losses
from flow_grpo.base.metric_table import explain
from flow_grpo.base.prompt import texts_of
from flow_grpo.command_line import checks
from flow_grpo.data import prompts
from flow_grpo.diffusers_patch.loading import schedule
from flow_grpo.diffusers_patch.sde_with_logprob import sde_step_with_logprob
from flow_grpo.run.rewards import Rewards
from flow_grpo.run.startup import start
from flow_grpo.settings import config_files, table
from flow_grpo.settings.objectives import FORWARD_OBJECTIVES

PAGES = [ROOT / "README.md", ROOT / "scripts/reproduce/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMING = [*PAGES, ROOT / "CONTRIBUTING.md"]
INDEXES = ("reference/experiments.md", "design/checks.md", "reference/code_map.md")
NAMED = (ROOT / "README.md").read_text() + "".join((ROOT / "docs" / page).read_text() for page in INDEXES)
FOLDERS = ("config", "dataset", "scripts", "flow_grpo", "tests", "benchmarks", "tools", "docs")
RECIPES = sorted((ROOT / "scripts/reproduce").glob("*.sh"))
SHELL = [*RECIPES, *sorted((ROOT / "scripts/single_node").glob("*.sh"))]


def python_of(page):
    """The Python blocks of a page of docs/."""
    text = (ROOT / f"docs/{page}.md").read_text()
    return [code for language, code in commands.blocks(text) if language == "python"]


def test_what_the_program_writes_into_pages_is_there():
    for page in make_docs.pages():
        text = page.read_text()
        assert make_docs.made(text) == text, f"{page.name}: run `make docs`"


def test_what_the_commands_of_pages_name_is_there(tmp_path):
    """The file of own_config.md is where its commands are to find it."""
    (code,) = python_of("howto/own_config")
    own_config = tmp_path / "mine.py"
    own_config.write_text(code)
    for page in PAGES:
        for language, text in commands.blocks(page.read_text()):
            if language == "python":
                compile(text, "page", "exec")
                continue
            assert language in ("", "bash"), "another language needs another check"
            for words in commands.commands(text):
                commands.check(words, {"~/experiments/mine.py": own_config})


def test_what_pages_name_in_backticks_is_there():
    """Settings, flags, configs, variants, files, commands and Python's names; none that only older configs have."""
    num_spans = 0
    named = set()
    problems = []
    for page in NAMING:
        for span in page_names.spans(page.read_text()):
            num_spans += 1
            named |= {span, span.partition("(")[0]}
            problem = page_names.problem(span)
            if problem:
                problems.append((page.name, span, problem))
    assert num_spans > 2000
    assert problems == []
    assert page_names.OUTSIDE - named == set(), "on no page any more"


def test_settings_take_the_values_that_pages_give_them():
    num_values = 0
    problems = []
    for page in NAMING:
        for setting, value in page_names.values(page.read_text()):
            num_values += 1
            problem = refusal(page_names.check_value, setting, value)
            if problem:
                problems.append((page.name, problem))
    assert num_values > 40
    assert problems == []


@pytest.mark.parametrize(
    "page",
    [
        "`sample.engine`",
        "`config.sample.engine`",
        "`reward.backend`",
        "`resolution`",
        "`process`",
        "`8bit`",
        "`sample.flash_ratio=high`",
        '`config.train.step_weight = "none"`',
        "`--guidance-scale`",
        "`--config.train.learning_rat=1`",
        "`,guardd`",
        "`shapes_qwenimage,longg`",
        "`config/grpo.py:pickscore_sd4`",
        "`flow_grpo/run/updates.py`",
        "`scripts/train_sd4.py`",
        "`older_names.py`",
        "`run.update.recompute_step(run, rows)`",
        "`optimise_all`",
        "`make demmo`",
        "`python scripts/evaluate.py runs/a --guidance-scale 1`",
    ],
)
def test_a_name_on_a_page_that_is_not_there_is_seen(page):
    (span,) = page_names.spans(f"Set {page} and see.")
    assert page_names.problem(span)


@pytest.mark.parametrize(
    "page",
    [
        '`train.step_weight` "mean_on"',
        '`train.step_weight` | "sqrt3", "none" or "equal"',
        "`config.train.beta` -1",
        "`sample.num_steps` 0",
        '`sample.num_steps` "many"',
    ],
)
def test_a_value_on_a_page_that_its_setting_does_not_take_is_seen(page):
    assert any(refusal(page_names.check_value, *pair) for pair in page_names.values(f"Take {page} then."))


NOT_OURS = "", ""  # said of no run: of other programs, or of how tests are written
REFUSED = {  # words of a sentence of a page that says "refuse" -> the file of its test, and words of it
    "Each refused setting is a row of": NOT_OURS,
    "A sentence that says what is refused needs an entry": NOT_OURS,
    "prompts whose images cannot share a batch are refused": (
        "test_edits.py",
        '"other sides", lambda: checks("flux_kontext"',
    ),
    "settings that Euler's class ignores is refused": ("test_model_files.py", "UniPC"),
    "which splits an image's tokens over GPUs, is refused": ("test_context_parallel.py", "is_refused_when_it_comes"),
    "A `score` that sets the default dtype is refused": ("test_rewards.py", "set torch's default dtype"),
    "Adapters of these layers, full weights and other models are refused": (
        "test_refusals.py",
        "which trains transformer_blocks.0.img_mod.1",
    ),
    "in between cuts the graph, which is refused": ("test_local_rewards.py", "without a graph"),
    "which is refused by name where a gradient is needed": ("test_local_rewards.py", "reward_without_a_gradient"),
    "A source of another form": ("test_preferences.py", "def test_foreign_source_is_refused"),
    '"sde" and "dance", and any other is refused': ("test_refusals.py", "'sde' or 'dance'"),
    "refuses what it cannot be trained with": ("test_refusals.py", "sde_type 'cps'"),
    "it refuses settings whose entries do not list it": ("test_config.py", "def test_a_script_refuses_exactly"),
    "Another schedule and a single update": ("test_refusals.py", '"old_decay_schedule 0", "but it is 0.5"'),
    "and so is `train.nft_beta`": ("test_refusals.py", "nft_beta is 0.3"),
    "Forwards without shared noise or whole groups": ("test_refusals.py", '"dgpo", "shared_noise True"'),
    "`guard`, `dppo` and `rsm` refuse `cps`": ("test_refusals.py", "sde_type 'cps'"),
    "refuses images to be edited": ("test_prompt_files.py", '"images to be edited"'),
    "another schedule is refused for it, and so is a `train.beta` of 0": ("test_refusals.py", "beta above 0"),
    "Schedules 0 and 2 are refused for": ("test_refusals.py", "75 updates"),
    "Settings of noise, windows and ratios are refused": ("test_config.py", "def test_a_script_refuses_exactly"),
    "a resumed run refuses other files": ("test_resume.py", '"train.teachers"])'),
    "without such a reward the gate is refused": ("test_refusals.py", '"set config.eval.rewards"'),
    "`train.clip_range` is refused": ("test_refusals.py", "\"objective 'dppo'\""),
    "A flag that is empty, has a value twice": ("test_evaluation.py", '"--out is empty"'),
    "is no choice and is refused": ("test_refusals.py", "step_weight is ''"),
    "a running folder is refused": ("test_folders.py", "def test_a_running_folder_is_refused"),
    "changed data, base or reference are refused": ("test_resume.py", "def test_what_a_run_learns_from_is_the_same"),
    "refuses to continue once an optimizer step was taken": ("test_stepwise.py", "update 1 came before its epoch"),
    "bitsandbytes 0.50.2 refuses sharded weights": NOT_OURS,
    "Setting one of them is refused unless yours declares": ("test_reads.py", "does_not_declare_is_refused"),
    "An unknown setting is refused": ("test_refusals.py", "--config.sample.num_stepz=3"),
    "A prompt of more than `text_tokens` tokens": ("test_refusals.py", '"text_tokens = 8"'),
    "no picture is refused with its line": ("test_pictures.py", "is_refused_by_its_line"),
    "it refuses settings that none of them reads": ("test_reads.py", "does_not_declare_is_refused"),
    "Another value than the default of one that it does not name": ("test_reads.py", "does_not_declare_is_refused"),
    "which the chosen loss does not read is refused": ("test_refusals.py", "kl_limit is 0.1"),
    "it would destroy what came later": ("test_resume.py", "def test_a_run_goes_on_from_nothing_but_its_own_folder"),
    "Any other folder than a run's is refused": ("test_refusals.py", 'resume_from="nowhere"'),
    "If any but a reward has changed, the run is refused": ("test_resume.py", '"preferences.path"'),
    "If it raises for all of them, the request is refused": ("test_scoring.py", "def test_a_served_reward_that_raises"),
    "A request that is refused (other 3xx and 4xx)": ("test_scoring.py", "def test_a_hostile_server_is_an_error"),
    "layers that a run does not train are refused": ("test_policies.py", "would_compute_otherwise_is_refused"),
    "a damaged file is refused": ("test_embeddings.py", "def test_what_was_not_written_for_a_prompt_is_refused"),
    "other numbers are refused with the next that it draws": ("test_sampler.py", "set 5 or 9"),
    "With 0, the default, `frames` above 1 is refused": ("test_videos.py", "qwenimage draws images"),
    "or a timestep for each token, and pipelines that animate": ("test_models.py", "def test_wan_22_is_refused"),
    "another pipeline class is refused": ("test_sampler.py", "holds a LTXPipeline"),
    "A second run that would resume there is refused": ("test_folders.py", "def test_a_running_folder_is_refused"),
    "refuse damaged weights": ("test_publishing.py", "def test_damaged_weights_are_not_uploaded"),
    "A script refuses a setting that it would ignore": ("test_config.py", "def test_a_script_refuses_exactly"),
    "another one refuses it": ("test_config.py", "def test_a_script_refuses_exactly"),
    "which train_*_pr.py refuses": ("test_refusals.py", "step_weight is ''"),
}


def test_every_sentence_that_says_what_is_refused_has_a_test():
    sentences = []
    for page in NAMING:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        parts = re.split(r"(?<=[.;|]) ", " ".join(text.split()))
        sentences += [part for part in parts if re.search(r"\brefuse[sd]?\b", part)]
    for sentence in sentences:
        assert any(words in sentence for words in REFUSED), f"no test is named: {sentence}"
    everything = "\n".join(sentences)
    for words, (file, row) in REFUSED.items():
        assert words in everything, f"on no page any more: {words}"
        if file:
            assert row in (ROOT / "tests" / file).read_text(), f"the test of {words!r} is gone"


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


def test_every_python_block_is_run_by_a_test_or_says_why_not():
    """A test takes all of a page's blocks, which it counts. Blocks of README are run as they come."""
    tests = Path(__file__).read_text()
    for page in PAGES[1:]:
        if re.search(r"(?<!-->\n)^```python$", page.read_text(), re.MULTILINE):
            assert f'= python_of("{page.parent.name}/{page.stem}")' in tests, page


def test_shell_scripts_name_settings_that_there_are_and_plan_on_their_gpus():
    for path in (ROOT / "scripts").glob("*/*.sh"):
        subprocess.run(["bash", "-n", path], check=True)
    for missing, given in {"NODES": {}, "HEAD": dict(NODES="2")}.items():
        command = ["bash", ROOT / "scripts/multi_node/torchrun.sh"]
        done = subprocess.run(command, env={"PATH": "/usr/bin:/bin"} | given, capture_output=True, text=True)
        assert done.returncode, missing
        assert f"{missing}: " in done.stderr
    rows = re.findall(r"^\| `(\w+\.sh)` \|", (ROOT / "scripts/reproduce/README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == [path.name for path in RECIPES]
    assert len(SHELL) >= 11
    for path in SHELL:
        started = [words for words in commands.commands(path.read_text()) if words[0] in ("torchrun", "python")]
        *before, (program, *arguments) = started
        for command in before:  # a reward's server
            commands.check(command[: command.index("&")], {})
        assert program == "torchrun"
        assert arguments[-1] == "$@", f"{path.name} takes further settings"
        commands.check_python(arguments, {})
        assert path.stat().st_mode & 0o111, f"{path.name} is to be executable"


def executed(code, name):
    """Run a block as a module; return what it defines."""
    names = {"__name__": name}
    exec(code, names)
    return names


def test_the_reward_of_ones_own_scores(tmp_path, monkeypatch):
    reward, gradient, _ = python_of("howto/own_reward")
    (tmp_path / "brightness.py").write_text(reward + gradient)
    monkeypatch.setattr(rewards, "__path__", [*rewards.__path__, str(tmp_path)])
    monkeypatch.setattr(rewards, "REGISTERED", {})  # by the fixture `shallow`
    monkeypatch.delitem(sys.modules, "flow_grpo.rewards.brightness", raising=False)  # of another test
    try:
        score = rewards.load("brightness", torch.device("cpu"), {"gamma": 2.0})
        images = torch.stack([torch.zeros(3, 8, 8), torch.full((3, 8, 8), 0.5)])
        assert score(images, ["", ""], [{}, {}]).tolist() == [0.0, 0.25]
        images.requires_grad_()
        rewards.load_differentiable("brightness", "cpu", {"gamma": 2.0})(images, ["", ""], [{}, {}]).sum().backward()
        # The slope of the squared mean of 192 numbers.
        assert torch.allclose(images.grad[1], torch.tensor(2 * 0.5 / 192))
        assert "brightness" in rewards.reward_names()
        assert rewards.bounds("brightness") == (0.0, 1.0)
    finally:
        sys.modules.pop("flow_grpo.rewards.brightness", None)


def test_the_reward_of_a_notebook_trains(shallow, tmp_path, monkeypatch):
    monkeypatch.setattr(rewards, "REGISTERED", {})
    for name in ("config", "scripts"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    *_, code = python_of("howto/own_reward")
    fewer = f"config.num_epochs, config.eval_freq, config.model = 1, 0, {shallow['model']!r}"
    exec(code.replace("train_qwenimage.main(", f"{fewer}\ntrain_qwenimage.main("), {})
    assert "reward/redness" in lines_of(tmp_path / "runs/shapes_qwenimage_smoke", "epoch")[0]


def test_the_loss_of_ones_own_on_noisy_steps_trains(shallow, tmp_path):
    """The first ratios are 1, and the second ones have moved towards clip_range times the advantage."""
    loss, *_ = python_of("howto/own_loss")
    config = config_of("shapes_qwenimage", tmp_path, num_epochs=1, eval_freq=0, **shallow)
    executed(loss, "train_penalty")["main"](config)
    first, second = lines_of(tmp_path / config.name, "update")
    assert first["ratio_std"] == first["parity/log_prob_abs_diff_max"] == 0 < first["grad_norm"]
    assert second["ratio_std"] > 0


def test_the_advantage_of_ones_own_trains(shallow, tmp_path):
    (advantage,) = python_of("howto/own_advantage")
    names = executed(advantage, "train_ranks")
    scores = torch.tensor([3.0, 1.0, 2.0, 5.0, 5.0, 4.0])
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    run = SimpleNamespace(config=SimpleNamespace(reward_fn={"shapes": 2.0}), device="cpu")
    values, weights = names["rank_advantages"](run, Rewards({"shapes": scores}, groups, groups.shape))
    assert values.tolist() == [1.0, -1.0, 0.0, 0.5, 0.5, -1.0]
    assert weights.tolist() == [1.0] * 6
    scores[1] = math.nan  # of a failed reward
    values, weights = names["rank_advantages"](run, Rewards({"shapes": scores}, groups, groups.shape))
    assert values.tolist() == [1.0, 0.0, -1.0, 0.5, 0.5, -1.0]
    assert weights.tolist() == pytest.approx([1.2, 0.0, 1.2, 1.2, 1.2, 1.2])
    config = config_of("shapes_qwenimage", tmp_path, num_epochs=1, eval_freq=0, **shallow)
    names["main"](config)
    line = lines_of(tmp_path / config.name, "update")[0]
    assert line["advantage_abs_mean"] > 0 < line["grad_norm"]


def test_the_types_of_settings_are_as_their_page_says(shallow, tmp_path, capsys):
    blocks = python_of("howto/typed_settings")
    config = config_of("shapes_qwenimage", tmp_path, train__learning_rate=0.5, custom={"temperature": 2.5}, **shallow)
    names = {"start": start, "checks": checks, "run": SimpleNamespace(config=table.typed(config))}
    for block in blocks:
        exec(compile(block, "typed_settings.md", "exec"), names)
    assert (names["other"].seed, names["other"].sample.num_steps, names["config"].seed) == (8, 8, 7)
    assert names["mine"].temperature == 2.5
    names["main"](config)
    assert capsys.readouterr().out.splitlines()[-1] == "0.5"
    assert config.sample.num_steps == 8


def test_the_mean_of_two_runs_is_a_model(recorded, tmp_path, monkeypatch):
    (mean,) = python_of("howto/evaluate")
    monkeypatch.chdir(tmp_path)
    Path("flow_grpo").symlink_to(ROOT / "flow_grpo")
    best_weights = {"a": recorded("nft, full weights").folder / "best", "b": ROOT / "flow_grpo/assets/tiny_qwenimage"}
    for name, best in best_weights.items():
        Path("runs", name).mkdir(parents=True)
        Path("runs", name, "best").symlink_to(best)
    exec(compile(mean, "page", "exec"), {})
    file = "transformer/diffusion_pytorch_model.safetensors"
    first = load_file(Path("runs/a/best", file))
    second = load_file(Path("runs/b/best", file))
    assert any((first[name] != second[name]).any() for name in first)
    for name, value in load_file(Path("runs/mean", file)).items():
        torch.testing.assert_close(value, (first[name] + second[name]) / 2)


def test_the_loss_of_ones_own_trains(shallow, tmp_path, monkeypatch):
    """A loss of one's own has no ratio; DiffusionNFT's own settings are refused."""
    monkeypatch.setitem(FORWARD_OBJECTIVES, "reward_weighted", None)  # to be put back
    _, loss, _ = python_of("howto/own_loss")
    main = executed(loss, "train_reward_weighted")["main"]
    how = shallow | dict(num_epochs=1, eval_freq=0, train__adv_clip_max=2.0)
    config = config_of("shapes_qwenimage_nft", tmp_path, **how)
    main(config)
    first, _ = lines_of(tmp_path / config.name, "update")
    assert first["grad_norm"] > 0 == first["old_distance"]
    assert "ratio_std" not in first
    config.train.nft_beta = 0.3
    with pytest.raises(ValueError, match="'reward_weighted' would ignore it"):
        main(config)


def test_a_loss_that_a_config_file_registers_needs_no_script_and_variants_know_it(shallow, tmp_path, monkeypatch):
    monkeypatch.setitem(FORWARD_OBJECTIVES, "reward_weighted", None)  # to be put back
    monkeypatch.delitem(FORWARD_OBJECTIVES, "reward_weighted")
    monkeypatch.syspath_prepend(tmp_path)
    _, loss, page = python_of("howto/own_loss")
    (tmp_path / "train_reward_weighted.py").write_text(loss)
    file = tmp_path / "reward_weighted.py"
    file.write_text(page.replace('2502.06061)"', '2502.06061)", whole_groups=True'))
    config = config_files.load(f"{file}:shapes_reward_weighted,smoke")
    assert config.train.updates_per_epoch == 1
    how = shallow | dict(output_dir=str(tmp_path / "runs"), num_epochs=1, eval_freq=0)
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in how.items()})
    train_qwenimage_nft.main(config)
    assert lines_of(tmp_path / "runs" / config.name, "update")[0]["grad_norm"] > 0

    # Where a script registers it later, a variant that asks for it finds none.
    del FORWARD_OBJECTIVES["reward_weighted"]
    file.write_text(page.replace("objectives.FORWARD_OBJECTIVES", "{}"))
    with pytest.raises(
        ValueError, match=r"forward_objective is 'reward_weighted'; it may be .*at the top of the config"
    ):
        config_files.load(f"{file}:shapes_reward_weighted,smoke")


def test_the_model_of_ones_own_trains_and_is_evaluated_with_its_own_guidance(shallow, tmp_path, monkeypatch):
    """By its name, from Python's path: a changed or missing class is an error, and none is read from the run."""
    (model,) = python_of("howto/own_model")
    path = tmp_path / "plain_guidance.py"
    path.write_text(model)
    monkeypatch.syspath_prepend(tmp_path)
    how = shallow | dict(num_epochs=1, sample__guidance_scale=3.0, eval__guidance_scale=7.0)
    scores = []
    for name in ("", "plain_guidance:PlainGuidance"):
        run = train("shapes_qwenimage", tmp_path / f"runs_{name}", model_class=name, **how)
        _, (row,) = evaluated(tmp_path, run, "--weights", "last")
        scores.append(row["avg"])
        of_last_weights = [line for line in lines_of(run, "test") if "test/avg" in line]
        assert row["avg"] == of_last_weights[-1]["test/avg"]
        assert lines_of(run, "update")[0]["parity/log_prob_abs_diff_max"] == 0
    assert scores[0] != scores[1]
    path.write_text(model.replace("positive - negative", "negative - positive"))
    with pytest.raises(ValueError, match="'plain_guidance:PlainGuidance' was stored with the digest"):
        evaluated(tmp_path, run, "--weights", "last")
    path.unlink()
    monkeypatch.delitem(sys.modules, "plain_guidance")
    with pytest.raises(ValueError, match="'plain_guidance:PlainGuidance', but Python finds no such"):
        evaluated(tmp_path, run, "--weights", "last")


def write_objects(path, objects):
    """Write a JSON object a line."""
    path.write_text("".join(json.dumps(fields) + "\n" for fields in objects))


def test_prompts_are_split_by_their_own_text_and_keep_their_metadata(tmp_path, capsys):
    lines = [f"a photo of number {i}" for i in range(40)]
    (tmp_path / "a.txt").write_text("\n".join([*lines, "", lines[0], "x" * 99]))
    padded = [f"  {line} " for line in lines]
    pq.write_table(pa.table({"caption": padded, "id": range(40)}), tmp_path / "a.parquet")
    write_objects(tmp_path / "a.jsonl", [{"prompt": line, "target": line[-1]} for line in lines])
    write_objects(tmp_path / "b.jsonl", [{"prompt": "no", "caption": line} for line in lines])

    def split(name, *more):
        out = str(tmp_path / name.replace(".", "_"))
        words = [str(tmp_path / name), "--out", out, "--test=8", "--validation=4", "--longest=50", *more]
        split_prompts.main(split_prompts.parser().parse_args(words))
        return [prompts.load_prompts(out, split) for split in split_prompts.SPLITS]

    found = split("a.txt")
    texts = [texts_of(rows) for rows in found]
    assert [len(rows) for rows in found] == [8, 4, 28]
    assert sorted(itertools.chain(*texts)) == sorted(lines)
    assert split("a.parquet", "--column=caption") == found
    assert split("a.parquet") == found  # the caption is the only column that can hold prompts

    with_metadata = split("a.jsonl")
    assert [texts_of(rows) for rows in with_metadata] == texts
    for prompt in itertools.chain(*with_metadata):
        assert prompt.metadata["target"] == prompt.text[-1]
    assert [texts_of(rows) for rows in split("b.jsonl", "--column=caption")] == texts

    refused = [("no column", lambda: split("a.parquet", "--column=prompt"), ["'prompt'", "caption, id"])]
    refused.append(("text", lambda: split("a.txt", "--column=prompt"), ["'prompt'"]))
    assert_refused([*refused, ("too few", lambda: split("a.txt", "--test=40"), ["40 prompts", "40 test"])])


def coming_from(section):
    """The second column of the table in a section of docs/reference/coming_from.md: what has the part here."""
    text = (ROOT / "docs/reference/coming_from.md").read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return "\n".join(row[1] for row in rows[1:])


def test_settings_metrics_and_functions_that_have_the_part_of_other_code_bases_are_there():
    sources = ["Flow-GRPO and TempFlow-GRPO", "DiffusionNFT", "DanceGRPO and MixGRPO"]
    sources += ["Flow-Factory", "verl-omni", "FlowBP"]
    keys = []
    for source in sources:
        keys += re.findall(r"`([^`]+)`", coming_from(f"Settings of {source}"))
    assert len(keys) > 80
    assert [key for key in keys if key not in table.BY_KEY] == []
    figures = re.findall(r"`([^`]+)`", coming_from("Metrics"))
    assert len(figures) > 15
    assert [name for name in figures if not explain(name)] == []
    functions = re.findall(r"`(\w+_with_logprob)\.(\w+)`", coming_from("Python"))
    assert len(functions) == 4
    for module, name in functions:
        assert hasattr(importlib.import_module(f"flow_grpo.diffusers_patch.{module}"), name)


def test_every_reward_is_listed_once_with_what_it_needs():
    page = (ROOT / "docs/reference/rewards.md").read_text()
    needs = page.split("| needs | rewards |")[1].split("\n\n")[0]
    listed = [name for name in re.findall(r"`(\w+)`", needs) if name in rewards.reward_names()]
    with_row = [name for name in rewards.reward_names() if f"| `{name}` |" in page]
    assert sorted(listed) == with_row
    assert len(listed) == len(set(listed))


def test_a_beta_that_is_copied_from_flow_grpos_code_is_divided_by_how_much_stronger_the_kl_is_here():
    """At SD3.5's 10 steps, where velocities differ alike at all of them."""
    scheduler = schedule(FlowMatchEulerDiscreteScheduler(shift=3.0), 10, 1024, torch.device("cpu"), sigmas=False)
    ours = 0.0
    theirs = 0.0
    stds = []
    x = torch.zeros(1, 4)
    for t in scheduler.timesteps[:-1]:
        step = sde_step_with_logprob(scheduler, x, t[None], x, noise_level=0.7, prev_sample=x)
        reference = sde_step_with_logprob(scheduler, x + 0.1, t[None], x, noise_level=0.7, prev_sample=x)
        means = step.prev_sample_mean, reference.prev_sample_mean
        ours += losses.gaussian_kl(*means, step.transition_std)
        theirs += losses.gaussian_kl(*means, step.std_dev_t)
        stds.append(step.transition_std.item())
    assert 1 / statistics.fmean(stds) == pytest.approx(2.252, abs=1e-3)  # TempFlow-GRPO's 2.25, as the pages say
    ratio = (ours / theirs).item()
    assert ratio == pytest.approx(4.39, abs=5e-3)
    assert grpo.pickscore_sd3().train.beta == pytest.approx(0.01 / ratio, rel=0.02)
    for recipe in RECIPES:
        if beta := re.search(r"train\.beta=([\d.]+)", recipe.read_text()):
            published = 0.004 if "tempflow" in recipe.stem else 0.04 / ratio  # TempFlow-GRPO's KL is ours
            assert float(beta[1]) == pytest.approx(published, rel=0.01)


SCHEDULES = {  # of the page's table: a scheduler of the published model's settings, and its steps
    "Qwen-Image": (dict(use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02), 10),
    "SD3.5": (dict(shift=3.0), 10),
    "FLUX.1": (dict(use_dynamic_shifting=True), 6),
}


def test_the_constants_of_mean_one_are_those_of_the_trained_steps():
    page = (ROOT / "docs/algorithms/tempflow_grpo.md").read_text()
    rows = re.findall(r"^\| (\S+?),(?: noise level)? ([\d.]+)(.*?) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 7
    for model, level, what, constant in rows:
        options, num_steps = SCHEDULES[model]
        how = dict(sigmas=model != "SD3.5")
        scheduler = schedule(FlowMatchEulerDiscreteScheduler(**options), num_steps, 1024, torch.device("cpu"), **how)
        trained = num_steps // 2 if "0.5" in what else num_steps - 1
        x = torch.zeros(1, 4)
        stds = []
        for t in scheduler.timesteps[:trained]:
            step = sde_step_with_logprob(scheduler, x, t[None], x, noise_level=float(level), prev_sample=x)
            stds.append(step.transition_std)
        assert 1 / torch.stack(stds).mean() == pytest.approx(float(constant), abs=6e-4)


def test_every_path_script_and_config_that_is_named_exists():
    paths = set(re.findall(rf"\b(?:{'|'.join(FOLDERS)})/[\w./-]*\w|\b[A-Z]+\.md\b", NAMED))
    assert len(paths) > 20
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
    for script in re.findall(r"`(train_\w+?)(?:\.py)?`", NAMED):
        assert (ROOT / "scripts" / f"{script}.py").exists(), script
    assert set(re.findall(r"\b(?:shapes|pickscore|edits|editreward|motions)_\w+", NAMED)) == page_names.configs()[0]


def test_every_make_target_that_is_named_exists_and_so_do_the_tests_that_the_makefile_lists():
    makefile = (ROOT / "Makefile").read_text()
    lists = re.findall(r"^(?:QUICK|ON_GPU) := ((?:.*\\\n)*.*)", makefile, re.MULTILINE)
    names = " ".join(lists).replace("\\", " ").split()
    assert len(names) > 10
    assert [name for name in names if not (ROOT / f"tests/test_{name}.py").exists()] == []
    targets = re.findall(r"^([\w-]+):", makefile, re.MULTILINE)
    named = re.findall(r"^make ([\w-]+)|`make (?:PYTHON=\S+ )?([\w-]+)", NAMED, re.MULTILINE)
    assert {first or second for first, second in named} <= set(targets)


def test_the_tests_that_it_names_are_there():
    named = re.findall(r'ARGS="?((?:tests/\S+?\.py ?)+)(?:-k (\w+))?["`]', NAMED)
    assert len(named) == NAMED.count("ARGS=") - NAMED.count("ARGS=FILE")
    for files, word in named:
        text = "".join((ROOT / file).read_text() for file in files.split())
        assert re.search(rf"def test_\w*{word}", text), (files, word)


def test_the_changelog_has_every_bullet_and_row_once():
    """A merge that keeps both sides can keep the whole of each."""
    lines = [line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith(("- ", "| `"))]
    assert len(lines) > 20
    assert sorted(set(lines)) == sorted(lines)


def test_the_changelog_is_the_notes_of_each_version_and_at_most_two_pages_of_what_is_not_released():
    """A merge must not bring back bullets that a release took together: keep yours, below the heading."""
    notes = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1:]
    unreleased, newest, *_ = notes
    assert unreleased.startswith("Unreleased\n")
    assert newest.startswith(f"{flow_grpo.__version__}\n")
    assert [note.partition("\n")[0] for note in notes if note.count("\n") > 120] == []


def test_hooks_need_no_network_and_do_what_make_check_and_make_docs_do():
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert local["repo"] == "local"
    assert {hook["language"] for hook in local["hooks"]} == {"system"}
    makefile = (ROOT / "Makefile").read_text().replace("$(VENV)", ".venv/bin/python")
    for hook in local["hooks"]:
        command = hook["entry"].removesuffix(" --force-exclude")
        assert re.search(rf"^\t{re.escape(command)}", makefile, re.MULTILINE), command


def test_public_ci_runs_the_same_script_on_the_oldest_and_the_newest_python_and_may_write_nothing():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    pythons = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert job["strategy"]["matrix"]["python"] == [pythons[0], pythons[-1]]
    always, once_merged = job["steps"][-2:]
    assert always == {"run": ".ci/run"}
    assert once_merged == {"if": "github.event_name == 'push'", "run": 'make test-all ARGS="-m slow"'}
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets" not in str(workflow)


def test_the_page_of_the_interface_declares_every_function_that_how_to_pages_import():
    declared = re.findall(r"^(?:def|class) (\w+)", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE)
    imported = set()
    for page in (ROOT / "docs/howto").glob("own_*.md"):
        for module, names in re.findall(r"^from (flow_grpo[\w.]*) import (.+)$", page.read_text(), re.MULTILINE):
            members = vars(importlib.import_module(module))
            imported |= {name for name in names.split(", ") if isinstance(members.get(name), FunctionType)}
    assert len(imported) > 4
    assert imported - {*declared} == set()


def test_the_page_of_the_interface_declares_what_the_loops_of_scripts_import_from_run():
    declared = re.findall(r"^(?:def|class) (\w+)", (ROOT / "docs/reference/api.md").read_text(), re.MULTILINE)
    imported = set()
    for script in ("", "_pr", "_nft"):
        tree = ast.parse((ROOT / f"scripts/train_qwenimage{script}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("flow_grpo.run."):
                imported |= {alias.name for alias in node.names}
    assert len(imported) > 10
    assert imported - {*declared} == set(), "add them to the section 'The loop'"


def anchors_of(page):
    """Names by which a page's headings are linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_to_a_file_and_a_heading():
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "scripts/reproduce/README.md")]
    pages += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
    num_links = 0
    broken = []
    for page in pages:
        for link in re.findall(r"\]\((?!http)([^)\s]+)\)", page.read_text()):
            num_links += 1
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and anchor not in anchors_of(target)):
                broken.append(f"{page.name}: {link}")
    assert num_links > 20
    assert broken == []


def numbers_of(text):
    """Numbers of a text as they are written, without the commas of thousands."""
    return re.findall(r"\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d{3})", "", text))


def test_every_measured_figure_of_readme_is_in_results():
    """A figure may be rounded: 0.95 is 0.948 there."""
    measured = [float(number) for number in numbers_of((ROOT / "benchmarks/RESULTS.md").read_text())]
    tables = re.findall(r"^\|.*\n\|-.*\n(?:\|.*\n)+", (ROOT / "README.md").read_text(), re.MULTILINE)
    figures = []
    for row in "".join(tables).splitlines():
        if "arXiv" not in row:
            cells = row.split("|")[2:]  # without the row's name
            figures += numbers_of(" | ".join(cells))
    assert len(figures) > 60
    missing = []
    for figure in figures:
        decimals = len(figure.partition(".")[2])
        half = 0.5 * 10**-decimals + 1e-9
        if not any(abs(value - float(figure)) <= half for value in measured):
            missing.append(figure)
    assert missing == []


def test_the_examples_of_readme_run(recorded, tmp_path, monkeypatch, capsys):
    (tmp_path / "flow_grpo").symlink_to(ROOT / "flow_grpo")
    shutil.copytree(recorded("branches").folder, tmp_path / "runs" / "shapes_qwenimage_pr")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL):
        exec(code, {})
    shown = capsys.readouterr().out
    assert "torch.Size([2, 3, 64, 64]) [tensor([" in shown
    assert "torch.Size([2, 7, 6, 3, 64, 64])" in shown
