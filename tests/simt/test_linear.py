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


def test_tf32(simt: Machine) -> None:
    a, g, w = example((2, 9, 40, 33), torch.float32)
    norms, sums = simt.linear_squared_norms(a, g, tf32=True), simt.linear_clipped_sums(a, g, w, tf32=True)
    torch.testing.assert_close(norms, reference.linear_squared_norms(a.double(), g.double()), rtol=2e-3, atol=0)
    want = reference.linear_clipped_sums(a.double(), g.double(), w)
    torch.testing.assert_close(sums[0], want[0], rtol=0, atol=2e-2)
    torch.testing.assert_close(sums[1], want[1], rtol=1e-13, atol=1e-13)


def test_slices_of_the_batch(simt: Machine) -> None:
    for positions in (1, 2):
        a, g, w = example((70, positions, 3, 2), torch.float32)
        for got, want in zip(
            simt.linear_clipped_sums(a, g, w), reference.linear_clipped_sums(a.double(), g.double(), w), strict=True
        ):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12 if positions == 1 else 1e-5)


@pytest.mark.parametrize("shape", [(3, 1, 40, 5), (3, 9, 12, 7)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_examples(simt: Machine, shape: tuple[int, ...], bad: float) -> None:
    """They have a non-finite norm, leave others alone, and are skipped where their weight is 0."""
    a, g, w = example(shape, torch.float32)
    w[1] = 0
    norms, sums = simt.linear_squared_norms(a, g), simt.linear_clipped_sums(a, g, w)
    a[1, 0, 3] = g[1, 0, 2] = bad
    after = simt.linear_squared_norms(a, g)
    assert torch.equal(after[[0, 2]], norms[[0, 2]])
    assert not after[1].isfinite()
    for got, want in zip(simt.linear_clipped_sums(a, g, w), sums, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("positions", [1, 3])
def test_large_values_do_not_overflow(simt: Machine, positions: int) -> None:
    a, g, _ = example((2, positions, 5, 3), torch.float32)
    a[0], g[0] = a[0] * 1e30, g[0] * 1e25
    want = reference.linear_squared_norms(a.double(), g.double())
    torch.testing.assert_close(simt.linear_squared_norms(a, g), want, rtol=1e-6, atol=0)


def test_parameters_are_optional(simt: Machine) -> None:
    for positions in (1, 3):
        a, g, _ = example((2, positions, 5, 3), torch.float32)
        alone = [simt.linear_squared_norms(a, g, weight=w, bias=not w) for w in (True, False)]
        torch.testing.assert_close(sum(alone), simt.linear_squared_norms(a, g), rtol=1e-14, atol=0)
        assert not simt.linear_squared_norms(a, g, weight=False, bias=False).any()
        w = torch.rand(2, dtype=torch.float64)
        both = simt.linear_clipped_sums(a, g, w)
        assert torch.equal(simt.linear_clipped_sums(a, g, w, bias=False), both[0])
        assert torch.equal(simt.linear_clipped_sums(a, g, w, weight=False), both[1])


@pytest.mark.parametrize("dtype", DTYPES[:1] + DTYPES[2:], ids=str)
def test_pairs_of_positions(simt: Machine, dtype: torch.dtype) -> None:
    """Few positions of many features: never below what the sum adds, and little above."""
    a, g, _ = example((3, 2, 70, 90), dtype)
    a[1, 1], g[1, 1] = a[1, 0], -g[1, 0] * (1 + 2**-6)  # cancels: computed directly
    got = simt.linear_squared_norms(a, g, bias=False)
    want = reference.linear_squared_norms(a.double(), g.double(), bias=False)
    assert (got[[0, 2]] >= want[[0, 2]]).all()
    torch.testing.assert_close(got, want, rtol=0.011, atol=0)
    for b, row in enumerate(torch.eye(3, dtype=torch.float64)):
        assert got[b] >= simt.linear_clipped_sums(a, g, row, bias=False).square().sum()
