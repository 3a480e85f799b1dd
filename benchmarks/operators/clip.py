"""Clip factors of a batch, and stored per-example gradients of a convolution (64 x 16 x 3 x 3) and an affine layer."""

from collections.abc import Iterator

import torch

from benchmarks.entry import Entry, size


def entries() -> Iterator[Entry]:
    parts = list(torch.rand(40, 512, dtype=torch.float64))
    yield Entry(
        "clip_factors",
        f"[{len(parts[0])}] in {len(parts)} parts",
        lambda: ((parts,), {"max_grad_norm": 0.1}),
        len(parts) * len(parts[0]),
        size(*parts) + 16 * len(parts[0]),
    )
    for batch, columns in ((256, 64 * 16 * 9), (512, 128)):
        rows, weights = torch.randn(batch, columns), torch.rand(batch, dtype=torch.float64)
        case = f"[{batch}, {columns}]"
        flops = 2 * rows.numel()
        yield Entry("row_squared_norms", case, lambda rows=rows: ((rows,), {}), flops, size(rows, weights))
        yield Entry(
            "weighted_row_sum",
            case,
            lambda rows=rows, weights=weights: ((rows, weights), {}),
            flops,
            size(rows, weights) + 8 * columns,
        )
