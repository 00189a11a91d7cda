"""Benchmarks: the work that they count, the runs that they make, and their tables."""

import contextlib
import json
import re
from functools import partial

import bench
import ladder
import learn
import learn_record
import pytest
import random_model
import scaling
import torch
import warm
from build_random_pipeline import clip_config
from flops import row_flops
from refused import assert_refused
from small import CHECKS, ENV, MODELS, ROOT, as_prompts, config_of, loaded, plan
from transformers import CLIPConfig, CLIPModel

from config import grpo, nft
from flow_grpo.command_line import checks
from flow_grpo.data.prompts import load_prompts
from flow_grpo.diffusers_patch import model_classes, registry
from flow_grpo.diffusers_patch.size import training_size
from flow_grpo.monitoring import provenance
from flow_grpo.run import evaluate, startup, update
from flow_grpo.settings import config_files, table
from flow_grpo.weights import load_weights, model_files, policies, quantisation

LATER = "train_flux2_klein", "train_flux2_klein_9b_pr", "train_flux2_klein_nft", "train_qwenimage_21_pr"
EDITS = "train_qwenimage_edit", "train_qwenimage_edit_first_pr"
SD3 = pytest.param("train_sd3_dpo", marks=pytest.mark.slow)  # whose table of positions takes eight seconds


def test_both_epochs_draw_one_prompt(tmp_path):
    """So that the measured one meets no width of text for the first time."""
    given = [prompt.text for prompt in load_prompts("dataset/shapes", "train")]
    (only,) = load_prompts(bench.one_prompt("dataset/shapes", tmp_path / "prompts"), "train")
    assert only.text in given
    assert len(only.text) == max(map(len, given)) > min(map(len, given))
    assert "include" in only.metadata


def test_the_work_of_an_epoch_is_counted_by_phase(shallow, tmp_path, monkeypatch):
    """2 trained steps of 4, guided; a branch that leaves at step k takes 3 - k more; an update's row counts twice."""
    how = dict(sample__guidance_scale=4.0, sample__completion_batch_size=1, sample__num_prompts_per_epoch=1)
    how |= dict(sample__num_images_per_prompt=2, sample__batch_size=2, sample__num_branches=2)
    how |= dict(model=shallow["model"], logger="none")
    config = config_of("shapes_qwenimage_pr", tmp_path, **how)
    config.sample.flash_ratio = 0.0
    config.sample.rollout_weights = "exact"
    branches = config.sample.num_branches
    monkeypatch.setattr(update, "move_weights", update.move_weights)  # to be put back
    monkeypatch.setattr(evaluate, "evaluate", evaluate.evaluate)
    figures = bench.epoch_metrics("train_qwenimage_pr", config, MODELS["qwenimage"], num_evaluated=2)
    assert figures["first_update_s"] > 0
    assert min(figures["evaluation/exact_s"], figures["evaluation/fast_s"]) > 0
    assert config.dataset.endswith("/prompts"), "bench.one_prompt's"
    model = loaded("qwenimage", shallow["model"])
    condition = model.encode(as_prompts(["a"]), width=config.text_tokens)
    size = training_size(config)
    row = row_flops(model, condition, size) + row_flops(model, condition.negative, size)
    trunks = config.sample.num_prompts_per_epoch * config.sample.num_images_per_prompt
    rollout_flops = figures["rollout_tflops"] * figures["time/rollout_s"] * 1e12
    update_flops = figures["update_tflops"] * figures["time/update_s"] * 1e12
    assert rollout_flops == pytest.approx(trunks * (2 + branches * (3 + 2)) * row, rel=1e-3)
    assert update_flops == pytest.approx(2 * trunks * 2 * row, rel=1e-3)


@pytest.mark.parametrize(
    ("script", "model", "run"),
    [
        ("train_qwenimage_nft", "qwenimage", "shapes_qwenimage_nft"),
        ("train_wan", "wan", "pickscore_wan_smoke"),
        ("train_flux_kontext_nft", "flux_kontext", "editreward_flux_kontext_nft_smoke"),
    ],
)
def test_a_tiny_benchmark_is_a_run_of_the_scripts_own_model(script, model, run):
    _, family, config = bench.setup(bench.parser().parse_args(["--script", script, "--size", "tiny"]))
    assert family is MODELS[model]
    assert config.name == run
    assert config.model == registry.tiny_folder(model)
    checks.check(config, CHECKS[config.algorithm])


