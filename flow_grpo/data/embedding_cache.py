"""Prompt embeddings on a disk: encoded once, read by every later run, so that no text encoder stays on the GPU.

The cache has a folder for each way of encoding (encoders and tokenizers, width, kind of device, versions), which has a
file for each prompt. Files appear whole or not at all: a kill leaves no half of one. A file's header has a digest of
its prompt, its way of encoding and its numbers, which is compared whenever the file is read.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from flow_grpo.base import folders
from flow_grpo.base.errors import UserError
from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch.condition import TENSORS, Condition

FORMAT = 3  # of the files; those of another are not read
REMEMBERED_BYTES = 2**30  # of conditions in memory: 1,170 of Qwen-Image's of 128 tokens
WAY_OUT = "delete it, and the next start of the run encodes it again"


class Cache:
    """Conditions of single prompts, one row each, of one way of encoding.

    Args:
        folder: of all ways of encoding.
        encoder: what the numbers depend on, as JSON has it; versions of the libraries and the kind of device are added.
        width: text tokens that prompts are padded to; on the disk they are not padded.
    """

    def __init__(self, folder: str, encoder: dict[str, Any], width: int, device: torch.device):
        way = dict(encoder)
        for package in ("torch", "transformers", "diffusers"):
            way[package] = version(package)
        way |= dict(width=width, device=device.type, fields=TENSORS, format=FORMAT)
        digest = hashlib.blake2b(json.dumps(way, sort_keys=True).encode(), digest_size=16)
        self.folder = Path(folder, digest.hexdigest()).absolute()
        self.device = device
        # By name: rows with the same negative share its memory.
        self._read_negative = lru_cache(maxsize=1024)(self._read_row)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def missing(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        """Return the prompts without a file, each once, and for each negative without one the first of its prompts.
        Raises UserError: a file is damaged. Reads headers."""
        lacking = []
        stored = []
        for prompt in {prompt.digest: prompt for prompt in prompts}.values():
            if self._path(prompt.digest).exists():
                stored.append(prompt)
            else:
                lacking.append(prompt)
        # Negatives differ from each other in their source images alone: prompts of text share theirs.
        with_sources = [prompt for prompt in stored if prompt.sources]
        negatives = set()
        for prompt in with_sources or stored[:1]:
            with _opened(self._path(prompt.digest)) as file:
                negative = (file.metadata() or {}).get("negative")
            if negative and negative not in negatives and not self._path(negative).exists():
                lacking.append(prompt)
            negatives.add(negative)
        return lacking

    def check_writable(self) -> None:
        """Raise UserError unless embeddings can be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise UserError(
                f"config.cache_dir: {self.folder.parent} lacks prompts of this run and cannot be written: "
                f"{error.strerror}"
            ) from error

    def fill(self, prompts: Iterable[Prompt], encode: Callable[[Prompt], Condition]) -> None:
        """Encode these prompts, each into a condition of one row, and write them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        folders.remove_leftovers(self.folder)
        # disable=None: there is a bar on a terminal only.
        for prompt in tqdm(prompts, "encoding prompts", leave=False, disable=None):
            row = encode(prompt)
            negative = ""
            if row.negative is not None:
                negative = f"negative_{_digest_of('', *_without_padding(row.negative))}"
                # Named by its content, and written once for all prompts.
                if not self._path(negative).exists():
                    self._write_row(negative, row.negative, "")
            self._write_row(prompt.digest, row, negative)

    def _write_row(self, name: str, row: Condition, negative: str) -> None:
        tensors, width = _without_padding(row)
        header = {"width": width, "negative": negative}
        header["digest"] = _digest_of(f"{self.folder.name} {name} {negative}", tensors, width)
        with folders.published(self._path(name)) as scratch:
            save_file(tensors, scratch, header)

    def read(self, prompt: Prompt) -> Condition:
        """Return the row of a prompt, on the device, as it was encoded; rows with the same negative share its memory.
        Raises UserError: the file is not the one that was written for this prompt."""
        row, name = self._read_row(prompt.digest)
        if not name:
            return row
        negative, _ = self._read_negative(name)
        return replace(row, negative=negative)

    def _read_row(self, name: str) -> tuple[Condition, str]:
        """Return a row, and the name of its negative, "" for none."""
        tensors, header = self._read_file(name)
        fields: dict[str, Any] = {field: part.to(self.device) for field, part in tensors.items()}
        row = Condition(**fields)
        if header["width"]:
            row = row.padded(int(header["width"]))
        return row, header["negative"]

    def _read_file(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return a file's tensors and its header. Raises UserError: it is damaged."""
        path = self._path(name)
        tensors = {}
        with _opened(path) as file:
            for field in file.keys():  # noqa: SIM118
                tensors[field] = file.get_tensor(field)
            header = file.metadata() or {}
        # The folder's name stands for the way of encoding: a file from another folder is refused, too.
        wanted = f"{self.folder.name} {name} {header.get('negative')}"
        if header.get("digest") != _digest_of(wanted, tensors, header.get("width", "")):
            raise UserError(f"{path} is damaged: it is not what was written for this prompt; {WAY_OUT}")
        return tensors, header


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file of tensors. Raises UserError where it is damaged, also within the block."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged ({error}); {WAY_OUT}") from error


def _without_padding(row: Condition) -> tuple[dict[str, Tensor], str]:
    """Return a row's tensors on the CPU, without the padding of masked text, and the width that the text had; the width
    is "" where nothing was cut off."""
    tensors = row.tensors()
    width = ""
    if row.mask is not None:
        length = int(row.mask.sum())
        # Only zeros behind an unbroken text can be put back by `Condition.padded`.
        if row.mask[:, :length].all() and not row.text_embeds[:, length:].any():
            tensors["text_embeds"] = row.text_embeds[:, :length]
            del tensors["mask"]
            width = str(row.num_tokens)
    on_cpu = {}
    for name, part in tensors.items():
        on_cpu[name] = part.contiguous().cpu()
    return on_cpu, width


def _digest_of(name: str, tensors: dict[str, Tensor], width: str) -> str:
    """Return a digest of what a file is for, and of all that it holds."""
    stored = sorted(tensors.items())
    shapes = []
    for field, part in stored:
        shapes.append([field, str(part.dtype), list(part.shape)])
    digest = hashlib.blake2b(json.dumps([name, width, shapes]).encode(), digest_size=16)
    for _, part in stored:
        digest.update(part.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def remembered(encode: Callable[[Prompt], Condition]) -> Callable[[Prompt], Condition]:
    """Return the same function of one prompt, which remembers REMEMBERED_BYTES of the last conditions that it made."""
    return _Memory(encode).recall


class _Memory:
    """The last conditions that an encoder made. Negatives that equal the first one share its memory."""

    def __init__(self, encode: Callable[[Prompt], Condition]):
        self.encode = encode
        self.first_negative: Condition | None = None
        self.rows: dict[Prompt, Condition] = {}  # in the order in which they were encoded

    def recall(self, prompt: Prompt) -> Condition:
        row = self.rows.get(prompt)
        if row is None:
            row = self._with_shared_negative(self.encode(prompt))
            self.rows[prompt] = row
            row_bytes = sum(part.nbytes for part in row.tensors().values())
            if len(self.rows) * row_bytes > REMEMBERED_BYTES:
                oldest = next(iter(self.rows))
                del self.rows[oldest]
        return row

    def _with_shared_negative(self, row: Condition) -> Condition:
        if row.negative is None:
            return row
        if self.first_negative is None:
            self.first_negative = row.negative
        if self.first_negative.equals(row.negative):
            return replace(row, negative=self.first_negative)
        return row
