"""What is said without training: --help, --list, --dry_run and mistakes; and what a run notes of how it was made."""

import importlib
import shutil
import subprocess
import sys

import pytest
from small import ROOT, as_prompts, config_of, train

from flow_grpo.base import alerts
from flow_grpo.base.errors import UserError
from flow_grpo.data.prompts import Split
from flow_grpo.monitoring import provenance
from flow_grpo.run import dry_run
from flow_grpo.settings import answers, command_line, config_files


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ("--help", 0, ["Flow-GRPO on Qwen-Image", "--list", "train"]),
        ("--help sample train.beta", 0, ["sample.noise_level", "train.beta"]),
        ("--help nothing", 2, ["'nothing'", "sample"]),
        ("--list", 0, ["shapes_qwenimage_pr", "mixgrpo"]),
        ("--config config/dpo.py:shapes_qwenimage_dpo --list", 0, ["online"]),
        ("--config config/grpo.py:shapes_qwenimage,mixgpro", 2, ["'mixgpro'", "mixgrpo"]),
        ("--config config/grpo.py:shapes_qwenimage_pr,fast", 2, ["shapes_qwenimage_pr has set algorithm"]),
        ("--config.sample.batch_size=7", 2, ["[1, 2, 4, 8, 16"]),
        ("--config.reward_fn.shapez=1", 2, ["'shapez'", "shapes"]),
        ("--dry_run=3", 2, ["3 GPUs", "[1, 2, 4, 8]"]),
    ],
)
def test_a_command_line_is_answered_before_torch_is_imported(words, status, says, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin"}
    command = [sys.executable, ROOT / "scripts" / "train_qwenimage.py", *words.split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == status, done
    assert all(word in (done.stderr if status else done.stdout) for word in says), done


TAB = """source <("$PYTHON" scripts/train_qwenimage.py --completion)
for COMP_LINE in "$@"; do
    COMP_POINT=${#COMP_LINE} COMPREPLY=()
    _flow_grpo
    printf "%s " "${COMPREPLY[@]}"
    echo
done"""
OFFERED = {  # what is typed after the script's name -> what bash takes in the place of the last word, after = and :
    "--config config/d": "config/dpo.py:",
    "--config=config/nft.py:shapes_": "shapes_qwenimage_nft",
    "--config config/nft.py:shapes_qwenimage_nft,smoke,aw": "shapes_qwenimage_nft,smoke,awm",
    "--config config/nothere.py:": "",
    "--config.train.dpo": "--config.train.dpo_beta=",
    "--config.fsdp.mode=": "replicate shard hybrid",
    "--help lora.d": "lora.dropout",
    "--config.reward_fn.jp": "--config.reward_fn.jpeg_compressibility=",
    "--config.reward.args.my_": "--config.reward.args.my_red.",  # my_helper.py has no load
    "--seed=1 --li": "--list",
}


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_runs_variants_and_settings_and_starts_no_other_script(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    (tmp_path / "theirs.py").write_text("open('started', 'w')")
    (tmp_path / "my_red.py").write_text("import torch\n\n\ndef load(device): ...")
    (tmp_path / "my_helper.py").write_text("load = None")
    lines = [f"{sys.executable} scripts/train_qwenimage.py {typed}" for typed in OFFERED]
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    env["FLOW_GRPO_REWARDS"] = str(tmp_path)
    command = ["bash", "-c", TAB, "bash", *lines, f"python {tmp_path}/theirs.py --"]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.strip() for line in done.stdout.splitlines()] == [*OFFERED.values(), ""], done
    assert not (ROOT / "started").exists()


def test_a_script_of_another_checkout_is_refused(tmp_path, monkeypatch):
    (tmp_path / "flow_grpo" / "settings").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "scripts" / "train_qwenimage.py")])
    with pytest.raises(SystemExit):
        command_line.parse("config/grpo.py:shapes_qwenimage")


def test_every_changed_setting_has_its_origin():
    words = ["--config.seed=7", "--config.train.beta=0.5"]
    file = "config/grpo.py:shapes_qwenimage_pr,dppo"
    config = command_line.config_of(["--config", file, *words], file)
    origins = answers.origins(file, config)
    assert (origins["seed"], origins["train.objective"]) == ("the command line", "dppo")
    assert origins["sample.num_branches"] == "shapes_qwenimage_pr"
    assert "num_epochs = 28" in answers.changed_settings(file, config)
    assert "train.adam_betas" not in origins


