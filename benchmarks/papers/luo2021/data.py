"""Pairs of a public data set and a private one that have no example and no class in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from dpkernels.data import ImageDataset, ImageSplit, load_dataset

CIFAR_PUBLIC = (0, 2, 4, 6, 8)  # airplane, bird, deer, frog, ship
CIFAR_PRIVATE = (1, 3, 5, 7, 9)  # automobile, cat, dog, horse, truck


@dataclass(frozen=True)
class Pair:
    """What is pre-trained on and what is kept private, the network for both, and how many examples are private."""

    public: Callable[[], ImageDataset]
    private: Callable[[], ImageDataset]
    model: str
    private_size: int


def only_classes(dataset: ImageDataset, classes: Sequence[int]) -> ImageDataset:
    """The examples of `classes`, which are then numbered from 0."""
    number = torch.full((dataset.num_classes,), -1, dtype=torch.int64)
    number[list(classes)] = torch.arange(len(classes))

    def chosen(split: ImageSplit) -> ImageSplit:
        labels = number[split.labels]
        return replace(split, images=split.images[labels >= 0], labels=labels[labels >= 0])

    return _mapped(dataset, chosen, classes=tuple(dataset.classes[c] for c in classes), nominal_size=None)


def first_examples(dataset: ImageDataset, count: int) -> ImageDataset:
    """The same with the first `count` training examples alone."""
    train = dataset.train
    assert isinstance(train, ImageSplit)
    small = replace(train, images=train.images[:count], labels=train.labels[:count])
    return replace(dataset, train=small, nominal_size=count)


def other_examples(dataset: ImageDataset, count: int) -> ImageDataset:
    """The `count` training examples after the first `count`, and as its test split as many after them: to choose
    hyper-parameters on, as public data would be."""
    train = dataset.train
    assert isinstance(train, ImageSplit)
    parts = [
        replace(train, images=train.images[begin : begin + count], labels=train.labels[begin : begin + count])
        for begin in (count, 2 * count)
    ]
    return replace(dataset, train=parts[0], test=parts[1], nominal_size=count)


def halved(dataset: ImageDataset) -> ImageDataset:
    """The same with each side of the images halved: means of 2x2 pixels."""

    def smaller(split: ImageSplit) -> ImageSplit:
        parts = (F.avg_pool2d(images.float(), 2).round().to(torch.uint8) for images in split.images.split(4096))
        return replace(split, images=torch.cat(list(parts)))

    return _mapped(dataset, smaller)


def _mapped(dataset: ImageDataset, change: Callable[[ImageSplit], ImageSplit], **fields: object) -> ImageDataset:
    assert isinstance(dataset.train, ImageSplit)
    assert isinstance(dataset.test, ImageSplit)
    return replace(dataset, train=change(dataset.train), test=change(dataset.test), **fields)  # type: ignore[arg-type]


PAIRS: dict[str, Pair] = {
    "mnist": Pair(
        lambda: halved(load_dataset("fashion-mnist")),
        lambda: halved(first_examples(load_dataset("mnist"), 10_000)),
        "resnet8",
        10_000,
    ),
    "cifar10": Pair(
        lambda: only_classes(load_dataset("cifar10"), CIFAR_PUBLIC),
        lambda: only_classes(load_dataset("cifar10"), CIFAR_PRIVATE),
        "resnet20",
        25_000,
    ),
}
"""By the name of the data set that the private part comes from."""
