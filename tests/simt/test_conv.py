"""The CUDA kernels of convolutions against their reference in float64."""

from dataclasses import asdict, dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from dpkernels.reference import conv as reference
from tests.simt.machine import Machine

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


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
    batch: int

    def __str__(self) -> str:
        return f"{self.channels}-{self.outputs}-{self.size}-{tuple(asdict(self.geometry).values())}-{self.batch}"


def conv(
    channels: int, outputs: int, size: tuple[int, ...], kernel: tuple[int, ...], *rest: tuple[int, ...], **more: Any
) -> Case:
    one = (1,) * len(kernel)
    stride, padding, dilation = rest or (one, tuple(k // 2 for k in kernel), one)
    batch = more.pop("batch", 2)
    return Case(channels, outputs, size, Geometry(kernel, stride, padding, dilation, **more), batch)


# Every kernel of each dtype: outputs below and above 32, several tiles, slabs and unfolded rows, a group's own outputs.
CASES = [
    conv(3, 5, (5, 7), (3, 3)),
    conv(9, 34, (3, 3), (3, 3)),  # two tiles of rows
    conv(4, 6, (6, 4), (3, 1), (2, 1), (1, 0), (1, 2), groups=2),
    conv(3, 4, (9,), (4,), (3,), (1,), (1,), transposed=True),
]
# Where only the geometry differs, in one dtype.
GEOMETRIES = [
    conv(4, 3, (8, 9), (1, 1), (2, 2), (0, 0), (1, 1)),
    conv(2, 3, (7, 6), (2, 4), (3, 2), (0, 3), (2, 1)),
    conv(2, 2, (41,), (5,), (1,), (40,), (20,)),  # taps so far apart that rows are unfolded
    conv(8, 40, (3, 3), (3, 3), groups=2),
    conv(6, 6, (5, 4), (3, 3), (2, 1), (1, 0), (1, 1), groups=6),
    conv(2, 3, (2, 3, 4), (2, 3, 2), (1, 2, 1), (1, 1, 0), (1, 1, 2)),
    conv(3, 2, (3, 2, 2), (3, 2, 2), (2, 1, 2), (1, 0, 1), (1, 1, 1), transposed=True),
    conv(3, 5, (5, 7), (3, 3), batch=0),
    conv(3, 2, (8, 8), (3, 3), batch=9),  # slices
]


def example(case: Case, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Input, output gradients, weights and the geometry as keywords."""
    q, sizes = case.geometry, []
    for n, k, s, p, d in zip(case.size, q.kernel_size, q.stride, q.padding, q.dilation, strict=True):
        reach = d * (k - 1) + 1
        sizes.append((n - 1) * s - 2 * p + reach if q.transposed else (n + 2 * p - reach) // s + 1)
    x, g = torch.randn(case.batch, case.channels, *case.size), torch.randn(case.batch, case.outputs, *sizes)
    return x.to(dtype), g.to(dtype), torch.rand(case.batch, dtype=torch.float64), asdict(q)


class Device:
    """The operators as dpkernels.ops has them, with maps that have their channels last or not."""

    def __init__(
        self, simt: Machine, x: Tensor, g: Tensor, q: dict[str, Any], last: tuple[bool, bool] = (False, False)
    ):
        self.simt, self.transposed, self.kernel_size = simt, q["transposed"], q["kernel_size"]
        seen, met = (g, x) if self.transposed else (x, g)
        seen_last, met_last = reversed(last) if self.transposed else last

        def lifted(sizes: Any, fill: int) -> list[int]:
            return [*[fill] * (3 - len(sizes)), *sizes]

        geometry = [lifted(q[k], f) for k, f in (("kernel_size", 1), ("stride", 1), ("padding", 0), ("dilation", 1))]
        sizes = [lifted(t.shape[2:], 1) for t in (seen, met)]
        self.maps = [t.movedim(1, -1) if at_end else t for t, at_end in ((seen, seen_last), (met, met_last))]
        self.shape = simt.module.ConvMaps(
            len(x), q["groups"], seen.size(1), met.size(1), *sizes, *geometry, seen_last, met_last
        )

    def norms(self, strategy: str = "direct", **more: Any) -> Any:
        more["strategy"] = getattr(self.simt.module.ConvStrategy, strategy)
        return self.simt.conv_squared_norms(*self.maps, self.shape, transposed=self.transposed, **more)

    def sums(self, weights: Tensor, bias: bool = True, **more: Any) -> Any:
        sums = self.simt.conv_clipped_sums(*self.maps, weights, self.shape, **more)
        if not bias:
            return sums
        source = self.maps[0 if self.transposed else 1]
        return sums, self.simt.conv_bias_sums(source, weights, self.shape, transposed=self.transposed)


def assert_matches(simt: Machine, case: Case, dtype: torch.dtype, last: tuple[bool, bool], tf32: bool = False) -> None:
    x, g, w, q = example(case, dtype)
    device = Device(simt, x, g, q, last)
    close = 1e-12 if dtype == torch.float64 else 3e-3 if tf32 else 3e-6
    norms, grads, bias_grads = reference.conv_squared_norms(x.double(), g.double(), store=True, **q)
    got, stored, got_bias = device.norms(store=True, tf32=tf32)
    torch.testing.assert_close(got, norms, rtol=close, atol=0)
    want = grads.flatten(2).transpose(1, 2)
    torch.testing.assert_close(stored.double(), want.reshape(stored.shape), rtol=0, atol=10 * close)
    torch.testing.assert_close(got_bias, bias_grads, rtol=1e-13, atol=1e-12)
    sums = reference.conv_clipped_sums(x.double(), g.double(), w, **q)
    got_sums = device.sums(w, tf32=tf32)
    torch.testing.assert_close(got_sums[0], sums[0].flatten(1), rtol=0, atol=10 * close)
    torch.testing.assert_close(got_sums[1], sums[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_matches_reference(simt: Machine, case: Case, dtype: torch.dtype, last: bool) -> None:
    assert_matches(simt, case, dtype, (last, last))


@pytest.mark.parametrize("case", GEOMETRIES, ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_any_geometry(simt: Machine, case: Case, last: bool) -> None:
    assert_matches(simt, case, torch.bfloat16, (last, last))


@pytest.mark.parametrize("last", [(False, True), (True, False)])
def test_layouts_mix(simt: Machine, last: tuple[bool, bool]) -> None:
    for case in CASES[2:]:
        assert_matches(simt, case, torch.float32, last)


@pytest.mark.parametrize("last", [False, True])
def test_tf32(simt: Machine, last: bool) -> None:
    for case in CASES[:2]:
        assert_matches(simt, case, torch.float32, (last, last), tf32=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_aligned_maps(simt: Machine, dtype: torch.dtype, last: bool) -> None:
    """Copies of four values at a time give the bits of single ones."""
    case = conv(4, 8, (4, 4), (3, 3))
    assert_matches(simt, case, dtype, (last, last))
    x, g, _, q = example(case, dtype)
    wider = torch.randn(2, 9, 4, 4).to(dtype)  # nine outputs are not aligned where channels are last
    wider[:, :8] = g
    stored = Device(simt, x, g, q, (last, last)).norms(store=True, bias=False)[1]
    assert torch.equal(Device(simt, x, wider, q, (last, last)).norms(store=True, bias=False)[1][..., :8], stored)


def assert_norms_bound_contributions(device: Device, batch: int, close: float = 1e-12, **more: Any) -> None:
    norms = device.norms(bias=False, **more)
    for b, row in enumerate(torch.eye(batch, dtype=torch.float64)):
        added = device.sums(row, bias=False, **more).square().sum()
        assert added * (1 - 1e-15) <= norms[b] <= added * (1 + close)


@pytest.mark.parametrize("case", [*CASES[:3], GEOMETRIES[4]], ids=str)
@pytest.mark.parametrize("tf32", [False, True])
def test_norm_is_of_what_the_sum_adds(simt: Machine, case: Case, tf32: bool) -> None:
    x, g, _, q = example(case)
    assert_norms_bound_contributions(Device(simt, x, g, q), case.batch, tf32=tf32)


@pytest.mark.parametrize("last", [False, True])
def test_many_positions(simt: Machine, last: bool) -> None:
    """More than are summed in float, of which the second piece cancels the first."""
    case = conv(1, 2, (1031,), (2,), (1,), (0,), (1,), batch=2)
    x, g, w, q = example(case)
    x[1], g[1, :, :512], g[1, :, 512:1024] = 1, 2**20, -(2**20)
    device = Device(simt, x, g, q, (last, last))
    norms, grads, _ = reference.conv_squared_norms(x.double(), g.double(), store=True, **q)
    got, stored, _ = device.norms(store=True)
    torch.testing.assert_close(got, norms, rtol=1e-5, atol=0)
    torch.testing.assert_close(stored.double(), grads.flatten(2).transpose(1, 2), rtol=0, atol=1e-4)
    sums = device.sums(w)
    for got_sum, want in zip(sums, reference.conv_clipped_sums(x.double(), g.double(), w, **q), strict=True):
        torch.testing.assert_close(got_sum, want.reshape(got_sum.shape), rtol=0, atol=1e-4)
    assert_norms_bound_contributions(device, 2, close=1e-5)


def test_large_values_do_not_overflow(simt: Machine) -> None:
    x, g, w, q = example(CASES[0])
    x[0] *= 1e30
    g[0] *= 1e25
    x[1, 0, 2, 3] = torch.finfo(torch.float32).max  # rounds to infinity as a tf32 number
    device = Device(simt, x, g, q)
    want = reference.conv_squared_norms(x.double(), g.double(), **q)[0]
    torch.testing.assert_close(device.norms()[0], want, rtol=1e-6, atol=0)
    want = reference.conv_clipped_sums(x.double(), g.double(), w, **q)[0]
    torch.testing.assert_close(device.sums(w)[0], want.flatten(1), rtol=1e-6, atol=1e35)
    assert_norms_bound_contributions(device, 2)


@pytest.mark.parametrize("case", [CASES[1], GEOMETRIES[4]], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("last", [False, True])
def test_non_finite_examples(simt: Machine, case: Case, bad: float, last: bool) -> None:
    """They have a non-finite norm, leave others alone, and are skipped where their weight is 0."""
    x, g, w, q = example(case)
    x, g = x[[0, 1, 1]].clone(), g[[0, 1, 1]].clone()
    w = torch.tensor([0.5, 0, 0.25], dtype=torch.float64)
    device = Device(simt, x, g, q, (last, last))
    norms, sums = device.norms()[0], device.sums(w)
    x[1, 0, 1, 1] = bad
    g[1, 0, 0, 0] = bad
    device = Device(simt, x, g, q, (last, last))
    after = device.norms()[0]
    assert torch.equal(after[[0, 2]], norms[[0, 2]])
    assert not after[1].isfinite()
    for got, want in zip(device.sums(w), sums, strict=True):
        assert torch.equal(got, want)
    assert not Device(simt, x, g, q, (last, last)).sums(w + 1)[0].isfinite().all()


def test_parameters_are_optional(simt: Machine) -> None:
    x, g, w, q = example(CASES[0])
    device = Device(simt, x, g, q)
    norms = device.norms()[0]
    alone = device.norms(weight=False)[0], device.norms(bias=False)
    torch.testing.assert_close(sum(alone), norms, rtol=1e-14, atol=0)
    assert torch.equal(device.sums(w, bias=False), device.sums(w)[0])


GRAMS = [
    conv(5, 7, (4, 4), (3, 3)),
    conv(35, 3, (8, 8), (3, 3), batch=1),  # two chunks of channels, four warps
    conv(4, 37, (5, 5), (3, 2), (2, 1), (1, 0), (1, 2)),
    conv(3, 6, (4, 3), (3, 3), (2, 2), (1, 1), (1, 1), transposed=True),
    conv(3, 5, (4, 4), (3, 3), batch=0),
]


@pytest.mark.parametrize("case", GRAMS, ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pairs_of_positions(simt: Machine, case: Case, last: bool, dtype: torch.dtype) -> None:
    """Never below the true norm or what the sum adds, and little above."""
    x, g, _, q = example(case, dtype)
    device = Device(simt, x, g, q, (last, last))
    want = reference.conv_squared_norms(x.double(), g.double(), **q)[0]
    got = device.norms("gram")[0]
    assert (want <= got).all()
    assert (got <= want * 1.011).all()
    for b, row in enumerate(torch.eye(case.batch, dtype=torch.float64)):
        assert got[b] >= sum(part.square().sum() for part in device.sums(row))
    if dtype == torch.float32 and case.batch:
        got = device.norms("gram", tf32=True, bias=False)
        for b, row in enumerate(torch.eye(case.batch, dtype=torch.float64)):
            added = device.sums(row, tf32=True, bias=False).square().sum()
            assert added <= got[b] <= 1.011 * added


def test_pairs_of_positions_that_cancel(simt: Machine) -> None:
    """Such examples, and those that leave the range of float, get the direct norm, bit by bit."""
    x, g, _, q = example(conv(6, 5, (4, 4), (1, 1), batch=6))
    x[1], g[1, :, ::2], g[1, :, 1::2] = 1, 1, -1 + 1e-6
    x[2] *= 1e30
    g[3] *= 1e-30
    x[4, 2, 1, 1] = torch.nan
    g[5] = 0
    device = Device(simt, x, g, q)
    direct, gram = device.norms(bias=False), device.norms("gram", bias=False)
    assert gram[0] > direct[0]
    assert torch.equal(gram[[1, 2, 3, 5]], direct[[1, 2, 3, 5]])
    assert gram[4].isnan()
    want = reference.conv_squared_norms(x.double(), g.double(), **q, bias=False)[0]
    torch.testing.assert_close(gram[[0, 2, 3, 5]], want[[0, 2, 3, 5]], rtol=0.011, atol=0)


def test_cost_model(simt: Machine) -> None:
    """Small maps of many channels by pairs of positions; what is stored, large or grouped directly."""

    def strategy(case: Case) -> str:
        x, g = torch.empty(0, case.channels, *case.size), example(case)[1]
        return simt.module.conv_strategy_cuda(Device(simt, x, g, example(case)[3]).shape).name

    assert strategy(conv(256, 256, (8, 8), (3, 3), batch=0)) == "gram"
    assert strategy(conv(512, 512, (4, 4), (3, 3), batch=0)) == "gram"
    assert strategy(conv(64, 64, (32, 32), (3, 3), batch=0)) == "direct"
    assert strategy(conv(3, 16, (8, 8), (3, 3), batch=0)) == "direct"
    assert strategy(conv(256, 256, (8, 8), (3, 3), groups=2, batch=0)) == "direct"
    x, g, _, q = example(conv(20, 24, (2, 2), (3, 3)))
    device = Device(simt, x, g, q)
    assert torch.equal(device.norms("auto")[0], device.norms("gram")[0])
    assert torch.equal(device.norms("auto", store=True)[0], device.norms("direct", store=True)[0])
