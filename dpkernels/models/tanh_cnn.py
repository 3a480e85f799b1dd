"""Convolutional networks with tanh activations, small enough to train privately.

Tramèr & Boneh, "Differentially Private Learning Needs Better Features (or Much More Data)", 2021, appendix C.2, Tables
6 and 7, and appendix D.5; Kurakin et al., "Toward Training at ImageNet Scale with Differential Privacy", 2022, appendix
H (the family simpleVGG, of which the CIFAR-10 network of Table 7 is a member). Every network takes an empty batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn

from dpkernels.models._shapes import check_count, check_shape, flat_features


def mnist_cnn(num_classes: int = 10) -> nn.Sequential:
    """Tramèr & Boneh, Table 6: 26,010 parameters with 10 classes.

    Input [batch, 1, 28, 28], output [batch, num_classes].
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(kernel_size=2, stride=1),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(kernel_size=2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.Tanh(),
        nn.Linear(32, check_count("num_classes", num_classes)),
    )


def cifar10_cnn(size: Literal["large", "small"] = "large", num_classes: int = 10) -> nn.Sequential:
    """Tramèr & Boneh, Table 7 ("large", 550,570 parameters) and appendix D.5 ("small", 167,642 parameters).

    Input [batch, 3, 32, 32], output [batch, num_classes].
    """
    if size == "large":
        return simple_vgg((32, 64, 128), 2, num_classes=num_classes)
    if size == "small":
        return simple_vgg((16, 32, 64), (2, 2, 1), num_classes=num_classes)
    raise ValueError(f"size must be 'large' or 'small', got {size!r}")


def simple_vgg(
    channels: Sequence[int] = (32, 64, 128),
    depth: int | Sequence[int] = 2,
    hidden: int = 128,
    *,
    num_classes: int = 10,
    input_shape: Sequence[int] = (3, 32, 32),
) -> nn.Sequential:
    """Kurakin et al., appendix H: blocks of 3x3 convolutions, a 2x2 max-pooling after each, and a hidden layer.

    channels: the width of each block; their number is the number of blocks. depth: the number of convolutions in each
    block, one for all or one a block. hidden: the units of the fully connected layer. simpleVGG-32(2)-64(2)-128(2)-128
    of the paper is the default. Input [batch, *input_shape], output [batch, num_classes].
    """
    shape = check_shape("input_shape", input_shape, rank=3)
    widths = check_shape("channels", channels)
    depths = (depth,) * len(widths) if isinstance(depth, int) else tuple(depth)
    if len(depths) != len(widths):
        raise ValueError(f"depth must be one int or one per block, got {len(depths)} for {len(widths)} blocks")

    layers: list[nn.Module] = []
    incoming = shape[0]
    for width, convolutions in zip(widths, depths, strict=True):
        for _ in range(check_count("depth", convolutions)):
            layers += [nn.Conv2d(incoming, width, kernel_size=3, padding=1), nn.Tanh()]
            incoming = width
        layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
    features = flat_features(layers, shape)
    layers += [
        nn.Flatten(),
        nn.Linear(features, check_count("hidden", hidden)),
        nn.Tanh(),
        nn.Linear(hidden, check_count("num_classes", num_classes)),
    ]
    return nn.Sequential(*layers)
