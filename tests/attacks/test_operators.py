"""Operators on random shapes, dtypes, strides and magnitudes: no norm below what the sum adds, sums as in float64.

For every operator and every example

- the squared norm is at least that of the very numbers that the clipped sum adds for it, as clipping needs it to be;
- the clipped sum is the float64 reference's, up to ``gamma_n`` of the sum of magnitudes of its n products;
- neither depends, in any bit, on what other examples the batch holds.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dpkernels.ops import clip, conv, embedding, linear, norm, sparse
from dpkernels.reference import conv as conv_reference
from dpkernels.reference import embedding as embedding_reference
from dpkernels.reference import linear as linear_reference
from dpkernels.reference import norm as norm_reference
from dpkernels.reference import sparse as sparse_reference

FEW, MANY = 15, 400  # cases of each operator
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FLOAT64 = 1e-9  # what a norm in float64 may be below the true one: clipping/rounding.py

Rows = tuple[Tensor, ...]  # the batch first


@dataclass(frozen=True)
class Call:
    """An operator's arguments, and what it does with some rows of them."""

    rows: Rows
    norms: Callable[[Rows], Tensor]  # squared, [batch]
    sums: Callable[[Rows, Tensor], Tensor]  # flat, of rows and weights
    reference: Callable[[Rows, Tensor], Tensor]  # sums of rows in float64
    terms: int  # products that one entry adds for one example
    magnitudes: Callable[[Rows], Rows]  # rows whose sums bound the sums of magnitudes of the products


# ---- random tensors --------------------------------------------------------------------------------------------------


def numbers(rng: Random, dtype: torch.dtype, *shape: int) -> Tensor:
    """Numbers of one magnitude or of many, with zeros, in memory as they may lie."""
    values = torch.randn(shape, dtype=torch.float64) * 10 ** rng.uniform(-3, 3)
    if rng.random() < 0.3:
        values *= 10 ** torch.empty(shape, dtype=torch.float64).uniform_(-3, 3)
    if rng.random() < 0.3:
        values *= torch.randint(2, shape)
    if dtype == torch.float16:
        values = values.clamp(-1e4, 1e4)
    return strided(rng, values.to(dtype))


def strided(rng: Random, values: Tensor) -> Tensor:
    """The same values, contiguous or not."""
    way = rng.randrange(4)
    if way == 0 and values.dim() > 1:  # dimensions in another order in memory
        order = list(range(values.dim()))
        rng.shuffle(order)
        return values.permute(order).contiguous().permute([order.index(d) for d in range(values.dim())])
    if way == 1:  # every other element of a longer tensor
        return torch.stack([values, torch.full_like(values, math.nan) if values.is_floating_point() else values], -1)[
            ..., 0
        ]
    if way == 2 and len(values):  # one row, repeated without being copied
        return values[:1].expand_as(values)
    return values


def operands(rng: Random, dtype: torch.dtype, first: tuple[int, ...], second: tuple[int, ...]) -> Rows:
    """Two maps [batch, channels, *positions]; now and then products at one position cancel those at the next."""
    if rng.random() < 0.8:
        return numbers(rng, dtype, *first), numbers(rng, dtype, *second)
    ones = torch.ones(first, dtype=torch.float64) * torch.randn(
        *first[:2], *(1,) * (len(first) - 2), dtype=torch.float64
    )
    signs = torch.randn(*second[:2], 1, dtype=torch.float64).expand(*second[:2], math.prod(second[2:])).clone()
    signs[..., 1::2] *= -1 + 10 ** -rng.uniform(1, 8)
    return strided(rng, ones.to(dtype)), strided(rng, signs.view(second).to(dtype))


def size(rng: Random, most: int) -> int:
    """Small sizes most of the time, and those beside powers of two."""
    return min(most, rng.choice((1, 2, 3, rng.randint(1, 9), rng.choice((15, 16, 17, 31, 32, 33, 63, 64, 65, 130)))))


# ---- the operators ---------------------------------------------------------------------------------------------------


def absolute(rows: Rows) -> Rows:
    """Of numbers; indices stay."""
    return tuple(r.abs() if r.is_floating_point() else r for r in rows)


