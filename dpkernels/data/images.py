"""Images held in memory: what every reader returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Split(Protocol):
    """Labelled examples of one shape that can be fetched in batches: images, or features of them."""

    @property
    def labels(self) -> Tensor:
        """int64 [examples]"""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one example."""

    @property
    def value_range(self) -> tuple[float, float]:
        """What pixels were scaled to."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Examples float32 [rows, *shape] and labels of `indices`."""

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All examples in order, at most `size` at a time."""


@dataclass(frozen=True, eq=False)
class ImageSplit(Dataset[tuple[Tensor, int]]):
    """Images and labels of one split, as bytes; scaled to floats when they are fetched.

    images: uint8 [examples, channels, height, width], from 0 to `largest`. labels: int64 [examples]. value_range: what
    0 and `largest` are scaled to. It is fixed, never computed from the images: constants taken from private data would
    have to be paid for.
    """

    images: Tensor
    labels: Tensor
    largest: int = 255
    value_range: tuple[float, float] = (0.0, 1.0)

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.dim() != 4:
            raise ValueError(
                "images must be uint8 [examples, channels, height, width], "
                f"got {self.images.dtype} {tuple(self.images.shape)}"
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise ValueError(
                f"labels must be int64 [{len(self.images)}], one per image, "
                f"got {self.labels.dtype} {tuple(self.labels.shape)}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """(channels, height, width)"""
        return tuple(self.images.shape[1:])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Image float32 [channels, height, width] and label."""
        return self._scaled(self.images[index]), int(self.labels[index])

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images float32 [rows, channels, height, width] and labels int64 [rows] of `indices`, int64 [rows]."""
        return self._scaled(self.images.index_select(0, indices)), self.labels.index_select(0, indices)

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All examples in order, at most `size` at a time: for evaluation."""
        for images, labels in zip(self.images.split(size), self.labels.split(size), strict=True):
            yield self._scaled(images), labels

    def _scaled(self, images: Tensor) -> Tensor:
        return scaled(images, self.largest, self.value_range)

    def __repr__(self) -> str:
        return f"ImageSplit({len(self)} images {tuple(self.images.shape[1:])}, value_range={self.value_range})"


def scaled(images: Tensor, largest: int, value_range: tuple[float, float]) -> Tensor:
    """uint8 images as float32, with 0 and `largest` at the ends of `value_range`."""
    low, high = value_range
    unit = images.to(torch.float32).div_(largest)
    return unit if (low, high) == (0.0, 1.0) else unit.mul_(high - low).add_(low)


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """A labelled image data set with its public test split; its images may have been replaced by features of them.

    nominal_size: the number of training examples that the data set is known to have, a public constant that a plan may
    use as its dataset_size; None where nothing is known (a folder of the user's), and then the user states it.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    test: Split
    nominal_size: int | None = None

    def __post_init__(self) -> None:
        if self.train.shape != self.test.shape:
            raise ValueError(
                f"{self.name}: train and test images must have one shape, got {self.train.shape} and {self.test.shape}"
            )

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one example: (channels, height, width) of images."""
        return self.test.shape

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    def scaled(self, low: float, high: float) -> ImageDataset:
        """The same images with pixels scaled to another range. Raises TypeError where they are features already."""

        def rescaled(name: str, split: Split) -> ImageSplit:
            if not isinstance(split, ImageSplit):
                raise TypeError(f"{name} must be images, got {type(split).__name__}")
            return replace(split, value_range=(low, high))

        return replace(self, train=rescaled("train", self.train), test=rescaled("test", self.test))

    def __repr__(self) -> str:
        return f"ImageDataset({self.name!r}, {self.num_classes} classes, train={self.train!r}, test={self.test!r})"
