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
from functools import cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from flow_grpo.base import folders
from flow_grpo.base.errors import UserError
from flow_grpo.base.prompt import Prompt
from flow_grpo.diffusers_patch.condition import TENSORS, Condition

FORMAT = 2  # of the files; those of another are not read
WAY_OUT = "delete it, and the next start of the run encodes it again"


class Cache:
    """Embeddings of single prompts, one row each, of one way of encoding.

    Args:
        folder: of all ways.
        encoder: what the numbers depend on, as JSON has it; versions of the libraries and the kind of device are added.
        width: text tokens that rows with a mask are padded to; on the disk they are not.
    """

    def __init__(self, folder: str, encoder: dict, width: int, device: torch.device):
        key = encoder | {package: version(package) for package in ("torch", "transformers", "diffusers")}
        key |= dict(width=width, device=device.type, fields=TENSORS, format=FORMAT)
        self.folder = Path(folder, _digest(json.dumps(key, sort_keys=True)))
        self.width, self.device = width, device

    def _path(self, prompt: Prompt | None) -> Path:
        return self.folder / f"{prompt.digest if prompt else 'negative'}.safetensors"

    def missing(self, prompts: Iterable[Prompt]) -> list[Prompt]:
        """Those to encode: each that is not there, once; or one of all, where their negative prompt is not there.

        Raises:
            UserError: the first file is damaged.
        """
        prompts = list({prompt.digest: prompt for prompt in prompts}.values())
        absent = [prompt for prompt in prompts if not self._path(prompt).exists()]
        if absent or not prompts or self._path(None).exists() or "negative" not in self._read(prompts[0])[1]:
            return absent
        return prompts[:1]

    def check_writable(self) -> None:
        """Raises UserError unless embeddings can be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise UserError(
                f"config.embeddings_cache: {self.folder.parent} lacks prompts of this run and cannot be written: "
                f"{error.strerror}"
            ) from error

    def fill(self, prompts: Iterable[Prompt], encode: Callable[[Prompt], Condition]) -> None:
        """Write these; encode: prompt -> its condition, 1 row."""
        self.folder.mkdir(parents=True, exist_ok=True)
        folders.remove_leftovers(self.folder)
        for prompt in tqdm(prompts, "encoding prompts", leave=False, disable=None):  # None: where there is no terminal
            row = encode(prompt)
            if row.negative is not None and not self._path(None).exists():
                self._write(None, row.negative)
            self._write(prompt, row)

    def _write(self, prompt: Prompt | None, row: Condition) -> None:
        length = row.num_tokens if row.mask is None else int(row.mask.sum())
        tensors = row.tensors() | dict(text=row.text[:, :length])
        tensors = {name: part.contiguous().cpu() for name, part in tensors.items() if name != "mask"}
        parts = " ".join(part for part in ("mask", "negative") if getattr(row, part) is not None)
        scratch = folders.scratch_beside(path := self._path(prompt))
        try:
            save_file(tensors, scratch, {"parts": parts, "digest": self._digest_of(prompt, parts, tensors)})
            folders.as_any_new_file(scratch)  # several users may share the cache
            folders.publish(scratch, path)
        finally:
            scratch.unlink(missing_ok=True)

    def _digest_of(self, prompt: Prompt | None, parts: str, tensors: dict[str, Tensor]) -> str:
        """Of everything that a file is for and holds."""
        shapes = [[name, str(part.dtype), list(part.shape)] for name, part in sorted(tensors.items())]
        content = json.dumps([self.folder.name, self._path(prompt).stem, parts, shapes])
        digest = hashlib.blake2b(content.encode(), digest_size=16)
        for _, part in sorted(tensors.items()):
            digest.update(part.view(torch.uint8).numpy())
        return digest.hexdigest()

    def read(self, prompt: Prompt | None) -> Condition:
        """One row, on the device, with the negative prompt's (which is None's) where there is one; all rows share it.

        Raises:
            UserError: the file is not the one that was written for this prompt.
        """
        tensors, parts = self._read(prompt)
        if "mask" in parts:
            length = tensors["text"].shape[1]
            tensors["text"] = F.pad(tensors["text"], (0, 0, 0, self.width - length))
            tensors["mask"] = torch.arange(self.width, device=self.device)[None] < length
        return Condition(**tensors, negative=self._negative if "negative" in parts else None)

    @cached_property
    def _negative(self) -> Condition:
        return self.read(None)

    def _read(self, prompt: Prompt | None) -> tuple[dict[str, Tensor], list[str]]:
        """A file's tensors, on the device, and which parts of a Condition follow from them."""
        path = self._path(prompt)
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                header = file.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} is damaged ({error}); {WAY_OUT}") from error
        parts = header.get("parts", "")
        if header.get("digest") != self._digest_of(prompt, parts, tensors):
            raise UserError(f"{path} is damaged: it is not what was written for this prompt; {WAY_OUT}")
        return {name: part.to(self.device) for name, part in tensors.items()}, parts.split()


def remembered(encode: Callable[[Prompt], Condition]) -> Callable[[Prompt], Condition]:
    """The same function of one prompt, which keeps the last 1024, with one negative for all: they are equal."""
    negatives: list[Condition] = []

    def encode_once(prompt: Prompt) -> Condition:
        row = encode(prompt)
        if row.negative is None:
            return row
        negatives[:] = negatives or [row.negative]
        return replace(row, negative=negatives[0])

    return lru_cache(maxsize=1024)(encode_once)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
