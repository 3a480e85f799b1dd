"""The linear layers of the baseline models, and some on sequences: of transformers, and a few positions."""

from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.entry import Entry, size
from benchmarks.models import layers

#: batch, positions, out_features, in_features
SEQUENCES = [
    (32, 128, 512, 256),
    (8, 128, 1024, 256),
    (16, 197, 768, 192),
    (4, 64, 3072, 768),
    (64, 16, 64, 64),
    (2, 1024, 64, 64),
]


def entries() -> Iterator[Entry]:
    shapes = [(seen.label, seen.input_shape[0], 1, *seen.module.weight.shape) for seen in layers(nn.Linear)]
    shapes += [("sequence", *shape) for shape in SEQUENCES]
    for label, batch, positions, d, p in shapes:
        case = f"{label}: [{batch}, {positions}] {p} -> {d}"
        a, g = torch.randn(batch, positions, p), torch.randn(batch, positions, d)
        weights = torch.rand(batch, dtype=torch.float64)
        norm_flops = 2 * batch * (p + d) if positions == 1 else 2 * batch * positions * p * d
        if positions == 1:
            w, reads = torch.randn(d, p), size(a, g)
            yield Entry(
                "linear_forward", case, lambda a=a[:, 0], w=w: ((a, w, None), {}), 2 * batch * p * (d + 1), reads
            )
        yield Entry("linear_squared_norms", case, lambda a=a, g=g: ((a, g), {}), norm_flops, size(a, g, weights))
        yield Entry(
            "linear_clipped_sums",
            case,
            lambda a=a, g=g, weights=weights: ((a, g, weights), {}),
            2 * batch * positions * p * d,
            size(a, g, weights) + 8 * d * (p + 1),
        )
