"""Models by name, as the command line asks for them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from torch import nn

from dpkernels.models._shapes import check_count, check_shape
from dpkernels.models.logistic import linear
from dpkernels.models.resnet import cifar_resnet, resnet18, resnet50
from dpkernels.models.scatternet import scatternet_cnn, scatternet_linear
from dpkernels.models.tanh_cnn import cifar10_cnn, mnist_cnn, simple_vgg

_Builder = Callable[[tuple[int, ...], int], nn.Module]


def _exactly(shape: tuple[int, ...], build: Callable[[int], nn.Module]) -> _Builder:
    def builder(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        if input_shape != shape:
            raise ValueError(
                f"input_shape must be {shape} for this model, got {input_shape}; "
                "linear takes any shape and simple_vgg any image"
            )
        return build(num_classes)

    return builder


def _resnet(build: Callable[..., nn.Module]) -> _Builder:
    def builder(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        channels, height, width = check_shape("input_shape", input_shape, rank=3)
        # The stem for photographs divides the size by 4, and the network by 32: a 64x64 image would end as 2x2.
        stem = "imagenet" if min(height, width) > 64 else "cifar"
        return build(num_classes, stem=stem, in_channels=channels)

    return builder


def _cifar_resnet(depth: int) -> _Builder:
    def builder(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        channels, _, _ = check_shape("input_shape", input_shape, rank=3)
        return cifar_resnet(depth, num_classes, in_channels=channels)

    return builder


_VGG = re.compile(r"simple_vgg((?:_\d{1,6}x\d{1,6})+)_(\d{1,6})")
_MOST_CONVOLUTIONS = 1000


def _vgg(name: str) -> _Builder | None:
    """simple_vgg of the widths and depths in its name: "simple_vgg_32x2_64x2_128x2_128" is what Kurakin et al. 2022,
    appendix H, write as simpleVGG-32(2)-64(2)-128(2)-128, where each block has two convolutions."""
    sizes = _VGG.fullmatch(name)
    if sizes is None:
        return None
    blocks = [tuple(map(int, block.split("x"))) for block in sizes[1].split("_")[1:]]
    channels, depths = zip(*blocks, strict=True)
    if sum(depths) > _MOST_CONVOLUTIONS:
        raise ValueError(f"name must be of at most {_MOST_CONVOLUTIONS} convolutions, got {sum(depths)}")
    hidden = int(sizes[2])
    return lambda shape, classes: simple_vgg(channels, depths, hidden, num_classes=classes, input_shape=shape)


_MODELS: dict[str, _Builder] = {
    "linear": linear,
    "mnist_cnn": _exactly((1, 28, 28), mnist_cnn),
    "cifar10_cnn": _exactly((3, 32, 32), lambda classes: cifar10_cnn("large", classes)),
    "cifar10_cnn_small": _exactly((3, 32, 32), lambda classes: cifar10_cnn("small", classes)),
    "scatternet_linear": lambda shape, classes: scatternet_linear(shape, num_classes=classes),
    "scatternet_cnn": lambda shape, classes: scatternet_cnn(shape, num_classes=classes),
    "simple_vgg": lambda shape, classes: simple_vgg(input_shape=shape, num_classes=classes),
    "resnet8": _cifar_resnet(8),
    "resnet20": _cifar_resnet(20),
    "resnet18": _resnet(resnet18),
    "resnet50": _resnet(resnet50),
}


def names() -> list[str]:
    """The names that `create` knows, beside those of `simple_vgg` with widths and depths."""
    return list(_MODELS)


def create(name: str, input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """The model called `name` for examples of `input_shape` (channels, height, width) and `num_classes` classes.

    Hyphens and underscores are the same, and case does not matter: "mnist-cnn" is "mnist_cnn". "simple_vgg" has three
    blocks of two convolutions with 32, 64 and 128 channels, and 128 hidden units; "simple_vgg-16x1-32x3-64" has a block
    of one convolution with 16 channels, one of three with 32, and 64 hidden units. Raises ValueError for an unknown
    name, and where the model does not fit the shape.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {type(name).__name__}")
    plain = name.strip().lower().replace("-", "_")
    builder = _MODELS.get(plain) or _vgg(plain)
    if builder is None:
        raise ValueError(
            f"name must be one of {', '.join(_MODELS)}, or a simple_vgg with widths, depths and hidden units such as "
            f"simple_vgg-32x2-64x2-128x2-128, got {name!r}"
        )
    return builder(check_shape("input_shape", input_shape), check_count("num_classes", num_classes))
