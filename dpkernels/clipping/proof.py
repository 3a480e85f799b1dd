"""Proves which rows of a gradient belong to which example, by a backward in which every example is weighted otherwise.

Clipping an example needs its gradient alone. That a tensor's rows belong to single examples does not follow from its
size: as many positions as examples, rows merged with time first, rows sorted, or statistics of the batch look alike.
So example i's loss is multiplied by a signed power of two, drawn at random. A row that belongs to example i alone
then is exactly that multiple of itself, since every operation of a backward is linear in its gradient and
multiplication by a power of two commutes with rounding, overflow and underflow apart. A row that others' losses
reach, too, is not: equality to the bit is asked for. Entries so small that they may have lost bits by underflow, and
non-finite ones, say nothing and are passed over. float16 alone is allowed its last two places.

A gradient that is zero says nothing either. A use of a parameter is *settled* once rows of two examples with different
weights were seen and one way to own them is left; until then every step with a gradient is proved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpkernels.clipping.graph import VIEWS, Graph, Use, kind_of, shape_of
from dpkernels.layers import Ownership
from dpkernels.layers.ownership import candidates

Root = tuple[Any, Tensor, Ownership]  # (edge, gradient there, whose its rows are)

#: Exponents e_i lie in a range of so many around 0, and where something may have vanished below the range of numbers
#: everything is looked at again this many powers of two higher. float16 has few.
_EXPONENTS, _HIGHER = 20, 60
_EXPONENTS_HALF, _HIGHER_HALF = 4, 8
#: What float16 may lose, relative to a value: it has so small a range that something underflows in most backwards.
_LAST_PLACES = 2.0**-9

#: How often it is looked, with other weights, where gradients fit several owners.
_LOOKS = 4

_Pair = tuple[Tensor | None, Tensor | None]  # an output's gradient, and the one of weighted losses


def prove(graph: Graph, uses: Sequence[Use], roots: Sequence[Root], batch: int, look: int = 0) -> list[Use]:
    """Narrow down whose the rows of each use's output gradient are, and mark what is settled.

    The graph is kept. Fills ``use.owners``. Another ``look`` gives the examples other weights.

    Returns:
        The uses of which no dimension belongs to single examples.
    """
    failed = _look(graph, uses, roots, batch, _LOOKS * look)
    for again in range(1, _LOOKS):
        unsure = [use for use in uses if use.ambiguous and use not in failed]
        if not unsure:
            break
        if again == 1:  # the view that takes merged rows apart may tell
            for use, view in _views(graph, unsure):
                if view not in _look(graph, [view], roots, batch, _LOOKS * look):
                    _take_over(graph, use, view)
        else:  # examples may have shared a weight
            failed += _look(graph, unsure, roots, batch, _LOOKS * look + again)
    return failed


def _look(graph: Graph, uses: Sequence[Use], roots: Sequence[Root], batch: int, seed: int) -> list[Use]:
    half = any(m.dtype == torch.float16 for node in graph.nodes for m in getattr(node, "_input_metadata", ()))
    count, higher = (_EXPONENTS_HALF, _HIGHER_HALF) if half else (_EXPONENTS, _HIGHER)
    random = torch.Generator().manual_seed(1000 * seed + batch)  # the user's stream of random numbers stays as it is
    exponents = torch.randperm(batch, generator=random) % count - count // 2
    signs = torch.randint(0, 2, (batch,), generator=random, dtype=torch.float64) * 2 - 1
    weights = torch.ldexp(signs, exponents)
    seen = _pairs(graph, uses, roots, weights, 0)
    counted = _finite(roots, batch)
    failed = [use for use, pairs in zip(uses, seen, strict=True) if not _narrow(use, [pairs], weights, counted, half)]
    if failed:
        first = [pairs for use, pairs in zip(uses, seen, strict=True) if use in failed]
        again = _pairs(graph, failed, roots, weights, higher)
        failed = [
            use
            for use, *pairs in zip(failed, first, again, strict=True)
            if not _narrow(use, pairs, weights, counted, half)
        ]
    return failed


def _views(graph: Graph, uses: Sequence[Use]) -> Iterator[tuple[Use, Use]]:
    """Uses that put out merged rows, each with the view that takes these apart."""
    by_node = {use.node: use for use in uses if use.outputs == 1}
    for number, below in enumerate(graph.children):
        use = by_node.get(below[0][0]) if len(below) == 1 else None
        if use is not None and kind_of(graph.nodes[number]) in VIEWS:
            yield use, Use(number, "View", None, (), 1, False)


def _take_over(graph: Graph, use: Use, view: Use) -> None:
    """Keep those owners of a use that agree with the owners of its view."""
    shape, (rows, *_) = shape_of(graph.nodes[view.node]), shape_of(graph.nodes[use.node])
    merged = next((k for k in range(len(shape) + 1) if math.prod(shape[:k]) == rows), 0)
    found = [
        Ownership(o.batch, 0, math.prod(shape[: o.dim]) * o.outer, o.inner * math.prod(shape[o.dim + 1 : merged]))
        for o in view.owners[0]
        if o.dim < merged
    ]
    if left := [o for o in use.owners[0] if o in found]:
        use.owners, use.settled, use.ambiguous = [left], view.settled and len(left) == 1, len(left) > 1


def assume_usual(graph: Graph, uses: Sequence[Use], batch: int) -> None:
    """Fill ``use.owners`` with the likeliest for each output."""
    for use in uses:
        shapes = [tuple(m.shape) for m in graph.nodes[use.node]._input_metadata]
        use.owners = [list(candidates(shape, batch))[:1] for shape in shapes]


def _pairs(
    graph: Graph, uses: Sequence[Use], roots: Sequence[Root], weights: Tensor, exponent: int
) -> list[list[_Pair]]:
    """For each use, its outputs' gradients of losses that are all multiplied by 2^exponent."""
    edges = [GradientEdge(graph.nodes[use.node], output) for use in uses for output in range(use.outputs)]
    starts = [torch.ldexp(g, torch.tensor(exponent, device=g.device)).to(g.dtype) for _, g, _ in roots]
    plain = _gradients(roots, edges, starts)
    tagged = [g * owner.column(weights.to(g), g.dim()) for g, (_, _, owner) in zip(starts, roots, strict=True)]
    both = iter(zip(plain, _gradients(roots, edges, tagged), strict=True))
    return [[next(both) for _ in range(use.outputs)] for use in uses]


