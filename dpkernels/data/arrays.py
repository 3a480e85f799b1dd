"""Rows of numbers on disk, mapped into memory: features of images, computed before training."""

from __future__ import annotations

import hashlib
import io
import json
import math
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from tqdm import tqdm

from dpkernels._files import bad_file, open_regular, reason, require_memory
from dpkernels.accounting.locked_file import file_locks
from dpkernels.data.cache import cache_folder
from dpkernels.data.images import ImageDataset, ImageSplit
from dpkernels.data.raw import check_labels, count_classes

_FORMAT = 1
_BATCH = 1024  # rows computed at once
_KEPT = 8  # batches after which a build that is broken off goes on
_CHECKED = 2**18  # numbers looked at at once
_DIGITS = 20  # of the note of how many rows are on disk
_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # Python 3.12 and older have no name for it
_PRIVATE = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_NORESERVE", _NORESERVE)
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
DTYPES: dict[str, np.dtype] = {"float16": np.dtype("float16"), "float32": np.dtype("float32")}


@dataclass(frozen=True, eq=False)
class ArraySplit(Dataset[tuple[Tensor, int]]):
    """Rows and labels of one split. Rows stay in their file until they are fetched, so there may be more than memory.

    rows: float16 or float32 [examples, *shape]. labels: int64 [examples]. value_range: what pixels were scaled to where
    the rows were computed from images.
    """

    rows: Tensor
    labels: Tensor
    value_range: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if self.rows.dtype not in (torch.float16, torch.float32) or self.rows.dim() < 2:
            raise ValueError(
                f"rows must be float16 or float32 [examples, *shape], got {self.rows.dtype} {tuple(self.rows.shape)}"
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.rows.shape[:1]:
            raise ValueError(
                f"labels must be int64 [{len(self.rows)}], one per row, "
                f"got {self.labels.dtype} {tuple(self.labels.shape)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example."""
        return tuple(self.rows.shape[1:])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Row float32 [*shape] and label."""
        return self.rows[index].float(), int(self.labels[index])

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Rows float32 [rows, *shape] and labels int64 [rows] of `indices`, int64 [rows]."""
        return self.rows.index_select(0, indices).float(), self.labels.index_select(0, indices)

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All examples in order, at most `size` at a time."""
        for rows, labels in zip(self.rows.split(size), self.labels.split(size), strict=True):
            yield rows.float(), labels

    def __repr__(self) -> str:
        return f"ArraySplit({len(self)} rows {self.shape}, {self.rows.dtype})"


def open_array(path: Path) -> Tensor:
    """An array in a .npy file as a tensor that is read from the file when it is used. Nothing writes to the file.

    Raises ValueError that names the file, where it is no array of float16 or float32 [examples, ...], or is empty.
    """
    array = _mapped(path)
    if array.dtype not in DTYPES.values() or array.ndim < 2 or not array.size:
        raise bad_file(path, "float16 or float32 [examples, ...], one number at least", f"{array.dtype} {array.shape}")
    return torch.from_numpy(array)


def _mapped(path: Path) -> np.ndarray:
    """The array in a .npy file, mapped into memory."""
    with open_regular(path) as file:
        try:
            shape, fortran, dtype = _HEADERS[np.lib.format.read_magic(file)](file)
            begin, count = file.tell(), math.prod(shape)
            there = os.fstat(file.fileno()).st_size - begin
            if dtype.hasobject or count < 0 or count * dtype.itemsize != there:
                raise ValueError(f"{there} bytes follow a header that says {dtype} {shape}")
            # Copy on write: torch wants memory that it may write to. None is set aside for it, since none will be.
            content = mmap.mmap(file.fileno(), 0, flags=_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            return np.frombuffer(content, dtype, count, begin).reshape(shape, order="F" if fortran else "C")
        except OSError:
            raise
        except Exception as error:  # a damaged header raises nearly anything, MemoryError where it nests deeply
            why = "its header makes no sense" if isinstance(error, (MemoryError, KeyError)) else reason(error)
            raise bad_file(path, "an array as numpy.save writes it", f"another file: {why}") from None


FILES = ("train.npy", "train-labels.npy", "test.npy", "test-labels.npy")


def read_arrays(folder: Path) -> ImageDataset | None:
    """Features that the user brings: a folder with train.npy and test.npy, float16 or float32 [examples, *shape], and
    train-labels.npy and test-labels.npy, integers [examples]; None where it has no train.npy.

    Classes are 0 to the largest label of the test split, which is public. Raises ValueError or FileNotFoundError that
    names the file.
    """
    if not os.path.lexists(folder / FILES[0]):
        return None
    for file in FILES:
        if not os.path.lexists(folder / file):
            raise FileNotFoundError(f"{folder}: expected {', '.join(FILES)}, {file} is missing")

    def labels(file: str) -> np.ndarray:
        values = _mapped(folder / file)
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise bad_file(folder / file, "integers [examples]", f"{values.dtype} {values.shape}")
        require_memory(folder / file, 8 * len(values))
        return values

    def split(name: str) -> ArraySplit:
        rows = open_array(folder / f"{name}.npy")
        own = check_labels(folder / f"{name}-labels.npy", labels(f"{name}-labels.npy"), len(rows), count)
        _check_finite(folder / f"{name}.npy", rows)
        return ArraySplit(rows, torch.from_numpy(own))

    count = count_classes(folder / "test-labels.npy", labels("test-labels.npy"))
    return ImageDataset(folder.resolve().name, tuple(map(str, range(count))), split("train"), split("test"))


def _check_finite(path: Path, rows: Tensor) -> None:
    """Read all rows once; ValueError where one is infinite or not a number: training drops such examples silently."""
    size = max(1, _CHECKED // max(1, rows[0].numel()))
    total = tqdm(total=len(rows), desc=f"checking {path.name}", unit=" rows", delay=1.0, disable=None, leave=False)
    with total as progress:
        for some in rows.split(size):
            if not torch.stack(torch.aminmax(some)).isfinite().all():
                raise bad_file(path, "finite numbers", "infinite ones, or some that are not a number")
            progress.update(len(some))


def with_features(
    dataset: ImageDataset,
    transform: Callable[[Tensor], Tensor],
    *,
    shape: Sequence[int],
    fingerprint: str,
    dtype: str = "float16",
    folder: Path | None = None,
) -> ImageDataset:
    """The data set with every image replaced by its features, computed once and kept in a cache on disk.

    transform: images float32 [batch, channels, height, width] to features [batch, *shape]; of each image alone.
    fingerprint: names the transform, and changes whenever any feature does. dtype: "float16" or "float32".
    folder: of the cache; else features in `cache_folder()`.

    A file is named after a hash of everything that it depends on: pixels, their scale, transform, shape, dtype. It
    appears when it is whole. A build that was broken off goes on where it last synced its rows, eight batches ago at
    most; a second process that wants the same file waits for the first. The files are readable by the user alone: what
    they are computed from may be private.

    Raises ValueError for an unknown dtype, features of another shape, or ones that float16 cannot hold; OSError where
    the folder cannot be written.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    place = cache_folder() / "features" if folder is None else folder
    place.mkdir(mode=0o700, parents=True, exist_ok=True)

    def replaced(name: str) -> ArraySplit:
        split = getattr(dataset, name)
        if not isinstance(split, ImageSplit):
            raise TypeError(f"{name} must be images, got {type(split).__name__}")
        key = _key(split, tuple(shape), fingerprint, dtype)
        path = place / f"{dataset.name.replace(os.sep, '-')}-{name}-{key}.npy"
        if not os.path.lexists(path):
            _build(path, split, transform, tuple(shape), DTYPES[dtype], f"features of {dataset.name}, {name}")
        rows = open_array(path)
        if (rows.shape, rows.dtype) != ((len(split), *shape), getattr(torch, dtype)):
            got = f"{rows.dtype} {tuple(rows.shape)}: delete it, and it is computed again"
            raise bad_file(path, f"features {dtype} {(len(split), *shape)}", got)
        return ArraySplit(rows, split.labels, split.value_range)

    return replace(dataset, train=replaced("train"), test=replaced("test"))


def _key(split: ImageSplit, shape: tuple[int, ...], fingerprint: str, dtype: str) -> str:
    pixels = split.images.contiguous()
    what = [_FORMAT, fingerprint, dtype, list(shape), list(pixels.shape), split.largest, list(split.value_range)]
    seen = hashlib.sha256(json.dumps(what).encode())
    seen.update(pixels.numpy().data)
    return seen.hexdigest()[:32]


def _build(
    path: Path,
    split: ImageSplit,
    transform: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    dtype: np.dtype,
    what: str,
) -> None:
    unfinished = path.with_suffix(".unfinished")
    header = io.BytesIO()
    described = {"descr": dtype.str, "fortran_order": False, "shape": (len(split), *shape)}
    np.lib.format.write_array_header_1_0(header, described)
    row = math.prod(shape) * dtype.itemsize  # bytes
    with _alone(unfinished) as note:
        if path.exists():  # another process made it while this one waited
            return
        try:
            with open_regular(unfinished, os.O_RDWR | os.O_CREAT, 0o600) as file:
                done = _noted(note, len(split))
                if os.fstat(file.fileno()).st_size < len(header.getvalue()) + done * row:
                    done = 0
                _note(note, done)
                file.write(header.getvalue())
                file.truncate(len(header.getvalue()) + done * row)
                file.seek(0, os.SEEK_END)
                progress = tqdm(
                    total=len(split), initial=done, desc=what, unit=" images", delay=1.0, disable=None, leave=False
                )
                with progress, torch.no_grad():
                    for begin in range(done, len(split), _BATCH):
                        images, _ = split.batch(torch.arange(begin, min(begin + _BATCH, len(split))))
                        features = transform(images)
                        if tuple(features.shape) != (len(images), *shape):
                            raise ValueError(
                                f"transform must give [{len(images)}, {', '.join(map(str, shape))}], "
                                f"got {tuple(features.shape)}"
                            )
                        largest = features.abs().amax().item() if features.numel() else 0.0
                        if not largest <= float(np.finfo(dtype).max):  # nor is it a number
                            raise ValueError(f"dtype must hold the features, got {dtype} for {largest:g}")
                        file.write(np.ascontiguousarray(features.numpy().astype(dtype)).data)
                        progress.update(len(images))
                        if (begin - done) // _BATCH % _KEPT == 0:
                            _sync(file)
                            _note(note, begin + len(images))
                _sync(file)
            os.replace(unfinished, path)
        except Exception:
            unfinished.unlink(missing_ok=True)
            raise
        _note(note, 0)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _noted(note: BinaryIO, most: int) -> int:
    """How many rows of the unfinished file are on disk, as the note says; 0 where it says nothing sensible."""
    text = os.pread(note.fileno(), _DIGITS + 1, 0)
    rows = int(text) if len(text) == _DIGITS and text.isdigit() else 0
    return rows if rows <= most else 0


def _note(note: BinaryIO, rows: int) -> None:
    """On disk at once, and after the rows that it counts."""
    os.pwrite(note.fileno(), b"%0*d" % (_DIGITS, rows), 0)
    os.fsync(note.fileno())


@contextmanager
def _alone(unfinished: Path) -> Iterator[BinaryIO]:
    """While no other process builds the same file; yields the lock's own file. The lock ends with its process."""
    fcntl = file_locks("a cache of features")
    with open_regular(unfinished.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
