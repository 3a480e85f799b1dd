"""Finds a data set by name or in a folder, and reads it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dpkernels.data.arrays import read_arrays
from dpkernels.data.cifar import CIFAR10_CLASSES, FOLDER, read_cifar10_folder, read_cifar10_tar
from dpkernels.data.digits import read_digits
from dpkernels.data.files import read_photographs
from dpkernels.data.folders import read_image_folder, read_image_tar
from dpkernels.data.idx import find_idx, read_idx_folder
from dpkernels.data.images import ImageDataset, ImageSplit
from dpkernels.data.raw import Bytes, Labels, RawImages
from dpkernels.data.torchvision_sets import read_torchvision

_DIGITS = tuple("0123456789")
_GARMENTS = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
_TORCHVISION = "torchvision:"
_MOST_IDX_CLASSES = 256  # a label is a byte
_LARGEST_SIDE = 8192
_IDX_HINT = "{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]"
_CIFAR_HINT = f"{FOLDER}/, cifar-10-python.tar.gz, or images as train/<class>/ and test/<class>/ in a folder or a tar"


@dataclass(frozen=True)
class _Named:
    """A data set that is known by name: where under a root it may lie, and what is public about it."""

    places: tuple[str, ...]
    classes: tuple[str, ...]
    size: int
    shape: tuple[int, int, int]
    hint: str


_NAMED = {
    "mnist": _Named(("mnist", "MNIST", "MNIST/raw"), _DIGITS, 60_000, (1, 28, 28), _IDX_HINT),
    "fashion-mnist": _Named(
        ("fashion-mnist", "fashion_mnist", "FashionMNIST", "FashionMNIST/raw"),
        _GARMENTS,
        60_000,
        (1, 28, 28),
        _IDX_HINT,
    ),
    "cifar10": _Named(
        ("cifar10", "cifar-10", "CIFAR10", FOLDER, "cifar-10-python.tar.gz"),
        CIFAR10_CLASSES,
        50_000,
        (3, 32, 32),
        _CIFAR_HINT,
    ),
}
_ALIASES = {"fashionmnist": "fashion-mnist", "cifar-10": "cifar10"}


def dataset_names() -> list[str]:
    """The names that `load_dataset` knows."""
    return ["digits", *_NAMED]


def load_dataset(
    name_or_folder: str | os.PathLike[str],
    root: str | os.PathLike[str] | None = None,
    *,
    value_range: tuple[float, float] = (-1.0, 1.0),
    num_classes: int | None = None,
    download: bool = False,
    image_size: int | None = None,
) -> ImageDataset:
    """A labelled image data set, in memory unless `image_size` is given.

    name_or_folder: "digits" (comes with scikit-learn), "mnist", "fashion-mnist" or "cifar10" (case, hyphens and
    underscores do not matter), "torchvision:CLASS" (any labelled image data set of torchvision with a train and a test
    split, where torchvision is installed), or a path: a folder with IDX files, with CIFAR-10's pickled batches or with
    images as train/<class>/<image> and test/<class>/<image>; a tar of either of the last two; or a folder that holds
    one such tar. A name wins over a folder of the same name: write "./mnist" for the folder.
    root: where named data sets lie, each in its own folder; else the environment variable DPKERNELS_DATA, else ./data.
    value_range: what pixels are scaled to, a fixed range: constants taken from private data would have to be paid for.
        Centred on zero by default, where networks with tanh learn faster.
    num_classes: the number of classes of a folder with IDX files, 10 unless given. download: let torchvision download.
    image_size: for a folder of images by class that may have any size and be more than memory holds (ImageNet): each
        is cropped and resized to so many pixels a side, in colour, when it is fetched (`FileSplit`); the test split may
        be called val.

    Raises FileNotFoundError that says where it looked and what to put there, and ValueError that names the file, what
    was expected and what came, for anything unreadable.
    """
    _check_value_range(value_range)
    if not isinstance(name_or_folder, (str, os.PathLike)):
        raise TypeError(f"name_or_folder must be a string or a path, got {type(name_or_folder).__name__}")
    text = os.fspath(name_or_folder)
    if image_size is not None:
        return _load_photographs(text, image_size, value_range)
    if isinstance(name_or_folder, str):
        name = text.strip().lower().replace("_", "-")
        name = _ALIASES.get(name, name)
        if name == "digits":
            return _finish("digits", read_digits(), value_range, nominal_size=1437)
        if name in _NAMED:
            return _load_named(name, _root(root), value_range)
        if name.startswith(_TORCHVISION):
            raw = read_torchvision(text.strip()[len(_TORCHVISION) :], _root(root), download)
            # A class with a train and a test split is a published data set, and so is its size.
            return _finish(text.strip(), raw, value_range, nominal_size=len(raw.train_labels))
    path = Path(text)
    if not path.exists():
        raise FileNotFoundError(
            f"name_or_folder must be one of {', '.join(dataset_names())}, torchvision:CLASS or a folder, got {text!r}"
        )
    if path.is_dir() and (features := read_arrays(path)) is not None:
        return features
    if num_classes is not None and not (type(num_classes) is int and 1 <= num_classes <= _MOST_IDX_CLASSES):
        raise ValueError(f"num_classes must be an integer from 1 to {_MOST_IDX_CLASSES}, got {num_classes!r}")
    classes = tuple(map(str, range(num_classes or 10)))
    raw_or_none = _read(path, classes)
    if raw_or_none is None:
        raise FileNotFoundError(f"{path}: expected {_IDX_HINT}, or {_CIFAR_HINT}, got none of them")
    return _finish(path.resolve().name, raw_or_none, value_range)


def _load_photographs(text: str, image_size: int, value_range: tuple[float, float]) -> ImageDataset:
    if type(image_size) is not int or not 1 <= image_size <= _LARGEST_SIDE:
        raise ValueError(f"image_size must be a positive number of pixels up to {_LARGEST_SIDE}, got {image_size!r}")
    if not Path(text).is_dir():
        raise FileNotFoundError(f"name_or_folder must be a folder of images where image_size is given, got {text!r}")
    return read_photographs(Path(text), image_size, value_range)


def _root(root: str | os.PathLike[str] | None) -> Path:
    return Path(root if root is not None else os.environ.get("DPKERNELS_DATA") or "data")


def _load_named(name: str, root: Path, value_range: tuple[float, float]) -> ImageDataset:
    known = _NAMED[name]
    places = [root / folder for folder in known.places]
    for place in places:
        raw = _read(place, known.classes) if place.exists() else None
        if raw is None:
            continue
        if len(raw.classes) != len(known.classes) or raw.train_images.shape[1:] != known.shape:
            raise ValueError(
                f"{place}: expected {name}, {len(known.classes)} classes of images {known.shape}, "
                f"got {len(raw.classes)} classes of {raw.train_images.shape[1:]}"
            )
        return _finish(name, raw, value_range, nominal_size=known.size)
    looked = ", ".join(str(place.absolute()) for place in places)
    raise FileNotFoundError(
        f"{name} was not found: looked in {looked}. Put {known.hint} into the first of them, or say where the data "
        "lies with root or the environment variable DPKERNELS_DATA"
    )


def _read(path: Path, idx_classes: tuple[str, ...]) -> RawImages | None:
    """Whatever kind of data set lies at `path`; None where there is none."""
    if not path.is_dir():
        return _read_tar(path)
    if (files := find_idx(path)) is not None:
        return read_idx_folder(files, idx_classes)
    for folder in (path, path / FOLDER):
        if os.path.lexists(folder / "data_batch_1"):
            return read_cifar10_folder(folder)
    if (path / "train").is_dir():
        return read_image_folder(path)
    tars = list(_tars(path))
    if len(tars) > 1:
        raise ValueError(f"{path}: expected one tar, got {[tar.name for tar in tars]}; name the one to read")
    return _read_tar(tars[0]) if tars else None


def _tars(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.endswith((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")):
            yield path


def _read_tar(path: Path) -> RawImages:
    return read_cifar10_tar(path) if path.name.startswith("cifar-10-python") else read_image_tar(path)


def _finish(
    name: str, raw: RawImages, value_range: tuple[float, float], nominal_size: int | None = None
) -> ImageDataset:
    def split(images: Bytes, labels: Labels) -> ImageSplit:
        # A copy where NumPy holds a view of a file's bytes: torch wants memory that it may write to.
        pixels = torch.from_numpy(np.require(images, requirements=["C", "W"]))
        return ImageSplit(
            pixels, torch.from_numpy(np.require(labels, requirements=["C", "W"])), raw.largest, value_range
        )

    train, test = split(raw.train_images, raw.train_labels), split(raw.test_images, raw.test_labels)
    return ImageDataset(name, raw.classes, train, test, nominal_size)


def _check_value_range(value_range: tuple[float, float]) -> None:
    if len(value_range) != 2 or not all(map(math.isfinite, value_range)) or not value_range[0] < value_range[1]:
        raise ValueError(f"value_range must be (low, high), finite and low < high, got {value_range}")
