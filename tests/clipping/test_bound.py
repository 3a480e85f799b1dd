"""No example contributes more than the bound, whatever it is: the privacy law, in floating point."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpkernels.clipping import GhostClipper
from tests.configurations import LAYERS, Framed

ROWS = 7
PRECISIONS = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "autocast": torch.float32,
}
WIDE = 5.4  # how many times as many decades float64 has as float32
pytestmark = pytest.mark.filterwarnings(
    "ignore:There is a performance drop", "ignore:Using padding='same'", "ignore:Mismatch dtype"
)


def context(precision: str) -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if precision == "autocast" else nullcontext()


def build(name: str, framed: bool, precision: str) -> nn.Module:
    """The layer alone, or between others."""
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
    except RuntimeError:
        assert precision not in ("float32", "float64")
        return None
    return tuple(y.shape[1:])


def freeze(model: nn.Module, train: str) -> None:
    """Leave the weights or the biases alone trainable, where there are any."""
    kept = [p for name, p in model.named_parameters() if train == "all" or ("bias" in name) == (train == "biases")]
    assume(kept)
    model.requires_grad_(False)
    for p in kept:
        p.requires_grad_(True)


# ---- awkward inputs: what the model takes, and the gradient of the losses with respect to its output -----------------


def powers(shape: tuple[int, ...], reach: float) -> Tensor:
    """Numbers of random magnitudes from 10^-reach to 10^reach."""
    return 10 ** torch.empty(shape, dtype=torch.float64).uniform_(-reach, reach)


def along(values: Tensor, dim: int, size: int) -> Tensor:
    """A vector's shape along one dimension of ``values``."""
    return torch.empty(size).view(*(size if d == dim % values.dim() else 1 for d in range(values.dim())))


def plain(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    """As drawn."""


def duplicates(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    """All others are the same example."""
    x[:], probe[:] = x[target].clone(), probe[target].clone()


def zero_input(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    x[target] = 0


def zero_inputs(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    x.zero_()


def zero_gradient(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    probe[target] = 0


def cancelling(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    """One activation everywhere, and output gradients that alternate along some dimension, with something left over."""
    x[:] = x.flatten(1)[:, 0].view(-1, *(1,) * (x.dim() - 1)).expand_as(x).clone()
    signs = probe.movedim(int(torch.randint(1, probe.dim(), ())), -1)
    pairs = signs.shape[-1] // 2 * 2
    signs[..., 1:pairs:2] = -signs[..., 0:pairs:2] * (1 + 10 ** -float(torch.randint(3, 30, ())))
    signs[..., pairs:] *= 10 ** -float(torch.randint(0, 34, ()))


def magnitudes(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    """Every number of a magnitude of its own, half of them zero."""
    for values in (x, probe) if x.is_floating_point() else (probe,):
        values.mul_(powers(values.shape, reach) * torch.randint(2, values.shape))


def disjoint(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    """Positions with features of their own, large in the input and small in the gradient or the other way round."""
    assume(x.is_floating_point() and min(x.dim(), probe.dim()) >= 3)
    position, feature = [(1, -1), (-1, 1)][int(torch.randint(2, ()))]
    size = max(x.shape[position], probe.shape[position])
    magnitude = powers((size,), reach)
    for values, factor in ((x, magnitude), (probe, powers((size,), 2) / magnitude)):
        at = torch.arange(values.shape[position]).view_as(along(values, position, values.shape[position]))
        column = torch.arange(values.shape[feature]).view_as(along(values, feature, values.shape[feature]))
        values.mul_(factor[at] * (at % 2 == column % 2))


def huge_entry(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    (x if x.is_floating_point() else probe)[target].view(-1)[0] = 3e38


def subnormal(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    (x if x.is_floating_point() else probe)[target] *= 1e-42


KINDS: list[Callable[[Tensor, Tensor, int, float], None]] = [
    plain,
    duplicates,
    zero_input,
    zero_inputs,
    zero_gradient,
    cancelling,
    magnitudes,
    disjoint,
    huge_entry,
    subnormal,
]


# ---- the law ---------------------------------------------------------------------------------------------------------


def total(
    clipper: GhostClipper, x: Tensor, probe: Tensor, factors: Tensor, sizes: list[int], precision: str
) -> tuple[dict[str, Tensor], Tensor]:
    """Clipped sums and norms over several physical batches, of losses whose output gradients are factors * probe."""
    sums: dict[str, Tensor] = {}
    norms = []
    for xs, probes, factor in zip(x.split(sizes), probe.split(sizes), factors.split(sizes), strict=True):
        if not len(xs):  # torch runs not every model on a batch of no rows
            norms.append(torch.zeros(0, dtype=torch.float64))
            continue
        with context(precision):
            y = clipper.model(cast(xs, precision))
        try:
            result = clipper.backward((y.double() * probes).flatten(1).sum(1) * factor)
        except RuntimeError as error:  # refused, whatever would have come of it
            assume("values that are not finite came before" not in str(error))
            raise
        sums = {name: value + sums.get(name, 0) for name, value in result.grads.items()}
        norms.append(result.norms)
    return sums, torch.cat(norms)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return float(torch.cat([(a[name] - b[name]).flatten() for name in a]).norm())


@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=8, deadline=None)
@given(
    framed=st.booleans(),
    precision=st.sampled_from(list(PRECISIONS)),
    train=st.sampled_from(["all", "weights", "biases"]),
    kind=st.sampled_from(KINDS),
    scale=st.floats(-30, 30),
    balance=st.floats(-60, 60),
    bound=st.floats(-10, 10).map(lambda exponent: 10.0**exponent),
    seed=st.integers(0, 10**6),
)
def test_no_example_contributes_more_than_the_bound(
    name: str,
    framed: bool,
    precision: str,
    train: str,
    kind: Callable[[Tensor, Tensor, int, float], None],
    scale: float,
    balance: float,
    bound: float,
    seed: int,
) -> None:
    """sum(D + x) - sum(D), measured in float64, is at most ``l2_bound`` for any input, and in any physical batches.

    Inputs are of magnitude 10^scale, output gradients of 10^(balance / 2 - scale), so that small ones meet large ones.
    """
    shape = output_shape(name, framed, precision)
    assume(shape is not None)
    torch.manual_seed(seed)
    model = build(name, framed, precision)
    freeze(model, train)
    x, probe = LAYERS[name].sample(ROWS), torch.randn(ROWS, *shape, dtype=torch.float64)
    target, cut = int(torch.randint(ROWS, ())), int(torch.randint(ROWS, ()))
    ten, wide = torch.tensor(10.0, dtype=torch.float64), WIDE if precision == "float64" else 1
    if x.is_floating_point():
        x = x.double()
    kind(x, probe, target, 28.0 * wide)
    if x.is_floating_point():
        x *= ten ** (scale * wide)
    probe *= ten ** ((balance / 2 - scale) * wide)
    with GhostClipper(model, bound) as clipper:
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
