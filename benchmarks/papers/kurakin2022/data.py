"""A fifth of CIFAR-10 at half its size: what the study of widths and depths is affordable on."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from dpkernels.data import ImageDataset, ImageSplit, load_dataset

NAME = "cifar10-16x16-fifth"
SIZE = 10_000


def small_cifar10() -> ImageDataset:
    """Every fifth training image and every fourth test image of CIFAR-10 (10,000 and 2,500, in equal numbers a class
    where the reader sorts by class), as means over 2x2 pixels, in bytes."""
    whole = load_dataset("cifar10")

    def split(name: str, stride: int) -> ImageSplit:
        images = getattr(whole, name)
        return ImageSplit(halved(images.images[::stride]), images.labels[::stride], value_range=images.value_range)

    return ImageDataset(NAME, whole.classes, split("train", 5), split("test", 4), SIZE)


def halved(images: Tensor) -> Tensor:
    """uint8 [images, channels, height, width] -> uint8 [images, channels, height / 2, width / 2], rounded means."""
    return F.avg_pool2d(images.float(), 2).round_().byte()
