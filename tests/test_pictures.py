"""Pictures of other people: of every kind the right colours, or one sentence before anything is loaded."""

import io
import json
import re
import struct
import zlib
from functools import partial

import numpy as np
import pytest
from PIL import Image
from refused import assert_refused
from small import MODELS

from flow_grpo.base import pictures
from flow_grpo.base.prompt import Prompt
from flow_grpo.data.prompts import load_file
from flow_grpo.diffusers_patch import registry

RED = (255, 0, 0)
WHITE = (255, 255, 255)
GREY_16 = np.full((4, 4), 40 * 257, np.uint16)  # white to whoever cuts at 255


def saved(picture, kind="png", **how):
    file = io.BytesIO()
    picture.save(file, kind, **how)
    return file.getvalue()


def palette(transparent):
    picture = Image.new("P", (4, 4), 1)
    picture.putpalette([0, 255, 0, *RED])
    return saved(picture, transparency=1) if transparent else saved(picture)


SEEN = {  # a file of one colour, the colour that is seen, and how far a JPEG may be from it
    "grey of 16 bits": (saved(Image.fromarray(GREY_16)), (40, 40, 40), 0),
    "tiff of 16 bits": (saved(Image.fromarray(GREY_16.astype(">u2")), "tiff"), (40, 40, 40), 0),
    "pgm of 16 bits": (saved(Image.fromarray(GREY_16), "ppm"), (40, 40, 40), 0),
    "white of 16 bits": (saved(Image.fromarray(np.full((4, 4), 65535, np.uint16))), WHITE, 0),
    "one bit": (saved(Image.new("1", (4, 4), 1)), WHITE, 0),
    "palette": (palette(transparent=False), RED, 0),
    "transparent palette": (palette(transparent=True), WHITE, 0),
    "transparent": (saved(Image.new("RGBA", (4, 4), (0, 0, 0, 0))), WHITE, 0),
    "half transparent": (saved(Image.new("RGBA", (4, 4), (255, 0, 0, 128))), (255, 127, 127), 1),
    "opaque": (saved(Image.new("RGBA", (4, 4), (*RED, 255))), RED, 0),
    "four inks": (saved(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "jpeg"), RED, 3),
    "moving": (saved(Image.new("RGB", (4, 4), RED), "gif", save_all=True,
                     append_images=[Image.new("RGB", (4, 4), "blue")]), RED, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_picture_of_every_kind_has_the_colour_that_is_seen(name):
    file, colour, tolerance = SEEN[name]
    picture = pictures.upright(file)
    assert picture.mode == "RGB"
    middle = picture.getpixel((2, 2))
    assert max(abs(found - wanted) for found, wanted in zip(middle, colour)) <= tolerance


def png_of_size(width, height):
    """A whole PNG whose header lies about its size."""
    kind = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    file = saved(Image.new("RGB", (4, 4)))
    return file[:12] + kind + struct.pack(">I", zlib.crc32(kind)) + file[33:]


def with_text_bomb():
    """A whole PNG with a text that unpacks to 200 MB."""
    file = saved(Image.new("RGB", (4, 4)))
    text = b"zTXt" + b"a\0\0" + zlib.compress(bytes(2 * 10**8), 1)
    return file[:33] + struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text)) + file[33:]


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
WRONG = {  # a file that is no whole picture, and words of the sentence
    "cut.jpg": (saved(NOISE, "jpeg")[:-200], "truncated"),
    "cut.png": (saved(NOISE)[:-200], "cannot be read"),
    "cut.webp": (saved(NOISE, "webp")[:-200], "webp"),
    "bomb.png": (png_of_size(60000, 60000), "3600000000 pixels"),
    "pointer.png": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    "empty.png": (b"", "is empty"),
    "page.png": (b"<html>404</html>", "no picture of a format"),
    "folder.png": (None, "Is a directory"),
    "phone.heic": (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99), "no picture of a format"),
    "drawing.svg": (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "no picture of a format"),
    "._whole.png": (b"\0\x05\x16\x07\0\2\0\0Mac OS X        " + bytes(99), "no picture of a format"),
    "Thumbs.db": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(99), "no picture of a format"),
    "text_bomb.png": (with_text_bomb(), "cannot be read"),
}


def dataset_of(folder, name, content):
    """A file of two prompts, of which the second edits a file of this content."""
    (folder / "whole.png").write_bytes(saved(NOISE))
    if content is None:
        (folder / name).mkdir()
    else:
        (folder / name).write_bytes(content)
    rows = [{"prompt": "a cat", "sources": [source]} for source in ("whole.png", name)]
    path = folder / "train_metadata.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_source_that_is_no_whole_picture_is_refused_by_its_line(tmp_path):
    rows = []
    for name, (content, *words) in WRONG.items():
        path = dataset_of(tmp_path, name, content).rename(tmp_path / f"{name}.jsonl")
        rows.append((name, partial(load_file, path), [f"{path}, line 2: ", tmp_path / name, *words]))
    assert_refused(rows)


ODD_NAMES = {"https://a.org/b.png": "fetch", "data:image/png;base64,iVBO": "fetch", "a\0.png": "no file can have"}


def test_names_of_no_file_are_refused_by_their_line(tmp_path):
    rows = []
    for number, (name, words) in enumerate(ODD_NAMES.items()):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps({"prompt": "a cat", "sources": [name]}) + "\n")
        rows.append((name, partial(load_file, path), [f"{path}, line 1: ", words]))
    assert_refused(rows)


def test_source_that_is_no_file_or_hardly_wide_is_refused(tmp_path):
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    Image.new("RGB", (1, 3000)).save(tmp_path / "narrow.png")
    model = MODELS["qwenimage_edit"].without_weights(registry.tiny_folder("qwenimage_edit"))
    narrow = Prompt("a cat", {}, (tmp_path / "narrow.png",))
    rows = [
        ("zero", Prompt("a cat", {}, (tmp_path / "zero.png",)).source_sizes, ["'a cat'", "device"]),
        ("narrow", partial(model.check_sources, [narrow]), ["'a cat'", "1 x 3000", "crop"]),
    ]
    assert_refused(rows)


def test_whole_file_with_something_behind_its_end_is_read(tmp_path):
    path = dataset_of(tmp_path, "longer.jpg", saved(NOISE, "jpeg") + bytes(100))
    assert load_file(path)[1].source_sizes() == [(64, 64)]


@pytest.mark.parametrize(("values", "words"), [(2.0**20, "values from"), (0.5, "floats")])
def test_values_whose_white_nobody_knows_are_refused(values, words):
    kind = np.int32 if values > 1 else np.float32
    file = saved(Image.fromarray(np.full((4, 4), values, kind)), "tiff")
    with pytest.raises(pictures.Unreadable, match=words):
        pictures.upright(file)


def test_source_that_is_damaged_later_is_named_with_its_prompt(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(saved(NOISE)[:200])
    with pytest.raises(ValueError, match=re.escape(f"a source of 'a cat': {path} cannot be read")):
        Prompt("a cat", {}, (path,)).pictures()
