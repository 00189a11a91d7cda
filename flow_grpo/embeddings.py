"""Prompt embeddings on a disk: encoded once, read by every later run, so that no text encoder stays on the GPU.

A folder holds a folder for each way of encoding (which encoders and tokenizers, which width, on which kind of device,
with which versions), and that a file for each prompt. Files appear whole or not at all: a kill leaves no half of one.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn import functional as F
from tqdm import tqdm

from flow_grpo import folders
from flow_grpo.diffusers_patch.condition import TENSORS, Condition


class Cache:
    """Embeddings of single prompts, one row each, of one way of encoding.

    Args:
        folder: of all ways.
        encoder: what the numbers depend on, as JSON has it; versions of the libraries and the kind of device are added.
        width: text tokens that rows with a mask are padded to; on the disk they are not.
    """

    def __init__(self, folder: str, encoder: dict, width: int, device: torch.device):
        key = encoder | {package: version(package) for package in ("torch", "transformers", "diffusers")}
        key |= dict(width=width, device=device.type, fields=TENSORS)
        self.folder = Path(folder, _digest(json.dumps(key, sort_keys=True)))
        self.width, self.device = width, device

    def _path(self, text: str | None) -> Path:
        return self.folder / f"{'negative' if text is None else _digest(text)}.safetensors"

    def missing(self, texts: Iterable[str]) -> list[str]:
        """Those that are not there, each once."""
        return [text for text in dict.fromkeys(texts) if not self._path(text).exists()]

    def check_writable(self) -> None:
        """Raises ValueError unless embeddings can be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise ValueError(
                f"config.embeddings_cache: {self.folder.parent} lacks prompts of this run and cannot be written: "
                f"{error.strerror}"
            ) from error

    def fill(self, texts: Iterable[str], encode: Callable) -> None:
        """Write these; encode: text -> its embeddings, 1 row."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for text in tqdm(texts, "encoding prompts", leave=False, disable=None):  # None: where there is no terminal
            row = encode(text)
            if row.negative is not None and not self._path(None).exists():
                self._write(None, row.negative)
            self._write(text, row)

    def _write(self, text: str | None, row: Condition) -> None:
        length = row.num_tokens if row.mask is None else int(row.mask.sum())
        tensors = {name: part for name, part in row.tensors().items() if name != "mask"} | dict(
            text=row.text[:, :length]
        )
        tensors = {name: part.contiguous() for name, part in tensors.items()}
        path, optional = self._path(text), [part for part in ("mask", "negative") if getattr(row, part) is not None]
        scratch = path.with_suffix(f".{os.getpid()}")
        save_file(tensors, scratch, {"parts": " ".join(optional)})
        folders.as_any_new_file(scratch)  # several users may share the cache
        scratch.replace(path)

    def read(self, text: str | None) -> Condition:
        """One row, on the device, with the negative prompt's (which is None's) where there is one.

        Raises:
            ValueError: the file is damaged.
        """
        try:
            with safe_open(self._path(text), framework="pt") as file:
                tensors = {name: file.get_tensor(name).to(self.device) for name in file.keys()}  # noqa: SIM118
                optional = file.metadata()["parts"].split()
        except SafetensorError as error:
            raise ValueError(f"{self._path(text)} is damaged ({error}); delete it") from error
        if "mask" in optional:
            length = tensors["text"].shape[1]
            tensors["text"] = F.pad(tensors["text"], (0, 0, 0, self.width - length))
            tensors["mask"] = torch.arange(self.width, device=self.device)[None] < length
        return Condition(**tensors, negative=self.read(None) if "negative" in optional else None)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
