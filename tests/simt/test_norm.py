"""The CUDA kernels of normalization layers against their reference in float64."""

from typing import Any

import pytest
import torch

from dpkernels.reference import norm as reference
from tests.simt.machine import Machine

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (batch, channels, spatial, groups): part of a warp, a warp, a block for a channel; more and fewer channels than teams
GROUP_SHAPES = [(0, 4, 3, 2), (1, 1, 1, 1), (3, 6, 0, 2), (2, 6, 31, 3), (2, 66, 5, 2), (2, 18, 33, 1), (2, 4, 1025, 2)]
# (batch, positions, features)
LAYER_SHAPES = [(0, 2, 3), (1, 1, 1), (3, 0, 5), (2, 3, 0), (2, 31, 33), (2, 130, 7), (1, 3, 1025)]


def values(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def assert_matches(got: Any, want: Any, scale: torch.Tensor, dtype: torch.dtype) -> None:
    """Errors stay within a few units in the last place of what is summed (``scale``: an upper bound of it)."""
    unit = torch.finfo(torch.float32).eps
    for grads, expected in zip(got[-2:], want[1:], strict=True):
        assert grads.dtype == torch.float64
        assert ((grads - expected).abs() <= 16 * unit * scale).all()
    if len(got) == 3:
        assert got[0].dtype == dtype
        tolerance = 100 * unit if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(got[0].double(), want[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", GROUP_SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["own", "fixed", "plain"])
def test_group_norm(simt: Machine, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> None:
    batch, channels, spatial, groups = shape
    groups = channels if kind == "fixed" else groups
    x, g = values(batch, channels, spatial, dtype=dtype), values(batch, channels, spatial, dtype=dtype)
    mean, rstd = torch.randn(batch, groups), torch.rand(batch, groups) + 0.5
    weight = None if kind == "plain" else values(channels, dtype=dtype)
    wide = [t if t is None else t.double() for t in (x, g, mean, rstd, weight)]
    want = reference.group_norm_backward(*wide, fixed=kind == "fixed")
    scale = reference.group_norm_backward(wide[0].abs(), wide[1].abs(), -wide[2].abs(), *wide[3:])
    got = simt.group_norm_backward(x, g, mean, rstd, weight, fixed=kind == "fixed")
    assert_matches(got, want, scale[1] + scale[2], dtype)


@pytest.mark.parametrize("shape", LAYER_SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["layer", "rms", "plain"])
def test_layer_norm(simt: Machine, shape: tuple[int, ...], dtype: torch.dtype, kind: str) -> None:
    batch, positions, features = shape
    x, g = values(*shape, dtype=dtype), values(*shape, dtype=dtype)
    mean, rstd = torch.randn(batch, positions), torch.rand(batch, positions) + 0.5
    statistics = (None if kind == "rms" else mean, rstd, None if kind == "plain" else values(features, dtype=dtype))
    wide = [t if t is None else t.double() for t in (x, g, *statistics)]
    want = reference.layer_norm_backward(*wide)
    scale = reference.layer_norm_backward(wide[0].abs(), wide[1].abs(), -mean.double().abs(), *wide[3:])
    got = simt.layer_norm_backward(x, g, *statistics)
    assert_matches(got, want, scale[1] + scale[2], dtype)


def test_input_grads_are_optional(simt: Machine) -> None:
    x, g, mean, rstd = torch.randn(2, 4, 20), torch.randn(2, 4, 20), torch.randn(2, 2), torch.rand(2, 2) + 1
    for got, want in zip(
        simt.group_norm_backward(x, g, mean, rstd, None, input_grads=False),
        simt.group_norm_backward(x, g, mean, rstd, None)[1:],
        strict=True,
    ):
        assert torch.equal(got, want)
    rows = torch.randn(2, 4), torch.rand(2, 4) + 1
    for got, want in zip(
        simt.layer_norm_backward(x, g, *rows, None, input_grads=False),
        simt.layer_norm_backward(x, g, *rows, None)[1:],
        strict=True,
    ):
        assert torch.equal(got, want)


def test_other_examples_do_not_matter(simt: Machine) -> None:
    """An example of NaN leaves the others' gradients as they are."""
    x, g, mean, rstd = torch.randn(3, 4, 20), torch.randn(3, 4, 20), torch.randn(3, 2), torch.rand(3, 2) + 1
    before = simt.group_norm_backward(x, g, mean, rstd, None)
    x[1], g[1] = torch.nan, torch.inf
    for got, want in zip(simt.group_norm_backward(x, g, mean, rstd, None), before, strict=True):
        assert torch.equal(got[[0, 2]], want[[0, 2]])
        assert not got[1].isfinite().any()
