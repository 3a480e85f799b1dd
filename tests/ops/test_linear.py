"""The linear family against its reference in float64."""

import math

import pytest
import torch

from dpkernels.ops.clip import clip_factors
from dpkernels.ops.linear import linear_clipped_sums, linear_forward, linear_squared_norms
from dpkernels.reference import linear as reference

SHAPES = [
    (0, 1, 3, 2),
    (1, 1, 1, 1),
    (5, 1, 31, 33),
    (4, 0, 3, 2),
    (3, 7, 129, 10),
    (2, 33, 5, 70),
    (3, 40, 64, 65),
    (2, 129, 1, 3),
    (2, 300, 50, 1),
    (3, 150, 200, 100),
]
UNIT = 2.0**-24  # of float32


def example(batch: int, positions: int, p: int, d: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(batch, positions, p).to(dtype),
        torch.randn(batch, positions, d).to(dtype),
        torch.rand(batch).double(),
    )


def in_float(a: torch.Tensor) -> bool:
    """Whether an example's positions are added up in float32."""
    return a.dtype != torch.float64 and a.size(1) >= 7


def magnitudes(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """S = sum_t ||a_t|| ||g_t|| of each example."""
    return (a.double().norm(dim=2) * g.double().norm(dim=2)).sum(1)


def assert_right(norms: torch.Tensor, expected: torch.Tensor, a: torch.Tensor, g: torch.Tensor) -> None:
    """Squared norms. Before they are squared, sums of up to 128 positions in float32 may differ from those of the exact
    gradient by u (128 + 3) S; above them by at most a Gram form's rounding, c u S^2, and (2^-22 k S)^2 for sums of k
    terms in float64."""
    unit = torch.finfo(torch.float64).eps / 2 if a.dtype == torch.float64 else UNIT
    off = UNIT * (min(a.size(1), 128) + 3) * magnitudes(a, g) if in_float(a) else 0
    slack = unit * (sum(a.shape[1:]) + g.shape[2] + 8) * magnitudes(a, g).square()
    if a.size(1) > 1 and not in_float(a):
        slack += ((a.size(1) + 2) * 2**-22 * magnitudes(a, g)).square()
    assert (norms.sqrt() >= expected.sqrt() * (1 - 1e-12) - off).all()
    assert (norms <= (expected.sqrt() * (1 + 1e-12) + off).square() + 1.05 * slack).all()


def assert_clipped(a: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, **which: bool) -> None:
    """No example adds more than its norm."""
    for b in range(a.size(0)):
        row = torch.eye(a.size(0), dtype=torch.float64)[b]
        added = math.hypot(*(float(t.norm()) for t in linear_clipped_sums(a, g, row, **which)))
        assert added <= float(norms[b].sqrt()) * (1 + 1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True)])
def test_matches_reference(isa: str, shape: tuple[int, ...], dtype: torch.dtype, which: tuple[bool, bool]) -> None:
    a, g, w = example(*shape, dtype)
    weight, bias = which
    expected = reference.linear_squared_norms(a.double(), g.double(), weight=weight, bias=bias)
    norms = linear_squared_norms(a, g, weight=weight, bias=bias)
    assert_right(norms, expected, a, g)
    assert_clipped(a, g, norms, weight=weight, bias=bias)
    sums = linear_clipped_sums(a, g, w, weight=weight, bias=bias)
    wanted = reference.linear_clipped_sums(a.double(), g.double(), w, weight=weight, bias=bias)
    rounding = reference.linear_clipped_sums(a.double().abs(), g.double().abs(), w, weight=weight, bias=bias)[0]
    rounding *= UNIT * (min(a.size(1), 128) + 3) if in_float(a) else 0
    for got, want, error in zip(sums, wanted, (rounding, 0), strict=True):
        assert got.dtype == torch.float64
        assert got.shape == want.shape
        assert ((got - want).abs() <= error + 1e-11).all()


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


def test_many_examples_and_blocks(isa: str) -> None:
    a, g, w = example(150, 3, 400, 210, torch.float32)
    expected = reference.linear_clipped_sums(a.double(), g.double(), w)
    for got, want in zip(linear_clipped_sums(a, g, w), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-11)


