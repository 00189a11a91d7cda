"""The command line: files from anywhere, overrides, sentences for what the user can mend, what is said without
training, and what a run notes of how it was made."""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import prepare_preferences
import pytest
from small import ROOT, config_of, train

from flow_grpo.base import folders, locations
from flow_grpo.base.errors import RunFailed, UserError
from flow_grpo.command_line import alerts, checks, command_line, help_text
from flow_grpo.data import prompts
from flow_grpo.monitoring import provenance
from flow_grpo.settings import table

DEFAULT = "config/grpo.py:shapes_qwenimage"
CONFIG = command_line.config_of([], DEFAULT)
MINE = '''"""My experiments."""
from neighbour import RATE

from config import grpo
from flow_grpo.settings.config_files import select


def mine():
    config = grpo.shapes_qwenimage()
    config.train.learning_rate = RATE
    config.custom.temperature = 0.5
    config.custom.phases = ("a", "b")
    return config


def large():
    config = grpo.pickscore_qwenimage()
    config.dataset, config.reward_fn, config.text_tokens = ".", {"mine": 1.0, "pickscore": 1.0}, 77
    config.attention = "flash_4"
    return config


def short(config):
    config.num_epochs = 3
    return config


def get_config(name="mine"):
    return select(name, (mine, large), (*grpo.VARIANTS, short), __file__)
'''


