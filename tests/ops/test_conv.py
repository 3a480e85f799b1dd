"""The convolution family against its reference in float64."""

from dataclasses import asdict, dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dpkernels.ops.conv import conv_clipped_sums, conv_squared_norms
from dpkernels.reference import conv as reference


@dataclass(frozen=True)
class Geometry:
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False


@dataclass(frozen=True)
class Case:
    channels: int
    outputs: int
    size: tuple[int, ...]
    geometry: Geometry
    batch: int = 3

    def __str__(self) -> str:
        return f"{self.channels}-{self.outputs}-{self.size}-{tuple(asdict(self.geometry).values())}-{self.batch}"


def conv(
    channels: int, outputs: int, size: tuple[int, ...], kernel: tuple[int, ...], *rest: tuple[int, ...], **more: object
) -> Case:
    one = (1,) * len(kernel)
    stride, padding, dilation = rest or (one, tuple(k // 2 for k in kernel), one)
    batch = more.pop("batch", 3)
    return Case(channels, outputs, size, Geometry(kernel, stride, padding, dilation, **more), batch)  # type: ignore[arg-type]


CASES = [
    conv(3, 5, (17,), (3,)),
    conv(4, 8, (33,), (2,), (2,), (1,), (3,), groups=2),
    conv(3, 5, (7, 9), (3, 3)),
    conv(17, 33, (6, 5), (3, 3)),
    conv(1, 16, (14, 13), (8, 8), (2, 2), (2, 2), (1, 1)),
    conv(6, 31, (9, 8), (3, 1), (2, 1), (1, 0), (1, 2)),  # rectangular
    conv(5, 40, (12, 11), (1, 1), (2, 2), (0, 0), (1, 1)),
    conv(4, 9, (10, 9), (2, 4), (3, 2), (0, 3), (2, 1)),
    conv(2, 3, (8, 8), (3, 3), (2, 2), (2, 2), (2, 2)),  # taps of one phase only
    conv(4, 8, (5, 7), (3, 3), groups=2),
    conv(4, 8, (5, 7), (3, 3), groups=4),
    conv(8, 48, (6, 6), (3, 3), groups=2),
    conv(40, 40, (5, 5), (3, 3), (2, 1), (1, 0), (1, 1), groups=40),  # depthwise
    conv(7, 21, (6, 4), (2, 3), groups=7),
    conv(130, 8, (4, 4), (3, 3)),
    conv(2, 3, (20, 21), (3, 3)),  # more positions than one piece holds
    conv(3, 48, (11, 13), (3, 3)),  # whole vectors of outputs, read in place where they come last
    conv(2, 96, (9, 11), (3, 3)),  # in place they would lie too far apart
    conv(4, 32, (5, 5), (3, 3), groups=2),
    conv(48, 48, (5, 5), (3, 3), groups=48),
    conv(4, 4, (19, 20), (3, 3), groups=4),
    conv(3, 4, (4, 5, 6), (2, 3, 2), (1, 2, 1), (1, 1, 0), (1, 1, 2)),
    conv(4, 6, (5, 4, 3), (3, 1, 3), groups=2),
    conv(3, 5, (7, 9), (3, 3), batch=0),
    conv(3, 5, (7, 9), (3, 3), batch=1),
    conv(3, 4, (9,), (4,), (3,), (1,), (1,), transposed=True),
    conv(6, 8, (5, 4), (3, 2), (2, 3), (1, 0), (1, 2), groups=2, transposed=True),
    conv(5, 5, (3, 4), (3, 3), groups=5, transposed=True),
    conv(2, 3, (3, 2, 4), (3, 2, 2), (2, 1, 2), (1, 0, 1), (1, 1, 1), transposed=True),
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def example(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, dict[str, object]]:
    """Input, output gradients, weights and the geometry as keywords."""
    x = torch.randn(case.batch, case.channels, *case.size)
    q = case.geometry
    name = ("conv_transpose" if q.transposed else "conv") + f"{len(q.kernel_size)}d"
    first, second = (case.channels, case.outputs) if q.transposed else (case.outputs, case.channels)
    weight = torch.randn(first, second // q.groups, *q.kernel_size)
    y = getattr(F, name)(x, weight, stride=q.stride, padding=q.padding, dilation=q.dilation, groups=q.groups)
    weights = torch.rand(case.batch, dtype=torch.float64)
    return x.to(dtype), torch.randn_like(y).to(dtype), weights, asdict(q)


def loop(x: Tensor, g: Tensor, q: dict[str, object]) -> list[Tensor]:
    """The weight gradients, one example at a time, by autograd in float64."""
    grads = []
    for one, grad in zip(x.double()[:, None], g.double()[:, None], strict=True):
        dims, transposed = x.dim() - 2, q["transposed"]
        first, second = (x.size(1), g.size(1)) if transposed else (g.size(1), x.size(1))
        weight = torch.zeros(first, second // q["groups"], *q["kernel_size"], dtype=torch.float64, requires_grad=True)  # type: ignore[operator, misc]
        settings = {k: q[k] for k in ("stride", "padding", "dilation", "groups")}
        y = getattr(F, ("conv_transpose" if transposed else "conv") + f"{dims}d")(one, weight, **settings)
        grads.append(torch.autograd.grad(y, weight, grad)[0])
    return grads


def assert_norms(norms: Tensor, expected: Tensor, strategy: str, dtype: torch.dtype) -> None:
    """A Gram norm is never below the true one; a direct one is of what the sum adds."""
    double = dtype == torch.float64
    if strategy == "gram":
        assert (norms >= expected * (1 - 1e-13)).all()
        assert (norms <= expected * (1 + (1e-11 if double else 1e-3))).all()
    else:
        torch.testing.assert_close(norms, expected, rtol=1e-11 if double else 1e-5, atol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_the_one_example_loop(case: Case) -> None:
    x, g, _, q = example(case)
    for got, want in zip(
        reference.conv_squared_norms(x.double(), g.double(), store=True, **q)[1], loop(x, g, q), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_reference(isa: str, case: Case, dtype: torch.dtype) -> None:
    x, g, w, q = example(case, dtype)
    expected, grads, bias_grads = reference.conv_squared_norms(x.double(), g.double(), store=True, **q)
    for strategy in ("direct", "gram"):
        norms, none, got_bias = conv_squared_norms(x, g, strategy=strategy, **q)
        assert none is None
        assert_norms(norms, expected, strategy, dtype)
        torch.testing.assert_close(got_bias, bias_grads, rtol=1e-13, atol=1e-12)
    norms, stored, _ = conv_squared_norms(x, g, store=True, **q)
    assert stored.shape == grads.shape
    assert stored.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = {"rtol": 1e-12, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(stored.double(), grads, **tolerance)
    torch.testing.assert_close(
        norms, stored.double().flatten(1).square().sum(1) + bias_grads.square().sum(1), rtol=1e-11, atol=0
    )
    got_sums, want_sums = conv_clipped_sums(x, g, w, **q), reference.conv_clipped_sums(x.double(), g.double(), w, **q)
    torch.testing.assert_close(got_sums[0], want_sums[0], **tolerance)
    torch.testing.assert_close(got_sums[1], want_sums[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_norm_is_of_what_the_sum_adds(isa: str, case: Case) -> None:
    """Directly computed, to the last bit; the Gram norm is not below it."""
    x, g, _, q = example(case)
    sums = [conv_clipped_sums(x, g, row, bias=False, **q)[0] for row in torch.eye(case.batch, dtype=torch.float64)]
    added = torch.stack([s.square().sum() for s in sums]) if sums else torch.empty(0, dtype=torch.float64)
    norms = {s: conv_squared_norms(x, g, bias=False, strategy=s, **q)[0] for s in ("direct", "gram")}
    torch.testing.assert_close(norms["direct"], added, rtol=1e-12, atol=0)
    assert (norms["direct"] >= added * (1 - 1e-15)).all()
    assert (norms["gram"] >= added).all()
    stored = conv_squared_norms(x, g, bias=False, store=True, **q)[1]
    for got, want in zip(stored, sums, strict=True):
        assert torch.equal(got, want.float())


@pytest.mark.parametrize("case", [c for c in CASES if len(c.size) > 1], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("which", ["input", "gradients", "both"])
def test_channels_last_is_read_as_it_lies(isa: str, case: Case, dtype: torch.dtype, which: str) -> None:
    """To the last bit, except for the bias, whose double sums run in another order."""
    x, g, w, q = example(case, dtype)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}[x.dim()]
    x_last = x if which == "gradients" else x.contiguous(memory_format=last)
    g_last = g if which == "input" else g.contiguous(memory_format=last)
    for strategy in ("direct", "gram"):
        got, want = (
            conv_squared_norms(a, b, strategy=strategy, bias=False, **q)[0] for a, b in ((x_last, g_last), (x, g))
        )
        assert torch.equal(got, want)
    got, want = (conv_squared_norms(a, b, store=True, **q) for a, b in ((x_last, g_last), (x, g)))
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(got[2], want[2], rtol=1e-12, atol=1e-12)
    got, want = (conv_clipped_sums(a, b, w, **q) for a, b in ((x_last, g_last), (x, g)))
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-12, atol=1e-12)


def test_channels_last_with_sizes_of_one() -> None:
    """There torch calls any stride channels-last."""
    q = asdict(Geometry((1, 3), (1, 1), (0, 1), (1, 1)))
    wide = torch.randn(4, 3, 5, 8).contiguous(memory_format=torch.channels_last)
    x, g, w = wide[1:2, :, :1], torch.randn(1, 2, 1, 8), torch.ones(1, dtype=torch.float64)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert not x.is_contiguous()
    assert torch.equal(conv_clipped_sums(x, g, w, **q)[0], conv_clipped_sums(x.contiguous(), g, w, **q)[0])
    assert torch.equal(conv_squared_norms(x, g, **q)[0], conv_squared_norms(x.contiguous(), g, **q)[0])


def test_dense_maps_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 map goes into the operator itself, channels last or not; another layout is made contiguous."""
    seen: list[int] = []
    real = torch.ops.dpkernels.conv_clipped_sums

    def spy(x: Tensor, g: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        seen.extend((x.data_ptr(), g.data_ptr()))
        return real(x, g, *rest)

    monkeypatch.setattr(torch.ops.dpkernels, "conv_clipped_sums", spy)
    x, g, w, q = example(conv(3, 5, (7, 9), (3, 3)))
    for x_in in (x, x.contiguous(memory_format=torch.channels_last)):
        conv_clipped_sums(x_in, g, w, **q)
        assert seen[-2:] == [x_in.data_ptr(), g.data_ptr()]
    turned = x.transpose(2, 3).contiguous().transpose(2, 3)
    torch.testing.assert_close(conv_clipped_sums(turned, g, w, **q), conv_clipped_sums(x, g, w, **q))


@pytest.mark.parametrize("which", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("transposed", [False, True])
def test_weight_and_bias_count_apart(which: tuple[bool, bool], transposed: bool) -> None:
    x, g, w, q = example(conv(4, 6, (5, 4), (3, 3), transposed=transposed))
    options = {"weight": which[0], "bias": which[1]}
    got = conv_squared_norms(x, g, store=True, **options, **q)
    want = reference.conv_squared_norms(x.double(), g.double(), store=True, **options, **q)
    got += conv_clipped_sums(x, g, w, **options, **q)
    want += reference.conv_clipped_sums(x.double(), g.double(), w, **options, **q)
    for a, b in zip(got, want, strict=True):
        if b is None:
            assert a is None
        else:
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


def test_store_where_it_pays() -> None:
    """Small gradients of a large map are stored; those of a wide layer on a small one are not, nor with a Gram norm."""
    for case, stored in ((conv(3, 8, (12, 12), (3, 3)), True), (conv(64, 64, (3, 3), (3, 3)), False)):
        x, g, _, q = example(case)
        assert (conv_squared_norms(x, g, store=None, **q)[1] is not None) == stored
        assert conv_squared_norms(x, g, store=None, strategy="gram", **q)[1] is None


def test_output_padding_beyond_what_the_input_reaches() -> None:
    """A transposed convolution's dilation admits it; it counts in the bias alone."""
    x, q = torch.randn(3, 2, 5), asdict(Geometry((2,), (1,), (0,), (3,), transposed=True))
    g = torch.randn(3, 4, 10)
    for strategy in ("direct", "gram"):
        got = conv_squared_norms(x, g, strategy=strategy, **q)[0]
        torch.testing.assert_close(got, reference.conv_squared_norms(x.double(), g.double(), **q)[0], rtol=1e-4, atol=0)
    for got, want in zip(
        conv_clipped_sums(x, g, torch.ones(3).double(), **q),
        (sum(loop(x, g[..., :8], q)), g.double().sum((0, 2))),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["direct", "gram"])
def test_scales_neither_overflow_nor_vanish(isa: str, strategy: str) -> None:
    q = asdict(Geometry((3, 3), (1, 1), (1, 1), (1, 1)))
    for scale_x, scale_g in [(1e25, 1e-25), (1e-25, 1e25), (1e-13, 1e-12), (1e-30, 1e-20), (1e30, 1e30), (1e-38, 1e38)]:
        x, g = torch.zeros(2, 3, 4, 4), torch.zeros(2, 2, 4, 4)
        x[0, 2, 1, 1], g[0, 1, 2, 2] = scale_x, scale_g
        x[1], g[1] = torch.randn(3, 4, 4), torch.randn(2, 4, 4)
        squared = x[0].double().square().sum() * g[0].double().square().sum()
        norms = conv_squared_norms(x, g, bias=False, strategy=strategy, **q)[0]
        torch.testing.assert_close(norms[0], squared, rtol=1e-4, atol=0)
        total = conv_clipped_sums(x, g, torch.tensor([1.0, 0.0]).double(), bias=False, **q)[0]
        torch.testing.assert_close(total.square().sum(), squared, rtol=1e-6, atol=0)
        assert norms[0] >= total.square().sum() * (1 - 1e-15)


def test_an_outlier_leaves_the_others_as_they_are() -> None:
    """Each example's products are accumulated in a precision of its own choice."""
    x, g, _, q = example(conv(3, 5, (7, 9), (3, 3)))
    alone = conv_clipped_sums(x[:2], g[:2], torch.ones(2).double(), **q)[0]
    x[2, 0, 0, 0], g[2] = 1e30, g[2] * 1e-30
    beside = conv_clipped_sums(x, g, torch.tensor([1.0, 1.0, 1e-300]).double(), **q)[0]
    torch.testing.assert_close(beside, alone, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("strategy", ["direct", "gram"])
def test_cancelling_positions(isa: str, strategy: str) -> None:
    """Positions whose products nearly cancel: a plain Gram form in float32 comes out negative."""
    x, g = torch.randn(50, 64, 1, 2) * 100, torch.randn(50, 64, 1, 1)
    x[..., 1], g = x[..., 0], torch.cat([g, -g * (1 + 1e-5)], 3)
    q = asdict(Geometry((1, 1), (1, 1), (0, 0), (1, 1)))
    expected = reference.conv_squared_norms(x.double(), g.double(), bias=False, **q)[0]
    gram = lambda t: torch.einsum("bct,bcu->btu", t.flatten(2), t.flatten(2))  # noqa: E731
    assert ((gram(x) * gram(g)).sum((1, 2)) <= 0).any()
    norms = conv_squared_norms(x, g, bias=False, strategy=strategy, **q)[0]
    torch.testing.assert_close(norms, expected, rtol=0.3, atol=0)
    if strategy == "gram":
        assert (norms >= expected).all()
    for b, row in enumerate(torch.eye(50, dtype=torch.float64)[:5]):
        assert norms[b] >= conv_clipped_sums(x, g, row, bias=False, **q)[0].square().sum() * (1 - 1e-15)


@pytest.mark.parametrize("case", [CASES[2], CASES[12], CASES[15]], ids=str)
def test_weight_zero_skips_whatever_the_values(case: Case) -> None:
    x, g, w, q = example(case)
    x[1], g[1], w[1] = torch.nan, torch.inf, 0
    for got, want in zip(
        conv_clipped_sums(x, g, w, **q), conv_clipped_sums(x[[0, 2]], g[[0, 2]], w[[0, 2]], **q), strict=True
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("strategy", ["direct", "gram"])
def test_values_that_are_not_finite_show_in_their_own_norm_only(strategy: str) -> None:
    x, g, _, q = example(conv(3, 5, (7, 9), (3, 3)))
    expected = conv_squared_norms(x, g, strategy=strategy, **q)[0]
    for bad in (torch.nan, torch.inf):
        y = x.clone()
        y[1, 2, 3, 4] = bad
        norms = conv_squared_norms(y, g, strategy=strategy, **q)[0]
        assert not norms[1].isfinite()
        assert torch.equal(norms[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize(
    "case", [conv(20, 40, (5, 5), (3, 3), batch=67), conv(3, 8, (12, 12), (3, 3), batch=70)], ids=str
)
def test_same_bits_for_any_number_of_threads(case: Case) -> None:
    x, g, w, q = example(case)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        norms = [conv_squared_norms(x, g, strategy=s, **q)[0] for s in ("direct", "gram")]
        results.append((*norms, *conv_squared_norms(x, g, store=True, **q), *conv_clipped_sums(x, g, w, **q)))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_non_contiguous_inputs() -> None:
    x, g, w, q = example(conv(4, 6, (5, 4), (3, 3)))
    last, expanded = x.to(memory_format=torch.channels_last), g[:, :, :1, :1].expand_as(g)
    assert torch.equal(conv_squared_norms(last, g, **q)[0], conv_squared_norms(x, g, **q)[0])
    assert torch.equal(
        conv_clipped_sums(x, expanded, w, **q)[0], conv_clipped_sums(x, expanded.contiguous(), w, **q)[0]
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck(transposed: bool) -> None:
    x, g, w, _ = example(conv(4, 6, (5, 4, 3), (3, 2, 3), groups=2, transposed=transposed))
    ints = ([3, 2, 3], [1, 1, 1], [1, 1, 1], [1, 1, 1], 2, transposed)
    ops = torch.ops.dpkernels
    for options in ((True, True, True, 0), (True, False, False, 2), (False, True, True, 1)):
        torch.library.opcheck(ops.conv_squared_norms.default, (x, g, *ints, *options))
    for which in ((True, True), (True, False), (False, True)):
        torch.library.opcheck(ops.conv_clipped_sums.default, (x, g, w, *ints, *which))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": torch.ones(3, 4, 5)}, r"input must be \[batch, in_channels, height, width\], got 3-D"),
        ({"input": torch.ones(2, 4, 5, 4)}, "output_grads must have size 2 in dimension 0"),
        ({"input": torch.ones(3, 4, 5, 4, dtype=torch.int64)}, "input must be floating-point"),
        ({"output_grads": torch.ones(3, 6, 5, 5)}, r"output_grads must have size 4 in dimension 3"),
        ({"kernel_size": (1, 1, 1, 1)}, "kernel_size must hold 1, 2 or 3 numbers"),
        ({"kernel_size": (3, 30)}, "kernel_size must fit into input"),
        ({"stride": (1,)}, "stride must hold 2 numbers"),
        ({"stride": (1, 0)}, "stride must hold numbers of at least 1"),
        ({"padding": (1, -1)}, "padding must hold numbers of at least 0"),
        ({"groups": 4}, "groups must divide the 6 channels of output_grads, got 4"),
        ({"strategy": "fast"}, "strategy must be one of"),
        ({"strategy": "gram", "store": True}, "strategy must be 'direct' or 'auto'"),
    ],
)
def test_errors_name_the_argument(change: dict[str, object], words: str) -> None:
    x, g, _, q = example(conv(4, 6, (5, 4), (3, 3)))
    with pytest.raises((ValueError, TypeError), match=words):
        conv_squared_norms(**{"input": x, "output_grads": g, **q, **change})


def test_weights_are_checked() -> None:
    x, g, w, q = example(conv(4, 6, (5, 4), (3, 3)))
    with pytest.raises(TypeError, match="weights must be float64"):
        conv_clipped_sums(x, g, w.float(), **q)
    with pytest.raises(ValueError, match="weights must have size 3"):
        conv_clipped_sums(x, g, w[:2], **q)
