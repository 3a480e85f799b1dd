"""Data sets of torchvision, where it is installed."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np

from dpkernels._files import bad_file, reason
from dpkernels.data.raw import Bytes, Labels, RawImages, check_labels, count_classes


def read_torchvision(name: str, root: Path, download: bool) -> RawImages:
    """The class `name` of torchvision.datasets under `root`: any that has a train and a test split of labelled images.

    Images must be grayscale or RGB of 8 bits a channel, and of one size. Nothing is downloaded unless `download` is
    true. Raises ImportError where torchvision is missing, ValueError for a name or a kind of data set that does not
    fit, FileNotFoundError where the files are not there.
    """
    try:
        import torchvision.datasets
    except (ImportError, RuntimeError) as error:  # it raises RuntimeError when built for another torch
        raise ImportError(f"torchvision:{name} needs torchvision, which cannot be imported: {error}") from None
    kind = getattr(torchvision.datasets, name, None)
    if not inspect.isclass(kind):
        raise ValueError(f"torchvision:{name}: expected a class of torchvision.datasets, got none of that name")
    train, test = (_open(kind, root, train, download) for train in (True, False))
    train_images, train_labels = _arrays(name, train)
    test_images, test_labels = _arrays(name, test)
    if train_images.shape[1:] != test_images.shape[1:]:
        raise bad_file(f"torchvision:{name}", f"test images of {train_images.shape[1:]}", f"{test_images.shape[1:]}")
    # The labels that occur are public facts of these published data sets.
    classes = getattr(train, "classes", None)
    if classes is None:
        classes = range(count_classes(f"torchvision:{name}", np.concatenate([train_labels, test_labels])))
    for labels in (train_labels, test_labels):
        check_labels(f"torchvision:{name}", labels, len(labels), len(classes))
    return RawImages(train_images, train_labels, test_images, test_labels, tuple(map(str, classes)))


def _open(kind: type, root: Path, train: bool, download: bool) -> Any:
    parameters = inspect.signature(kind).parameters
    options: dict[str, object] = {}
    if "train" in parameters:
        options["train"] = train
    elif "split" in parameters:
        options["split"] = "train" if train else "test"
    else:
        raise ValueError(f"torchvision:{kind.__name__}: expected a data set with a train and a test split, it has none")
    if "download" in parameters:
        options["download"] = download
    try:
        return kind(root, **options)
    except RuntimeError as error:  # torchvision's way to say that the files are not there
        raise FileNotFoundError(f"torchvision:{kind.__name__} in {root}: {error}") from None
    except ImportError:
        raise
    except Exception as error:  # and it does not catch what its decoders raise
        raise _damaged(f"torchvision:{kind.__name__} in {root}", error) from None


def _arrays(name: str, dataset: Any) -> tuple[Bytes, Labels]:
    """uint8 [examples, channels, height, width] and int64 [examples], item by item as the data set yields them."""
    images: list[Bytes] = []
    labels: list[int] = []
    for index in range(len(dataset)):
        try:
            image, label = dataset[index]
            pixels, number = np.asarray(image), int(label)
        except Exception as error:
            raise _damaged(f"torchvision:{name}[{index}]", error) from None
        if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] != 3):
            raise bad_file(
                f"torchvision:{name}[{index}]", "a grayscale or RGB image of 8 bits", f"{pixels.dtype} {pixels.shape}"
            )
        if images and pixels.shape != images[0].shape:
            raise bad_file(f"torchvision:{name}[{index}]", f"one size, {images[0].shape}", f"{pixels.shape}")
        images.append(pixels)
        labels.append(number)
    if not images:
        raise bad_file(f"torchvision:{name}", "at least one image", "none")
    stacked = np.stack(images)
    return stacked[:, None] if stacked.ndim == 3 else stacked.transpose(0, 3, 1, 2), np.array(labels, np.int64)


def _damaged(where: str, error: Exception) -> ValueError:
    return bad_file(where, "a labelled image of torchvision", f"{type(error).__name__}: {reason(error)}")
