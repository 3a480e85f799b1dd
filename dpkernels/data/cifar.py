"""CIFAR-10 as its authors distribute it: pickled batches, in a folder or a tar.gz (www.cs.toronto.edu/~kriz/cifar).

A pickle can run any code when it is loaded. These are not loaded, but read as what they say (`pickled`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from dpkernels._files import bad_file, read_regular, reason
from dpkernels.data.pickled import PickledArray, PickleError, unpickled
from dpkernels.data.raw import Bytes, Labels, RawImages, check_labels
from dpkernels.data.unpacking import LARGEST_FILE, read_members

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FOLDER = "cifar-10-batches-py"
_TRAIN = tuple(f"data_batch_{i}" for i in range(1, 6))
_TEST = "test_batch"
_PIXELS = 3 * 32 * 32


def read_cifar10_folder(folder: Path) -> RawImages:
    """CIFAR-10 from the folder that holds data_batch_1 .. data_batch_5 and test_batch."""
    return _assemble(folder, lambda name: read_regular(folder / name, LARGEST_FILE))


def read_cifar10_tar(path: Path) -> RawImages:
    """CIFAR-10 from cifar-10-python.tar.gz; nothing is unpacked to the disk."""
    wanted = {f"{FOLDER}/{name}": name for name in (*_TRAIN, _TEST)}
    found = dict(read_members(path, lambda name: wanted.get(name.removeprefix("./"))))

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
        batch = unpickled(content)
        missing = [key for key in (b"data", b"labels") if key not in batch] if isinstance(batch, dict) else [batch]
        if missing:
            got = f"none with {missing[0]!r}" if isinstance(batch, dict) else type(batch).__name__
            raise bad_file(path, expected, got)
        data, labels = (it.values if isinstance(it, PickledArray) else it for it in (batch[b"data"], batch[b"labels"]))
    except PickleError as error:
        raise bad_file(path, expected, f"another: {reason(error)}") from None
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != _PIXELS:
        raise bad_file(path, expected, f"{getattr(data, 'dtype', type(data).__name__)} {getattr(data, 'shape', '')}")
    if isinstance(labels, list):
        strange = next((type(label).__name__ for label in labels if type(label) is not int), None)
        if strange is not None:
            raise bad_file(path, expected, f"labels that are {strange}")
        labels = np.array(labels)  # of object where one needs more than 64 bits
    if not isinstance(labels, np.ndarray) or labels.ndim != 1 or labels.dtype.kind not in "iuO":
        got = f"{labels.dtype} {labels.shape}" if isinstance(labels, np.ndarray) else type(labels).__name__
        raise bad_file(path, expected, f"labels that are {got}")
    return data.reshape(-1, 3, 32, 32), check_labels(path, labels, len(data), len(CIFAR10_CLASSES))