@pytest.mark.parametrize("script", ["train_qwenimage", "train_flux_nft", SD3, *LATER, *EDITS])
def test_a_full_size_benchmark_is_a_run_that_its_script_accepts_on_one_gpu(script):
    """The weights of such a run are random, and none is made here."""
    name, family, config = bench.setup(bench.parser().parse_args(["--script", script, "--size", "full"]))
    settings = checks.check(config, CHECKS[config.algorithm])
    assert plan(config).batches_per_epoch >= 1
    assert name == re.sub("flux2_klein(_9b)?|qwenimage_21|qwenimage_edit(_first)?|flux|sd3", "qwenimage", script)
    with random_model.registered(family, "Random"):
        assert model_classes.of_folder(config.model) is family
        load_weights.check_model(settings.model, settings.lora, family)
        model_files.check_weights(config.model, family)
        assert all(weight.is_meta for weight in family.empty_transformer(config.model).parameters())
        model = family.without_weights(config.model)
        model.check_prompts(load_prompts(config.dataset, "train"), config.text_tokens)


def test_published_run_is_named_after_its_model():
    named = {}
    of_config = {}
    for run in (*grpo.RUNS, *nft.RUNS):
        weights = registry.published(run().model)
        if weights is not None:
            named[run.__name__] = random_model.model_of(run.__name__)
            of_config[run.__name__] = weights.model
    assert named == of_config
    assert {"qwenimage_edit", "qwenimage_edit_first"} < set(named.values())


@pytest.mark.parametrize("base_precision", ["", "fp8_weights"])
def test_weights_that_are_on_no_disk_are_laid_out_as_they_are(base_precision):
    class Drawn(MODELS["qwenimage"]):
        ON_DISK = False

    model = Drawn(loaded("qwenimage").pipeline, torch.device("cpu"))
    before = model.transformer.img_in.weight.clone()
    startup.lay_out(table.typed(config_of("shapes_qwenimage", base_precision=base_precision)), model, None)
    assert torch.equal(model.transformer.img_in.weight, before)
    assert quantisation.precision_of(model.transformer) == base_precision


def arguments(*words):
    args = learn.parser().parse_args(["train", *map(str, words)])
    args.noises = args.noises or 4
    return args


def write(folder, lines):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def epoch(number, images, forwards, rollout_s, update_s):
    times = {"time/rollout_s": rollout_s, "time/update_s": update_s, "time/eval_s": 100.0, "time/save_s": 50.0}
    return {"kind": "epoch", "epoch": number, "step": 0, "images": images, "forwards": forwards, **times}


def result(number, accuracy, validation):
    evaluation = {"kind": "eval", "epoch": number, "step": 0, "eval/shapes_accuracy": validation}
    return [evaluation, {"kind": "test", "epoch": number, "step": 0, "test/shapes_accuracy": accuracy}]


LAST = {"kind": "test", "epoch": 4, "step": 0, "test_best/shapes_accuracy": 0.55, "best_epoch": 2.0}


def made_up(folder):
    """Write runs of "grpo": a seed that went up and down, one that was cut short, and none of seed 3."""
    epochs = [epoch(n, 10 * n + 10, 40, 2.0, 1.0) for n in range(4)]
    up_and_down = [*result(0, 0.4, 0.3), *epochs[:2], *result(2, 0.6, 0.5), *epochs[2:], *result(4, 0.5, 0.4), LAST]
    write(folder / "grpo_seed1", up_and_down)
    write(folder / "grpo_seed2", [*result(0, 0.4, 0.3), *epochs[:2], *result(2, 0.7, 0.2), epochs[2]])
    for name, ended in (("grpo_seed1", True), ("grpo_seed2", False)):
        describe(folder / name, ended)
    write(folder / "pairs", [epoch(0, 800, 0, 12.0, 0.0)])


def describe(folder, ended, **settings):
    """Write the files of a run that say how it was made, and whether it has ended."""
    config = config_files.load(f"{ROOT}/config/grpo.py:shapes_qwenimage")
    config.update_from_flattened_dict({"eval.best_by": learn_record.FIGURE, **settings})
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    start = {"start": "", "command": []}
    if ended:
        start["end"] = ""
    (folder / provenance.FILE).write_text(json.dumps({"starts": [start]}))


def cells(text, title):
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {title} |")]
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


@pytest.mark.parametrize("gpu", [[], ["--gpu"]], ids=["CPU", "GPU"])
@pytest.mark.parametrize("run", learn.RUNS, ids=lambda run: run.name)
def test_every_run_passes_its_scripts_checks_and_divides_over_a_gpu(run, gpu, tmp_path):
    config = config_files.load(f"{ROOT / run.config}")
    config.update_from_flattened_dict(learn.settings_of(run, 2, arguments("--out", tmp_path, *gpu)))
    assert (ROOT / run.script).exists()
    assert run.script == {"grpo": learn.GRPO, "pr": learn.PR, "nft": learn.NFT, "dpo": learn.DPO}[config.algorithm]
    checks.check(config, CHECKS[config.algorithm])
    policies.check_lora(config.lora)
    assert plan(config).updates_per_epoch == config.train.updates_per_epoch
    assert (config.seed, config.eval.test_freq) == (2, config.eval_freq)


