"""Parameters that meet the batch entry by entry: biases, scales, class tokens, position embeddings, masks.

An example's gradient is its rows of the output's gradient, times what the parameter was multiplied with, summed over
the entries that the parameter was stretched to.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpkernels.layers.base import STORED, Record, StoredRule
from dpkernels.layers.ownership import Ownership

_Local = Callable[[Any, Tensor], Tensor]  # (node, output gradient) -> gradient of the stretched operand


def _scaled(node: Any, g: Tensor) -> Tensor:
    return g if node._saved_alpha == 1 else g * node._saved_alpha


#: For each node and input: the gradient of the operand before it is summed.
_LOCAL: dict[str, dict[int, _Local]] = {
    "Add": {0: lambda node, g: g, 1: _scaled},
    "Sub": {0: lambda node, g: g, 1: lambda node, g: -_scaled(node, g)},
    "Mul": {0: lambda node, g: g * node._saved_other, 1: lambda node, g: g * node._saved_self},
    "Div": {
        0: lambda node, g: g / node._saved_other,
        1: lambda node, g: -g * node._saved_self / node._saved_other.square(),
    },
    "Where": {
        0: lambda node, g: g.where(node._saved_condition, g.new_zeros(())),
        1: lambda node, g: g.where(~node._saved_condition, g.new_zeros(())),
    },
    "Addcmul": {
        0: lambda node, g: g,
        1: lambda node, g: g * node._saved_tensor2 * node._saved_value,
        2: lambda node, g: g * node._saved_tensor1 * node._saved_value,
    },
    "Expand": {0: lambda node, g: g},
    "Repeat": {0: lambda node, g: g},
    "PreluKernel": {1: lambda node, g: g * node._saved_self.clamp_max(0)},
}


class BroadcastRule(StoredRule):
    """Elementwise operations with an operand that has no batch dimension, or one of size 1."""

    nodes: ClassVar[dict[str, dict[int, str]]] = {
        kind: {position: f"operand {position}" for position in positions} for kind, positions in _LOCAL.items()
    }

    def serves(self, node: Any, shapes: dict[str, tuple[int, ...]], owner: Ownership) -> bool:
        whole = tuple(node._input_metadata[0].shape)
        dims = len(whole)
        if "Repeat" in node.name():  # the operand, once for each example
            (shape,) = shapes.values()
            one = shape if dims == len(shape) else (1, *shape)
            return owner == Ownership(owner.batch, 0, 1, one[0]) and whole == (owner.batch * one[0], *one[1:])
        return all(dims - len(s) > owner.dim or s[owner.dim - dims] == 1 for s in shapes.values())

    def record(
        self, node: Any, grads: Sequence[Tensor | None], shapes: dict[str, tuple[int, ...]], owner: Ownership
    ) -> Record:
        (g,) = grads
        assert g is not None
        local = _LOCAL[node.name().removesuffix("Backward0")]
        per_example = {}
        for operand, shape in shapes.items():
            full = local[int(operand.split()[1])](node, g)
            rows = owner.rows(full)
            if "Repeat" not in node.name():
                rows = _sum_to(rows, shape, owner.dim, g.dim())
            per_example[operand] = rows.reshape(owner.batch, *shape)
        return Record(STORED, (), g.new_empty(owner.batch, 0), frozenset(shapes), per_example)


def _sum_to(rows: Tensor, shape: tuple[int, ...], dim: int, dims: int) -> Tensor:
    """Sum [batch, rows, *dimensions but ``dim``] over the rows and what an operand of ``shape`` was stretched to."""
    sizes = (1,) * (dims - len(shape)) + tuple(shape)
    sizes = sizes[:dim] + sizes[dim + 1 :]
    over = [1] if rows.size(1) > 1 else []
    over += [i + 2 for i, size in enumerate(sizes) if size == 1 and rows.size(i + 2) != 1]
    half = rows.dtype in (torch.float16, torch.bfloat16)
    return rows.sum(over, dtype=torch.float32 if half else None) if over else rows
