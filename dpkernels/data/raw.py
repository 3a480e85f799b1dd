"""What a reader hands over: plain arrays, and the errors it raises about files."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]

IMAGE_EXTENSIONS = {".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
GRAY_MODES = {"1", "L", "LA"}  # of Pillow, with 8 bits a channel at most
COLOUR_MODES = {"RGB", "RGBA", "RGBX", "P", "PA", "CMYK", "YCbCr", "HSV", "LAB"}
EIGHT_BIT_MODES = GRAY_MODES | COLOUR_MODES


@dataclass(frozen=True, eq=False)
class RawImages:
    """train_images, test_images: uint8 [examples, channels, height, width]; labels: int64 [examples]."""

    train_images: Bytes
    train_labels: Labels
    test_images: Bytes
    test_labels: Labels
    classes: tuple[str, ...]
    largest: int = 255


def bad_file(path: str | os.PathLike[str], expected: str, got: str) -> ValueError:
    """The error about a file that is not what it should be."""
    return ValueError(f"{os.fspath(path)}: expected {expected}, got {got}")


def check_labels(path: str | os.PathLike[str], labels: Labels, count: int, classes: int) -> None:
    """Raise unless there are `count` labels, each in 0 .. classes - 1."""
    if len(labels) != count:
        raise bad_file(path, f"{count} labels, one per image", f"{len(labels)}")
    outside = labels[(labels < 0) | (labels >= classes)]
    if len(outside):
        raise bad_file(path, f"labels from 0 to {classes - 1}", f"{outside[0]} ({len(outside)} labels are outside)")