def test_the_table_has_a_row_for_every_run_and_the_numbers_worked_out_by_hand(tmp_path):
    """Last 0.5 and 0.7; best 0.55, measured, and 0.4, the test where validation was best; highest 0.6 and 0.7. An epoch
    trains for 3 s, whatever evaluation and saving take, on 10 images and 40 rows; there are 4 epochs, and 3."""
    made_up(tmp_path)
    text = learn_record.table(tmp_path, [("grpo", "one"), ("nft", "two")], (1, 2, 3))
    state = "1 of 3; seed 2 ended early, after 3 epochs; seed 3 missing"
    spreads = ["0.600 (0.500 to 0.700)", "0.475 (0.400 to 0.550)", "0.650 (0.600 to 0.700)", "-"]
    assert cells(text, "one") == [state, *spreads, "35", "140", "10"]
    assert cells(text, "two") == ["0 of 3; seed 1 missing; seed 2 missing; seed 3 missing", *"-------"]
    assert cells(text, "pairs for offline DPO, made once")[5:] == ["800", "-", "12"]
    learn.main(learn.parser().parse_args(["draw", "--out", str(tmp_path)]))
    rows = (tmp_path / "table.md").read_text().splitlines()[4:]
    assert [row.split(" | ")[0] for row in rows[:-1]] == [f"| {run.title}" for run in learn.RUNS]
    folders = [learn.PAIRS, *(run.name for run in learn.RUNS)]
    assert len(set(folders)) == len(folders), "each has a folder of its own"
    assert "grpo_seed1" in (tmp_path / "report.html").read_text()


def test_the_best_of_a_study_has_the_variety_that_its_runs_ask_for(tmp_path):
    """The first run's highest validation has too little of it, and the second run's has too little from the start."""
    for seed, varieties, ended in ((1, (1.0, 0.95, 0.5), False), (2, (0.8, 0.7, 0.6), True)):
        lines = []
        for number, variety in enumerate(varieties):
            evaluation, test = result(number, 0.4 + 0.1 * number, 0.4 + 0.1 * number)
            lines += [evaluation | {"eval/variety": variety}, test, epoch(number, 10, 40, 2.0, 1.0)]
        write(tmp_path / f"grpo_seed{seed}", lines)
        describe(tmp_path / f"grpo_seed{seed}", ended, **{"eval.min_variety": 0.9})
    state, last, best, highest, *_ = cells(learn_record.table(tmp_path, [("grpo", "one")], (1, 2)), "one")
    assert state == "1 of 2; seed 1 ended early, after 3 epochs; seed 2 without a best policy"
    assert best == "0.500 (0.500 to 0.500)"
    assert last == highest == "0.600 (0.600 to 0.600)"


def test_a_finished_run_is_not_repeated_and_others_are(tmp_path, monkeypatch, capfd):
    """An interpreter that only says what it was asked stands in for training."""
    made_up(tmp_path)
    monkeypatch.setattr(learn.sys, "executable", "/bin/echo")
    before = (tmp_path / "grpo_seed1" / "metrics.jsonl").read_bytes()
    words = ["--out", tmp_path, "--only", "grpo", "--seconds", 30]
    assert learn.train(arguments(*words)) == 2, "seeds 2 and 3"
    assert (tmp_path / "grpo_seed1" / "metrics.jsonl").read_bytes() == before
    assert sorted(path.name for path in tmp_path.glob("*.log")) == ["grpo_seed2.log", "grpo_seed3.log"]
    asked = (tmp_path / "grpo_seed2.log").read_text()
    assert "--config.resume_from=latest" in asked
    assert f"--config.output_dir={tmp_path} --config.run_name=grpo_seed2" in asked
    assert "grpo_seed1: finished before" in capfd.readouterr().out


