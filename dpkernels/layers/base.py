"""What an operation of autograd's graph adds to per-example gradients: the interface that every rule implements.

A parameter enters a graph as an *operand* of a node: directly, or moved and computed from by nodes that depend on
parameters alone. When the backward reaches that node, a :class:`Record` takes what the operand's per-example gradients
are made of, and the node's rule turns records into squared norms and clipped sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dpkernels.layers.ownership import Ownership
from dpkernels.ops.clip import row_squared_norms, weighted_row_sum


@dataclass
class Record:
    """One backward through one operation. Every tensor has the batch first.

    Attributes:
        rule: what computes with it.
        saved: what the operation kept of its forward.
        output_grad: gradient of the summed losses with respect to the output; may be expanded (strides 0).
        operands: what it is about.
        per_example: operand -> its gradients [batch, *operand], where the rule stores them.
        settings: of the operation, such as a convolution's stride.
    """

    rule: Rule
    saved: tuple[Tensor, ...]
    output_grad: Tensor
    operands: frozenset[str]
    per_example: dict[str, Tensor] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def examples(self, start: int, stop: int) -> Record:
        """The record of some of the examples."""
        some = slice(start, stop)
        return replace(
            self,
            saved=tuple(t[some] for t in self.saved),
            output_grad=self.output_grad[some],
            per_example={operand: t[some] for operand, t in self.per_example.items()},
        )


class Rule(ABC):
    """How one kind of operation is clipped. A rule has no state: what it needs of a call is in its records.

    Attributes:
        nodes: autograd nodes that it serves, by name without "Backward0", and their operands: the name of each by its
            position among the node's inputs.
    """

    nodes: ClassVar[dict[str, dict[int, str]]] = {}

    def owner(self, owners: Sequence[Ownership | None], grads: Sequence[Tensor | None]) -> Ownership | None:
        """Whose the rows are, of those of the node's outputs; None where the rule takes no such gradients."""
        return owners[0] if grads[0] is not None else None

    def serves(self, node: Any, shapes: dict[str, tuple[int, ...]], owner: Ownership) -> bool:
        """Whether :meth:`record` can be called; else the node's own backward runs for each example.

        Args:
            node: the autograd node, whose saved tensors can be read.
            shapes: of the operands that trainable parameters flow into.
            owner: whose the rows of its first output are.
        """
        return True

    @abstractmethod
    def record(
        self, node: Any, grads: Sequence[Tensor | None], shapes: dict[str, tuple[int, ...]], owner: Ownership
    ) -> Record:
        """What the per-example gradients of the operands are made of. ``grads`` are those of the node's outputs."""

    @abstractmethod
    def squared_norms(self, record: Record, operands: frozenset[str]) -> Tensor:
        """float64 [batch]: squared norm of each example's gradient over ``operands``, never below that of what
        :meth:`clipped_sums` adds. May store gradients in the record, and drop what they were made of."""

    @abstractmethod
    def clipped_sums(self, record: Record, weights: Tensor, operands: frozenset[str]) -> dict[str, Tensor]:
        """float64 sums over examples of weight times gradient, in the operands' shapes; weight 0 skips the example."""

    @abstractmethod
    def gradients(self, record: Record, operand: str) -> Tensor:
        """Each example's gradient of one operand, [batch, *operand]."""

    def joined(self, records: Sequence[Record], operand: str) -> Record | None:
        """One record whose gradient of ``operand`` is the sum of theirs; None where there is no such record."""
        return None


class StoredRule(Rule):
    """Gradients of each example that are stored, in whatever way they came about."""

    def record(
        self, node: Any, grads: Sequence[Tensor | None], shapes: dict[str, tuple[int, ...]], owner: Ownership
    ) -> Record:
        raise NotImplementedError("stored gradients come from other rules")

    def squared_norms(self, record: Record, operands: frozenset[str]) -> Tensor:
        norms = [row_squared_norms(_rows(record.per_example[operand])) for operand in sorted(operands)]
        return norms[0] if len(norms) == 1 else torch.stack(norms).sum(0)

    def clipped_sums(self, record: Record, weights: Tensor, operands: frozenset[str]) -> dict[str, Tensor]:
        stored = record.per_example
        return {o: weighted_row_sum(_rows(stored[o]), weights).view(stored[o].shape[1:]) for o in sorted(operands)}

    def gradients(self, record: Record, operand: str) -> Tensor:
        return record.per_example[operand]

    def joined(self, records: Sequence[Record], operand: str) -> Record | None:
        return stored(operand, torch.stack([r.per_example[operand].double() for r in records]).sum(0))


def _rows(gradients: Tensor) -> Tensor:
    return gradients.reshape(gradients.size(0), -1)


STORED = StoredRule()


def stored(operand: str, gradients: Tensor) -> Record:
    """A record of the gradients [batch, *operand] themselves."""
    return Record(STORED, (), gradients.new_empty(gradients.size(0), 0), frozenset({operand}), {operand: gradients})
