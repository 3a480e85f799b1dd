"""ResNet-v2 with group normalization (Kurakin et al. 2022, section 3.1 and Figure 5).

He et al., "Identity Mappings in Deep Residual Networks", 2016: normalization and ReLU come before each convolution, so
the residual path is never normalized. Wu & He, "Group Normalization", 2018: 32 groups. Batch normalization would mix
examples, and a mixed gradient cannot be clipped per example.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from dpkernels.models._shapes import check_count

Stem = Literal["cifar", "imagenet"]


class ResNet(nn.Sequential):
    """Stem, block groups, normalization, ReLU, mean and classifier, in this order."""

    @property
    def block_groups(self) -> tuple[tuple[str, ...], ...]:
        """The names of the modules that are frozen with each block group (Kurakin et al. 2022, appendix G).

        The stem goes with the first and the final normalization with the last, so that with all of them frozen only
        the classifier is trained.
        """
        names = list(self._modules)
        first, *others = (at for at, module in enumerate(self) if isinstance(module, nn.Sequential))
        ends = [first, *others[:-1], len(names) - 2]
        return tuple(
            tuple(names[begin : end + 1]) for begin, end in zip([0, *(e + 1 for e in ends)], ends, strict=False)
        )


def resnet18(
    num_classes: int = 1000, *, stem: Stem = "imagenet", in_channels: int = 3, groups: int = 32, width: int = 64
) -> ResNet:
    """ResNet-v2-18: four block groups of two basic blocks; 11.69M parameters with 1000 classes.

    stem: "imagenet" (7x7 convolution, stride 2, then a max-pooling of stride 2; for images of about 224x224) or "cifar"
    (3x3 convolution of stride 1; for 32x32). width: channels of the first block group, which every later one doubles.
    groups: of every group normalization; must divide `width`. Input [batch, in_channels, height, width], output [batch,
    num_classes].
    """
    return _resnet((2, 2, 2, 2), False, num_classes, stem, in_channels, groups, width)


def resnet50(
    num_classes: int = 1000, *, stem: Stem = "imagenet", in_channels: int = 3, groups: int = 32, width: int = 64
) -> ResNet:
    """ResNet-v2-50: four block groups of 3, 4, 6 and 3 bottleneck blocks; 25.55M parameters with 1000 classes.

    Arguments and shapes as in `resnet18`; a block group puts out four times the channels that `width` says.
    """
    return _resnet((3, 4, 6, 3), True, num_classes, stem, in_channels, groups, width)


def cifar_resnet(
    depth: int, num_classes: int = 10, *, in_channels: int = 3, groups: int = 4, width: int = 16
) -> ResNet:
    """The narrow ResNets of He et al. 2016 for small images, in version 2: three block groups of (depth - 2) / 6 basic
    blocks with 16, 32 and 64 channels after a 3x3 convolution. With 10 classes depth 20 has 0.27M parameters.

    depth: 6 n + 2, as in 8, 14, 20. Other arguments and shapes as in `resnet18`.
    """
    blocks, rest = divmod(check_count("depth", depth) - 2, 6)
    if rest or blocks < 1:
        raise ValueError(f"depth must be 6 n + 2 with n at least 1, got {depth}")
    return _resnet((blocks,) * 3, False, num_classes, "cifar", in_channels, groups, width)


class PreActivationBlock(nn.Module):
    """One residual block of ResNet-v2, shortcut(x) + residual(x): [batch, incoming, ...] -> [batch, outgoing, ...].

    A basic block has two 3x3 convolutions, the first with the stride; a bottleneck has 1x1, 3x3 (with the stride), 1x1
    convolutions through outgoing / 4 channels. Where the shape changes, the shortcut is a 1x1 projection of the
    activated input, as in He et al. 2016.
    """

    def __init__(self, incoming: int, outgoing: int, stride: int, bottleneck: bool, groups: int) -> None:
        super().__init__()
        if bottleneck:
            inner = outgoing // 4
            convolutions = [(incoming, inner, 1, 1), (inner, inner, 3, stride), (inner, outgoing, 1, 1)]
        else:
            convolutions = [(incoming, outgoing, 3, stride), (outgoing, outgoing, 3, 1)]
        self.activation = nn.Sequential(nn.GroupNorm(groups, incoming), nn.ReLU())
        layers: list[nn.Module] = [_convolution(*convolutions[0])]
        for convolution in convolutions[1:]:
            layers += [nn.GroupNorm(groups, convolution[0]), nn.ReLU(), _convolution(*convolution)]
        self.residual = nn.Sequential(*layers)
        changes = stride != 1 or incoming != outgoing
        self.projection = _convolution(incoming, outgoing, 1, stride) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        activated = self.activation(x)
        shortcut = x if self.projection is None else self.projection(activated)
        return shortcut + self.residual(activated)


class SpatialMean(nn.Module):
    """Global average pooling: [batch, channels, height, width] -> [batch, channels], also for an empty batch."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.mean(x, dim=(2, 3))


def _convolution(incoming: int, outgoing: int, kernel: int, stride: int) -> nn.Conv2d:
    layer = nn.Conv2d(incoming, outgoing, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


def _resnet(
    blocks: Sequence[int], bottleneck: bool, num_classes: int, stem: Stem, in_channels: int, groups: int, width: int
) -> ResNet:
    check_count("num_classes", num_classes)
    check_count("in_channels", in_channels)
    if check_count("width", width) % check_count("groups", groups):
        raise ValueError(f"groups must divide {width}, the channels of the first block group, got {groups}")
    if stem == "imagenet":
        layers: list[nn.Module] = [_convolution(in_channels, width, 7, 2), nn.MaxPool2d(3, stride=2, padding=1)]
    elif stem == "cifar":
        layers = [_convolution(in_channels, width, 3, 1)]
    else:
        raise ValueError(f"stem must be 'cifar' or 'imagenet', got {stem!r}")

    incoming = width
    for group, count in enumerate(blocks):
        outgoing = width * 2**group * (4 if bottleneck else 1)
        block_group = nn.Sequential()
        for position in range(count):
            stride = 2 if group > 0 and position == 0 else 1
            block_group.append(PreActivationBlock(incoming, outgoing, stride, bottleneck, groups))
            incoming = outgoing
        layers.append(block_group)
    layers += [nn.GroupNorm(groups, incoming), nn.ReLU(), SpatialMean(), nn.Linear(incoming, num_classes)]
    return ResNet(*layers)
