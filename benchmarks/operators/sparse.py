"""Selected weights of the 3x3 convolutions of a ResNet-18 on 32x32 images, 1% and 10% of each."""

from collections.abc import Iterator

import torch

from benchmarks.entry import Entry, size


def entries() -> Iterator[Entry]:
    batch, settings = 64, {"kernel_size": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    for channels, side in ((64, 32), (256, 8), (512, 4)):
        for share in (0.01, 0.1):
            weights = channels * channels * 9
            selected = torch.randperm(weights)[: round(share * weights)].sort().values

            def arguments(
                channels: int = channels, side: int = side, selected: torch.Tensor = selected
            ) -> tuple[tuple[torch.Tensor, ...], dict[str, tuple[int, ...]]]:
                maps = (torch.randn(batch, channels, side, side) for _ in range(2))
                return (*maps, selected), settings

            yield Entry(
                "sparse_gradients",
                f"[{batch}] {channels} -> {channels}, {side}x{side} by 3, {share:.0%}",
                arguments,
                2 * batch * len(selected) * side * side,
                4 * batch * (2 * channels * side * side + len(selected)) + size(selected),
                reference=channels < 512,
            )
