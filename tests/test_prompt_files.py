"""Files of prompts from elsewhere: each is read by the column that is clear, or is one sentence."""

import gzip
import io
import json
import os
import zipfile
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import split_prompts
from refused import assert_refused

from flow_grpo.base.prompt import texts_of
from flow_grpo.data import prompt_files, prompts

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
COCO = {"images": [], "annotations": [{"id": 1, "caption": "a"}]}


def parquet(**columns):
    stored = io.BytesIO()
    pq.write_table(pa.table(columns), stored)
    return stored.getvalue()


def zipped():
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w") as archive:
        archive.writestr("sheet.xml", "a")
    return stored.getvalue()


READ = {  # file -> its bytes and its prompts
    "blanks.jsonl": (b'{"prompt": "a"}\t\n{"prompt": "b"} \n', ["a", "b"]),
    "parti.tsv": (b'Prompt\tCategory\n"a cat, red"\tAnimals\na dog\tAnimals\n', ["a cat, red", "a dog"]),
    "drawbench.csv": (
        b'\xef\xbb\xbfPrompts,Kind\r\n"a, b",Colors\r\n"two\nlines",Misc\r\n\r\n',
        ["a, b", "two\nlines"],
    ),
    "metadata.csv": (b"file_name,text\n0001.png,a drawing\n", ["a drawing"]),
    "texts.json": (b'[\n  "a cat",\n  "a dog"\n]\n', ["a cat", "a dog"]),
    "objects.json": (b'[{"prompt": "a cat", "text": "b"}]', ["a cat"]),
    "ENDING.JSONL": (b'{"prompt": "a cat"}\n', ["a cat"]),
    "caption.jsonl": (b'{"caption": "a cat"}\n{"caption": "a dog"}\n', ["a cat", "a dog"]),
    "instruction.jsonl": (b'{"instruction": "make it red"}\n', ["make it red"]),
    "texts.jsonl": (b'"a cat"\n"a dog"\n', ["a cat", "a dog"]),
    "diffusiondb.parquet": (parquet(image_name=["0.png"], prompt=["a cat"], seed=[1]), ["a cat"]),
    "coded.parquet": (parquet(Caption=pa.array(["a cat", "a cat"]).dictionary_encode()), ["a cat", "a cat"]),
    "with spaces.txt": (b"[photo] a cat\n{soft} light, a prompt\n", ["[photo] a cat", "{soft} light, a prompt"]),
    "marked.jsonl": (b'\xef\xbb\xbf{"prompt": "a", "score": NaN}\r\n{"prompt": "b"}\r\n', ["a", "b"]),
    "index.csv": (b",prompt\n0,a cat\n1,a dog\n", ["a cat", "a dog"]),
    "views.parquet": (parquet(prompt=pa.array(["a cat"], pa.string_view())), ["a cat"]),
}
REFUSED = {  # file -> its bytes, and words besides its name
    "pointer.txt": (POINTER, "git lfs pull"),
    "pointer.jsonl": (POINTER, "git lfs pull"),
    "pointer.parquet": (POINTER, "git lfs pull"),
    "coco.json": (json.dumps(COCO).encode(), "images, annotations", "list"),
    "lines.json": (b'{"prompt": "a"}\n{"prompt": "b"}\n', ".jsonl"),
    "two.jsonl": (b'{"caption": "a", "text": "b"}\n', "line 1", "caption, text", "--column"),
    "none.jsonl": (b'{"question": "a"}\n', "line 1", "question", "--column"),
    "later.jsonl": (b'{"prompt": "a"}\n{"caption": "b"}\n', "line 2", '"prompt"'),
    "null.jsonl": (b'{"prompt": "a"}\n{"prompt": null}\n', "line 2"),
    "blank.jsonl": (b'{"prompt": "a"}\n\n{"prompt": "b"}\n', "line 2"),
    "mixed.jsonl": (b'"a"\n3\n', "line 2", "'3'"),
    "twice.jsonl": (b'{"prompt": "a", "prompt": "b"}\n', "line 1", "'prompt' twice"),
    "chat.parquet": (parquet(prompt=[[{"role": "user", "content": "a"}]]), "'prompt'", "list<"),
    "numbers.parquet": (parquet(prompt=[1, 2]), "'prompt'", "int64"),
    "null.parquet": (parquet(prompt=["a", None]), "row 2"),
    "cut.parquet": (parquet(prompt=["a"])[:-5], "parquet"),
    "parquet.txt": (parquet(prompt=["a"]), ".parquet"),
    "packed.txt": (gzip.compress(b"a"), "gunzip"),
    "packed.jsonl.gz": (gzip.compress(b"{}"), "gunzip"),
    "sheet.csv": (zipped(), ".csv"),
    "utf16.txt": ("a cat\n".encode("utf-16"), "line 1", "UTF-8"),
    "unmarked.txt": ("a cat\n".encode("utf-16-le"), "line 1", "UTF-8"),
    "latin.csv": ("prompt\ncaf\u00e9\n".encode("latin-1"), "line 2", "0xe9"),
    "old_mac.txt": (b"a\rb\r", "line 1", "carriage return"),
    "README.txt": (b"About these prompts\n", "rename"),
    "LICENSE": (b"MIT License\n", "rename"),
    "model.gguf": (b"GGUF\0\0", ".txt, .jsonl"),
    "page.txt": (b"<!DOCTYPE html>\n<html>\n", "HTML"),
    "merge.txt": (b"a\n<<<<<<< HEAD\nb\n", "line 2", "merge"),
    "table.txt": (b"Prompt\tCategory\na\tb\n", ".tsv"),
    "objects.txt": (b'{"prompt": "a"}\n', ".jsonl"),
    "list.txt": (b'[\n"a"\n]\n', ".json"),
    "headless.csv": (b"a red cat,Animals\n", "line 1", "a red cat, Animals", "names the columns"),
    "semicolons.csv": (b"Prompt;Category\na;b\n", "line 1", "Prompt;Category"),
    "unquoted.csv": (b"prompt,tag\na cat, red,b\n", "line 2", "3 fields", "2 columns"),
    "open.csv": (b'prompt,tag\n"a,b\nc,d\n', "line 3"),
    "twice.csv": (b"prompt,prompt\na,b\n", "two columns"),
    "header.csv": (b"prompt,tag\n", "empty"),
    "empty.json": (b"[]", "empty"),
    "comma.jsonl": (b'{"prompt": "a",}\n', "line 1", "JSON"),
    "repr.jsonl": (b"{'prompt': 'a'}\n", "line 1", "JSON"),
    "joined.jsonl": (b'{"prompt": "a"},\n{"prompt": "b"}\n', "line 1", "JSON"),
    "pretty.jsonl": (b'{\n  "prompt": "a"\n}\n', "line 1", "goes on", ".json"),
    "entries.jsonl": (b'[{"prompt": "a"},\n{"prompt": "b"}]\n', "line 1", "goes on", ".json"),
    "nested.jsonl": (b'{"prompt": {"text": "a"}}\n', "line 1", '"prompt" string'),
    "lists.parquet": (parquet(prompt=[["a", "b"]]), "'prompt'", "list<"),
    "struct.parquet": (parquet(prompt=[{"en": "a"}]), "'prompt'", "struct<"),
    "bytes.parquet": (parquet(prompt=[b"a"]), "'prompt'", "binary"),
    "arrow.parquet": (b"ARROW1\0\0", ".parquet"),
    "formatted.txt": (b"{\\rtf1\\ansi\\ansicpg1252\n\\f0 a cat\\\n}", "plain text"),
    "old_word.txt": (b"\xd0\xcf\x11\xe0\xa1\xb1", ".csv or .txt"),
    "paper.txt": (b"%PDF-1.4\n1 0 obj\n", "plain text"),
    "markup.txt": (b'<?xml version="1.0"?>\n<p>a cat</p>\n', "XML"),
    "python.txt": (b'prompts = [\n  "a cat",\n]\n', "Python or YAML"),
    "yaml.txt": (b"prompts:\n  - a cat\n", "Python or YAML"),
    "endless.txt": (b"a " * 60_000, "line 1", "119,999 characters"),
    "unseen.txt": ("a\n\u200b\ufeff\n".encode(), "line 2", "empty prompt"),
    "quoted.csv": (b'"prompt";"kind"\n"a, b";"c"\n', "line 1", "';' separates"),
    "windows.csv": (b'"id";"prompt"\r\n"1";"a, b"\r\n', "line 1", "';' separates"),
    "tabs.csv": (b"id\tprompt\n1\ta\n", "line 1", "separates"),
}


