"""No example contributes more than the bound, whatever it is: the privacy law, in floating point."""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpkernels.clipping import GhostClipper
from dpkernels.layers import REGISTRY
from tests.configurations import LAYERS, Framed

ROWS = 7
PRECISIONS = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "autocast": torch.float32,
}
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:Using padding='same'")


def context(precision: str) -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if precision == "autocast" else nullcontext()


def build(name: str, framed: bool, precision: str) -> nn.Module:
    configuration = LAYERS[name]
    return (Framed(configuration) if framed else configuration.make()).to(PRECISIONS[precision])


def cast(x: Tensor, precision: str) -> Tensor:
    return x.to(PRECISIONS[precision]) if x.is_floating_point() else x


@functools.cache
def output_shape(name: str, framed: bool, precision: str) -> tuple[int, ...] | None:
    """Shape of one example's output; None where torch itself cannot run the layer in this precision."""
    model, x = build(name, framed, precision), LAYERS[name].sample(2)
    try:
        with context(precision):
            y = model(cast(x, precision))
        y.sum().backward()
    except RuntimeError as error:
        if "not implemented for" not in str(error):
            raise
        return None
    return tuple(y.shape[1:])


def losses(model: nn.Module, x: Tensor, probe: Tensor, precision: str) -> Tensor:
    """Losses whose gradients with respect to the output are ``probe``."""
    with context(precision):
        y = model(cast(x, precision))
    return (y.double() * probe).flatten(1).sum(1)


def powers(shape: tuple[int, ...], reach: float) -> Tensor:
    """Numbers of random magnitudes from 10^-reach to 10^reach."""
    return 10 ** torch.empty(shape, dtype=torch.float64).uniform_(-reach, reach)


def spoil(kind: str, x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    """Make the example ``target``, or all, what ``kind`` says, in place."""
    if kind == "duplicates":
        x[:], probe[:] = x[target].clone(), probe[target].clone()
    elif kind == "zero input":
        x[target] = 0
    elif kind == "zero gradient":
        probe[target] = 0
    elif kind == "cancelling":  # one activation everywhere, gradients of alternating sign along some dimension
        same = x.flatten(1)[:, 0].view(-1, *(1,) * (x.dim() - 1))
        x[:] = same.expand_as(x).clone()
        signs = probe.movedim(int(torch.randint(1, probe.dim(), ())), 1)
        size = signs.shape[1]
        signs[:] = signs[:, :1] * (-1.0) ** torch.arange(size).view(-1, *(1,) * (probe.dim() - 2))
        signs *= 1 + 10 ** -float(torch.randint(3, 30, ())) * torch.randn_like(signs)
        signs[:, size // 2 * 2 :] *= 10 ** -float(torch.randint(0, 34, ()))  # what is left over
    elif kind == "magnitudes" and x.is_floating_point():
        x *= powers(x.shape, reach)
        probe *= powers(probe.shape, reach)
        x *= torch.rand_like(x) < 0.5
        probe *= torch.rand_like(probe) < 0.5
    elif kind == "huge entry" and x.is_floating_point():
        x[target].view(-1)[0] = 3e38
    elif kind == "subnormal" and x.is_floating_point():
        x[target] *= 1e-42 / float(x[target].abs().max())


KINDS = [
    "plain",
    "duplicates",
    "zero input",
    "zero gradient",
    "cancelling",
    "magnitudes",
    "huge entry",
    "subnormal",
]


def total(
    clipper: GhostClipper, x: Tensor, probe: Tensor, factors: Tensor, sizes: list[int], precision: str
) -> tuple[dict[str, Tensor], Tensor]:
    """Clipped sums and norms over several physical batches."""
    sums: dict[str, Tensor] = {}
    norms = []
    for xs, probes, factor in zip(x.split(sizes), probe.split(sizes), factors.split(sizes), strict=True):
        result = clipper.backward(losses(clipper.model, xs, probes, precision) * factor)
        sums = {name: value + sums.get(name, 0) for name, value in result.grads.items()}
        norms.append(result.norms)
    return sums, torch.cat(norms)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return float(torch.cat([(a[name] - b[name]).flatten() for name in a]).norm())


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=10, deadline=None)
@given(
    framed=st.booleans(),
    precision=st.sampled_from(list(PRECISIONS)),
    memory=st.sampled_from(["keep", "lean"]),
    kind=st.sampled_from(KINDS),
    scales=st.tuples(st.floats(-30, 30), st.floats(-30, 30)),
    bound=st.floats(-10, 10).map(lambda exponent: 10.0**exponent),
    seed=st.integers(0, 10**6),
)
def test_no_example_contributes_more_than_the_bound(
    name: str,
    framed: bool,
    precision: str,
    memory: str,
    kind: str,
    scales: tuple[float, float],
    bound: float,
    seed: int,
) -> None:
    """sum(D + x) - sum(D), measured in float64, is at most ``l2_bound`` for any input, and in any physical batches."""
    shape = output_shape(name, framed, precision)
    assume(shape is not None)
    torch.manual_seed(seed)
    model = build(name, framed, precision)
    x, probe = LAYERS[name].sample(ROWS), torch.randn(ROWS, *shape, dtype=torch.float64)
    target, cut = int(torch.randint(ROWS, ())), int(torch.randint(ROWS, ()))
    wide = 5 if precision == "float64" else 1  # this far its range reaches
    if x.is_floating_point():
        x = x.double()
    spoil(kind, x, probe, target, 25.0 * wide)
    if x.is_floating_point():
        x *= 10 ** (scales[0] * wide)
    probe *= 10 ** (scales[1] * wide)
    with GhostClipper(model, bound, memory=memory) as clipper:
        everyone = torch.ones(ROWS, dtype=torch.float64)
        with_x, norms = total(clipper, x, probe, everyone, [cut, ROWS - cut], precision)
        # A loss of NaN drops the example by selection: torch computes the others as before, in batches of equal size.
        dropped = everyone.clone()
        dropped[target] = math.nan
        without, _ = total(clipper, x, probe, dropped, [cut, ROWS - cut], precision)
        assert distance(with_x, without) <= clipper.l2_bound
        others = torch.arange(ROWS) != target
        first = cut - (target < cut)
        without, rest = total(clipper, x[others], probe[others], everyone[others], [first, ROWS - 1 - first], precision)
        if torch.equal(rest, norms[others]):  # unless torch rounded the others otherwise in a smaller batch
            assert distance(with_x, without) <= clipper.l2_bound


def test_every_registered_layer_is_among_them() -> None:
    made = {type(module) for configuration in LAYERS.values() for module in configuration.make().modules()}
    abstract = {nn.modules.batchnorm._BatchNorm}
    assert REGISTRY.keys() - made == abstract
