"""Clip factors and stored per-example gradients: against the reference, and never above the bound."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpkernels.ops.clip import clip_factors, row_squared_norms, weighted_row_sum
from dpkernels.reference import clip as reference

SHAPES = [(0, 3), (1, 0), (1, 1), (3, 31), (5, 33), (6, 129), (4, 1024), (7, 3001)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("batch", [0, 1, 31, 129])
@pytest.mark.parametrize(("bound", "scale"), [(1.0, 1.0), (0.1, 129.0), (math.inf, 3.0), (1e10, 1e-3)])
def test_factors_match_reference(isa: str, batch: int, bound: float, scale: float) -> None:
    parts = [torch.rand(batch, dtype=torch.float64) * 10.0**k for k in range(-4, 3)]
    got = clip_factors(parts, max_grad_norm=bound, loss_scale=scale)
    want = reference.clip_factors(parts, max_grad_norm=bound, loss_scale=scale)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=0)


@pytest.mark.parametrize("bound", [0.5, math.inf])
def test_non_finite_zero_and_extreme_norms(isa: str, bound: float) -> None:
    squared = torch.tensor([math.nan, math.inf, -1.0, 0.0, 1e-300, 5e-324, 1e300], dtype=torch.float64)
    weights, norms = clip_factors([squared], max_grad_norm=bound, loss_scale=2.0)
    largest = 2.0 if bound == math.inf else 0.5e-150
    torch.testing.assert_close(
        weights, torch.tensor([0, 0, 0, 2, 2, 2, largest], dtype=torch.float64), rtol=1e-14, atol=0
    )
    assert norms[3] == 0
    assert norms[:3].isfinite().tolist() == [False] * 3
    assert (weights * norms / 2.0)[6] <= bound


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.just(0.0) | st.floats(1e-290, 1e40), min_size=1, max_size=20),
    st.floats(1e-10, 1e10),
    st.floats(1e-20, 1e20),
)
def test_weight_times_gradient_is_within_the_bound(squares: list[float], bound: float, scale: float) -> None:
    """In exact arithmetic: weight^2 * sum of the squared norms <= C^2."""
    parts = [torch.tensor([s], dtype=torch.float64) for s in squares]
    weights, norms = clip_factors(parts, max_grad_norm=bound, loss_scale=scale)
    exact = sum(map(Fraction, squares))
    assert Fraction(weights.item()) ** 2 * exact <= Fraction(bound) ** 2
    assert weights.item() <= scale
    assert Fraction(norms.item()) ** 2 >= exact * Fraction(scale) ** 2


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_match_reference(isa: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, weights = torch.randn(shape).to(dtype), torch.rand(shape[0]).double()
    norms, expected = row_squared_norms(rows), reference.row_squared_norms(rows)
    torch.testing.assert_close(norms, expected, rtol=1e-12, atol=0)
    assert (norms >= expected * (1 - 1e-16 * shape[1])).all()
    torch.testing.assert_close(
        weighted_row_sum(rows, weights), reference.weighted_row_sum(rows, weights), rtol=1e-13, atol=1e-13
    )


def test_row_norms_round_upward(isa: str) -> None:
    for size in (1, 40, 999):
        rows = torch.randn(20, size, dtype=torch.float64)
        for norm, row in zip(row_squared_norms(rows).tolist(), rows.tolist(), strict=True):
            assert Fraction(norm) >= sum(Fraction(x) ** 2 for x in row)


def test_scales_neither_overflow_nor_vanish(isa: str) -> None:
    rows = torch.tensor([[1e-38, 1e-38], [1e38, 1e38]])
    torch.testing.assert_close(row_squared_norms(rows), rows.double().square().sum(1), rtol=1e-14, atol=0)


def test_weight_zero_skips_whatever_the_values(isa: str) -> None:
    rows, weights = torch.randn(9, 70), torch.rand(9).double()
    rows[4], weights[4], rows[8], weights[8] = torch.nan, 0, torch.inf, 0
    kept = [0, 1, 2, 3, 5, 6, 7]
    assert torch.equal(weighted_row_sum(rows, weights), weighted_row_sum(rows[kept], weights[kept]))
    assert torch.equal(weighted_row_sum(rows, torch.zeros_like(weights)), torch.zeros(70, dtype=torch.float64))


def test_long_sums_keep_every_example() -> None:
    """One million equal contributions after a large one: a float32 accumulator would lose them."""
    rows = torch.full((1_000_001, 1), 1e-8)
    rows[0] = 1e3
    got = weighted_row_sum(rows, torch.ones(len(rows), dtype=torch.float64))
    torch.testing.assert_close(got, rows.double().sum(0), rtol=1e-10, atol=0)  # float32: 1e-5


def test_same_bits_for_any_number_of_threads() -> None:
    rows, weights = torch.randn(64, 5000), torch.rand(64).double()
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append((row_squared_norms(rows), weighted_row_sum(rows, weights)))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_non_contiguous_inputs() -> None:
    rows, weights = torch.randn(6, 5), torch.rand(12).double()[::2]
    assert torch.equal(row_squared_norms(rows.t()), row_squared_norms(rows.t().contiguous()))
    assert torch.equal(weighted_row_sum(rows.t().contiguous().t(), weights), weighted_row_sum(rows, weights.clone()))
    got = clip_factors([weights], max_grad_norm=0.1)
    assert torch.equal(got[0], clip_factors([weights.clone()], max_grad_norm=0.1)[0])


def test_opcheck() -> None:
    rows, weights = torch.randn(3, 5), torch.rand(3).double()
    torch.library.opcheck(torch.ops.dpkernels.clip_factors.default, ([weights, weights], 0.5, 2.0))
    torch.library.opcheck(torch.ops.dpkernels.row_squared_norms.default, (rows,))
    torch.library.opcheck(torch.ops.dpkernels.weighted_row_sum.default, (rows, weights))


def test_errors_name_the_argument() -> None:
    norms = torch.ones(3, dtype=torch.float64)
    for bound in (0.0, -1.0, 1e-11, 1e11, math.nan):
        with pytest.raises(ValueError, match=r"max_grad_norm must be in \[1e-10, 1e\+10\]"):
            clip_factors([norms], max_grad_norm=bound)
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="loss_scale must be in"):
            clip_factors([norms], max_grad_norm=1.0, loss_scale=scale)
    with pytest.raises(ValueError, match="squared_norms must hold at least one tensor"):
        clip_factors([], max_grad_norm=1.0)
    with pytest.raises(ValueError, match=r"squared_norms\[1\] must have size 3"):
        clip_factors([norms, norms[:2]], max_grad_norm=1.0)
    with pytest.raises(TypeError, match=r"squared_norms\[0\] must be float64"):
        clip_factors([norms.float()], max_grad_norm=1.0)
    with pytest.raises(ValueError, match=r"per_example must be \[batch, size\], got 1-D"):
        row_squared_norms(torch.ones(3))
    with pytest.raises(ValueError, match="weights must have size 2"):
        weighted_row_sum(torch.ones(2, 3), norms)
