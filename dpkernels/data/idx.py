"""IDX files, the format of MNIST and Fashion-MNIST, gzip or not.

A file is two zero bytes, the type of its numbers (8: unsigned byte), the number of dimensions, the sizes as big-endian
32-bit integers, and the numbers, last dimension fastest (http://yann.lecun.com/exdb/mnist).
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import numpy as np

from dpkernels._files import bad_file, open_regular, require_memory
from dpkernels.data.raw import Bytes, Labels, RawImages, check_labels
from dpkernels.data.unpacking import Unpacked, UnpackError

_UNSIGNED_BYTE = 8
_ROLES = {
    "train_images": ("train-images", 3),
    "train_labels": ("train-labels", 1),
    "test_images": ("t10k-images", 3),
    "test_labels": ("t10k-labels", 1),
}


def read_idx(path: Path, rank: int) -> Bytes:
    """The array in an IDX file of unsigned bytes with `rank` dimensions; ValueError says what is wrong with it.

    No more is read, and nothing more unpacked, than the header says and one byte.
    """
    header = 4 + 4 * rank
    magic = struct.pack(">HBB", 0, _UNSIGNED_BYTE, rank)
    with open_regular(path) as file:
        try:
            content = Unpacked(file)
            content.allow(header)
            start = content.read(header)
            if start[:4] != magic:
                expected = f"an IDX file of bytes with {rank} dimensions (magic {magic.hex()})"
                raise bad_file(path, expected, start[:4].hex())
            if len(start) < header:
                raise bad_file(path, f"a header of {header} bytes", f"{len(start)} bytes: the file is truncated")
            sizes = struct.unpack(f">{rank}I", start[4:])
            if not math.prod(sizes):
                raise bad_file(path, "one number at least", f"an array of {'x'.join(map(str, sizes))}")
            promised = f"{header + math.prod(sizes)} bytes for an array of {'x'.join(map(str, sizes))}"
            there = os.fstat(file.fileno()).st_size
            if not content.is_packed and there != header + math.prod(sizes):
                raise bad_file(path, promised, f"{there}")
            require_memory(path, math.prod(sizes))
            content.allow(math.prod(sizes) + 1)
            values = content.read(math.prod(sizes) + 1)
        except UnpackError as error:
            raise bad_file(path, "a whole gzip file", f"one that does not unpack: {error}") from None
    if len(values) != math.prod(sizes):
        more = "more" if len(values) > math.prod(sizes) else f"{header + len(values)}"
        raise bad_file(path, promised, more)
    return np.frombuffer(values, np.uint8).reshape(sizes)


def find_idx(folder: Path) -> dict[str, Path] | None:
    """The four files of a data set in `folder`, by role; None where there is none of them."""
    found: dict[str, Path] = {}
    for role, (part, rank) in _ROLES.items():
        for name in (f"{part}-idx{rank}-ubyte", f"{part}.idx{rank}-ubyte"):
            for candidate in (folder / name, folder / f"{name}.gz"):
                if os.path.lexists(candidate):
                    found.setdefault(role, candidate)
    if not found:
        return None
    missing = [f"{part}-idx{rank}-ubyte[.gz]" for role, (part, rank) in _ROLES.items() if role not in found]
    if missing:
        raise FileNotFoundError(f"{folder}: expected the four IDX files of a data set, got none of {missing}")
    return found


def read_idx_folder(files: dict[str, Path], classes: tuple[str, ...]) -> RawImages:
    """Grayscale images and labels from the files that `find_idx` found."""

    def split(name: str) -> tuple[Bytes, Labels]:
        images = read_idx(files[f"{name}_images"], rank=3)
        path = files[f"{name}_labels"]
        return images[:, None], check_labels(path, read_idx(path, rank=1), len(images), len(classes))

    train_images, train_labels = split("train")
    test_images, test_labels = split("test")
    if train_images.shape[1:] != test_images.shape[1:]:
        size = "x".join(map(str, train_images.shape[2:]))
        raise bad_file(files["test_images"], f"images of {size} as in the training file", f"{test_images.shape[2:]}")
    return RawImages(train_images, train_labels, test_images, test_labels, classes)