@pytest.mark.parametrize("name", READ)
def test_a_file_is_read_by_its_ending_and_the_column_that_is_clear(name, tmp_path):
    stored, texts = READ[name]
    (tmp_path / name).write_bytes(stored)
    read = prompts.load_file(tmp_path / name)
    assert texts_of(read) == texts
    assert all(prompt.metadata.get("prompt", prompt.text) == prompt.text for prompt in read)


def test_what_holds_no_prompts_or_no_clear_column_is_one_sentence(tmp_path):
    rows = []
    for name, (stored, *words) in REFUSED.items():
        (tmp_path / name).write_bytes(stored)
        rows.append((name, lambda name=name: prompts.load_file(tmp_path / name), [tmp_path / name, *words]))
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    (tmp_path / "gone.txt").symlink_to("nothing")
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.jsonl")
    others = {
        "zero.txt": "device",
        "pipe.jsonl": "pipe",
        "loop.txt": "links",
        "gone.txt": "link",
        "folder.txt": "directory",
        "no.csv": "not exist",
    }
    for name, word in others.items():
        rows.append((name, lambda name=name: prompts.load_file(tmp_path / name), [tmp_path / name, word]))
    assert_refused(rows)


def test_a_column_that_is_asked_for_is_taken_from_every_format_or_refused(tmp_path):
    stored = {
        "a.csv": b"prompt,note\na,b\n",
        "a.jsonl": b'{"prompt": "a", "note": "b"}\n',
        "a.json": b'[{"note": "b"}]',
    }
    stored["a.parquet"] = parquet(prompt=["a"], note=["b"])
    rows = []
    for name, content in stored.items():
        (tmp_path / name).write_bytes(content)
        (row,) = prompt_files.read_rows(tmp_path / name, "note")
        assert (row.text, row.metadata.get("prompt", "b")) == ("b", "b")
        rows.append((name, lambda name=name: prompt_files.read_rows(tmp_path / name, "other"), ["'other'", "note"]))
    (tmp_path / "a.txt").write_text("a\n")
    rows.append(("text", lambda: prompt_files.read_rows(tmp_path / "a.txt", "note"), ["'note'", "without columns"]))
    assert_refused(rows)


