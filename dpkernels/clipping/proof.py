"""Proves which rows of a gradient belong to which example, by a backward in which every example is weighted otherwise.

Clipping an example needs its gradient alone. That a tensor's rows belong to single examples does not follow from its
size: as many positions as examples, rows merged with time first, rows sorted, or statistics of the batch look alike.
So example i's loss is multiplied by 2^e_i, e_i random. A row that belongs to example i alone then is exactly 2^e_i times
itself, since every operation of a backward is linear in its gradient and multiplication by a power of two commutes with
rounding, overflow and underflow apart. A row that others' losses reach, too, is not: equality to the bit is asked for.
Entries so small that they may have lost bits by underflow, and non-finite ones, say nothing and are passed over.

A gradient that is zero says nothing either. A use of a parameter is *settled* once rows of two examples with different
weights were seen and one way to own them is left; until then every step with a gradient is proved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpkernels.clipping.graph import Graph, Use
from dpkernels.layers import Ownership
from dpkernels.layers.ownership import candidates

Root = tuple[Any, Tensor, Ownership]  # (edge, gradient there, whose its rows are)

#: Exponents are below this; float16 has few.
_EXPONENTS = {torch.float16: 4}
_MOST_EXPONENTS = 20


def prove(graph: Graph, uses: Sequence[Use], roots: Sequence[Root], batch: int) -> list[Use]:
    """Narrow down whose the rows of each use's output gradient are, and mark what is settled.

    The graph is kept. Fills ``use.owners``.

    Returns:
        The uses of which no dimension belongs to single examples.
    """
    least = min((_EXPONENTS.get(g.dtype, _MOST_EXPONENTS) for _, g, _ in roots), default=_MOST_EXPONENTS)
    random = torch.Generator().manual_seed(batch)  # the user's stream of random numbers stays as it is
    exponents = torch.randperm(batch, generator=random) % least
    weights = torch.ldexp(torch.ones(batch, dtype=torch.float64), exponents)
    edges = [GradientEdge(graph.nodes[use.node], output) for use in uses for output in range(use.outputs)]
    plain = _gradients(roots, edges, [g for _, g, _ in roots])
    weighted = _gradients(roots, edges, [g * owner.column(weights.to(g), g.dim()) for _, g, owner in roots])
    failed, position = [], 0
    for use in uses:
        pairs = [(g, h) for g, h in zip(plain[position:], weighted[position:], strict=True)][: use.outputs]
        position += use.outputs
        if not _narrow(use, pairs, weights, batch):
            failed.append(use)
    return failed


def _gradients(roots: Sequence[Root], edges: list[Any], grads: list[Tensor]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad([edge for edge, _, _ in roots], edges, grads, retain_graph=True, allow_unused=True)


def _narrow(use: Use, pairs: list[tuple[Tensor | None, Tensor | None]], weights: Tensor, batch: int) -> bool:
    """Drop the owners of a use that its gradients contradict; whether every output has one left."""
    owners = use.owners or [[] for _ in pairs]
    settled = batch > 1
    for output, (g, h) in enumerate(pairs):
        if g is None or h is None:
            continue
        shape = tuple(g.shape)
        left = [resized for owner in owners[output] if (resized := owner.resized(shape, batch)) is not None]
        left = [o for o in left or candidates(shape, batch) if _agrees(o, g, h, weights)]
        owners[output] = left
        if not left:
            return False
        seen = left[0].rows(g).flatten(1).ne(0).any(1).cpu()
        settled &= len(left) == 1 and len(weights[seen].unique()) > 1
    use.owners, use.settled = owners, settled
    return True


def _agrees(owner: Ownership, g: Tensor, h: Tensor, weights: Tensor) -> bool:
    """Whether every row of ``h`` is that of ``g`` times the weight of the example that owns it."""
    expected = g * owner.column(weights.to(g), g.dim())
    telling = torch.finfo(g.dtype).tiny * float(weights.max())
    differs = (expected != h) & expected.isfinite() & h.isfinite()
    differs &= (expected.abs() > telling) | (h.abs() > telling)
    return not bool(differs.any())
