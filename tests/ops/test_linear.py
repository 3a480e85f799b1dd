"""The linear family against its reference in float64."""

import math

import pytest
import torch

from dpkernels.ops.clip import clip_factors
from dpkernels.ops.linear import linear_clipped_sums, linear_forward, linear_squared_norms
from dpkernels.reference import linear as reference

SHAPES = [(0, 1, 3, 2), (1, 1, 1, 1), (5, 1, 31, 33), (4, 0, 3, 2), (3, 7, 129, 10), (2, 33, 5, 70), (3, 40, 64, 65)]


def example(batch: int, positions: int, p: int, d: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(batch, positions, p).to(dtype),
        torch.randn(batch, positions, d).to(dtype),
        torch.rand(batch).double(),
    )


def assert_upward(norms: torch.Tensor, expected: torch.Tensor, a: torch.Tensor, g: torch.Tensor) -> None:
    """At least the true squared norm, above it by at most a Gram form's rounding, c u S^2, and (2^-22 k S)^2 for sums
    of k terms, with S = sum_t ||a_t|| ||g_t||."""
    magnitude = (a.double().norm(dim=2) * g.double().norm(dim=2)).sum(1)
    unit = torch.finfo(torch.float64 if a.dtype == torch.float64 else torch.float32).eps / 2
    slack = unit * (sum(a.shape[1:]) + g.shape[2] + 8) * magnitude.square()
    if a.size(1) > 1:
        slack += ((a.size(1) + 2) * 2**-22 * magnitude).square()
    assert (norms >= expected * (1 - 1e-12)).all()
    assert (norms <= expected * (1 + 1e-12) + slack).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True)])
