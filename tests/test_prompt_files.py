"""Files of prompts from elsewhere: each is read by the column that is clear, or is one sentence."""

import gzip
import io
import json
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
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
    others = {"loop.txt": "links", "gone.txt": "link", "folder.txt": "directory", "no.csv": "not exist"}
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


def test_a_data_set_folder_without_its_files_names_the_file_of_prompts_that_it_has(tmp_path):
    (tmp_path / "all.csv").write_text("prompt\na\n")
    words = ["train.txt", "'all.csv'", "tools/split_prompts.py"]
    assert_refused([("csv", lambda: prompts.load_prompts(str(tmp_path), "train"), words)])
