"""Rows of a table that indices pick: ``nn.Embedding``, ``F.embedding`` and bags of one example each."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpkernels.layers.base import Record, Rule
from dpkernels.layers.ownership import Ownership
from dpkernels.ops.embedding import (
    embedding_bag_clipped_sums,
    embedding_bag_squared_norms,
    embedding_clipped_sums,
    embedding_squared_norms,
)


class EmbeddingRule(Rule):
    """Saves the indices, [batch, positions]."""

    nodes: ClassVar[dict[str, dict[int, str]]] = {"Embedding": {0: "weight"}}

    def serves(self, node: Any, shapes: dict[str, tuple[int, ...]], owner: Ownership) -> bool:
        return owner.dim < node._saved_indices.dim() and not node._saved_scale_grad_by_freq

    def record(
        self, node: Any, grads: Sequence[Tensor | None], shapes: dict[str, tuple[int, ...]], owner: Ownership
    ) -> Record:
        (g,) = grads
        assert g is not None
        indices = owner.rows(node._saved_indices).reshape(owner.batch, -1)
        return self.lookup(indices, owner.rows(g), shapes["weight"][0], signed(node._saved_padding_idx))

    def lookup(self, indices: Tensor, g: Tensor, rows: int, padding_idx: int) -> Record:
        """The record of positions [batch, positions] of a table with ``rows`` rows, negative for no padding."""
        settings = {"rows": rows, "padding_idx": None if padding_idx < 0 else padding_idx}
        return Record(self, (indices,), g.reshape(*indices.shape, -1), frozenset({"weight"}), settings=settings)

    def squared_norms(self, record: Record, operands: frozenset[str]) -> Tensor:
        (indices,) = record.saved
        return embedding_squared_norms(indices, record.output_grad, padding_idx=record.settings["padding_idx"])

    def clipped_sums(self, record: Record, weights: Tensor, operands: frozenset[str]) -> dict[str, Tensor]:
        (indices,) = record.saved
        padding_idx, rows = record.settings["padding_idx"], record.settings["rows"]
        sums = embedding_clipped_sums(
            indices, record.output_grad, weights, num_embeddings=rows, padding_idx=padding_idx
        )
        return {"weight": sums}

    def gradients(self, record: Record, operand: str) -> Tensor:
        (indices,), g = record.saved, record.output_grad
        padding_idx = record.settings["padding_idx"]
        if padding_idx is not None:
            g = g.masked_fill((indices == padding_idx).unsqueeze(-1), 0)
        total = torch.zeros(len(g), record.settings["rows"], g.size(-1), dtype=torch.float64, device=g.device)
        return total.scatter_add_(1, indices.unsqueeze(-1).expand_as(g), g.double())

    def joined(self, records: Sequence[Record], operand: str) -> Record | None:
        first = records[0].settings
        if any(record.settings != first for record in records):
            return None
        indices, g = (
            torch.cat(parts, 1) for parts in zip(*((r.saved[0], r.output_grad) for r in records), strict=True)
        )
        return Record(self, (indices,), g, frozenset({operand}), settings=first)


class EmbeddingBagRule(Rule):
    """Bags of one size, a bag for each example. Saves (indices,) or (indices, per_sample_weights)."""

    nodes: ClassVar[dict[str, dict[int, str]]] = {"EmbeddingBag": {0: "weight"}}

    def serves(self, node: Any, shapes: dict[str, tuple[int, ...]], owner: Ownership) -> bool:
        indices, offsets = node._saved_indices, node._saved_offsets
        if not owner.plain or node._saved_mode > 1 or node._saved_scale_grad_by_freq or indices.numel() % owner.batch:
            return False
        each = indices.numel() // owner.batch
        return indices.dim() == 1 and bool((offsets[: owner.batch].diff() == each).all()) and int(offsets[0]) == 0

    def record(
        self, node: Any, grads: Sequence[Tensor | None], shapes: dict[str, tuple[int, ...]], owner: Ownership
    ) -> Record:
        g, scales = grads[0], node._saved_per_sample_weights
        assert g is not None
        padding_idx = signed(node._saved_padding_idx)
        saved = tuple(t.view(owner.batch, -1) for t in (node._saved_indices, scales) if t is not None)
        mode = ("sum", "mean")[node._saved_mode]
        settings = {"mode": mode, "padding_idx": None if padding_idx < 0 else padding_idx, "rows": shapes["weight"][0]}
        return Record(self, saved, g, frozenset(shapes), settings=settings)

    def squared_norms(self, record: Record, operands: frozenset[str]) -> Tensor:
        return embedding_bag_squared_norms(record.saved[0], record.output_grad, **self._options(record))

    def clipped_sums(self, record: Record, weights: Tensor, operands: frozenset[str]) -> dict[str, Tensor]:
        rows, indices = record.settings["rows"], record.saved[0]
        options = self._options(record)
        return {
            "weight": embedding_bag_clipped_sums(indices, record.output_grad, weights, num_embeddings=rows, **options)
        }

    def gradients(self, record: Record, operand: str) -> Tensor:
        batch = record.output_grad.size(0)
        weights = torch.ones(1, dtype=torch.float64, device=record.output_grad.device)
        one = (record.examples(i, i + 1) for i in range(batch))
        return torch.stack([self.clipped_sums(r, weights, frozenset({operand}))[operand] for r in one])

    def _options(self, record: Record) -> dict[str, Any]:
        scales = record.saved[1] if len(record.saved) == 2 else None
        settings = record.settings
        return {"mode": settings["mode"], "per_sample_weights": scales, "padding_idx": settings["padding_idx"]}


def signed(value: int) -> int:
    """An integer that autograd shows unsigned."""
    return (value + 2**63) % 2**64 - 2**63