def extreme(positions: int, p: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Examples of wild scales: large positions that cancel but for a rest, rows of zeros, rows of their own scale each,
    values whose products leave the range of float32 on either side."""
    a, g = torch.randn(6, positions, p), torch.randn(6, positions, d)
    a[1, 1::2], g[1, 1::2] = a[1, : positions // 2 * 2 : 2], -g[1, : positions // 2 * 2 : 2] * (1 + 2.0**-20)
    a[1] *= 1e8
    a[2, ::2], g[3, 1::3] = 0, 0
    a[2] *= 10 ** (torch.rand(positions, 1) * 60 - 30)
    g[3] *= 10 ** (torch.rand(positions, 1) * 60 - 30)
    a[4, :, ::3] *= 1e25
    g[4, :, ::2] *= 1e20
    a[5] *= 1e-22
    g[5] *= 1e-19
    return a, g


@pytest.mark.parametrize("positions", [1, 2, 6, 7, 9, 31, 127, 128, 129, 260])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 40), (70, 2), (33, 17), (260, 120)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_example_adds_more_than_its_norm(
    isa: str, positions: int, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    a, g = (x.to(dtype) for x in extreme(positions, *sizes))
    norms = linear_squared_norms(a, g, bias=False)
    assert norms.isfinite().all()
    assert_clipped(a, g, norms, bias=False)
    exact = reference.linear_squared_norms(a.double(), g.double(), bias=False)
    off = (UNIT * 131 if in_float(a) else 2**-22 * (positions + 2)) * magnitudes(a, g)
    assert ((norms.sqrt() - exact.sqrt()).abs() <= 0.02 * exact.sqrt() + off + 1e-36).all()
    for b in range(len(a)):
        assert contribution(a, g, 1e-3, b, bias=False) <= 1e-3 * (1 + 1e-6)


def test_roundings_in_one_direction_count(isa: str) -> None:
    """Every position but the first is a little more than half of the sum's last bit, and rounds up to a whole one."""
    a, g = torch.ones(1, 128, 144), torch.full((1, 128, 144), 2.0**-24 * (1 + 2.0**-10))
    g[:, 0] = 1
    norms = linear_squared_norms(a, g, bias=False)
    exact = reference.linear_squared_norms(a.double(), g.double(), bias=False)
    added = linear_clipped_sums(a, g, torch.ones(1, dtype=torch.float64), bias=False)[0].norm()
    assert added >= exact.sqrt() * (1 + 120 * UNIT)
    assert_clipped(a, g, norms, bias=False)


def test_sums_beyond_the_range_of_float32_are_right_and_leave_others_as_they_are(isa: str) -> None:
    a, g = torch.randn(5, 140, 40), torch.randn(5, 140, 30)
    a[2, :, 1:] = 0
    a[2, :, 0] *= 1e28
    g[2] *= 1e26
    norms = linear_squared_norms(a, g, bias=False)
    torch.testing.assert_close(
        norms, reference.linear_squared_norms(a.double(), g.double(), bias=False), rtol=1e-2, atol=0
    )
    ones = torch.ones(5, dtype=torch.float64)
    sums = linear_clipped_sums(a, g, ones)[0]
    others = linear_clipped_sums(a, g, ones * (torch.arange(5) != 2))[0]
    assert torch.equal(sums[:, 1:], others[:, 1:])
    want = reference.linear_clipped_sums(a.double(), g.double(), ones)[0]
    torch.testing.assert_close(sums[:, 0], want[:, 0], rtol=1e-13, atol=1e-13 * float(want.abs().max()))


def test_values_whose_squares_leave_the_range_of_float32_count(isa: str) -> None:
    """Dots of a Gram form overflow and vanish where the gradient does neither."""
    for scale in (1e25, 1e-25):
        a, g = torch.randn(2, 20, 64) * scale, torch.randn(2, 20, 64) / scale
        expected = reference.linear_squared_norms(a.double(), g.double(), bias=False)
        torch.testing.assert_close(linear_squared_norms(a, g, bias=False), expected, rtol=1e-2, atol=0)
    assert not linear_squared_norms(torch.randn(2, 20, 64), torch.zeros(2, 20, 64)).any()


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


@pytest.mark.parametrize("positions", [1, 2, 40, 200])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_non_finite_example_is_dropped(isa: str, positions: int, wrong: float) -> None:
    """One such value makes the norm infinite or NaN; an example of weight 0 is skipped, whatever it holds."""
    a, g, _ = example(3, positions, 30, 20, torch.float32)
    for x in (a, g):
        whole = x[1].clone()
        x[1, positions // 2, 3] = wrong
        norms = linear_squared_norms(a, g)
        weights, _ = clip_factors([norms], max_grad_norm=1.0)
        assert norms.isfinite().tolist() == [True, False, True]
        assert (weights > 0).tolist() == [True, False, True]
        for got, want in zip(
            linear_clipped_sums(a, g, weights), linear_clipped_sums(a[::2], g[::2], weights[::2]), strict=True
        ):
            assert torch.equal(got, want)
        x[1] = whole


@pytest.mark.parametrize("shape", [(64, 5, 300, 130), (3, 300, 50, 60), (5, 33, 300, 130), (40, 1, 40, 700)])
def test_same_bits_for_any_number_of_threads(isa: str, shape: tuple[int, ...]) -> None:
    a, g, w = example(*shape, torch.float32)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(
            (
                linear_squared_norms(a, g),
                *linear_clipped_sums(a, g, w),
                *linear_forward(a[:, 0], g[0, 0, :, None].expand(-1, a.size(2)), None),
            )
        )
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


@pytest.mark.parametrize("shape", [(9, 3, 20, 10), (9, 40, 20, 10), (4, 300, 20, 10), (4, 20, 260, 130)])
def test_what_an_example_adds_depends_on_no_other(isa: str, shape: tuple[int, ...]) -> None:
    a, g, w = example(*shape, torch.float32)
    norms, sums = linear_squared_norms(a, g), linear_clipped_sums(a, g, w)
    alone = [linear_clipped_sums(a[b : b + 1], g[b : b + 1], w[b : b + 1]) for b in range(len(a))]
    for got, parts in zip(sums, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(got, sum(parts), rtol=1e-13, atol=1e-13)
    assert torch.equal(norms, torch.cat([linear_squared_norms(a[b : b + 1], g[b : b + 1]) for b in range(len(a))]))


@pytest.mark.parametrize("positions", [3, 40])
def test_non_contiguous_inputs(positions: int) -> None:
    a, g, w = example(4, positions, 6, 5, torch.float32)
    strided = a.transpose(0, 1).contiguous().transpose(0, 1)
    features_first = a.mT.contiguous().mT
    merged = a.reshape(4 * positions, 6).unflatten(0, (4, positions))
    expanded = g[:, :1].expand(-1, positions, -1)  # stride 0, as under a mean over positions
    for other in (strided, features_first, merged):
        assert torch.equal(linear_squared_norms(other, g), linear_squared_norms(a, g))
        assert torch.equal(linear_clipped_sums(other, expanded, w)[0], linear_clipped_sums(a, expanded.clone(), w)[0])
    assert torch.equal(linear_squared_norms(a, expanded), linear_squared_norms(a, expanded.clone()))


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