def _gradients(roots: Sequence[Root], edges: list[Any], grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad([edge for edge, _, _ in roots], edges, grads, retain_graph=True, allow_unused=True)


def _finite(roots: Sequence[Root], batch: int) -> Tensor:
    """Which examples start with finite gradients. Others are in no sum, and their gradients may be anything."""
    counted = torch.ones(batch, dtype=torch.bool)
    for _, g, owner in roots:
        counted &= owner.rows(g).isfinite().flatten(1).all(1).cpu()
    return counted


def _narrow(use: Use, looks: Sequence[list[_Pair]], weights: Tensor, counted: Tensor, half: bool) -> bool:
    """Drop the owners of a use that its gradients contradict in every look; whether every output has one left."""
    batch = len(weights)
    owners = [list(known) for known in use.owners] or [[] for _ in range(use.outputs)]
    settled, ambiguous = batch > 1 and bool(counted.all()), False
    for output in range(use.outputs):
        pairs = [(g, h) for look in looks for g, h in [look[output]] if g is not None and h is not None]
        if not pairs:
            continue
        g, _ = pairs[0]
        shape = tuple(g.shape)
        left = [resized for owner in owners[output] if (resized := owner.resized(shape, batch)) is not None]
        left = [o for o in left or candidates(shape, batch) if _agrees(o, pairs, weights, counted, half)]
        owners[output] = left
        if not left:
            return False
        rows = left[0].rows(g).flatten(1)
        seen = rows.ne(0).any(1).cpu()
        settled &= len(left) == 1 and len(weights[seen].unique()) > 1
        ambiguous |= len(left) > 1 and bool(seen.any())
    use.owners, use.settled, use.ambiguous = owners, settled, ambiguous
    return True


def _agrees(
    owner: Ownership, pairs: Sequence[tuple[Tensor, Tensor]], weights: Tensor, counted: Tensor, half: bool
) -> bool:
    """Whether each value of ``h`` is that of ``g`` times the weight of its example, in one look at least."""
    wrong: Tensor | None = None
    for g, h in pairs:
        expected = g * owner.column(weights.to(g), g.dim())
        telling = torch.finfo(torch.float16 if half else g.dtype).tiny * float(
            weights.abs().max() / weights.abs().min()
        )
        differs = (expected != h) if not half else (expected - h).abs() > _LAST_PLACES * h.abs()
        differs &= expected.isfinite() & h.isfinite()
        differs &= (expected.abs() > telling) | (h.abs() > telling)
        if wrong is not None:  # right in this look counts only where it could have been wrong
            differs = wrong & (differs | ~(expected.isfinite() & h.isfinite()))
        wrong = differs
    assert wrong is not None
    if not bool(counted.all()):
        wrong = wrong & owner.column(counted.to(wrong.device), wrong.dim())
    return not bool(wrong.any())