def test_a_dry_run_says_what_a_run_would_be_and_makes_no_folder(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        train("shapes_qwenimage_pr", tmp_path / "runs", dry_run=2, lora__rank=32)
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "an epoch on 2 GPUs" in said
    assert "0.5898 million are trained" in said
    assert not (tmp_path / "runs").exists()


def test_a_measured_row_is_found_by_run_variants_and_settings():
    config = config_files.load(f"{ROOT}/config/grpo.py:pickscore_qwenimage")
    assert dry_run.measured(config)["gib"] == 58.6
    config.lora.rank, config.lora.alpha, config.sample.batch_size = 16, 32, 2
    assert dry_run.measured(config)["card"] == "48 GB"
    config.name = "mine"
    assert dry_run.measured(config) is None


def test_prompts_that_are_trained_on_and_evaluated_are_named():
    train_prompts, others = as_prompts(["a", "b", "c"]), as_prompts(["d"])
    splits = [Split("validation", others), Split("test", as_prompts(["c", "b", "e"]))]
    assert "2 test prompts, such as 'c'" in dry_run.overlap(train_prompts, splits)
    assert dry_run.overlap(train_prompts, splits[:1]) == ""


def test_what_made_a_run_is_noted_with_a_users_own_files_and_without_queries_of_addresses(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    words = ["train.py", "--config", f"{file}:a,b", "--config.reward.args.ocr.url=http://h/x?key=SECRET"]
    monkeypatch.setattr(sys, "argv", words)
    (run_folder := tmp_path / "run").mkdir()
    (tmp_path / "rates").mkdir()
    (tmp_path / "rates" / "low.py").write_text("RATE = 1e-5")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("rates.low")
    for epoch in (0, 3):
        file.write_text(f"# mine at {epoch}")
        provenance.begin(run_folder, config_of("shapes_qwenimage"), world_size=2, epoch=epoch)
        provenance.end(run_folder)
    copies = sorted(run_folder.glob("source/epoch_*/mine.py"))
    assert [copy.read_text() for copy in copies] == ["# mine at 0", "# mine at 3"]
    assert (run_folder / "source/epoch_000003/rates/low.py").read_text() == "RATE = 1e-5"
    starts = provenance.starts(run_folder)
    assert [(start["epoch"], start["ranks"]) for start in starts] == [(0, 2), (3, 2)]
    assert all(start["start"] <= start["end"] for start in starts)
    assert {"command", "host", "commit", "changed_files", "versions", "gpus"} <= starts[0].keys()
    assert "SECRET" not in (run_folder / provenance.FILE).read_text()


def test_whom_config_alert_names_is_told_of_the_end_and_of_a_crash_but_not_of_ctrl_c(tmp_path, shallow, monkeypatch):
    told, program = tmp_path / "told", tmp_path / "tell.py"
    program.write_text(f"import sys\nopen({str(told)!r}, 'a').write(sys.argv[1] + chr(10))")
    command = f"{sys.executable} {program}"
    train("shapes_qwenimage", tmp_path / "runs", alert=command, num_epochs=1, eval_freq=0, **shallow)
    config = command_line.config_of([f"--config.alert={command}"], "config/grpo.py:shapes_qwenimage")
    for error in (KeyboardInterrupt(), UserError("config.seed is 7")):
        with pytest.raises(SystemExit):
            command_line.run(lambda config, error=error: raising(error), config)
    lines = told.read_text().splitlines()
    assert len(lines) == 2
    assert "has ended after 1 epochs" in lines[0]
    assert "shapes_qwenimage has failed: UserError: config.seed is 7" in lines[1]
    monkeypatch.setenv("RANK", "1")
    assert alerts.send("false", "said by rank 0 alone") == ""
    monkeypatch.setenv("RANK", "0")
    said = alerts.send("ls --my-token", "a command that fails ends no run")
    assert said.startswith("config.alert failed: ls ended with ")
    assert (
        alerts.send("false a_token", "and shows no word of it but the first")
        == "config.alert failed: false ended with 1"
    )


def raising(error):
    raise error
