"""Prompt embeddings on a disk: encoded once, read by every later run, so that no text encoder stays on the GPU.

A folder holds a folder for each way of encoding (which encoders and tokenizers, which width, on which kind of device,
with which versions), and that a file for each prompt. Files appear whole or not at all: a kill leaves no half of one. A
file's header has a digest of its prompt, its way of encoding and its numbers, which is compared whenever it is read.
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

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
KEPT_BYTES = 2**30  # of prompts that a run does not encode or read again: 1,170 of Qwen-Image's of 128 tokens
WAY_OUT = "delete it, and the next start of the run encodes it again"


class Cache:
    """Conditions of single prompts, one row each, of one way of encoding.

    Args:
        folder: of all ways.
        encoder: what the numbers depend on, as JSON has it; versions of the libraries and the kind of device are added.
        width: text tokens that prompts are padded to; on the disk they are not.
    """

    def __init__(self, folder: str, encoder: dict, width: int, device: torch.device):
        key = encoder | {package: version(package) for package in ("torch", "transformers", "diffusers")}
        key |= dict(width=width, device=device.type, fields=TENSORS, format=FORMAT)
        digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=16)
        self.folder, self.device = Path(folder, digest.hexdigest()).absolute(), device
        self._negative = lru_cache(maxsize=1024)(self._row)  # by name; rows that share one share its memory

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def missing(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        """Those to encode: each that is not there, once; or one of all, where its negative is not there. Raises
        UserError: the first file is damaged."""
        prompts = list({prompt.digest: prompt for prompt in prompts}.values())
        absent = [prompt for prompt in prompts if not self._path(prompt.digest).exists()]
        if absent or not prompts:
            return absent
        negative = self._read(prompts[0].digest)[1]["negative"]
        return prompts[:1] if negative and not self._path(negative).exists() else []

    def check_writable(self) -> None:
        """Raises UserError unless embeddings can be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise UserError(
                f"config.cache_dir: {self.folder.parent} lacks prompts of this run and cannot be written: "
                f"{error.strerror}"
            ) from error

    def fill(self, prompts: Iterable[Prompt], encode: Callable[[Prompt], Condition]) -> None:
        """Write these; encode: prompt -> its condition, 1 row."""
        self.folder.mkdir(parents=True, exist_ok=True)
        folders.remove_leftovers(self.folder)
        for prompt in tqdm(prompts, "encoding prompts", leave=False, disable=None):  # None: where there is no terminal
            row, negative = encode(prompt), ""
            if row.negative is not None:
                negative = f"negative_{_digest_of('', *_without_padding(row.negative))}"
                if not self._path(negative).exists():
                    self._write(negative, row.negative)
            self._write(prompt.digest, row, negative)

    def _write(self, name: str, row: Condition, negative: str = "") -> None:
        tensors, width = _without_padding(row)
        header = {"width": width, "negative": negative}
        header["digest"] = _digest_of(f"{self.folder.name} {name} {negative}", tensors, width)
        with folders.published(self._path(name)) as scratch:
            save_file(tensors, scratch, header)

    def read(self, prompt: Prompt) -> Condition:
        """One row, on the device, as it was encoded; rows with the same negative share its memory. Raises UserError:
        the file is not the one that was written for this prompt."""
        row, negative = self._row(prompt.digest)
        return replace(row, negative=self._negative(negative)[0] if negative else None)

    def _row(self, name: str) -> tuple[Condition, str]:
        """A row, and the name of its negative."""
        tensors, header = self._read(name)
        row = Condition(**{field: part.to(self.device) for field, part in tensors.items()})
        return row.padded(int(header["width"])) if header["width"] else row, header["negative"]

    def _read(self, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
        path = self._path(name)
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {field: file.get_tensor(field) for field in file.keys()}  # noqa: SIM118
                header = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is damaged ({error}); {WAY_OUT}") from error
        wanted = f"{self.folder.name} {name} {header.get('negative')}"
        if header.get("digest") != _digest_of(wanted, tensors, header.get("width", "")):
            raise UserError(f"{path} is damaged: it is not what was written for this prompt; {WAY_OUT}")
        return tensors, header


def _without_padding(row: Condition) -> tuple[dict[str, Tensor], str]:
    """A row's tensors on the CPU; of masked text whose padding is zeros without it, and the width that it had."""
    tensors, width = row.tensors(), ""
    if row.mask is not None:
        length = int(row.mask.sum())
        if row.mask[:, :length].all() and not row.text_embeds[:, length:].any():
            tensors, width = tensors | dict(text_embeds=row.text_embeds[:, :length]), str(row.num_tokens)
            del tensors["mask"]
    return {name: part.contiguous().cpu() for name, part in tensors.items()}, width


def _digest_of(name: str, tensors: dict[str, Tensor], width: str) -> str:
    """Of everything that a file is for and holds."""
    shapes = [[field, str(part.dtype), list(part.shape)] for field, part in sorted(tensors.items())]
    digest = hashlib.blake2b(json.dumps([name, width, shapes]).encode(), digest_size=16)
    for _, part in sorted(tensors.items()):
        digest.update(part.view(torch.uint8).numpy())
    return digest.hexdigest()


def remembered(encode: Callable[[Prompt], Condition]) -> Callable[[Prompt], Condition]:
    """The same function of one prompt, which keeps KEPT_BYTES of the last ones. Negatives that equal the first one
    share its memory: then a batch of them is one row, see Condition."""
    first: list[Condition] = []
    kept: dict[Prompt, Condition] = {}  # in the order in which they were encoded

    def recall(prompt: Prompt) -> Condition:
        row = kept.get(prompt)
        if row is None:
            row = encode(prompt)
            if row.negative is not None:
                first[:] = first or [row.negative]
                row = replace(row, negative=first[0] if first[0].equals(row.negative) else row.negative)
            kept[prompt] = row
            if len(kept) * sum(part.nbytes for part in row.tensors().values()) > KEPT_BYTES:
                del kept[next(iter(kept))]
        return row

    return recall
