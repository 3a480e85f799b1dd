"""Checkpoints: model, optimizer and position. Never a key, never the sum of an unfinished logical batch."""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from dpkernels._files import open_regular, reason
from dpkernels.training.files import write_atomically
from dpkernels.transfer.saved import load_saved

FORMAT = 2
_SEAL = b"sha256:"
_SEALED = len(_SEAL) + 2 * hashlib.sha256().digest_size  # bytes at the end of the file
_END = 22  # bytes of a zip archive's last record, without a comment


@dataclass(frozen=True)
class Checkpoint:
    """What a run goes on from.

    step: steps of the plan that were spent when it was written. averaged: the moving average of the model, where the
    run has one. fingerprint: of the features that it trains on, empty for images.
    """

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    averaged: dict[str, Any] | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if type(self.step) is not int or self.step < 0:
            raise ValueError(f"step must be a number of steps, got {self.step!r}")
        for name, value in (("model", self.model), ("optimizer", self.optimizer), ("averaged", self.averaged)):
            if not isinstance(value, dict) and not (name == "averaged" and value is None):
                raise TypeError(f"{name} must be a state dict, got {type(value).__name__}")
        if not isinstance(self.fingerprint, str):
            raise TypeError(f"fingerprint must be a string, got {type(self.fingerprint).__name__}")

    def save(self, path: Path) -> None:
        """Written whole or not at all, with a digest of all that is in the file."""
        document = {"format": FORMAT, **vars(self)}

        def write(temporary: Path) -> None:
            torch.save(document, temporary)
            with open(temporary, "r+b") as file:
                _seal(file)

        write_atomically(path, write)


def load_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in `path`, on the CPU. Only tensors and plain values are read: no code of the file runs.

    Raises ValueError for a file that is not a checkpoint of this format, or of which a single bit was changed.
    """
    try:
        with open_regular(path) as file:
            _check_seal(file)
        document = load_saved(path)
        if document.pop("format") != FORMAT:
            raise ValueError("it has another format")
        return Checkpoint(**document)
    except FileNotFoundError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        why = reason(error)
        raise ValueError(f"{path} must be a checkpoint of format {FORMAT}, but it cannot be read: {why}") from None


# torch.save writes a zip archive, whose last record may be followed by a comment: the digest of everything before it.


def _seal(file: BinaryIO) -> None:
    end = file.seek(-_END, os.SEEK_END)
    record = file.read()
    if record[:4] != b"PK\5\6" or record[-2:] != b"\0\0":
        raise RuntimeError("torch.save wrote no zip archive, or one with a comment of its own")
    file.seek(-2, os.SEEK_END)
    file.write(struct.pack("<H", _SEALED))
    file.write(_SEAL + _digest(file, end + _END))


def _check_seal(file: BinaryIO) -> None:
    """Raise ValueError where the content is not what `_seal` saw."""
    size = os.fstat(file.fileno()).st_size
    if size < _END + _SEALED:
        raise ValueError("it is truncated")
    file.seek(size - _SEALED)
    seal = file.read(_SEALED)
    if not seal.startswith(_SEAL):
        raise ValueError("its digest is missing: it is truncated, or of another version")
    if seal != _SEAL + _digest(file, size - _SEALED):
        raise ValueError("its digest is of another content: it is damaged")


def _digest(file: BinaryIO, size: int) -> bytes:
    """SHA-256 of the first `size` bytes, in hexadecimal digits; the file is then read or written from there."""
    seen = hashlib.sha256()
    file.seek(0)
    while size and (part := file.read(min(size, 2**20))):
        seen.update(part)
        size -= len(part)
    return seen.hexdigest().encode()
