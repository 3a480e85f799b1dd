"""Checks of the arguments that every model takes, and the size of what a stack of layers puts out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn


def check_count(name: str, value: object) -> int:
    """`value` as a positive int; TypeError or ValueError names the argument."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


def check_shape(name: str, shape: Sequence[int], rank: int | None = None) -> tuple[int, ...]:
    """`shape` as a tuple of positive ints, of length `rank` where one is given."""
    if isinstance(shape, (str, bytes)) or not isinstance(shape, Sequence):
        raise TypeError(f"{name} must be a sequence of ints without the batch dimension, got {type(shape).__name__}")
    sizes = tuple(check_count(f"{name}[{i}]", size) for i, size in enumerate(shape))
    if not sizes or (rank is not None and len(sizes) != rank):
        wanted = "at least 1 dimension" if rank is None else f"{rank} dimensions (channels, height, width)"
        raise ValueError(f"{name} must have {wanted}, the batch dimension left out, got {tuple(shape)}")
    return sizes


def flat_features(layers: Iterable[nn.Module], input_shape: tuple[int, ...]) -> int:
    """How many numbers a stack of convolutions, max-poolings and activations puts out for one example of `input_shape`,
    (channels, height, width), without running it; ValueError where that is too small."""
    channels, *sizes = input_shape
    for layer in layers:
        if isinstance(layer, (nn.Conv2d, nn.MaxPool2d)):
            kernel, stride, padding = map(_pair, (layer.kernel_size, layer.stride, layer.padding))
            sizes = [(size + 2 * p - k) // s + 1 for size, k, s, p in zip(sizes, kernel, stride, padding, strict=True)]
            channels = layer.out_channels if isinstance(layer, nn.Conv2d) else channels
            if min(sizes) < 1:
                raise ValueError(f"input_shape {input_shape} is too small for the convolutions and poolings")
    return channels * math.prod(sizes)


def _pair(value: Any) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)
