"""CIFAR-10 as its authors distribute it: pickled batches, in a folder or a tar.gz (www.cs.toronto.edu/~kriz/cifar).

A pickle can run any code when it is loaded, so only the names that a NumPy array needs are let through.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dpkernels.data.raw import Bytes, Labels, RawImages, bad_file, check_labels

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FOLDER = "cifar-10-batches-py"
_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
_TEST = "test_batch"
_PIXELS = 3 * 32 * 32

# NumPy has moved this function between modules; asking an array for it works with every version.
_RECONSTRUCT: Any = np.zeros(1).__reduce__()[0]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("_codecs", "encode"): lambda text, encoding: text.encode(encoding),
}


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no part of an array") from None


def read_cifar10_folder(folder: Path) -> RawImages:
    """CIFAR-10 from the folder that holds data_batch_1 .. data_batch_5 and test_batch."""
    return _assemble(folder, lambda name: (folder / name).read_bytes())


def read_cifar10_tar(path: Path) -> RawImages:
    """CIFAR-10 from cifar-10-python.tar.gz; nothing is unpacked to the disk."""
    wanted = {f"{FOLDER}/{name}" for name in (*_TRAIN, _TEST)}
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = member.name.removeprefix("./")
                if name in wanted and (file := archive.extractfile(member)) is not None:
                    found[name.removeprefix(f"{FOLDER}/")] = file.read()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise bad_file(path, "a whole tar archive", f"one that does not unpack: {error}") from None

    def read(name: str) -> bytes:
        if name not in found:
            raise FileNotFoundError(name)
        return found[name]

    return _assemble(path, read)


def _assemble(source: Path, read: Callable[[str], bytes]) -> RawImages:
    def batch(name: str) -> tuple[Bytes, Labels]:
        try:
            content = read(name)
        except FileNotFoundError:
            raise FileNotFoundError(f"{source}: expected the batches {_TRAIN} and {_TEST}, {name} is missing") from None
        return _parse(source / name, content)

    batches = [batch(name) for name in _TRAIN]
    test_images, test_labels = batch(_TEST)
    train_images = np.concatenate([images for images, _ in batches])
    train_labels = np.concatenate([labels for _, labels in batches])
    return RawImages(train_images, train_labels, test_images, test_labels, CIFAR10_CLASSES)


def _parse(path: Path, content: bytes) -> tuple[Bytes, Labels]:
    expected = f"a pickled CIFAR-10 batch: b'data' uint8 [images, {_PIXELS}] and b'labels'"
    try:
        batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        data, labels = batch[b"data"], np.asarray(batch[b"labels"])
    except Exception as error:  # a damaged pickle raises nearly anything
        raise bad_file(path, expected, f"{type(error).__name__}: {error}") from None
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != _PIXELS:
        raise bad_file(path, expected, f"{getattr(data, 'dtype', type(data).__name__)} {getattr(data, 'shape', '')}")
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise bad_file(path, expected, f"labels that are {labels.dtype} {labels.shape}")
    check_labels(path, labels.astype(np.int64), len(data), len(CIFAR10_CLASSES))
    return data.reshape(-1, 3, 32, 32), labels.astype(np.int64)
