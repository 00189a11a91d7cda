"""A name that is no setting is answered with what has its part here, and never with a setting that is only loosely
alike; a config file that cannot be read, or is another program's, with one sentence."""

import re
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from refused import assert_refused, refusal
from small import ROOT
from test_refusals import made

from flow_grpo.command_line import checks, command_line, launcher
from flow_grpo.settings import config_files, stored_config, table, unknown_names

DEFAULT = "config/grpo.py:shapes_qwenimage"
WORDS = [row for row in unknown_names.rows() if re.fullmatch(r"[\w.]+", row.name)]
ROWS = [row for row in WORDS if row.name not in table.BY_KEY]


def typed(*words):
    """The sentence with which a command line is refused."""
    return refusal(command_line.config_of, [*words], DEFAULT)


def named(message):
    return set(re.findall(r"config\.([\w.]*\w)", message))


def test_every_row_names_settings_that_there_are_and_of_each_program_there_are_some():
    rows = unknown_names.rows()
    for row in rows:
        assert table.BY_KEY.keys() >= set(row.ours)
    count = Counter(row.program for row in rows)
    assert len(count) == 6
    assert min(count.values()) >= 8
    assert count["verl-omni"] > 22


def test_a_name_of_another_program_is_answered_with_its_row_and_no_other_setting():
    assert len(ROWS) > 100
    for row in ROWS:
        if row.name not in stored_config.MOVED:
            message = typed(f"--config.{row.name}=1")
            assert f"'s {row.name} " in message, row
            assert set(row.ours) <= named(message.split(row.name, 2)[-1]), row
            assert message.endswith(unknown_names.PAGE)
            assert "vae_batch_size" not in message


def test_of_a_name_with_many_counterparts_two_are_said():
    counterparts = {row.ours for row in unknown_names.rows() if row.name.endswith("train_batch_size")}
    assert len(counterparts) > 2
    assert unknown_names.of_other_program("train_batch_size").count(" is config.") == 2


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("config.sample.train_batch_size = 2", "sample.batch_size"),
        ("config.sample.eval_num_steps = 50", "eval.num_steps"),
        ("config.exploration_k = 6", "sample.num_branches"),
        ("config.train.ema = True", "train.ema_decay"),
        ('config.prompt_fn = "general_ocr"', "dataset"),
        ('config.mixed_precision = "bf16"', "precision"),
        ("config.use_lora = True", "lora.rank"),
        ('config.pretrained.model = "a"', "model"),
        ("config.per_prompt_stat_tracking = True", "sample.baseline"),
    ],
)
def test_a_config_file_has_the_answer_of_the_command_line(line, key):
    name = re.match(r"config\.([\w.]+)", line)[1]
    answers = [refusal(made(line)), typed(f"--config.{name}=1")]
    for answer in answers:
        assert key in named(answer)
        assert answer.endswith(unknown_names.PAGE)
    advice = [answer.partition("; ")[2] for answer in answers]
    assert advice[0].split("; ")[0] == advice[1].split("; ")[0] or name.startswith("pretrained")


def slips(word):
    """A word with one letter wrong, missing, doubled, or two neighbours that have changed places."""
    places = st.integers(0, len(word) - 1)
    letters = st.sampled_from("abcdefghijklmnopqrstuvwxyz_")
    return st.one_of(
        st.builds(lambda i: word[:i] + word[i + 1 :], places),
        st.builds(lambda i, letter: word[:i] + letter + word[i:], places, letters),
        st.builds(lambda i, letter: word[:i] + letter + word[i + 1 :], places, letters),
        st.builds(lambda i: word[:i] + word[i : i + 2][::-1] + word[i + 2 :], places),
    )


def slips_of(key):
    return st.tuples(st.just(key), slips(key.rpartition(".")[2]))


LONG_KEYS = [key for key in table.BY_KEY if len(key.rpartition(".")[2]) > 4]
SLIPS = st.sampled_from(LONG_KEYS).flatmap(slips_of)


@hypothesis_settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(SLIPS)
def test_a_slip_is_answered_with_the_setting_that_was_meant(key_and_slip):
    key, slip = key_and_slip
    assume(slip not in [name.rpartition(".")[2] for name in [*table.BY_KEY, *stored_config.MOVED]])
    assert key in named(unknown_names.answer(slip))


@pytest.mark.parametrize("name", ["train_batch_sizes", "eval_num_step", "num_batches", "kl_beta_2", "ema", "eta", "h"])
def test_a_name_that_is_only_loosely_alike_is_no_slip(name):
    assert unknown_names.nearest(f"sample.{name}", table.BY_KEY) == []