OTHER_FOLDERS = [  # names of the files of a data set, and words of the sentence
    (["all.csv"], "'all.csv'", "tools/split_prompts.py"),
    (["test.txt", "._all.csv", "all.csv"], "'all.csv'"),
    (["test.txt", "00000.tar"], "['00000.tar', 'test.txt']"),
    (["dataset_info.json", "state.json", "data-00000-of-00001.arrow"], "save_to_disk", "to_csv"),
]


def split_into(folder, source, *words):
    """Run split_prompts.py."""
    words = [source, "--out", folder, "--test=2", "--validation=1", *words]
    args = split_prompts.parser().parse_args([str(word) for word in words])
    split_prompts.check_flags(args)
    split_prompts.main(args)


def test_what_is_split_is_what_a_run_reads(tmp_path):
    plain = tmp_path / "plain.txt"
    plain.write_text("".join(f"number {i}\n" for i in range(8)))
    tagged = tmp_path / "tagged.jsonl"
    tagged.write_text("".join(json.dumps({"prompt": f"tagged {i}", "tag": "a"}) + "\n" for i in range(8)))
    edits = tmp_path / "edits.jsonl"
    edits.write_text("".join(json.dumps({"prompt": "make it blue", "sources": [f"{i}.png"]}) + "\n" for i in range(8)))

    split_into(tmp_path / "out", plain)
    split_into(tmp_path / "out", plain)
    split_into(tmp_path / "two", plain, "--validation=0")
    assert prompts.find_file(tmp_path / "two", "validation") is None, "an empty file of validation prompts is refused"
    assert [len(prompts.load_prompts(tmp_path / "two", split)) for split in ("train", "test")] == [6, 2]
    split_into(tmp_path / "objects", tagged)
    rows = [
        ("text beside objects", lambda: split_into(tmp_path / "objects", plain), ["train_metadata.jsonl", "another"]),
        ("objects beside text", lambda: split_into(tmp_path / "out", tagged), ["test.txt", "another data set"]),
        ("a split less", lambda: split_into(tmp_path / "out", plain, "--validation=0"), ["has validation.txt of"]),
        ("images to be edited", lambda: split_into(tmp_path / "edited", edits), [edits, "line 1", "sources"]),
        ("a negative number", lambda: split_into(tmp_path / "other", plain, "--test=-5"), ["--test is -5"]),
        ("a file", lambda: split_into(plain, plain), ["--out", plain, "is no folder"]),
        ("below a file", lambda: split_into(plain / "a", plain), ["--out", plain, "is no folder"]),
    ]
    assert_refused(rows)
    assert len(prompts.load_prompts(tmp_path / "out", "validation")) == 1


def test_a_data_set_folder_without_its_files_says_what_it_has(tmp_path):
    rows = []
    for number, (names, *words) in enumerate(OTHER_FOLDERS):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in names:
            (folder / name).write_text("prompt\na\n")
        load = partial(prompts.load_prompts, str(folder), "train")
        rows.append((str(names), load, ["train.txt", *words]))
    assert_refused(rows)


def test_what_has_the_name_of_a_split_is_refused_by_its_own_name(tmp_path):
    rows = []
    for target in ("nothing", "train.txt", "/dev/zero"):
        folder = tmp_path / target.strip("/").replace("/", " ")
        folder.mkdir()
        (folder / "train.txt").symlink_to(target)
        load = partial(prompts.load_prompts, str(folder), "train")
        rows.append((target, load, [folder / "train.txt"]))
    assert_refused(rows)
