"""Files of tensors that somebody else wrote, opened within bounds: what `torch.save` and safetensors leave.

torch reads tensors and plain values alone (`weights_only`), so that no code of the file runs. What it would still do
for a small file is take any amount of memory: unpack compressed parts, or call constructors that are told a size. And
it reads numbers without a look at the archive's checksums: `save_sealed` adds a digest of the whole file.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from dpkernels._files import open_regular, reason, require_memory, require_regular

_MOST_DESCRIBED = 2**26  # bytes of the pickle that describes all tensors
_MOST_INSTRUCTIONS = 2**20  # of it: about 40 describe a tensor
_LEGACY_PICKLES = 5  # before the numbers in a file of torch 1.5 and older
# Of the functions that torch lets through: these make something of a size that they are told, or of one text many.
_ALLOCATE = {"bytearray", "encode"}
_SEAL = b"sha256:"
_SEALED = len(_SEAL) + 2 * hashlib.sha256().digest_size  # bytes at the end of the file
_END = 22  # bytes of a zip archive's last record, without a comment


def load_saved(
    path: Path, expected: str = "tensors and plain values as torch.save writes them", *, sealed: bool = False
) -> Any:
    """What a file of `torch.save` holds, on the CPU: tensors and plain values.

    sealed: it must have the digest of `save_sealed`; where any file has one, it must be right.

    Raises ValueError that names the file and what was expected of it, FileNotFoundError where there is none.
    """
    with open_regular(path) as file:
        require_memory(path, file.seek(0, os.SEEK_END))
        try:
            _check_seal(file, sealed)
            _check(file)
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            # torch's own words advise to run the code of the file.
            why = reason(ValueError(str(error).rpartition("WeightsUnpickler error: ")[2]))
        except Exception as error:  # a damaged file raises nearly anything
            why = reason(error)
    raise ValueError(f"{path} must hold {expected}, but it cannot be read: {why}")


def save_sealed(document: Any, path: Path) -> None:
    """`torch.save` and a digest of all that is in the file, which stays a file of torch: the digest is the comment that
    a zip archive may end with."""
    torch.save(document, path)
    with open(path, "r+b") as file:
        end = file.seek(-_END, os.SEEK_END)
        record = file.read()
        if record[:4] != b"PK\5\6" or record[-2:] != b"\0\0":
            raise RuntimeError("torch.save wrote no zip archive, or one with a comment of its own")
        file.seek(-2, os.SEEK_END)
        file.write(struct.pack("<H", _SEALED))
        file.write(_SEAL + _digest(file, end + _END))


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """The safetensors file `path` as `safetensors.safe_open` opens it. Raises as `load_saved` does."""
    from safetensors import SafetensorError, safe_open

    require_memory(path, require_regular(path).st_size)
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} must be a safetensors file, but it cannot be read: {reason(error)}") from None


def _check_seal(file: BinaryIO, needed: bool) -> None:
    """Raise ValueError where the content is not what `save_sealed` wrote, or has no digest and needs one."""
    content = max(file.seek(0, os.SEEK_END) - _SEALED, 0)
    file.seek(content)
    seal = file.read(_SEALED)
    if seal.startswith(_SEAL):
        if seal != _SEAL + _digest(file, content):
            raise ValueError("its digest is of another content, so that it is damaged: restore it from a copy")
    elif needed:
        raise ValueError(
            "it does not end with a digest, so that it is cut off or of an earlier version: restore it from a copy, or "
            "go on with that version"
        )


def _digest(file: BinaryIO, size: int) -> bytes:
    """SHA-256 of the first `size` bytes, in hexadecimal digits; the file is then read or written from there."""
    seen = hashlib.sha256()
    file.seek(0)
    while size and (part := file.read(min(size, 2**20))):
        seen.update(part)
        size -= len(part)
    return seen.hexdigest().encode()


def _check(file: BinaryIO) -> None:
    """Raise ValueError where reading would take more than a small multiple of the file's size."""
    file.seek(0)
    if file.read(4) != b"PK\3\4":
        file.seek(0)
        beginning = io.BytesIO(file.read(_MOST_DESCRIBED))
        for _ in range(_LEGACY_PICKLES):
            _check_pickle(beginning)
        return
    size = file.seek(0, 2)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("it is compressed, which torch.save does not do")
        if sum(entry.file_size for entry in entries) > size:
            raise ValueError("its parts are larger than the file")
        for entry in entries:
            if entry.filename.endswith("/data.pkl"):
                if entry.file_size > _MOST_DESCRIBED:
                    raise ValueError(f"its description of tensors has {entry.file_size:,} bytes")
                _check_pickle(io.BytesIO(archive.read(entry)))


def _check_pickle(file: io.BytesIO) -> None:
    for count, (instruction, argument, _) in enumerate(pickletools.genops(file)):
        if count > _MOST_INSTRUCTIONS:
            raise ValueError(f"it describes tensors by more than {_MOST_INSTRUCTIONS:,} instructions")
        if instruction.name == "GLOBAL":
            name = str(argument).rpartition(" ")[2]
            if name in _ALLOCATE or name.endswith("Tensor"):
                raise ValueError(f"it calls {str(argument).replace(' ', '.')[:100]}, as files of weights do not")
        elif instruction.name == "STACK_GLOBAL":
            raise ValueError("it is of a pickle protocol that torch.save does not use")
