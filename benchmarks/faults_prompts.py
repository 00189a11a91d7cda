"""Prompt files as editors, scripts and accidents leave them: they are read as a text editor would, or one sentence."""

import json
from functools import partial
from pathlib import Path

from faults_commands import Command, judge
from faults_runs import Bench
from faults_tries import Dice, Try, Verdict

from flow_grpo import prompts

TEXTS = ("a red circle", "two blue squares", "a green triangle left of a red circle", "three yellow crosses")
ODD = (  # within a line of text they are part of the prompt
    *("\u2028", "\u0085", "\x0b", "\x1c", "\x0c", "\t", "\u202e", "\N{PILE OF POO}", "\u00e9", "e\u0301", "\u200b"),
    *("\0", "\x1b[31m", "\ufeff", "%s", "{}", "\\", '"', "'", "<|im_end|>", "\ue000", "\U0010ffff", "\x7f"),
)
ENDS = ("\n", "\r\n")
ENCODINGS = ("utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1", "cp1252", "shift_jis")
INCLUDES = (
    *(None, 5, "x", {}, [], [5], [{}], [{"class": "nowhere", "count": 1}], [{"class": 5}], [{"class": "circle"}]),
    *([{"class": "circle", "count": c}] for c in (-1, 0, 1.5, "1", None, 10**9, True, [])),
    *([{"class": "circle", "count": 1, "color": c}] for c in ("nowhere", 5, None, [])),
    *([{"class": "circle", "count": 1, "position": p}] for p in ("left", ["left of", 9], ["left of", -1], [], 5)),
)
LINES = (
    *('{"prompt": ', "[]", "5", "null", '{"prompt": 5}', '{"prompt": null}', '{"text": "a"}', '{"prompt": ""}'),
    *('{"prompt": "a\\ud800"}', '{"prompt": "a", "prompt": "b"}', '{"prompt": NaN}', '{"prompt": "a", "x": NaN}'),
    *("{" * 20000, "[" * 100000, '{"prompt": ' + "9" * 5000 + "}", "", " ", "#", "'a'", '{"prompt": "\t"}'),
)


def make(bench: Bench, seed: int, number: int) -> Try:
    """One file, as one of the functions below damages it."""
    dice = Dice(seed, "prompts", number)
    damage = dice.pick(DAMAGES)
    split = dice.pick(("train", "test", "validation"))
    return Try("prompts", number, f"{damage.__name__} {split}", partial(attempt, bench, damage, split, dice))


def attempt(bench: Bench, damage, split: str, dice: Dice, folder: Path) -> Verdict:
    """Train on a data set with one odd file."""
    data = folder / "data"
    data.mkdir()
    for other in ("train", "test"):
        (data / f"{other}.txt").write_text("a red circle\na blue square\n")
    name, content, expected = damage(dice)
    for file in data.glob(f"{split}.txt"):
        file.unlink()
    path = data / name.replace("SPLIT", split)
    path.write_bytes(content)
    if expected is not None and (texts := read(path)) != expected:
        return Verdict(False, f"read as {texts!r:.200} instead of {expected!r:.200}")
    needs_metadata = path.suffix == ".jsonl" and damage is metadata
    flags = {"num_epochs": 1, "dataset": data} | ({"reward_fn__shapes": 1.0} if needs_metadata else {})
    ended = Command(bench.words("grpo", "runs", **flags), folder).wait()
    return judge(ended, [path.name, "prompt"])


def read(path: Path) -> list[str] | str:
    try:
        return [prompt.text for prompt in prompts.load_file(path)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def plain(rows: list[str], end: str = "\n") -> str:
    return end.join(rows)


def rows_of(dice: Dice) -> list[str]:
    return [dice.pick(TEXTS) for _ in range(1 + dice.below(5))]


def as_json(texts: list[str], ascii_only: bool = True) -> list[str]:
    return [json.dumps({"prompt": text}, ensure_ascii=ascii_only) for text in texts]


def line_ends(dice: Dice):
    """Any of an editor's, with or without one at the end."""
    rows, end = rows_of(dice), dice.pick(ENDS)
    text = plain(rows, end) + dice.pick(("", end))
    return "SPLIT.txt", text.encode(), rows


def byte_order_mark(dice: Dice):
    rows = rows_of(dice)
    name, lines = dice.pick((("SPLIT.txt", rows), ("SPLIT_metadata.jsonl", as_json(rows))))
    return name, plain(lines).encode("utf-8-sig"), rows


def odd_character(dice: Dice):
    """Somewhere within a prompt's words."""
    rows, odd = rows_of(dice), dice.pick(ODD)
    row = dice.below(len(rows))
    place = 1 + dice.below(len(rows[row]) - 2)
    rows[row] = rows[row][:place] + odd + rows[row][place:]
    name, lines = dice.pick((("SPLIT.txt", rows), ("SPLIT_metadata.jsonl", as_json(rows, dice.share() < 0.5))))
    return name, plain(lines).encode(), rows if odd not in ("\0",) else None


def other_encoding(dice: Dice):
    rows = [*rows_of(dice), "caf\u00e9"]
    encoding = dice.pick(ENCODINGS)
    name, lines = dice.pick((("SPLIT.txt", rows), ("SPLIT_metadata.jsonl", as_json(rows, False))))
    return name, plain(lines).encode(encoding, errors="replace"), None


def odd_line(dice: Dice):
    lines = as_json(rows_of(dice))
    lines.insert(dice.below(len(lines) + 1), dice.pick(LINES))
    return "SPLIT_metadata.jsonl", plain(lines).encode(), None


def metadata(dice: Dice):
    """What the reward reads besides the text."""
    row = {"prompt": "a red circle"} | ({"include": dice.pick(INCLUDES)} if dice.share() < 0.9 else {})
    return "SPLIT_metadata.jsonl", json.dumps(row).encode(), None


def long_prompt(dice: Dice):
    text = dice.pick(("a " * 500000, "x" * 10**6, "a red circle " * 50, "\N{PILE OF POO}" * 10**5))
    return "SPLIT.txt", text.encode(), None


def random_bytes(dice: Dice):
    return dice.pick(("SPLIT.txt", "SPLIT_metadata.jsonl")), dice.bytes(1 + dice.below(500)), None


def flipped(dice: Dice):
    data = bytearray(plain(as_json(rows_of(dice))).encode())
    data[dice.below(len(data))] ^= 1 << dice.below(8)
    return "SPLIT_metadata.jsonl", bytes(data), None


def few(dice: Dice):
    text = dice.pick(("", "\n", " ", "\n\n\n", "a\n\n", "\na", "a", "a\n" * 3, "\ufeff", "\r\n", "\0"))
    return dice.pick(("SPLIT.txt", "SPLIT_metadata.jsonl")), text.encode(), None


DAMAGES = (
    *(line_ends, byte_order_mark, odd_character, odd_character, other_encoding, odd_line, odd_line),
    *(metadata, metadata, long_prompt, random_bytes, flipped, few),
)
