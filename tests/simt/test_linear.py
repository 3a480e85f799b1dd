"""The CUDA kernels of linear layers against their reference in float64."""

import pytest
import torch
from torch import Tensor

from dpkernels.reference import linear as reference
from tests.simt.machine import Machine

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# (batch, positions, in_features, out_features): one position and several; parts of a tile, of a copy, of a chunk
SHAPES = [(0, 1, 3, 2), (3, 1, 1, 1), (5, 1, 70, 33), (0, 3, 3, 2), (2, 0, 3, 2), (2, 3, 0, 2), (3, 2, 5, 1)]
TILES = [(2, 33, 66, 3), (2, 9, 4, 68)]


def example(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    batch, positions, p, d = shape
    a, g = torch.randn(batch, positions, p).to(dtype), torch.randn(batch, positions, d).to(dtype)
    return a, g, torch.rand(batch, dtype=torch.float64)


def tolerance(dtype: torch.dtype, tf32: bool = False) -> float:
    return 1e-12 if dtype == torch.float64 else 2e-3 if tf32 else 3e-6


@pytest.mark.parametrize("shape", [*SHAPES, *TILES])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_reference(simt: Machine, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    a, g, w = example(shape, dtype)
    norms = simt.linear_squared_norms(a, g)
    torch.testing.assert_close(
        norms, reference.linear_squared_norms(a.double(), g.double()), rtol=tolerance(dtype), atol=0
    )
    for got, want in zip(
        simt.linear_clipped_sums(a, g, w), reference.linear_clipped_sums(a.double(), g.double(), w), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance(dtype) * 10)


@pytest.mark.parametrize("shape", [(3, 1, 40, 5), (2, 33, 12, 7)])
def test_norm_is_of_what_the_sum_adds(simt: Machine, shape: tuple[int, ...]) -> None:
    a, g, _ = example(shape, torch.float32)
    for tf32 in (False, True):
        norms = simt.linear_squared_norms(a, g, tf32=tf32)
        for b, row in enumerate(torch.eye(len(a), dtype=torch.float64)):
            added = sum(t.square().sum() for t in simt.linear_clipped_sums(a, g, row, tf32=tf32))
            assert added * (1 - 1e-15) <= norms[b] <= added * (1 + 1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 3, 2), (5, 70, 5), (3, 4, 0), (2, 0, 3), (9, 33, 1)])
def test_forward(simt: Machine, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, p, d = shape
    a, weight, bias = (torch.randn(*size).to(dtype) for size in ((rows, p), (d, p), (d,)))
    for b in (bias, None):
        outputs, squares = simt.linear_forward(a, weight, b)
        want = reference.linear_forward(a.double(), weight.double(), None if b is None else b.double())
        assert outputs.dtype == dtype
        close = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(outputs.double(), want[0], rtol=close, atol=10 * close)
        torch.testing.assert_close(squares, want[1], rtol=1e-14, atol=0)
