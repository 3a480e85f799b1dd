"""Products with a matrix of parameters: what ``nn.Linear``, ``F.linear``, ``x @ w`` and Conv1D of transformers become.

The operand ``weight`` is the matrix [in, out] on the right of the product, or [out, in] where it stands on the left.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpkernels.layers.base import Record, Rule
from dpkernels.layers.ownership import Ownership
from dpkernels.ops.linear import linear_clipped_sums, linear_squared_norms


class LinearRule(Rule):
    """``x @ weight + bias`` on rows. Saves the input, [batch, positions, in]."""

    nodes: ClassVar[dict[str, dict[int, str]]] = {"Addmm": {0: "bias", 2: "weight"}, "Mm": {1: "weight"}}

    def serves(self, node: Any, shapes: dict[str, tuple[int, ...]], owner: Ownership) -> bool:
        scaled = hasattr(node, "_saved_alpha") and (node._saved_alpha != 1 or node._saved_beta != 1)
        return owner.dim == 0 and not scaled and len(shapes.get("bias", (0,))) == 1

    def record(
        self, node: Any, grads: Sequence[Tensor | None], shapes: dict[str, tuple[int, ...]], owner: Ownership
    ) -> Record:
        (g,) = grads
        assert g is not None
        g = owner.rows(g)
        if "weight" not in shapes:
            return Record(self, (g[..., :0],), g, frozenset(shapes))
        x = node._saved_mat1 if "Addmm" in node.name() else node._saved_self
        return Record(self, (owner.rows(x),), g, frozenset(shapes))

    def squared_norms(self, record: Record, operands: frozenset[str]) -> Tensor:
        (x,), g = record.saved, record.output_grad
        return linear_squared_norms(x, g, weight="weight" in operands, bias="bias" in operands)

    def clipped_sums(self, record: Record, weights: Tensor, operands: frozenset[str]) -> dict[str, Tensor]:
        (x,), g = record.saved, record.output_grad
        weight, bias = linear_clipped_sums(x, g, weights, weight="weight" in operands, bias="bias" in operands)
        return {operand: value for operand, value in (("weight", weight.mT), ("bias", bias)) if operand in operands}

    def gradients(self, record: Record, operand: str) -> Tensor:
        (x,), g = record.saved, record.output_grad
        return g.sum(1, dtype=torch.float64) if operand == "bias" else x.double().mT @ g.double()

    def joined(self, records: Sequence[Record], operand: str) -> Record | None:
        x, g = torch.cat([r.saved[0] for r in records], 1), torch.cat([r.output_grad for r in records], 1)
        return Record(self, (x,), g, frozenset({operand}))


class LeftLinearRule(LinearRule):
    """``weight @ x`` on columns: the same, turned round."""

    nodes: ClassVar[dict[str, dict[int, str]]] = {"Addmm": {1: "weight"}, "Mm": {0: "weight"}}

    def serves(self, node: Any, shapes: dict[str, tuple[int, ...]], owner: Ownership) -> bool:
        return owner.dim == 1 and getattr(node, "_saved_alpha", 1) == 1

    def record(
        self, node: Any, grads: Sequence[Tensor | None], shapes: dict[str, tuple[int, ...]], owner: Ownership
    ) -> Record:
        (g,) = grads
        assert g is not None
        rows = Ownership(owner.batch, 0, owner.outer, owner.inner)
        return Record(self, (rows.rows(node._saved_mat2.mT),), rows.rows(g.mT), frozenset(shapes))

    def clipped_sums(self, record: Record, weights: Tensor, operands: frozenset[str]) -> dict[str, Tensor]:
        return {"weight": super().clipped_sums(record, weights, operands)["weight"].mT}

    def gradients(self, record: Record, operand: str) -> Tensor:
        return super().gradients(record, operand).mT


class VectorRule(LinearRule):
    """``x @ weight`` with a vector: one output."""

    nodes: ClassVar[dict[str, dict[int, str]]] = {"Mv": {1: "weight"}}

    def record(
        self, node: Any, grads: Sequence[Tensor | None], shapes: dict[str, tuple[int, ...]], owner: Ownership
    ) -> Record:
        (g,) = grads
        assert g is not None
        return Record(self, (owner.rows(node._saved_self),), owner.rows(g).unsqueeze(-1), frozenset(shapes))

    def clipped_sums(self, record: Record, weights: Tensor, operands: frozenset[str]) -> dict[str, Tensor]:
        return {"weight": super().clipped_sums(record, weights, operands)["weight"].squeeze(1)}

    def gradients(self, record: Record, operand: str) -> Tensor:
        return super().gradients(record, operand).squeeze(2)
