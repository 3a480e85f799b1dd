"""Noise for all parameters of the smallest and the largest baseline model."""

from collections.abc import Iterator

import torch

from benchmarks.entry import Entry
from benchmarks.models import parameter_shapes


def entries() -> Iterator[Entry]:
    key = torch.arange(32, dtype=torch.uint8)
    for name in ("mnist_cnn", "resnet18"):
        count = sum(shape.numel() for shape in parameter_shapes(name))
        stream = (key, 1, 2, 0, count)
        small = count < 1_000_000
        for operator, settings in (
            ("random_bits", {}),
            ("gaussian", {}),
            ("grid_gaussian", {"noise_std": 1.0, "grid": 2.0**-30}),
        ):
            # Twenty rounds of ChaCha20 are 20 operations a byte; they are integers and count as none.
            yield Entry(
                operator, f"{name}: {count} values", lambda s=stream, k=settings: (s, k), 0, 8 * count, reference=small
            )
    words = torch.randint(-(2**63), 2**63 - 1, (1000, 4))
    yield Entry("box_muller", "1000 pairs", lambda: ((words,), {}), 0, 80 * len(words))
