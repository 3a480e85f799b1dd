"""The norm family against its reference in float64, and against autograd."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from dpkernels.ops.norm import group_norm_backward, layer_norm_backward
from dpkernels.reference import norm as reference

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
GROUP_SHAPES = [(0, 4, 3, 2), (1, 1, 1, 1), (3, 6, 0, 2), (2, 6, 31, 3), (3, 33, 33, 33), (2, 8, 1, 4), (2, 4, 1025, 1)]
LAYER_SHAPES = [(0, 2, 3), (1, 1, 1), (3, 0, 5), (2, 31, 33), (4, 65, 7), (3, 1, 257), (1, 3, 600)]


def group_example(batch: int, channels: int, spatial: int, groups: int, dtype: torch.dtype) -> list[torch.Tensor]:
    x, mean, rstd = torch.randn(batch, channels, spatial), torch.randn(batch, groups), torch.rand(batch, groups) + 0.5
    return [t.to(dtype) for t in (x, torch.randn_like(x), mean, rstd, torch.randn(channels))]


def channels_last(maps: torch.Tensor) -> torch.Tensor:
    """The same values, in memory as [batch, spatial, channels]."""
    return maps.mT.contiguous().mT


def layer_example(batch: int, positions: int, features: int, dtype: torch.dtype) -> list[torch.Tensor]:
    x, mean, rstd = torch.randn(batch, positions, features), torch.randn(batch, positions), torch.rand(batch, positions)
    rstd = rstd + 0.5
    return [t.to(dtype) for t in (x, torch.randn_like(x), mean, rstd, torch.randn(features))]


def assert_matches(got: Any, want: Any, scale: torch.Tensor, dtype: torch.dtype) -> None:
    """Errors stay within a few units in the last place of what is summed (``scale``: an upper bound of it)."""
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    for grads, expected in zip(got[1:], want[1:], strict=True):
        assert grads.dtype == torch.float64
        assert ((grads - expected).abs() <= 16 * unit * scale).all()
    if got[0] is not None:
        assert got[0].dtype == dtype
        tolerance = 100 * unit if dtype in (torch.float32, torch.float64) else 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(got[0].double(), want[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", GROUP_SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["own", "fixed", "plain"])
@pytest.mark.parametrize("last", ["", "x", "x and g"])  # what lies with its channels last
def test_group_norm_matches_reference(
    isa: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str, last: str
) -> None:
    x, g, mean, rstd, weight = group_example(*shape, dtype)
    x = channels_last(x) if "x" in last else x
    g = channels_last(g) if "g" in last else g
    if kind == "fixed":
        mean, rstd = torch.randn(shape[:2]).to(dtype), torch.rand(shape[:2]).to(dtype) + 1
    scales, fixed = None if kind == "plain" else weight, kind == "fixed"
    wide = [t if t is None else t.double() for t in (x, g, mean, rstd, scales)]
    want = reference.group_norm_backward(*wide, fixed=fixed)
    size = reference.group_norm_backward(wide[0].abs(), wide[1].abs(), -wide[2].abs(), *wide[3:])
    got = group_norm_backward(x, g, mean, rstd, scales, fixed=fixed)
    assert_matches(got, want, size[1] + size[2], dtype)
    assert got[0].stride() == x.stride()
    absent = group_norm_backward(x, g, mean, rstd, scales, input_grads=False)
    assert absent[0] is None
    assert torch.equal(absent[1], got[1])


@pytest.mark.parametrize("shape", LAYER_SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["layer", "rms", "plain"])
def test_layer_norm_matches_reference(isa: str, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> None:
    x, g, mean, rstd, weight = layer_example(*shape, dtype)
    statistics = (None if kind == "rms" else mean, rstd, None if kind == "plain" else weight)
    wide = [t if t is None else t.double() for t in (x, g, *statistics)]
    want = reference.layer_norm_backward(*wide)
    size = reference.layer_norm_backward(wide[0].abs(), wide[1].abs(), -mean.double().abs(), *wide[3:])
    got = layer_norm_backward(x, g, *statistics)
    assert_matches(got, want, size[1] + size[2], dtype)
    absent = layer_norm_backward(x, g, *statistics, input_grads=False)
    assert absent[0] is None
    assert torch.equal(absent[1], got[1])


def test_reference_is_autograd() -> None:
    """The formulas themselves, against torch's layers."""
    x, weight, bias = torch.randn(3, 6, 5).double(), torch.randn(6).double(), torch.randn(6).double()
    g = torch.randn_like(x)
    for parameter in (x, weight, bias):
        parameter.requires_grad_()
    statistics = torch.native_group_norm(x, weight, bias, 3, 6, 5, 2, 1e-5)
    expected = torch.autograd.grad(statistics[0], (x, weight, bias), g)
    dx, weight_grads, bias_grads = reference.group_norm_backward(x, g, *statistics[1:], weight)
    for got, want in zip((dx, weight_grads.sum(0), bias_grads.sum(0)), expected, strict=True):
        torch.testing.assert_close(got, want)

    mean, rstd = torch.randn(6).double(), torch.rand(6).double() + 1
    output = F.batch_norm(x, mean, rstd**-2, weight, bias, eps=0)
    expected = torch.autograd.grad(output, (x, weight, bias), g)
    statistics = mean.expand(3, 6), rstd.expand(3, 6)
    dx, weight_grads, bias_grads = reference.group_norm_backward(x, g, *statistics, weight, fixed=True)
    for got, want in zip((dx, weight_grads.sum(0), bias_grads.sum(0)), expected, strict=True):
        torch.testing.assert_close(got, want)

    weight, bias = torch.randn(5).double().requires_grad_(), torch.randn(5).double().requires_grad_()
    statistics = torch.native_layer_norm(x, [5], weight, bias, 1e-5)
    expected = torch.autograd.grad(statistics[0], (x, weight, bias), g)
    mean, rstd = (t.squeeze(-1) for t in statistics[1:])
    dx, weight_grads, bias_grads = reference.layer_norm_backward(x, g, mean, rstd, weight)
    for got, want in zip((dx, weight_grads.sum(0), bias_grads.sum(0)), expected, strict=True):
        torch.testing.assert_close(got, want)

    expected = torch.autograd.grad(F.rms_norm(x, [5], weight, 1e-5), (x, weight), g)
    rstd = (x.square().mean(2) + 1e-5).rsqrt()
    dx, weight_grads, _ = reference.layer_norm_backward(x, g, None, rstd, weight)
    for got, want in zip((dx, weight_grads.sum(0)), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_scales_neither_overflow_nor_vanish(isa: str) -> None:
    """Values of 1e25 and 1e-25 on either side: what comes out is the product of the scales."""
    x, g, mean, rstd, weight = group_example(2, 6, 40, 2, torch.float32)
    rows = layer_example(2, 40, 6, torch.float32)
    for x_scale in (1e-25, 1.0, 1e25):
        for g_scale in (1e-25, 1.0, 1e25):
            for backward, (values, grads, means, rstds, scales), dims in (
                (group_norm_backward, (x, g, mean, rstd, weight), (6, 40)),
                (layer_norm_backward, rows, (40, 6)),
            ):
                plain = backward(values, grads, means, rstds, scales)
                got = backward(values * x_scale, grads * g_scale, means * x_scale, rstds / x_scale, scales)
                assert values.shape[1:] == dims
                for factor, scaled, base in zip((g_scale / x_scale, g_scale, g_scale), got, plain, strict=True):
                    assert scaled is not None
                    assert base is not None
                    if 1e-30 < factor < 1e30:
                        torch.testing.assert_close(
                            scaled.double(), base.double() * factor, rtol=1e-4, atol=1e-5 * factor
                        )


def test_large_mean_does_not_cancel(isa: str) -> None:
    """A mean of 1000 standard deviations: x * rstd - mean * rstd would lose three digits."""
    x, g, _, _, weight = group_example(2, 4, 200, 2, torch.float32)
    x = x + 2000
    _, mean, rstd = torch.native_group_norm(x, None, None, 2, 4, 200, 2, 1e-5)
    want = reference.group_norm_backward(*(t.double() for t in (x, g, mean, rstd, weight)))
    for maps in ((x, g), (channels_last(x), channels_last(g))):
        got = group_norm_backward(*maps, mean, rstd, weight)
        for values, expected in zip(got, want, strict=True):
            torch.testing.assert_close(values.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("last", [False, True])
def test_other_examples_do_not_matter(last: bool) -> None:
    """An example of NaN leaves the others' gradients as they are."""
    values = group_example(3, 4, 20, 2, torch.float32)
    values[:2] = (channels_last(t) if last else t for t in values[:2])
    before = group_norm_backward(*values)
    values[0][1], values[1][1] = torch.nan, torch.inf
    for got, want in zip(group_norm_backward(*values), before, strict=True):
        assert torch.equal(got[[0, 2]], want[[0, 2]])
        assert not got[1].isfinite().any()


def test_same_bits_for_any_number_of_threads() -> None:
    before = torch.get_num_threads()
    group, layer = group_example(40, 16, 100, 4, torch.float32), layer_example(40, 20, 100, torch.float32)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        last = group_norm_backward(*(channels_last(t) for t in group[:2]), *group[2:])
        results.append((*group_norm_backward(*group), *last, *layer_norm_backward(*layer)))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_non_contiguous_inputs() -> None:
    x, g, mean, rstd, weight = group_example(3, 6, 20, 3, torch.float32)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    expanded = g[:, :, :1].expand(-1, -1, 20)
    got = group_norm_backward(strided, expanded, mean, rstd, weight)
    want = group_norm_backward(x, expanded.contiguous(), mean, rstd, weight)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_opcheck() -> None:
    x, g, mean, rstd, weight = group_example(2, 4, 5, 2, torch.float32)
    torch.library.opcheck(torch.ops.dpkernels.group_norm_backward.default, (x, g, mean, rstd, weight, False, True))
    torch.library.opcheck(torch.ops.dpkernels.group_norm_backward.default, (x, g, mean, rstd, None, True, False))
    x, g, mean, rstd, weight = layer_example(2, 3, 5, torch.float32)
    torch.library.opcheck(torch.ops.dpkernels.layer_norm_backward.default, (x, g, mean, rstd, weight, True))
    torch.library.opcheck(torch.ops.dpkernels.layer_norm_backward.default, (x, g, None, rstd, weight, False))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.ones(2, 4)}, r"x must be \[batch, channels, spatial\], got 2-D"),
        ({"output_grads": torch.ones(2, 4, 6)}, "output_grads must have size 5 in dimension 2"),
        ({"mean": torch.ones(2, 3)}, "rstd must have size 3 in dimension 1"),
        ({"mean": torch.ones(2, 3), "rstd": torch.ones(2, 3)}, "groups that divide the 4 channels of x, got 3"),
        ({"mean": torch.ones(3, 2)}, "mean must have size 2 in dimension 0"),
        ({"mean": torch.ones(4)}, r"mean must be \[batch, groups\], got 1-D"),
        ({"weight": torch.ones(3)}, "weight must have size 4 in dimension 0"),
        ({"x": torch.ones(2, 4, 5, dtype=torch.int64)}, "x must be floating-point"),
        ({"rstd": None}, "rstd must be a tensor"),
    ],
)
def test_group_norm_errors_name_the_argument(change: dict[str, Any], words: str) -> None:
    names = ("x", "output_grads", "mean", "rstd", "weight")
    good = dict(zip(names, group_example(2, 4, 5, 2, torch.float32), strict=True))
    with pytest.raises((ValueError, TypeError), match=words):
        group_norm_backward(**(good | change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.ones(2, 4)}, r"x must be \[batch, positions, features\], got 2-D"),
        ({"mean": torch.ones(2, 4)}, "mean must have size 3 in dimension 1"),
        ({"rstd": None}, "rstd must be a tensor"),
        ({"weight": torch.ones(3)}, "weight must have size 5 in dimension 0"),
    ],
)
def test_layer_norm_errors_name_the_argument(change: dict[str, Any], words: str) -> None:
    names = ("x", "output_grads", "mean", "rstd", "weight")
    good = dict(zip(names, layer_example(2, 3, 5, torch.float32), strict=True))
    with pytest.raises((ValueError, TypeError), match=words):
        layer_norm_backward(**(good | change))
