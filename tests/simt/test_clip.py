"""The CUDA kernels of clipping: the CPU's bits where the order of sums is its own, else the reference."""

from fractions import Fraction

import pytest
import torch

from dpkernels.ops import clip
from dpkernels.reference import clip as reference
from tests.simt.machine import Machine

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SHAPES = [(0, 5), (1, 0), (1, 1), (3, 31), (9, 257), (33, 65)]


@pytest.mark.parametrize(("batch", "parts"), [(0, 1), (1, 3), (257, 2), (31, 997)])
def test_clip_factors_have_the_bits_of_the_cpu(simt: Machine, batch: int, parts: int) -> None:
    """997 parts need three launches."""
    squared = [
        torch.rand(batch, dtype=torch.float64) * 10.0 ** float(torch.randint(-300, 300, ())) for _ in range(parts)
    ]
    if batch > 30:
        squared[0][3], squared[0][5], squared[0][7] = torch.nan, torch.inf, 0
    for bound, scale in ((1.0, 1.0), (1e-10, 31.0), (torch.inf, 1e-3)):
        got = simt.clip_factors(squared, max_grad_norm=bound, loss_scale=scale)
        want = clip.clip_factors(squared, max_grad_norm=bound, loss_scale=scale)
        for ours, cpu in zip(got, want, strict=True):
            assert torch.equal(ours.view(torch.int64), cpu.view(torch.int64))


@pytest.mark.parametrize("shape", [*SHAPES, (2, 150_001)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_row_squared_norms(simt: Machine, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """At most a few units above the exact norm, never below. The longest row is cut in two."""
    rows = torch.randn(shape).to(dtype)
    got = simt.row_squared_norms(rows)
    torch.testing.assert_close(got, reference.row_squared_norms(rows), rtol=1e-12, atol=0)
    for norm, row in zip(got.tolist(), rows.double()[:, :2000].tolist(), strict=True):
        if shape[1] <= 2000:
            assert Fraction(norm) >= sum(Fraction(x) ** 2 for x in row)


def test_squares_neither_overflow_nor_vanish(simt: Machine) -> None:
    for scale in (1e-38, 1e38):
        assert simt.row_squared_norms(torch.full((1, 4), scale)).item() == pytest.approx(4 * scale**2, rel=1e-6)
    got = simt.row_squared_norms(torch.tensor([[1.0, torch.nan], [torch.inf, 1.0], [3.0, 4.0]]))
    assert got.isfinite().tolist() == [False, False, True]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weighted_row_sum(simt: Machine, shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, weights = torch.randn(shape).to(dtype), torch.rand(shape[0], dtype=torch.float64)
    weights[::4] = 0
    rows[::4] = torch.nan  # skipped, not multiplied
    got = simt.weighted_row_sum(rows, weights)
    torch.testing.assert_close(got, reference.weighted_row_sum(rows, weights), rtol=1e-13, atol=1e-13)
