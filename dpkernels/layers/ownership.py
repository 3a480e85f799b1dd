"""Which rows of a tensor belong to which example.

In most tensors of a model the first dimension is the batch. Elsewhere it is another one, or part of one: an ordinary
linear layer multiplies [batch * positions, features], attention that takes time first [positions * batch, features],
and windows of an image lie in [batch * windows, ...].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ownership:
    """Rows of dimension ``dim`` belong to examples: it is ``outer`` times the batch times ``inner`` long.

    Example i has the rows whose index is ``(k * batch + i) * inner + j``, with k below ``outer`` and j below ``inner``.
    """

    batch: int
    dim: int = 0
    outer: int = 1
    inner: int = 1

    @property
    def plain(self) -> bool:
        """Whether the first dimension is the batch."""
        return self.dim == 0 and self.outer == 1 and self.inner == 1

    def first(self, tensor: Tensor) -> Tensor:
        """The tensor as [batch, outer, inner, *other dimensions], without ``outer`` and ``inner`` where it is plain."""
        if self.plain:
            return tensor
        parts = tensor.unflatten(self.dim, (self.outer, self.batch, self.inner))
        return parts.movedim((self.dim + 1, self.dim, self.dim + 2), (0, 1, 2))

    def rows(self, tensor: Tensor) -> Tensor:
        """The tensor as [batch, rows, *other dimensions]: the dimension's rows of each example."""
        if self.plain:
            return tensor.unsqueeze(1)
        if self.outer == 1 and self.dim == 0:
            return tensor.unflatten(0, (self.batch, self.inner))
        return self.first(tensor).flatten(1, 2)

    def column(self, values: Tensor, dims: int) -> Tensor:
        """Values [batch] laid out to be multiplied with a tensor of ``dims`` dimensions."""
        shape = [1] * dims
        shape[self.dim] = self.outer * self.batch * self.inner
        return values.repeat_interleave(self.inner).repeat(self.outer).view(shape)

    def of(self, example: int, tensor: Tensor) -> Tensor:
        """The tensor with the rows of other examples set to zero."""
        only = torch.zeros(self.batch, dtype=torch.bool, device=tensor.device)
        only[example] = True
        return tensor.where(self.column(only, tensor.dim()), tensor.new_zeros(()))

    def resized(self, shape: tuple[int, ...], batch: int) -> Ownership | None:
        """The same for a tensor of another batch; None where its shape does not fit.

        Of ``outer`` and ``inner`` at most one can differ, since the shape tells their product alone.
        """
        if self.dim >= len(shape) or shape[self.dim] % batch:
            return None
        each = shape[self.dim] // batch
        if self.inner == 1:
            return Ownership(batch, self.dim, each, 1)
        if self.outer == 1:
            return Ownership(batch, self.dim, 1, each)
        return Ownership(batch, self.dim, self.outer, each // self.outer) if each % self.outer == 0 else None


def candidates(shape: tuple[int, ...], batch: int) -> Iterator[Ownership]:
    """Every way in which rows of a tensor may belong to examples, the usual ones first."""
    for dim, size in enumerate(shape):
        each, rest = divmod(size, batch)
        if rest or not each:
            continue
        yield Ownership(batch, dim, 1, each)
        for outer in range(2, each + 1):
            if each % outer == 0:
                yield Ownership(batch, dim, outer, each // outer)