@pytest.fixture(autouse=True)
def collecting():
    """The garbage collector of this process works as before after a command line, whether that has run or not."""
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.enable()


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    """A user's own config file and its neighbour, in a folder that is not the current one."""
    folder = tmp_path / "experiments"
    folder.mkdir()
    (folder / "mine.py").write_text(MINE)
    (folder / "neighbour.py").write_text("RATE = 0.25\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if Path(entry).resolve() != ROOT])  # as for a user
    monkeypatch.setattr(sys, "argv", [str(ROOT / "scripts" / "train_qwenimage.py")])
    for name in ("config", "config.grpo"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder / "mine.py"


def test_a_data_set_has_to_be_there_where_a_script_reads_it():
    """Not where pairs are stored and nothing is evaluated, nor where pairs are made of images that are there."""
    words = ["--config=config/dpo.py:shapes_qwenimage_dpo", "--config.dataset=nowhere"]

    def parse(script, *more):
        return command_line.parse(DEFAULT, script, [*words, *more])

    assert parse(checks.DPO, "--config.eval_freq=0").dataset == "nowhere"
    assert parse(prepare_preferences.preparing(prepare_preferences.Options(source="images"))).dataset == "nowhere"
    online = "--config.eval_freq=0", "--config.preferences.path="
    for script, *more in [
        (checks.DPO,),
        (checks.DPO, *online),
        (prepare_preferences.preparing(prepare_preferences.DEFAULTS),),
    ]:
        with pytest.raises(SystemExit):
            parse(script, *more)


def test_options_of_a_reward_that_are_no_dict_are_refused_in_a_sentence(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "from flow_grpo.settings.table import default_config\n\n\ndef get_config(name):\n"
        "    config = default_config()\n    config.reward.args.shapes = 5\n    return config\n"
    )
    with pytest.raises(SystemExit):
        command_line.parse(DEFAULT, checks.GRPO, [f"--config={file}:mine"])
    assert "config.reward.args.shapes is 5; it must be a dict" in capsys.readouterr().err


def test_a_users_own_file_anywhere_takes_variants_and_overrides(own_file):
    words = ["--config", f"{own_file}:mine,short,guard", "--config.seed=7", "--config.reward_fn.ocr=0.5"]
    config = command_line.config_of(words, DEFAULT)
    assert (config.num_epochs, config.seed, config.name) == (3, 7, "mine_guard_short")
    assert (config.train.objective, config.train.learning_rate) == ("guard", 1e-4)
    assert dict(config.reward_fn)["ocr"] == 0.5
    assert command_line.config_of([f"--config={own_file}"], DEFAULT).train.learning_rate == 0.25


def test_a_file_called_config_beside_a_users_own_is_named(own_file):
    (own_file.parent / "config.py").touch()
    with pytest.raises(UserError, match=f"{own_file.parent / 'config.py'}.*rename"):
        command_line.config_of([f"--config={own_file}"], DEFAULT)


def test_smoke_replaces_what_is_not_on_this_machine_and_says_so(own_file):
    config = command_line.config_of([f"--config={own_file}:large,smoke"], DEFAULT)
    assert (config.dataset, config.text_tokens) == (".", 77)
    assert (config.model, config.height, config.precision) == ("flow_grpo/assets/tiny_qwenimage", 64, "fp32")
    assert (config.attention, config.vae_precision, config.compile, config.cache_dir) == ("", "fp32", False, "")
    assert config.reward_fn.to_dict() == {"mine": 1.0}  # a file of one's own stays, one with hub weights goes
    lines = help_text.replaced(f"{own_file}:large,smoke", config)
    assert [line.split()[2] for line in lines] == ["model", "reward_fn", "height", "width", "precision"]
    assert help_text.replaced(f"{own_file}:large", config) == []


WATCHING = """
from config import grpo
from flow_grpo.settings.config_files import select


def mine():
    config = grpo.pickscore_qwenimage()
    config.eval.rewards = ("aesthetic", "jpeg_compressibility")
    config.eval.best_by = "aesthetic"
    with config.unlocked():
        config.reward.args = {"pickscore": {"url": "http://127.0.0.1:1"}}
    return config


def get_config(name):
    return select(name, (mine,), grpo.VARIANTS, __file__)
"""


def test_smoke_leaves_out_watched_rewards_that_are_not_here_and_what_is_said_of_them(tmp_path):
    file = tmp_path / "watching.py"
    file.write_text(WATCHING)
    config = command_line.config_of([f"--config={file}:mine,smoke"], DEFAULT)
    assert config.eval.rewards == ("jpeg_compressibility",)
    assert (config.eval.best_by, config.reward.args.to_dict()) == ("avg", {})
    checks.check(config, checks.GRPO)
    lines = help_text.replaced(f"{file}:mine,smoke", config)
    assert "smoke replaces eval.best_by aesthetic by avg" in lines
    assert any(line.startswith("smoke replaces eval.rewards ('aesthetic', ") for line in lines)
    # What the command line names is asked as the file says.
    watched = ("--config.eval.rewards=ocr,pickscore", "--config.eval.rewards=('ocr', 'pickscore')")
    for named in ("--config.reward_fn.pickscore=1", *watched):
        config = command_line.config_of([f"--config={file}:mine,smoke", named], DEFAULT)
        assert config.reward.args.to_dict() == {"pickscore": {"url": "http://127.0.0.1:1"}}


OWN_PROMPTS = """
from config import grpo
from flow_grpo.settings.config_files import select


def mine():
    config = grpo.{run}()
    config.dataset = {dataset!r}
    return config


def get_config(name):
    return select(name, (mine,), grpo.VARIANTS, __file__)
"""


@pytest.mark.parametrize("run", ["pickscore_qwenimage", "shapes_qwenimage"])
def test_smoke_takes_no_reward_of_a_shipped_task_for_prompts_of_ones_own(run, tmp_path):
    file = tmp_path / "own_prompts.py"
    file.write_text(OWN_PROMPTS.format(run=run, dataset=str(tmp_path)))
    config = command_line.config_of([f"--config={file}:mine,smoke"], DEFAULT)
    assert (config.dataset, config.model) == (str(tmp_path), "flow_grpo/assets/tiny_qwenimage")
    assert config.reward_fn.to_dict() == {"jpeg_compressibility": 1.0}


LEFT_OUT = "smoke leaves out the reward pickscore, which needs weights of the hub or a server"
SMOKE_AND_FLAGS = [  # flags, the rewards that remain, and what smoke is said to have replaced among these
    ([], {"shapes": 1.0}, ["dataset", "reward_fn"]),
    (["--config.reward_fn.jpeg_compressibility=0.5"], {"jpeg_compressibility": 0.5}, ["dataset"]),
    (["--config.reward_fn.jpeg_compressibility", "0.5"], {"jpeg_compressibility": 0.5}, ["dataset"]),
    (["--config.reward_fn.pickscore=1"], {"pickscore": 1.0}, ["dataset"]),
    (["--config.reward_fn.ocr=0.0"], {"shapes": 1.0}, ["dataset"]),
    (["--config.dataset=dataset/ocr"], {"shapes": 1.0}, ["reward_fn"]),
]


@pytest.mark.parametrize(("flags", "weights", "replaced"), SMOKE_AND_FLAGS)
def test_smoke_puts_nothing_beside_what_the_command_line_names(flags, weights, replaced):
    file = "config/grpo.py:pickscore_qwenimage,smoke"
    config = command_line.config_of([f"--config={file}", *flags], DEFAULT)
    used = [(name, weight) for name, weight in config.reward_fn.items() if weight]
    assert dict(used) == weights
    assert config.text_tokens == (20 if "dataset" in replaced else 128)
    lines = help_text.replaced(file, config, flags)
    keys = [line.split()[2] for line in lines]
    assert [key for key in keys if key in ("dataset", "reward_fn")] == replaced
    expected = [LEFT_OUT] if "jpeg_compressibility" in weights else []
    assert [line for line in lines if "leaves out" in line] == expected


def test_published_configs_are_found_from_any_directory_and_ones_own_file_goes_before_them(own_file, monkeypatch):
    monkeypatch.chdir(own_file.parent)
    monkeypatch.setattr(sys, "argv", ["copy_of_a_script.py"])
    assert command_line.config_of(["--config", "config/nft.py:pickscore_sd3_nft"], DEFAULT).algorithm == "nft"
    assert command_line.config_of([], DEFAULT).name == "shapes_qwenimage"
    Path("config").mkdir()
    own_file.rename("config/grpo.py")
    Path("neighbour.py").rename("config/neighbour.py")
    assert command_line.config_of(["--config", "config/grpo.py:mine"], DEFAULT).train.learning_rate == 0.25


FLAGS = [
    ("--config.compile", "compile", True),
    ("--noconfig.compile", "compile", False),
    ("-config.seed 3", "seed", 3),
    ("--config.train.learning_rate=1", "train.learning_rate", 1.0),
    ("--config.sample.sde_window_range=(1,4)", "sample.sde_window_range", (1, 4)),
    ("--config.eval.rewards=('ocr',)", "eval.rewards", ("ocr",)),
    ("--config.seed=3 --config.seed=4", "seed", 4),
    ("--config.eval.rewards=shapes,ocr", "eval.rewards", ("shapes", "ocr")),
    ("--config.eval.rewards shapes,ocr", "eval.rewards", ("shapes", "ocr")),
    ("--config.eval.rewards=shapes", "eval.rewards", ("shapes",)),
    ("--config.eval.rewards=('shapes','ocr')", "eval.rewards", ("shapes", "ocr")),
    ("--config.eval.rewards=", "eval.rewards", ()),
    ("--config.sample.sde_window_range=1,4", "sample.sde_window_range", (1, 4)),
]


def test_a_flag_sets_a_value_of_its_settings_type():
    values = [table.value_of(command_line.config_of(words.split(), DEFAULT), key) for words, key, _ in FLAGS]
    assert list(map(repr, values)) == [repr(value) for *_, value in FLAGS]


def test_rewards_that_no_file_lists_and_their_options_may_be_set():
    options = dict(path="/models/my clip", layers=3, scale=0.5, fast=False, url="http://10.0.0.2:18087")
    words = [f"--config.reward.args.mine.{key}={value}" for key, value in options.items()]
    words += ["--config.reward_fn.mine", "-0.5", "--config.reward_fn.shapes=0.25"]
    config = command_line.config_of(words, DEFAULT)
    assert (config.reward_fn.mine, config.reward_fn.shapes) == (-0.5, 0.25)
    assert config.reward.args.mine.to_dict() == options


def test_settings_of_ones_own_are_free_in_a_file_of_ones_own(own_file):
    config = command_line.config_of([f"--config={own_file}", "--config.custom.temperature=2"], DEFAULT)
    checks.check(config, checks.GRPO)
    assert config.custom.to_dict() == dict(temperature=2.0, phases=("a", "b"))
    with pytest.raises(AttributeError):
        config.train.temperature = 1.0


def raising(error):
    """A script's main that fails."""

    def main(config):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "rank", "status", "says"),
    [
        (UserError("config.seed\n  is\t7"), "0", 2, "config.seed is 7"),
        (UserError("config.seed is 7"), "3", 2, "config.seed is 7"),
        (UserError("a" * 10**6), "0", 2, f"{'a' * 1800} ... {'a' * 200}"),
        (FloatingPointError("the loss is nan"), "0", 1, "the loss is nan"),
        (RunFailed("disk full: free some space"), "0", 1, "disk full: free some space"),
        (RuntimeError("[../pair.cc:538] Connection closed by peer [127.0.0.1]:1"), "1", 1, command_line.ANOTHER_RANK),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_bug_is_one_sentence_with_its_status_and_a_bug_keeps_its_traceback(
    error, rank, status, says, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["train_qwenimage.py"])
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as ended:
        command_line.run(raising(error), CONFIG)
    assert ended.value.code == status
    assert capsys.readouterr().err == f"train_qwenimage.py{f', rank {rank}' if rank != '0' else ''}: {says}\n"
    with pytest.raises(ValueError, match="invalid literal"):
        command_line.run(lambda config: int(config.name), CONFIG)


def ctrl_c(config):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(9)


def ctrl_c_of_which_a_library_makes_another_error(config):
    try:
        ctrl_c(config)
    except BaseException as error:
        raise OSError("could not write") from error


@pytest.mark.parametrize("main", [ctrl_c, ctrl_c_of_which_a_library_makes_another_error])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_ctrl_c_is_one_sentence_of_rank_0_that_says_how_to_go_on(main, rank, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train_qwenimage.py"])
    monkeypatch.setenv("RANK", rank)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "epoch_000001").mkdir(parents=True)
    folders.lock(tmp_path)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    try:
        with pytest.raises(SystemExit) as ended:
            command_line.run(main, CONFIG)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL  # a second one ends the process at once
        way = f"the same command with --config.resume_from={checkpoints} goes on from its last checkpoint"
        assert capsys.readouterr().err == ("" if rank == "1" else f"train_qwenimage.py: stopped by Ctrl-C; {way}\n")
        for error in (RunFailed("a server is away"), RunFailed(f"a server is away; {way}")):
            with pytest.raises(SystemExit), command_line.sentences():
                raise error
            assert capsys.readouterr().err.endswith(f": a server is away; {way}\n")
        with pytest.raises(SystemExit), command_line.sentences("a way of its own"):
            raise KeyboardInterrupt
        way = "a way of its own"
        assert capsys.readouterr().err == ("" if rank == "1" else f"train_qwenimage.py: stopped by Ctrl-C; {way}\n")
    finally:
        signal.signal(signal.SIGINT, before)
        folders.release(tmp_path)
    assert ended.value.code == 130


def test_an_error_names_the_variant_that_has_set_its_setting_and_not_the_command_line():
    file = "config/grpo.py:shapes_qwenimage,flash"
    config = command_line.config_of(["--config", file, "--config.height=17"], DEFAULT)
    by_variant = UserError("config.sample.flash_ratio is 0.4")
    assert help_text.culprit(by_variant, file, config) == "; flash has set sample.flash_ratio"
    for sentence in ("config.height is 17", "no setting is to blame"):
        assert help_text.culprit(UserError(sentence), file, config) == ""


def test_what_is_shipped_is_found_from_any_directory_and_in_the_assets_of_an_installed_package(tmp_path, monkeypatch):
    names = "flow_grpo/assets/tiny_qwenimage", "dataset/shapes"
    before = prompts.load_prompts(names[1], "train")
    monkeypatch.chdir(tmp_path)
    assert all((locations.PACKAGE.parent / name).samefile(locations.resolve(name)) for name in names)
    assert prompts.load_prompts(names[1], "train") == before
    (tmp_path / "dataset" / "shapes").mkdir(parents=True)
    assert locations.resolve(names[1]) == names[1]  # the user's own goes first
    assert locations.resolve("black-forest-labs/FLUX.1-dev") == "black-forest-labs/FLUX.1-dev"
    installed = tmp_path / "site-packages" / "flow_grpo"
    monkeypatch.setattr(locations, "PACKAGE", installed)
    data = installed / "assets" / "dataset" / "ocr"
    data.mkdir(parents=True)
    assert locations.resolve("dataset/ocr") == str(data)


TRAIN = "scripts/train_qwenimage.py"
COMMANDS = [f"scripts/{path.name}" for path in sorted((ROOT / "scripts").glob("*.py"))]
COMMANDS += ["tools/convert_lora.py", "tools/split_prompts.py", "-m flow_grpo.monitoring.report"]
TINY = "flow_grpo/assets/tiny_qwenimage"
ANSWERED = [  # a command, its exit status, and words of its answer
    *((f"{command} --help", 0, ["python" if "train" not in command else "torchrun"]) for command in COMMANDS),
    (f"{TRAIN} --help", 0, ["Flow-GRPO on Qwen-Image", "--list", "train"]),
    (f"{TRAIN} --help sample train.beta", 0, ["sample.noise_level", "train.beta"]),
    (f"{TRAIN} --help nothing", 2, ["'nothing'", "sample"]),
    (f"{TRAIN} --list", 0, ["pickscore_qwenimage_2512_pr ", "TempFlow-GRPO on Qwen-Image-2512", "mixgrpo"]),
    (f"{TRAIN} --config config/dpo.py:shapes_qwenimage_dpo --list", 0, ["online"]),
    (f"{TRAIN} --config config/grpo.py:", 2, ["config/grpo.py:", "--list"]),
    (f"{TRAIN} --config config/grpo.py:shapes_qwenimage_pr,fast", 2, ["shapes_qwenimage_pr has set algorithm"]),
    (f"{TRAIN} --config.reward_fn.shapez=1", 2, ["'shapez'", "shapes"]),
    (f"{TRAIN} --dry_run=3", 2, ["3 GPUs", "[1, 2, 4, 8]"]),
    (f"{TRAIN} --config.dataset=README.md", 2, ["'README.md'", "tools/split_prompts.py"]),
    (f"{TRAIN} --config.dataset={'a' * 300}", 2, ["config.dataset", "aaa"]),
    (f"{TRAIN} --config.resume_from=nowhere --dry_run", 2, ["'nowhere'"]),
    (f"{TRAIN} --config.model=me/mine", 2, ["'me/mine'", "refused"]),
    (f"scripts/evaluate.py {TINY} --guidance-scale 1", 2, ["--guidance-scale"]),
    ("scripts/evaluate.py scripts/nowhere", 2, ["'scripts/nowhere'"]),
    (f"scripts/evaluate.py {TINY} --model me/mine", 2, ["'me/mine'", "refused"]),
    (f"scripts/evaluate.py {TINY} --set eval.num_stepz=3", 2, ["eval.num_stepz"]),
    (f"scripts/evaluate.py {TINY} --rewards shapez", 2, ["'shapez'", "shapes"]),
    ("scripts/minimal_grpo.py --epochs 3", 2, ["--epochs"]),
    ("scripts/prepare_preferences.py --max_row=3", 2, ["--max_row"]),
    ("scripts/prepare_preferences.py --config.sample.batch_size=7", 2, ["multiple"]),
    ("scripts/prepare_preferences.py --dry_run", 2, ["--dry_run"]),
    ("scripts/push_to_hub.py scripts/nowhere --repo me/mine", 2, ["scripts/nowhere"]),
    ("scripts/push_to_hub.py scripts --repo mine", 2, ["'mine'", "USER/NAME"]),
    ("scripts/push_to_hub.py scripts --rep me/mine", 2, ["--rep"]),
    ("scripts/serve_reward.py shapez", 2, ["'shapez'", "shapes"]),
    ("scripts/serve_reward.py shapes --options 3", 2, ["--options", "'3' is no object"]),
    ("scripts/serve_reward.py shapes --options {a", 2, ["--options", "'{a' is no JSON"]),
    ("-m flow_grpo.monitoring.report --ot page.html scripts", 2, ["--ot"]),
]


@pytest.fixture
def without_torch(tmp_path):
    """The environment of a command whose end it is to import torch."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    return {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin", "HF_ENDPOINT": "http://127.0.0.1:1"}


def wrong_answer(status, out, err, expected, says):
    """The answer of a command, if it is not as expected, else ""."""
    is_right = status == expected and all(word in (err if status else out) for word in says)
    return "" if is_right and "Traceback" not in err else f"{status}: {out}{err}"


def test_every_command_line_is_answered_before_torch_is_imported(without_torch):
    """In forks of one process; a process of its own is below."""
    commands = json.dumps([command.split() for command, *_ in ANSWERED])
    how = dict(env=without_torch, cwd=ROOT, capture_output=True, text=True)
    done = subprocess.run([sys.executable, "tests/light.py"], input=commands, **how)
    assert done.returncode == 0, done.stderr
    wrong = []
    for (command, expected, says), answer in zip(ANSWERED, json.loads(done.stdout), strict=True):
        said = wrong_answer(*answer, expected, says)
        if said:
            wrong.append(f"{command} -> {said}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("words", ["", "-m flow_grpo "])
def test_a_process_of_its_own_answers_before_torch_is_imported(words, without_torch):
    script = f"{words}train_qwenimage" if words else TRAIN
    for more, expected, says in (("--help", 0, ["--list"]), ("--config.reward_fn.shapez=1", 2, ["'shapez'"])):
        command = [sys.executable, *f"{script} {more}".split()]
        done = subprocess.run(command, env=without_torch, cwd=ROOT, capture_output=True, text=True)
        assert wrong_answer(done.returncode, done.stdout, done.stderr, expected, says) == ""


def test_a_script_of_another_checkout_is_refused(tmp_path, monkeypatch):
    (tmp_path / "flow_grpo" / "settings").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "scripts" / "train_qwenimage.py")])
    with pytest.raises(SystemExit):
        command_line.parse("config/grpo.py:shapes_qwenimage")


def test_the_garbage_collector_rests_between_the_command_line_and_main():
    config = command_line.parse(DEFAULT, checks.GRPO, [])
    assert not gc.isenabled()
    states = []
    command_line.run(lambda config: states.append(gc.isenabled()), config)
    assert states == [True]


def test_the_garbage_collector_does_not_look_through_all_that_a_run_keeps_while_it_grows():
    config = command_line.parse(DEFAULT, checks.GRPO, [])
    before = gc.get_stats()
    command_line.run(lambda config: [[] for _ in range(1_000_000)], config)
    passes = [now["collections"] - then["collections"] for now, then in zip(gc.get_stats(), before)]
    assert passes[0] > 100
    assert passes[2] == 0


def test_every_changed_setting_has_its_origin():
    words = ["--config.seed=7", "--config.train.beta=0.5"]
    file = "config/grpo.py:shapes_qwenimage_pr,dppo"
    config = command_line.config_of(["--config", file, *words], file)
    origins = help_text.origins(file, config)
    assert (origins["seed"], origins["train.objective"]) == ("the command line", "dppo")
    assert origins["sample.num_branches"] == "shapes_qwenimage_pr"
    assert "num_epochs = 28" in help_text.changed_settings(file, config)
    assert "train.adam_betas" not in origins


def test_what_made_a_run_is_noted_with_a_users_own_files_and_without_queries_of_addresses(tmp_path, monkeypatch):
    file = tmp_path / "mine.py"
    words = ["train.py", "--config", f"{file}:a,b", "--config.reward.args.ocr.url=http://h/x?key=SECRET"]
    monkeypatch.setattr(sys, "argv", words)
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    (tmp_path / "rates").mkdir()
    (tmp_path / "rates" / "low.py").write_text("RATE = 1e-5")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("rates.low")
    for epoch in (0, 3):
        file.write_text(f"# mine at {epoch}")
        provenance.note_start(run_folder, config_of("shapes_qwenimage"), world_size=2, epoch=epoch)
        provenance.note_end(run_folder)
    copies = sorted(run_folder.glob("source/epoch_*/mine.py"))
    assert [copy.read_text() for copy in copies] == ["# mine at 0", "# mine at 3"]
    assert (run_folder / "source/epoch_000003/rates/low.py").read_text() == "RATE = 1e-5"
    beside = {name.split("/")[0] for name in provenance.modules_beside(ROOT / "setup.py")}
    assert "tests" in beside
    assert not beside & {"flow_grpo", ".venv"}, "nothing that is shipped or installed"
    starts = provenance.starts(run_folder)
    assert [(start["epoch"], start["ranks"]) for start in starts] == [(0, 2), (3, 2)]
    assert all(start["start"] <= start["end"] for start in starts)
    assert {"command", "host", "commit", "changed_files", "versions", "gpus"} <= starts[0].keys()
    assert "SECRET" not in (run_folder / provenance.FILE).read_text()


def test_whom_config_alert_names_is_told_of_the_end_and_of_a_crash_but_not_of_ctrl_c(tmp_path, shallow, monkeypatch):
    told = tmp_path / "told"
    program = tmp_path / "tell.py"
    program.write_text(f"import sys\nopen({str(told)!r}, 'a').write(sys.argv[1] + chr(10))")
    command = f"{sys.executable} {program}"
    train("shapes_qwenimage", tmp_path / "runs", alert=command, num_epochs=1, eval_freq=0, **shallow)
    config = command_line.config_of([f"--config.alert={command}"], DEFAULT)
    for error in (KeyboardInterrupt(), UserError("config.seed is 7")):
        with pytest.raises(SystemExit):
            command_line.run(raising(error), config)
    lines = told.read_text().splitlines()
    assert len(lines) == 2
    assert "has ended after 1 epoch" in lines[0]
    assert "shapes_qwenimage has failed: UserError: config.seed is 7" in lines[1]
    monkeypatch.setenv("RANK", "1")
    assert alerts.send("false", "said by rank 0 alone") == ""
    monkeypatch.setenv("RANK", "0")
    said = alerts.send("false a_token", "a command that fails ends no run, and only its first word is shown")
    assert said == "config.alert failed: false ended with 1"
