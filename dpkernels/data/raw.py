"""What a reader hands over: plain arrays, with labels that fit them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpkernels._files import Name, bad_file

Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]

_MANY = 10_000  # classes of which a test split may lack most


@dataclass(frozen=True, eq=False)
class RawImages:
    """train_images, test_images: uint8 [examples, channels, height, width]; labels: int64 [examples]."""

    train_images: Bytes
    train_labels: Labels
    test_images: Bytes
    test_labels: Labels
    classes: tuple[str, ...]
    largest: int = 255


def check_labels(path: Name, labels: np.ndarray, count: int, classes: int) -> Labels:
    """The integers `labels` as int64; ValueError unless there are `count`, one at least, each in 0 .. classes - 1."""
    if len(labels) != count:
        raise bad_file(path, f"{count} labels, one per example", f"{len(labels)}")
    if not count:
        raise bad_file(path, "one example at least", "none")
    outside = labels[(labels < 0) | (labels >= classes)]
    if len(outside):
        raise bad_file(path, f"labels from 0 to {classes - 1}", f"{outside[0]} ({len(outside)} labels are outside)")
    return labels.astype(np.int64)


def count_classes(path: Name, labels: np.ndarray) -> int:
    """How many classes there are where integers `labels`, of a public split, number them from 0.

    Raises ValueError where there are none, and for a number so far above how many different ones occur that it numbers
    no classes.
    """
    if not len(labels):
        raise bad_file(path, "one example at least", "none")
    count = int(labels.max()) + 1
    most = max(_MANY, 10 * len(np.unique(labels)))
    if count > most:
        raise bad_file(path, f"classes numbered from 0, below {most:,} for these labels", f"label {count - 1}")
    return count