@pytest.mark.parametrize(("seen", "given"), [("2,5", "5"), ("GPU-a, GPU-b", "GPU-b"), ("", "")])
def test_a_run_gets_one_of_the_gpus_that_the_study_was_given(seen, given, tmp_path, monkeypatch):
    """Not one of the machine's others."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert learn.execute(["/usr/bin/env"], tmp_path / "log", 1, 1) == 0
    assert f"CUDA_VISIBLE_DEVICES={given}" in (tmp_path / "log").read_text().splitlines()


def test_a_resumed_run_gets_the_seconds_that_its_checkpoint_leaves(tmp_path):
    write(tmp_path / "grpo_seed1", [{"kind": "epoch", "epoch": n, "time/epoch_s": 7.0} for n in range(3)])
    args = arguments("--out", tmp_path, "--seconds", 36)

    def hours():
        command = learn.command_of(learn.RUNS[0], 1, args)
        (flag,) = [word for word in command if word.startswith("--config.max_hours=")]
        return float(flag.split("=")[1])

    assert hours() == pytest.approx(0.01)
    checkpoint = tmp_path / "grpo_seed1" / "checkpoints" / "epoch_000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "progress.json").write_text("{}")
    assert hours() == pytest.approx(22 / 3600)


def test_numbers_of_gpus_go_up_to_those_that_the_process_sees(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    args = scaling.parser().parse_args([str(tmp_path / "lines.jsonl"), "--runs", "start"])
    assert scaling.pending(args) == [("start", 1), ("start", 2)]


def test_one_rank_has_no_more_threads_than_each_of_several(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    variables = scaling.environment(["1", "3"])
    assert variables["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert variables["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert scaling.environment(["0"])["OMP_NUM_THREADS"] == "4", "what is set stays"


def narrow_clip():
    """A scorer of the real class that costs little beside the processes of the test."""
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    text = clip_config(sizes).to_dict()
    return CLIPModel(CLIPConfig(text_config=text, vision_config=sizes | dict(patch_size=32), projection_dim=32))


def test_scaling_does_not_wait_for_a_server_that_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "clip_model", narrow_clip)
    monkeypatch.setattr(scaling.sys, "executable", "/bin/false")
    with contextlib.ExitStack() as stack, pytest.raises(RuntimeError, match="ended with exit status 1"):
        scaling.start_servers(0, tmp_path / "clip", stack)


@pytest.mark.slow
def test_scaling_measures_what_its_file_lacks_and_the_hidden_share_of_a_reward(tmp_path, monkeypatch, capsys):
    """On the CPU, for a host of three: two draw and the third one scores."""
    tiny = "sample.num_images_per_prompt=2 sample.batch_size=2 sample.sde_window_size=0"
    run = scaling.Configuration("train_qwenimage --size tiny", 2, tiny)
    monkeypatch.setattr(scaling, "RUNS", {"tiny": run, "reward": run})
    monkeypatch.setattr(scaling, "clip_model", narrow_clip)
    monkeypatch.setattr(scaling, "PORTS", scaling.PORTS[:1])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    args = scaling.parser().parse_args([str(tmp_path / "lines.jsonl"), "--runs", "reward", "tiny"])
    assert scaling.pending(args) == [("tiny", 1), ("tiny", 2), ("reward", 2)]
    some = scaling.parser().parse_args([str(args.lines), "--runs", "tiny", "--gpus", "3"])
    assert scaling.pending(some) == [("tiny", 3)]
    for name, gpus in (("tiny", 1), ("tiny", 2), ("reward", 1)):
        scaling.write(args.lines, {"configuration": name, "gpus": gpus, "images_per_s": 4.0})
    assert scaling.pending(args) == [("reward", 2)]
    scaling.main(args)
    line = scaling.read(args.lines)[-1]
    assert (line["configuration"], line["gpus"], line["images"]) == ("reward", 2, 8)
    assert line["collectives/cpu_s"] > 0
    assert line["host/own_gib"] > 0.7, "of both ranks; torchrun and one of them have 0.56"
    assert f"| reward | 2 | {line['images_per_s'] / 8:.3g} |" in capsys.readouterr().out
    assert line["hidden_share"] == 1 - line["time/reward_s"] / line["reward_alone_s"]
    assert scaling.pending(args) == []


def test_a_flag_of_a_benchmark_that_names_a_value_twice_or_a_setting_without_one_is_refused():
    """Two runs would share one folder, or the first value would be ignored."""
    no_value = ["--set", "seed"]
    sets = ["--set", "seed=1", "precision=bf16", "seed=2"]
    bases = ["--bases", "small=a"]
    commands = [
        (learn, ["train", "--seeds", "1", "2", "1"], "--seeds names a value twice: 1, 2, 1"),
        (learn, ["train", "--only", "nft", "nft"], "--only names a value twice"),
        (learn, ["train", *sets], "--set names a value twice: seed, precision, seed"),
        (learn, ["train", *no_value], "--set 'seed' has no value: write KEY=VALUE"),
        (ladder, ["train", *bases, *no_value], "--set 'seed' has no value: write KEY=VALUE"),
        (scaling, ["lines.jsonl", *no_value], "--set 'seed' has no value: write KEY=VALUE"),
        (bench, no_value, "--set 'seed' has no value: write KEY=VALUE"),
        (ladder, ["train", *bases, "--seeds", "1", "1"], "--seeds names a value twice"),
        (ladder, ["train", *bases, "--only", "nft", "nft"], "--only names a value twice"),
        (ladder, ["train", *bases, "small=b"], "--bases names a value twice: small, small"),
        (ladder, ["train", "--bases", "folder"], "write SIZE=FOLDER"),
        (ladder, ["train", "--bases", "very_small=a"], "without _"),
        (scaling, ["lines.jsonl", "--gpus", "1", "1"], "--gpus names a value twice"),
        (scaling, ["lines.jsonl", "--runs", "nft", "nft"], "--runs names a value twice"),
        (scaling, ["lines.jsonl", *sets], "--set names a value twice"),
        (bench, sets, "--set names a value twice"),
    ]
    rows = []
    for script, words, sentence in commands:
        check = partial(script.check_flags, script.parser().parse_args(words))
        rows.append((" ".join(words), check, [sentence]))
    assert_refused(rows)
    for script in (learn, ladder):
        script.check_flags(script.parser().parse_args(["draw"]))


@pytest.mark.parametrize(
    "command",
    [
        ["learn.py", "train", "--seeds", "1", "1"],
        ["ladder.py", "train", "--bases", "small=a", "--seeds", "1", "1"],
        ["scaling.py", "lines.jsonl", "--gpus", "1", "1"],
        ["bench.py", "--set", "seed=1", "seed=2"],
    ],
    ids=lambda command: command[0],
)
def test_a_benchmark_checks_its_flags_before_it_begins(command):
    done = warm.run([f"benchmarks/{command[0]}", *command[1:]], ENV)
    assert done.returncode == 2
    assert "names a value twice" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_ladders_runs_differ_in_base_and_rate_alone(tmp_path):
    args = ladder.parser().parse_args(["train", "--bases", "small=a", "--out", str(tmp_path), "--gpu"])
    rungs = ladder.rungs(["small", "large"], args.only, [1, 2])
    assert len({rung.name for rung in rungs}) == 2 * 2 * 5 * 5
    for rung in rungs:
        assert ladder.Rung.of_folder(rung.name) == rung
    assert ladder.rungs(["small"], ["nft"], [1]) == [rung for rung in rungs if rung[0::3] == ("small", 1)][10:15]
    for algorithm, run in ladder.ALGORITHMS.items():
        rates = [rung.rate for rung in rungs if rung.algorithm == algorithm and rung[0::3] == ("small", 1)]
        config = config_files.load(run.config)
        own_rate = run.settings.get("train.learning_rate", config.train.learning_rate)
        assert rates[2] == own_rate
        assert [rate / own_rate for rate in rates] == pytest.approx([1 / 9, 1 / 3, 1, 3, 9], rel=0.05)
        rung = ladder.Rung("small", algorithm, rates[0], 1)
        command = ladder.command_of(rung, "bases/small", args)
        given = dict(flag.removeprefix("--config.").split("=", 1) for flag in command[3:])
        of_study = learn.settings_of(run, 1, args)
        changed = {key for key, value in given.items() if str(of_study.get(key)) != value}
        assert changed == {"model", "train.learning_rate", "run_name", "max_hours"}
        assert (given["model"], float(given["train.learning_rate"])) == ("bases/small", rates[0])


def test_a_ladders_table_has_accuracies_at_equal_forwards(tmp_path):
    def run(name, *accuracies):
        """A run that is tested before its first epoch and after each, of 100 forwards."""
        lines = []
        for epoch, accuracy in enumerate(accuracies):
            if epoch:
                lines.append({"kind": "epoch", "epoch": epoch - 1, "step": 0, "forwards": 100})
            line = {"kind": "test", "epoch": epoch, "step": 0, "test/shapes_accuracy": accuracy, "test/variety": 0.9}
            lines.append(line)
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    run("small_nft_0.1_1", 0.4, 0.5, 0.6)
    run("small_nft_0.1_2", 0.4, 0.7, 0.9, 0.2)
    run("large_elbo_0.001_1", 0.4)
    rows = ladder.draw(tmp_path).splitlines()[2:]
    assert rows == [
        "| large | elbo | 0.001 | 1 | 0.400 | 0.400 | 0.90 | 0 |",
        "| small | nft | 0.1 | 2 | 0.750 | 0.750 | 0.90 | 200 |",
    ]