def flat(parts: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


def linear_layer(rng: Random, dtype: torch.dtype, batch: int) -> Call:
    positions, p, d = rng.choice((1, size(rng, 65))), size(rng, 130), size(rng, 65)
    maps = operands(rng, dtype, (batch, p, positions), (batch, d, positions))
    rows = maps[0].mT, maps[1].mT
    which = rng.choice(({}, {"bias": False}, {"weight": False}))
    return Call(
        rows,
        lambda r: linear.linear_squared_norms(*r, **which),
        lambda r, w: flat(linear.linear_clipped_sums(*r, w, **which)),
        lambda r, w: flat(linear_reference.linear_clipped_sums(*r, w, **which)),
        positions,
        absolute,
    )


def _draw(rng: Random, dims: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(rng.randint(low, high) for _ in range(dims))


def geometry(
    rng: Random, *, transposed: bool | None = None
) -> tuple[int, int, tuple[int, ...], tuple[int, ...], dict[str, Any]]:
    """Channels, outputs, the input's and the output's map, and the settings."""
    while True:
        dims = rng.choice((1, 2, 2, 3))
        groups = rng.choice((1, 1, 1, 2, 3))
        channels, outputs = groups * rng.choice((1, 2, 3, 9, 17)), groups * rng.choice((1, 2, 5, 16, 33))
        ranges = {"kernel_size": (1, 4), "stride": (1, 3), "padding": (0, 2), "dilation": (1, 2)}
        settings = {name: _draw(rng, dims, *ends) for name, ends in ranges.items()}
        spatial = _draw(rng, dims, 1, 9 if dims < 3 else 5)
        up = rng.random() < 0.3 if transposed is None else transposed
        x = torch.empty(1, channels, *spatial, device="meta")
        w = (channels, outputs // groups) if up else (outputs, channels // groups)
        call = getattr(F, ("conv_transpose" if up else "conv") + f"{dims}d")
        rest = {name: value for name, value in settings.items() if name != "kernel_size"}
        try:
            y = call(x, torch.empty(*w, *settings["kernel_size"], device="meta"), groups=groups, **rest)
        except RuntimeError:  # a kernel larger than the map, or an output without positions
            continue
        if y.numel():
            return channels, outputs, spatial, tuple(y.shape[2:]), settings | {"groups": groups, "transposed": up}


def convolution(rng: Random, dtype: torch.dtype, batch: int) -> Call:
    channels, outputs, spatial, positions, settings = geometry(rng)
    rows = operands(rng, dtype, (batch, channels, *spatial), (batch, outputs, *positions))
    which = rng.choice(({}, {"bias": False}, {"weight": False}))
    strategy = rng.choice(("auto", "direct", "gram"))
    return Call(
        rows,
        lambda r: conv.conv_squared_norms(*r, **settings, **which, strategy=strategy)[0],
        lambda r, w: flat(conv.conv_clipped_sums(*r, w, **settings, **which)),
        lambda r, w: flat(conv_reference.conv_clipped_sums(*r, w, **settings, **which)),
        math.prod(spatial if settings["transposed"] else positions),
        absolute,
    )


def stored_convolution(rng: Random, dtype: torch.dtype, batch: int) -> Call:
    """Norms with the gradients that they are of, which the sum then adds."""
    channels, outputs, spatial, positions, settings = geometry(rng)
    rows = operands(rng, dtype, (batch, channels, *spatial), (batch, outputs, *positions))
    which = {"bias": False}

    def sums(r: Rows, w: Tensor) -> Tensor:
        grads = conv.conv_squared_norms(*r, **settings, **which, store=True)[1]
        return clip.weighted_row_sum(grads.flatten(1), w)

    return Call(
        rows,
        lambda r: conv.conv_squared_norms(*r, **settings, **which, store=True)[0],
        sums,
        lambda r, w: conv_reference.conv_clipped_sums(*r, w, **settings, **which)[0].flatten(),
        math.prod(spatial if settings["transposed"] else positions),
        absolute,
    )


def selected_weights(rng: Random, dtype: torch.dtype, batch: int) -> Call:
    channels, outputs, spatial, positions, settings = geometry(rng, transposed=False)
    del settings["transposed"]
    rows = operands(rng, dtype, (batch, channels, *spatial), (batch, outputs, *positions))
    count = outputs * channels // settings["groups"] * math.prod(settings["kernel_size"])
    entries = (torch.rand(count) < rng.choice((0.05, 0.5, 1))).nonzero().squeeze(1)
    grads = lambda r: sparse.sparse_gradients(*r, entries, **settings)  # noqa: E731
    return Call(
        rows,
        lambda r: clip.row_squared_norms(grads(r)),
        lambda r, w: clip.weighted_row_sum(grads(r), w),
        lambda r, w: w @ sparse_reference.sparse_gradients(*r, entries, **settings),
        math.prod(positions),
        absolute,
    )


def tokens(rng: Random, dtype: torch.dtype, batch: int) -> Call:
    positions, table, dim = size(rng, 40), size(rng, 130), size(rng, 65)
    indices = strided(rng, torch.randint(table, (batch, positions)))
    padding = rng.choice((None, rng.randrange(table)))
    return Call(
        (indices, numbers(rng, dtype, batch, positions, dim)),
        lambda r: embedding.embedding_squared_norms(*r, padding_idx=padding),
        lambda r, w: embedding.embedding_clipped_sums(*r, w, num_embeddings=table, padding_idx=padding).flatten(),
        lambda r, w: embedding_reference.embedding_clipped_sums(
            *r, w, num_embeddings=table, padding_idx=padding
        ).flatten(),
        positions,
        absolute,
    )


def bags(rng: Random, dtype: torch.dtype, batch: int) -> Call:
    positions, table, dim = size(rng, 40), size(rng, 130), size(rng, 65)
    indices = strided(rng, torch.randint(table, (batch, positions)))
    padding, mode = rng.choice((None, rng.randrange(table))), rng.choice(("sum", "mean"))
    rows: Rows = (indices, numbers(rng, dtype, batch, dim))
    if mode == "sum" and rng.random() < 0.5:
        rows += (numbers(rng, dtype, batch, positions),)

    def options(r: Rows) -> dict[str, Any]:
        return {"mode": mode, "padding_idx": padding, "per_sample_weights": r[2] if len(r) > 2 else None}

    return Call(
        rows,
        lambda r: embedding.embedding_bag_squared_norms(*r[:2], **options(r)),
        lambda r, w: embedding.embedding_bag_clipped_sums(*r[:2], w, num_embeddings=table, **options(r)).flatten(),
        lambda r, w: embedding_reference.embedding_bag_clipped_sums(
            *r[:2], w, num_embeddings=table, **options(r)
        ).flatten(),
        positions + 1,
        absolute,
    )


def _of_stored(
    rows: Rows, grads: Callable[[Rows], tuple[Any, ...]], expected: Callable[[Rows], tuple[Any, ...]], terms: int
) -> Call:
    """Per-example gradients of weight and bias [batch, size] after the first result."""
    return Call(
        rows,
        lambda r: sum(clip.row_squared_norms(part) for part in grads(r)[1:]),  # type: ignore[arg-type, return-value]
        lambda r, w: flat(tuple(clip.weighted_row_sum(part, w) for part in grads(r)[1:])),
        lambda r, w: flat(tuple(w @ part for part in expected(r)[1:])),
        terms,
        lambda r: (r[0].abs(), r[1].abs(), -r[2].abs(), r[3].abs()),  # x - mean is a sum, too
    )


def group_norm(rng: Random, dtype: torch.dtype, batch: int) -> Call:
    groups, spatial = rng.choice((1, 2, 3)), size(rng, 130)
    channels = groups * size(rng, 33)
    maps = [numbers(rng, dtype, batch, channels, spatial) for _ in range(2)]
    statistics = [numbers(rng, dtype, batch, groups), numbers(rng, dtype, batch, groups).abs()]
    fixed = rng.random() < 0.5
    return _of_stored(
        (*maps, *statistics),
        lambda r: norm.group_norm_backward(*r, None, fixed=fixed),
        lambda r: norm_reference.group_norm_backward(*r, None, fixed=fixed),
        spatial,
    )


def layer_norm(rng: Random, dtype: torch.dtype, batch: int) -> Call:
    positions, features = size(rng, 65), size(rng, 130)
    maps = [numbers(rng, dtype, batch, positions, features) for _ in range(2)]
    statistics = [numbers(rng, dtype, batch, positions), numbers(rng, dtype, batch, positions).abs()]
    return _of_stored(
        (*maps, *statistics),
        lambda r: norm.layer_norm_backward(*r, None),
        lambda r: norm_reference.layer_norm_backward(*r, None),
        positions,
    )


def stored_rows(rng: Random, dtype: torch.dtype, batch: int) -> Call:
    return Call(
        (numbers(rng, dtype, batch, size(rng, 130)),),
        lambda r: clip.row_squared_norms(*r),
        lambda r, w: clip.weighted_row_sum(*r, w),
        lambda r, w: w @ r[0],
        1,
        absolute,
    )


OPERATORS: dict[str, Callable[[Random, torch.dtype, int], Call]] = {
    "linear": linear_layer,
    "conv": convolution,
    "conv, stored": stored_convolution,
    "sparse": selected_weights,
    "embedding": tokens,
    "embedding bag": bags,
    "group norm": group_norm,
    "layer norm": layer_norm,
    "stored rows": stored_rows,
}


# ---- the law ---------------------------------------------------------------------------------------------------------


def verify(name: str, seed: int) -> None:
    rng = Random(f"{name} {seed}")
    torch.manual_seed(rng.randrange(2**31))
    dtype, batch = rng.choice(DTYPES), rng.choice((0, 1, 2, 3, 5, 9, 20))
    call = OPERATORS[name](rng, dtype, batch)
    weights = torch.rand(batch, dtype=torch.float64) * torch.randint(2, (batch,))
    norms, sums = call.norms(call.rows), call.sums(call.rows, weights)

    for i in range(batch):
        one = torch.zeros(batch, dtype=torch.float64)
        one[i] = 1
        added = float(call.sums(call.rows, one).square().sum())
        assert float(norms[i]) >= added * (1 - FLOAT64), f"the norm of example {i} is below that of what it adds"

    wide = tuple(r.double() if r.is_floating_point() else r for r in call.rows)
    expected = call.reference(wide, weights)
    magnitudes = call.reference(call.magnitudes(wide), weights)
    # Within an example n products, each of a few roundings, in float for half precision; across examples in double, as
    # the reference is all along.
    unit = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2
    n, double = call.terms + 8, 2.0**-52 * batch * (call.terms + 8)
    assert bool(((sums - expected).abs() <= (n * unit / (1 - n * unit) + double) * magnitudes).all()), "the sum is off"

    if batch:
        kept = slice(rng.randrange(batch), rng.randint(1, batch))  # which lie in memory as they did
        assert torch.equal(call.norms(tuple(r[kept] for r in call.rows)), norms[kept]), "a norm depends on others"
        alone = [call.sums(tuple(r[i : i + 1] for r in call.rows), weights[i : i + 1]) for i in range(batch)]
        total = torch.stack(alone).sum(0)
        assert bool(((sums - total).abs() <= double * magnitudes).all()), "what an example adds depends on others"


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str, isa: str) -> None:
    for seed in range(FEW):
        verify(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_in_many_cases(name: str, isa: str) -> None:
    for seed in range(FEW, FEW + MANY):
        verify(name, seed)


def test_a_rounded_norm_and_a_crossed_sum_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = linear.linear_squared_norms
    monkeypatch.setattr(linear, "linear_squared_norms", lambda *a, **k: right(*a, **k) * (1 - 1e-6))
    with pytest.raises(AssertionError, match="below that of what it adds"):
        collections.deque((verify("linear", seed) for seed in range(FEW)), maxlen=0)
    monkeypatch.undo()
    sums = clip.weighted_row_sum
    monkeypatch.setattr(clip, "weighted_row_sum", lambda r, w: sums(r, w) * (1 - 1e-9 * (len(w) - 1)))
    with pytest.raises(AssertionError, match="what an example adds depends on others"):
        collections.deque((verify("stored rows", seed) for seed in range(FEW)), maxlen=0)