def test_matches_reference(isa: str, shape: tuple[int, ...], dtype: torch.dtype, which: tuple[bool, bool]) -> None:
    a, g, w = example(*shape, dtype)
    weight, bias = which
    expected = reference.linear_squared_norms(a.double(), g.double(), weight=weight, bias=bias)
    norms = linear_squared_norms(a, g, weight=weight, bias=bias)
    assert_upward(norms, expected, a, g)
    for got, want in zip(
        linear_clipped_sums(a, g, w, weight=weight, bias=bias),
        reference.linear_clipped_sums(a.double(), g.double(), w, weight=weight, bias=bias),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 3, 2), (1, 1, 1), (5, 31, 33), (33, 1030, 4), (9, 2100, 10), (4, 7, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_forward_matches_reference(isa: str, shape: tuple[int, ...], dtype: torch.dtype, bias: bool) -> None:
    rows, p, d = shape
    a, w, b = torch.randn(rows, p).to(dtype), torch.randn(d, p).to(dtype), torch.randn(d).to(dtype) if bias else None
    outputs, squared = linear_forward(a, w, b)
    expected, expected_squared = reference.linear_forward(a.double(), w.double(), None if b is None else b.double())
    assert outputs.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    torch.testing.assert_close(outputs.double(), expected, rtol=tolerance, atol=tolerance * p**0.5)
    torch.testing.assert_close(squared, expected_squared, rtol=1e-13, atol=0)


def test_large_task_grid_and_depth(isa: str) -> None:
    a, g, w = example(150, 3, 200, 70, torch.float32)
    expected = reference.linear_clipped_sums(a.double(), g.double(), w)
    for got, want in zip(linear_clipped_sums(a, g, w), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-11)


def test_scales_neither_overflow_nor_vanish(isa: str) -> None:
    for scale_a, scale_g, squared in [(1e25, 1e-25, 1.0), (1e-13, 1e-12, 1e-50), (1e30, 1e30, 1e120)]:
        a, g = torch.zeros(1, 1, 4), torch.zeros(1, 1, 3)
        a[..., 2], g[..., 1] = scale_a, scale_g
        got = linear_squared_norms(a, g, bias=False)
        torch.testing.assert_close(got, torch.tensor([squared], dtype=torch.float64), rtol=1e-5, atol=0)


def test_cancelling_positions_round_upward(isa: str) -> None:
    """Outer products that nearly cancel: the Gram form would come out negative in float32."""
    a, g = torch.randn(20, 1, 64), torch.randn(20, 1, 64)
    a, g = torch.cat([a, a], 1) * 100, torch.cat([g, -g * (1 + 1e-3)], 1)
    expected = reference.linear_squared_norms(a.double(), g.double(), bias=False)
    norms = linear_squared_norms(a, g, bias=False)
    assert (norms >= expected).all()
    torch.testing.assert_close(norms, expected, rtol=0.02, atol=0)


def contribution(a: torch.Tensor, g: torch.Tensor, bound: float, example: int, **which: bool) -> float:
    """How far the example moves the clipped sum."""
    weights, _ = clip_factors([linear_squared_norms(a, g, **which)], max_grad_norm=bound)
    with_it = linear_clipped_sums(a, g, weights, **which)
    weights[example] = 0
    without = linear_clipped_sums(a, g, weights, **which)
    return math.hypot(*(float((x - y).norm()) for x, y in zip(with_it, without, strict=True)))


def test_positions_that_cancel_leave_what_others_add_as_it_is(isa: str) -> None:
    """Huge output gradients that cancel but for a small rest: on their way through the sum they could round the others
    to nothing."""
    a, g = torch.zeros(9, 3, 2), torch.randn(9, 3, 4)
    g[4] = torch.tensor([1e30, -1e30, 1e-3])[:, None]
    assert contribution(a, g, 1.0, 4, weight=False) <= 1.0
    a, g = torch.randn(60, 1, 8), torch.randn(60, 1, 8)
    a, g = torch.cat([a, a], 1).double(), torch.cat([g, -g], 1).double()
    g[:, 1] *= 1 + 1e-14
    assert contribution(a, g, 1.0, 30, bias=False) <= 1.0


@pytest.mark.parametrize("flush", [False, True])
def test_what_vanishes_below_the_range_counts(isa: str, flush: bool) -> None:
    """Activations whose squares vanish, beside output gradients whose squares are large."""
    a, g = torch.zeros(1, 2, 40), torch.zeros(1, 2, 40)
    a[0, 0, :20], g[0, 0, :20] = 1e-23, 1e18  # weighs 2e-4
    a[0, 1, 20:], g[0, 1, 20:] = 1, 1e-7  # weighs 2e-6
    tiny = torch.full((1, 1, 100), 1.5e-162, dtype=torch.float64)
    torch.set_flush_denormal(flush)
    try:
        assert contribution(a, g, 1e-8, 0, bias=False) <= 1.0001e-8
        assert contribution(tiny, 1e153 * torch.ones_like(tiny), 1e-10, 0, bias=False) <= 1e-10
    finally:
        torch.set_flush_denormal(False)


def test_weight_zero_skips_whatever_the_values() -> None:
    a, g, w = example(3, 2, 5, 4, torch.float32)
    a[1], g[1], w[1] = torch.nan, torch.inf, 0
    for got, want in zip(
        linear_clipped_sums(a, g, w), linear_clipped_sums(a[[0, 2]], g[[0, 2]], w[[0, 2]]), strict=True
    ):
        assert torch.equal(got, want)


def test_same_bits_for_any_number_of_threads() -> None:
    a, g, w = example(64, 5, 300, 130, torch.float32)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(
            (
                linear_squared_norms(a, g),
                *linear_clipped_sums(a, g, w),
                *linear_forward(a[:, 0], g[0, 0, :, None].expand(-1, 300), None),
            )
        )
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_non_contiguous_inputs() -> None:
    a, g, w = example(4, 3, 6, 5, torch.float32)
    strided = a.transpose(0, 1).contiguous().transpose(0, 1)
    expanded = g[:, :1].expand(-1, 3, -1)
    assert torch.equal(linear_squared_norms(strided, g), linear_squared_norms(a, g))
    assert torch.equal(linear_clipped_sums(a, expanded, w)[0], linear_clipped_sums(a, expanded.contiguous(), w)[0])


def test_opcheck() -> None:
    a, g, w = example(3, 2, 5, 4, torch.float32)
    torch.library.opcheck(torch.ops.dpkernels.linear_squared_norms.default, (a, g, True, False))
    torch.library.opcheck(torch.ops.dpkernels.linear_forward.default, (a[:, 0].contiguous(), torch.randn(4, 5), None))
    torch.library.opcheck(torch.ops.dpkernels.linear_clipped_sums.default, (a, g, w, True, True))


@pytest.mark.parametrize(
    ("a", "g", "words"),
    [
        (torch.ones(2, 3), torch.ones(2, 1, 3), r"activations must be \[batch, positions, in_features\], got 2-D"),
        (torch.ones(2, 1, 3), torch.ones(3, 1, 3), "output_grads must have size 2 in dimension 0"),
        (torch.ones(2, 1, 3, dtype=torch.int64), torch.ones(2, 1, 3), "activations must be floating-point"),
    ],
)
def test_errors_name_the_argument(a: torch.Tensor, g: torch.Tensor, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        linear_squared_norms(a, g)
