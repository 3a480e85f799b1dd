"""Files of tensors that somebody else wrote, opened within bounds: what `torch.save` and safetensors leave.

torch reads tensors and plain values alone (`weights_only`), so that no code of the file runs. What it would still do
for a small file is take any amount of memory: unpack compressed parts, or call constructors that are told a size.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from dpkernels._files import open_regular, reason, require_memory, require_regular

_MOST_DESCRIBED = 2**26  # bytes of the pickle that describes all tensors
_MOST_INSTRUCTIONS = 2**22  # of it
_LEGACY_PICKLES = 5  # before the numbers in a file of torch 1.5 and older
# Of the functions that torch lets through: these make something of a size that they are told, or of one text many.
_ALLOCATE = {"bytearray", "encode"}


def load_saved(path: Path) -> Any:
    """What a file of `torch.save` holds, on the CPU: tensors and plain values.

    Raises ValueError that names the file, FileNotFoundError where there is none.
    """
    try:
        with open_regular(path) as file:
            require_memory(path, file.seek(0, 2))
            file.seek(0)
            _check(file)
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:
        # torch's own words advise to run the code of the file.
        cause = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
        raise _unreadable(path, reason(ValueError(cause))) from None
    except Exception as error:  # a damaged file raises nearly anything
        if str(error).startswith(str(path)):
            raise
        raise _unreadable(path, reason(error)) from None


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


def _unreadable(path: Path, why: str) -> ValueError:
    return ValueError(
        f"{path} must hold tensors and plain values as torch.save writes them, but it cannot be read: {why}"
    )


def _check(file: BinaryIO) -> None:
    """Raise ValueError where reading would take more than a small multiple of the file's size."""
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
