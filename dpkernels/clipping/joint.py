"""Parameters that are used several times: the norm of a sum of gradients.

Uses of one kind are joined along positions, a table that is embedding and output layer at once has a cross term, and
slices of a parameter that share no entry stand for themselves. Anything else adds the gradients of some examples at a
time, for the norm and once more for the clipped sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor

from dpkernels.layers import Record
from dpkernels.layers.embedding import EmbeddingRule
from dpkernels.layers.linear import LinearRule
from dpkernels.layers.moves import Move, Permuted, Sliced, pull
from dpkernels.ops.clip import row_squared_norms, weighted_row_sum

_MOST_VALUES = 2**24  # of stored gradients at a time


class Part(NamedTuple):
    """One use of a parameter."""

    record: Record
    operand: str
    moves: tuple[Move, ...]


def join(parts: list[Part]) -> list[Part]:
    """The uses of a parameter, of one kind as one where that is possible: its norm is of the very numbers that its sum
    adds."""
    alike: dict[tuple[int, str, tuple[Move, ...]], list[Part]] = {}
    for part in parts:
        alike.setdefault((id(part.record.rule), part.operand, part.moves), []).append(part)
    joined: list[Part] = []
    for first, *others in alike.values():
        records = [first.record, *(part.record for part in others)]
        one = first.record.rule.joined(records, first.operand) if others else None
        joined += [first, *others] if one is None else [first._replace(record=one)]
    return joined


def squared_norms(parts: list[Part], batch: int) -> Tensor:
    """float64 [batch]: squared norms of the sums over the uses, never below those of what :func:`clipped_sum` adds."""
    if _apart(parts):
        return torch.stack([p.record.rule.squared_norms(p.record, frozenset({p.operand})) for p in parts]).sum(0)
    if (pair := _tied(parts)) is not None:
        return _tied_norms(*pair)
    return torch.cat([row_squared_norms(total.reshape(len(total), -1)) for _, total in _totals(parts, batch)])


def clipped_sum(parts: list[Part], factors: Tensor) -> Tensor:
    """float64 in the parameter's shape."""
    if _apart(parts) or _tied(parts) is not None:
        sums = [
            pull(p.moves, p.record.rule.clipped_sums(p.record, factors, frozenset({p.operand}))[p.operand], 0)
            for p in parts
        ]
        return torch.stack(sums).sum(0)
    sums = []
    for start, gradients in _totals(parts, len(factors)):
        rows = gradients.reshape(len(gradients), -1)
        sums.append(weighted_row_sum(rows, factors[start : start + len(rows)]).view(gradients.shape[1:]))
    return torch.stack(sums).sum(0)


def _apart(parts: list[Part]) -> bool:
    """Whether there is one use, or slices of the parameter that share no entry."""
    first = [p.moves[0] if p.moves else None for p in parts]
    return all(isinstance(a, Sliced) and b is not None and a.apart(b) for a, b in combinations(first, 2))


def _tied(parts: list[Part]) -> tuple[Record, Record] | None:
    """The output layer and the embedding that share a table [rows, features], one use each."""
    if len(parts) != 2:
        return None
    by_rule = {type(p.record.rule): p for p in parts}
    linear, embedding = by_rule.get(LinearRule), by_rule.get(EmbeddingRule)
    if linear is None or embedding is None or embedding.moves or linear.operand != "weight":
        return None
    return (linear.record, embedding.record) if linear.moves == (Permuted((1, 0)),) else None


def _tied_norms(linear: Record, embedding: Record) -> Tensor:
    """``||L||^2 + ||E||^2 + 2 <L, E>`` with ``<L, E> = sum_ts g_t[v_s] (a_t . e_s)`` in float64.

    The clipped sum of L may round by ``||dL|| <= eps S``, S = sum_t ||a_t|| ||g_t||, which its own norm covers as far
    as L alone goes; what is added covers ``2 ||dL|| ||E||``.
    """
    (a,), g = linear.saved, linear.output_grad
    (indices,), e = embedding.saved, embedding.output_grad
    padding = embedding.settings["padding_idx"]
    e = e.double() if padding is None else e.double().masked_fill((indices == padding).unsqueeze(-1), 0)
    picked = g.gather(2, indices.unsqueeze(1).expand(-1, g.size(1), -1)).double()
    cross = (picked * (a.double() @ e.mT)).sum((1, 2))
    size = (a.double().norm(dim=2) * g.double().norm(dim=2)).sum(1) * e.norm(dim=2).sum(1)
    eps = torch.finfo(torch.float32 if g.dtype != torch.float64 else torch.float64).eps
    alone = linear.rule.squared_norms(linear, frozenset({"weight"}))
    alone = alone + embedding.rule.squared_norms(embedding, frozenset({"weight"}))
    return (alone + 2 * cross).clamp_min(0) + (2 * (min(g.size(1), 128) + 3) * eps + 1e-12) * size


def _totals(parts: list[Part], batch: int) -> Iterator[tuple[int, Tensor]]:
    """Sums over the uses of the gradients of some examples at a time: (first example, [examples, *parameter])."""
    step = 1
    start = 0
    while start < batch:
        stop = min(batch, start + step)
        total: Tensor | None = None
        for p in parts:
            record = p.record.examples(start, stop)
            own = pull(p.moves, record.rule.gradients(record, p.operand).double(), 1)
            total = own if total is None else total + own
        assert total is not None
        yield start, total
        start = stop
        step = max(1, _MOST_VALUES // max(1, total[0].numel()))
