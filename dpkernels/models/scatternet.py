"""Classifiers that stand on ScatterNet features: Tramèr & Boneh 2021, appendix C.2, Tables 5, 8 and 9.

They take features [batch, channels, height, width], not images: (81, 7, 7) for a 28x28 grayscale image, (243, 8, 8) for
a 32x32 RGB image. Tables 8 and 9 list more max-poolings than the networks have whose sizes Table 4 gives (33K and 187K
parameters): those leave out both poolings of Table 8 and the last one of Table 9. We build the networks of Table 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from torch import nn

from dpkernels.models._shapes import check_count, check_shape, flat_features

Normalization = int | nn.Module | None
Variant = Literal["mnist", "cifar10", "cifar10-small"]

_IMAGE_CHANNELS = (1, 3)
_VARIANTS: dict[int, Variant] = {81: "mnist", 243: "cifar10"}  # by channels


def scatternet_linear(
    shape: Sequence[int], normalization: Normalization = None, *, num_classes: int = 10
) -> nn.Sequential:
    """Logistic regression on ScatterNet features (Table 5): 39,700 parameters for (81, 7, 7), 155,530 for (243, 8, 8).

    shape: (channels, height, width) of the features of one example. normalization: the number of groups of a group
    normalization without parameters (the paper tries 9, 27 and 81), a module that maps [batch, *shape] to the same
    shape, or None. Output [batch, num_classes].
    """
    sizes = _feature_shape(shape)
    classes = check_count("num_classes", num_classes)
    return nn.Sequential(*_normalization(sizes, normalization), nn.Flatten(), nn.Linear(math.prod(sizes), classes))


def scatternet_cnn(
    shape: Sequence[int], normalization: Normalization = None, *, variant: Variant | None = None, num_classes: int = 10
) -> nn.Sequential:
    """A small tanh CNN on ScatterNet features.

    shape, normalization: as in `scatternet_linear`. variant: "mnist" is Table 8 (33,066 parameters for (81, 7, 7)),
    "cifar10" Table 9 (187,210 for (243, 8, 8)), "cifar10-small" its variant with 16-16-32-32 filters; None picks by the
    number of channels, 81 or 243, and raises ValueError for another one. Output [batch, num_classes].
    """
    sizes = _feature_shape(shape)
    classes = check_count("num_classes", num_classes)
    channels = sizes[0]
    variant = variant or _VARIANTS.get(channels)
    if variant == "mnist":
        layers = [*_convolution(channels, 16, stride=2), *_convolution(16, 32)]
        hidden = 32
    elif variant == "cifar10":
        layers = [*_convolution(channels, 64), nn.MaxPool2d(2), *_convolution(64, 64)]
        hidden = 0
    elif variant == "cifar10-small":
        layers = [*_convolution(channels, 16), *_convolution(16, 16), nn.MaxPool2d(2)]
        layers += [*_convolution(16, 32), *_convolution(32, 32)]
        hidden = 0
    elif variant is None:
        raise ValueError(
            f"shape must have {' or '.join(map(str, _VARIANTS))} channels where variant is None, got {sizes}"
        )
    else:
        raise ValueError(f"variant must be 'mnist', 'cifar10', 'cifar10-small' or None, got {variant!r}")

    features = flat_features(layers, sizes)
    layers.append(nn.Flatten())
    if hidden:
        layers += [nn.Linear(features, hidden), nn.Tanh()]
    layers.append(nn.Linear(hidden or features, classes))
    return nn.Sequential(*_normalization(sizes, normalization), *layers)


def _feature_shape(shape: Sequence[int]) -> tuple[int, ...]:
    sizes = check_shape("shape", shape, rank=3)
    if sizes[0] in _IMAGE_CHANNELS:
        raise ValueError(
            f"shape must be that of ScatterNet features, got {sizes}, which is that of images: take "
            f"dpkernels.features.ScatterNet({sizes}).feature_shape, and give the model what it makes of them"
        )
    return sizes


def _convolution(incoming: int, outgoing: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(incoming, outgoing, kernel_size=3, stride=stride, padding=1), nn.Tanh()]


def _normalization(shape: tuple[int, ...], normalization: Normalization) -> list[nn.Module]:
    if normalization is None:
        return []
    if isinstance(normalization, nn.Module):
        return [normalization]
    if isinstance(normalization, bool) or not isinstance(normalization, int):
        raise TypeError(
            f"normalization must be a number of groups, a module or None, got {type(normalization).__name__}"
        )
    if normalization < 1 or shape[0] % normalization:
        raise ValueError(f"normalization must be a number of groups that divides {shape[0]}, got {normalization}")
    return [nn.GroupNorm(normalization, shape[0], affine=False)]
