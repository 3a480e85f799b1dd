"""How a parameter becomes an operand by being moved alone: views, transpositions, casts and slices.

A move takes gradients of its output back to gradients of its input. Entries only change places, so that norms stay;
what was left out by a slice has gradient 0. :class:`Picked` is the exception: it takes some entries out of a whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dpkernels.layers.embedding import signed

Shape = tuple[int, ...]


class Move:
    """One step from a parameter to an operand."""

    def pull(self, grads: Tensor, lead: int) -> Tensor:
        """Gradients of the input from those of the output, behind ``lead`` dimensions that both have."""
        raise NotImplementedError


@dataclass(frozen=True)
class Reshaped(Move):
    """A view of another shape."""

    shape: Shape

    def pull(self, grads: Tensor, lead: int) -> Tensor:
        return grads.reshape(grads.shape[:lead] + self.shape)


@dataclass(frozen=True)
class Permuted(Move):
    """Dimensions in another order: ``order`` puts them back."""

    order: Shape

    def pull(self, grads: Tensor, lead: int) -> Tensor:
        return grads.permute(*range(lead), *(d + lead for d in self.order))


@dataclass(frozen=True)
class Sliced(Move):
    """Entries ``start``, ``start + step``, ... of one dimension of ``shape``."""

    shape: Shape
    dim: int
    start: int
    step: int
    length: int
    drop: bool = False  # whether the dimension is gone

    def pull(self, grads: Tensor, lead: int) -> Tensor:
        if self.drop:
            grads = grads.unsqueeze(self.dim + lead)
        whole = grads.new_zeros(grads.shape[:lead] + self.shape)
        stop = self.start + self.step * (self.length - 1) + 1 if self.length else self.start
        where = [slice(None)] * (lead + self.dim) + [slice(self.start, stop, self.step)]
        whole[tuple(where)] = grads
        return whole

    def apart(self, other: Move) -> bool:
        """Whether another slice of the same shape shares no entry with this one."""
        if not isinstance(other, Sliced) or (self.shape, self.dim) != (other.shape, other.dim):
            return False
        mine = range(self.start, self.start + self.step * self.length, self.step)
        return not set(mine) & set(range(other.start, other.start + other.step * other.length, other.step))


@dataclass(frozen=True)
class Picked(Move):
    """A vector of parameters scattered into a larger one of constants."""

    index: Tensor = field(compare=False)

    def pull(self, grads: Tensor, lead: int) -> Tensor:
        return grads.flatten(lead).index_select(-1, self.index)


def move(node: Any, kind: str, output: int, shape: Shape) -> tuple[Move, ...] | None:
    """The moves that a node makes of an input of ``shape``, none where it leaves it as it is; None where it computes.

    Args:
        node: an autograd node with one differentiable input.
        kind: its name without "Backward0".
        output: which of its outputs.
        shape: of that input.
    """
    dims = len(shape)
    if kind in ("ToCopy", "Alias", "Clone", "Contiguous", "Detach"):
        return ()
    if kind in ("View", "UnsafeView", "ReshapeAlias", "Reshape", "Squeeze", "Unsqueeze"):
        return (Reshaped(shape),)
    if kind == "Expand":
        return (Reshaped(shape),) if math.prod(node._input_metadata[0].shape) == math.prod(shape) else None
    if kind == "T":
        return (Permuted((1, 0)),) if dims == 2 else ()
    if kind == "Transpose":
        order = list(range(dims))
        a, b = (signed(d) % dims for d in (node._saved_dim0, node._saved_dim1))
        order[a], order[b] = b, a
        return (Permuted(tuple(order)),)
    if kind == "Permute":
        places = [signed(d) % dims for d in node._saved_dims]
        return (Permuted(tuple(sorted(range(dims), key=places.__getitem__))),)
    if kind == "Slice":
        dim = signed(node._saved_dim) % dims
        end = node._saved_end
        where = range(shape[dim])[slice(node._saved_start, end if end is None else signed(end), node._saved_step)]
        return (Sliced(shape, dim, where.start, where.step, len(where)),)
    if kind == "Select":
        dim = signed(node._saved_dim) % dims
        return (Sliced(shape, dim, signed(node._saved_index) % shape[dim], 1, 1, drop=True),)
    if kind in ("Split", "UnsafeSplit"):
        dim, size = signed(node._saved_dim) % dims, node._saved_split_size
        return (Sliced(shape, dim, output * size, 1, min(size, shape[dim] - output * size)),)
    if kind in ("SplitWithSizes", "UnsafeSplitWithSizes"):
        dim, sizes = signed(node._saved_dim) % dims, node._saved_split_sizes
        return (Sliced(shape, dim, sum(sizes[:output]), 1, sizes[output]),)
    if kind == "Unbind":
        dim = signed(node._saved_dim) % dims
        return (Sliced(shape, dim, output, 1, 1, drop=True),)
    if kind == "Scatter" and node.next_functions[0][0] is None and dims == 1:
        return (Picked(node._saved_index),)
    return None


def pull(moves: tuple[Move, ...], grads: Tensor, lead: int) -> Tensor:
    """Gradients of the parameter from those of the operand that ``moves``, in the order of the forward, made of it."""
    for step in reversed(moves):
        grads = step.pull(grads, lead)
    return grads
