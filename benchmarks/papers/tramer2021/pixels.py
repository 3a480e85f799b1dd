"""Pixels as the paper has those of CIFAR-10: in units of the mean and standard deviation of ImageNet's.

What stands under features that are normalized by channel does not matter; without, and with group normalization, whose
groups see the mean of the low-pass channels, it does. One scale for all three colours, whose constants differ little.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

MEAN, STD = 0.449, 0.226


@contextmanager
def imagenet_units() -> Iterator[None]:
    """While this holds, features are taken of pixels in these units."""
    with mock.patch("dpkernels.training.build.PIXELS", (-MEAN / STD, (1 - MEAN) / STD)):
        yield
