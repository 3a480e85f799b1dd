"""The convolutions of the baseline models, and a depthwise one."""

from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.entry import Entry, size
from benchmarks.models import Seen, layers


def entries() -> Iterator[Entry]:
    with torch.device("meta"):
        depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64)
    shapes = [*layers(nn.Conv2d), Seen("depthwise", depthwise, (64, 64, 16, 16), (64, 64, 16, 16))]
    for seen in shapes:
        conv, (batch, p, *image), (_, d, *positions) = seen.module, seen.input_shape, seen.output_shape
        settings = {name: getattr(conv, name) for name in ("kernel_size", "stride", "padding", "dilation", "groups")}
        settings["bias"] = conv.bias is not None
        case = f"{seen.label}: [{batch}] {p} -> {d}, {image[0]}x{image[1]} by {conv.kernel_size[0]}"
        flops = 2 * batch * conv.weight.numel() * positions[0] * positions[1]
        moved = 4 * batch * (p * image[0] * image[1] + d * positions[0] * positions[1])

        def arguments(seen: Seen = seen) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.randn(seen.input_shape), torch.randn(seen.output_shape)

        weights = torch.rand(batch, dtype=torch.float64)
        yield Entry(
            "conv_squared_norms",
            case,
            lambda arguments=arguments, settings=settings: (arguments(), settings),
            flops,
            moved + 8 * batch,
        )
        yield Entry(
            "conv_clipped_sums",
            case,
            lambda arguments=arguments, settings=settings, weights=weights: ((*arguments(), weights), settings),
            flops,
            moved + size(weights) + 8 * conv.weight.numel(),
        )
