"""Normalization with a scale and an offset: group, instance and layer norm, and batch norm by public statistics.

Their per-example parameter gradients are as small as the parameters, and are stored.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from dpkernels.layers.base import STORED, Record, StoredRule
from dpkernels.layers.ownership import Ownership
from dpkernels.ops.norm import group_norm_backward, layer_norm_backward


class _AffineNorm(StoredRule):
    """``y = weight * xhat + bias``; subclasses say over what ``xhat`` is normalized."""

    @abstractmethod
    def _gradients(self, node: Any, g: Tensor, owner: Ownership) -> tuple[Tensor, Tensor]:
        """Of scale and offset, [batch, size] each."""

    def record(
        self, node: Any, grads: Sequence[Tensor | None], shapes: dict[str, tuple[int, ...]], owner: Ownership
    ) -> Record:
        g = grads[0]
        assert g is not None
        weight, bias = self._gradients(node, g, owner)
        both = {"weight": weight, "bias": bias}
        per_example = {operand: both[operand].reshape(owner.batch, *shape) for operand, shape in shapes.items()}
        return Record(STORED, (), weight.new_empty(owner.batch, 0), frozenset(shapes), per_example)


class ChannelNormRule(_AffineNorm):
    """Channels in dimension 1, statistics of each example."""

    nodes: ClassVar[dict[str, dict[int, str]]] = {"NativeGroupNorm": {1: "weight", 2: "bias"}}

    def serves(self, node: Any, shapes: dict[str, tuple[int, ...]], owner: Ownership) -> bool:
        return owner.dim == 0

    def _statistics(self, node: Any, x: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Mean and 1 / deviation, [rows, groups], and whether they are constants."""
        return node._saved_result1, node._saved_result2, False

    def _gradients(self, node: Any, g: Tensor, owner: Ownership) -> tuple[Tensor, Tensor]:
        x = node._saved_input
        mean, rstd, fixed = self._statistics(node, x)
        shape = (x.size(0), x.size(1), math.prod(x.shape[2:]))
        _, weight, bias = group_norm_backward(
            x.reshape(shape), g.reshape(shape), mean, rstd, None, fixed=fixed, input_grads=False
        )
        return (weight, bias) if owner.plain else (owner.rows(weight).sum(1), owner.rows(bias).sum(1))


class FixedNormRule(ChannelNormRule):
    """Batch norm by its running statistics: a scale and an offset for each channel."""

    nodes: ClassVar[dict[str, dict[int, str]]] = {"NativeBatchNorm": {1: "weight", 2: "bias"}}

    def serves(self, node: Any, shapes: dict[str, tuple[int, ...]], owner: Ownership) -> bool:
        return owner.dim == 0 and not node._saved_training

    def _statistics(self, node: Any, x: Tensor) -> tuple[Tensor, Tensor, bool]:
        mean, variance = node._saved_running_mean, node._saved_running_var
        rstd = (variance + node._saved_eps).rsqrt()
        return mean.expand(x.shape[:2]), rstd.expand(x.shape[:2]), True


class PositionNormRule(_AffineNorm):
    """Layer norm: the last dimensions of each position."""

    nodes: ClassVar[dict[str, dict[int, str]]] = {"NativeLayerNorm": {1: "weight", 2: "bias"}}

    def serves(self, node: Any, shapes: dict[str, tuple[int, ...]], owner: Ownership) -> bool:
        return owner.dim < node._saved_input.dim() - len(node._saved_normalized_shape)

    def _gradients(self, node: Any, g: Tensor, owner: Ownership) -> tuple[Tensor, Tensor]:
        features = math.prod(node._saved_normalized_shape)
        x, g = (owner.rows(t).reshape(owner.batch, -1, features) for t in (node._saved_input, g))
        mean, rstd = (owner.rows(t).reshape(owner.batch, -1) for t in (node._saved_result1, node._saved_result2))
        _, weight, bias = layer_norm_backward(x, g, mean, rstd, None, input_grads=False)
        return weight, bias
