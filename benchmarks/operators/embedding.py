"""Embeddings of a sequence of tokens, and bags of them. No baseline model has one."""

from collections.abc import Iterator

import torch

from benchmarks.entry import Entry, size


def entries() -> Iterator[Entry]:
    batch, positions, rows, dim = 32, 64, 5000, 128
    indices, weights = torch.randint(rows, (batch, positions)), torch.rand(batch, dtype=torch.float64)
    table = 8 * rows * dim
    for operator, g, settings in (
        ("embedding", torch.randn(batch, positions, dim), {}),
        ("embedding_bag", torch.randn(batch, dim), {"mode": "mean"}),
    ):
        case = f"[{batch}, {positions}] of {rows} rows of {dim}"
        moved = size(indices, g, weights)
        flops = 2 * g.numel()
        yield Entry(f"{operator}_squared_norms", case, lambda g=g, s=settings: ((indices, g), s), flops, moved)
        yield Entry(
            f"{operator}_clipped_sums",
            case,
            lambda g=g, s=settings: ((indices, g, weights), {"num_embeddings": rows, **s}),
            flops,
            moved + table,
        )
