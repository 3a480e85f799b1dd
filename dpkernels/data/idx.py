"""IDX files, the format of MNIST and Fashion-MNIST, gzip or not.

A file is two zero bytes, the type of its numbers (8: unsigned byte), the number of dimensions, the sizes as big-endian
32-bit integers, and the numbers, last dimension fastest (http://yann.lecun.com/exdb/mnist).
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from dpkernels.data.raw import Bytes, Labels, RawImages, bad_file, check_labels

_GZIP = b"\x1f\x8b"
_UNSIGNED_BYTE = 8
_ROLES = {
    "train_images": ("train-images", 3),
    "train_labels": ("train-labels", 1),
    "test_images": ("t10k-images", 3),
    "test_labels": ("t10k-labels", 1),
}


def read_idx(path: Path, rank: int) -> Bytes:
    """The array in an IDX file of unsigned bytes with `rank` dimensions; ValueError says what is wrong with it."""
    content = path.read_bytes()
    if content[:2] == _GZIP:
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise bad_file(path, "a whole gzip file", f"one that does not unpack: {error}") from None
    header = 4 + 4 * rank
    magic = struct.pack(">HBB", 0, _UNSIGNED_BYTE, rank)
    if content[:4] != magic:
        raise bad_file(path, f"an IDX file of bytes with {rank} dimensions (magic {magic.hex()})", content[:4].hex())
    if len(content) < header:
        raise bad_file(path, f"a header of {header} bytes", f"{len(content)} bytes: the file is truncated")
    sizes = struct.unpack(f">{rank}I", content[4:header])
    expected = header + math.prod(sizes)
    if len(content) != expected:
        raise bad_file(path, f"{expected} bytes for an array of {'x'.join(map(str, sizes))}", f"{len(content)}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(sizes)


def find_idx(folder: Path) -> dict[str, Path] | None:
    """The four files of a data set in `folder`, by role; None where there is none of them."""
    found: dict[str, Path] = {}
    for role, (part, rank) in _ROLES.items():
        for name in (f"{part}-idx{rank}-ubyte", f"{part}.idx{rank}-ubyte"):
            for candidate in (folder / name, folder / f"{name}.gz"):
                if candidate.is_file():
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
        labels = read_idx(path, rank=1).astype(np.int64)
        check_labels(path, labels, len(images), len(classes))
        return images[:, None], labels

    train_images, train_labels = split("train")
    test_images, test_labels = split("test")
    if train_images.shape[1:] != test_images.shape[1:]:
        size = "x".join(map(str, train_images.shape[2:]))
        raise bad_file(files["test_images"], f"images of {size} as in the training file", f"{test_images.shape[2:]}")
    return RawImages(train_images, train_labels, test_images, test_labels, classes)