THEIRS = """
import ml_collections


def ocr_sd3():
    config = ml_collections.ConfigDict()
    config.sample = ml_collections.ConfigDict({"num_steps": 10, "train_batch_size": 8})
    return config


def get_config(name):
    return globals()[name]()
"""
OURS = """
from config import grpo
from flow_grpo.settings.config_files import select


def mine():
    return grpo.shapes_qwenimage()


def another():
    return mine()


RUNS = (mine,)


def get_config(name="mine"):
    return select(name, RUNS, grpo.VARIANTS, __file__)
"""
FILES = [  # what a file holds, how its run is named, words of the sentence
    (THEIRS, "own.py:ocr_sd3", ["another program", "docs/reference/coming_from.md"]),
    (THEIRS, "own.py:ocr_sd3,smoke", ["'ocr_sd3,smoke'", "select()", "own_config.md"]),
    (THEIRS, "own.py", ["takes a name", "own.py:NAME"]),
    (OURS, "own.py:another", ["no run 'another' in", "own.py; it has a function another that RUNS does not list"]),
    (OURS, "own.py:yours", ["no run 'yours' in", "own.py; nearest"]),
    (OURS.replace("grpo.VARIANTS", "()"), "own.py:mine,smoke", ["'smoke' in", "own.py, which lists no variants"]),
    (OURS.replace("return mine()", "return nothing()").replace("(mine,)", "(mine, another)"), "own.py:another",
     ["another in", "own.py, line 11: NameError"]),
    ("\nRUNS = (later,)\n", "own.py", ["own.py, line 2: NameError", "'later'"]),
    ("config.seed = 1\n", "own.py", ["own.py, line 1: NameError", "'config'"]),
    ("import no_such_module\n", "own.py", ["own.py, line 1", "no_such_module"]),
    ("\n\ndef broken(:\n", "own.py", ["own.py, line 3: SyntaxError"]),
    ("seed = 1\0\n", "own.py", ["own.py: SyntaxError: source code"]),
    ("train:\n  beta: 0\n", "own.yaml", ["own.yaml is no Python file", "docs/reference/coming_from.md"]),
]  # fmt: skip


def test_a_config_file_that_means_nothing_here_is_one_sentence_that_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load(text, name):
        (tmp_path / name.partition(":")[0]).write_text(text)
        return lambda: config_files.load(f"{tmp_path}/{name}")

    for text, name, words in FILES:
        assert_refused([(name, load(text, name), words)])


def test_the_published_files_are_named_from_the_checkout_and_a_copy_by_its_own_name(tmp_path):
    assert "in config/nft.py" in refusal(config_files.load, f"{ROOT}/config/nft.py:no_such_run")
    copy = tmp_path / "own.py"
    copy.write_text((ROOT / "config/grpo.py").read_text())
    assert f"in {copy}" in refusal(config_files.load, f"{copy}:no_such_run")


def test_a_reward_may_be_added_by_its_name_in_a_config_file():
    config = table.default_config()
    config.reward_fn.jpeg_compressibility = 0.5
    config.reward.args.shapes = {"url": "http://127.0.0.1:18087"}
    assert config.reward_fn.to_dict() == {"shapes": 1.0, "jpeg_compressibility": 0.5}
    checks.check(config, checks.GRPO)


def test_settings_of_ones_own_may_be_set_on_the_command_line_alone():
    config = command_line.config_of(["--config.custom.rate=0.5", "--config.custom.phases=('a','b')"], DEFAULT)
    assert config.custom.to_dict() == {"rate": 0.5, "phases": ("a", "b")}


def test_a_slip_of_a_setting_of_ones_own_is_refused(tmp_path):
    lines = "    config = grpo.shapes_qwenimage()\n    config.custom.rate = 0.5\n    return config"
    file = tmp_path / "own.py"
    file.write_text(OURS.replace("    return grpo.shapes_qwenimage()", lines))
    words = [f"--config={file}", "--config.custom.ratte=1"]
    assert "nearest: config.custom.rate" in refusal(command_line.config_of, words, DEFAULT)


RANKS = [
    (dict(RANK="0"), ["WORLD_SIZE and MASTER_ADDR and MASTER_PORT", "torchrun"]),
    (dict(WORLD_SIZE="x"), ["WORLD_SIZE", "'x'"]),
    (dict(RANK="abc"), ["RANK", "'abc'"]),
    (dict(LOCAL_RANK="-1"), ["LOCAL_RANK", "'-1'"]),
    (dict(RANK="2", WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="1"), ["RANK is 2", "WORLD_SIZE is 2"]),
    (dict(WORLD_SIZE="2"), ["WORLD_SIZE is 2", "RANK is not set"]),
]


@pytest.mark.parametrize(("environment", "words"), RANKS)
def test_an_environment_that_describes_no_rank_is_one_sentence(environment, words, monkeypatch):
    for name in (*launcher.NUMBERS, *launcher.MEETING_PLACE):
        monkeypatch.delenv(name, raising=False)
    launcher.check()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert_refused([(str(environment), launcher.check, words)])


def test_a_rank_of_torchrun_is_understood(monkeypatch):
    for name, value in dict(RANK="1", WORLD_SIZE="2", MASTER_ADDR="a", MASTER_PORT="1", LOCAL_RANK="1").items():
        monkeypatch.setenv(name, value)
    launcher.check()
    assert launcher.world_size() == 2
