"""Convolutions and linear layers of which only selected weights are trained, and their rules.

The trainable parameter of :class:`SparseConv2d` and :class:`SparseLinear` is the vector of the selected weights: norms,
clipping, noise and the update are of these numbers alone, whatever the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dpkernels.layers.base import Record, Rule
from dpkernels.layers.conv import ConvRule
from dpkernels.layers.linear import LinearRule
from dpkernels.layers.ownership import Ownership
from dpkernels.ops.clip import row_squared_norms, weighted_row_sum
from dpkernels.ops.conv import conv_clipped_sums, conv_squared_norms
from dpkernels.ops.sparse import sparse_gradients

#: Gradients of all selected weights are stored where an example has no more of them than this, or than so many times
#: the values of its input and output gradient.
_SMALL, _TIMES_OPERANDS = 4096, 4


class _Sparse(nn.Module):
    """What the modules share."""

    dense_type: ClassVar[type[nn.Conv2d | nn.Linear]]
    base: Tensor
    index: Tensor

    def __init__(self, module: nn.Conv2d | nn.Linear, mask: Tensor) -> None:
        if type(module) is not self.dense_type:
            raise TypeError(f"module must be an nn.{self.dense_type.__name__}, got {type(module).__name__}")
        _require_free(module)
        dense = module.weight.detach()
        if not isinstance(mask, Tensor):
            raise TypeError(f"mask must be a tensor, got {type(mask).__name__}")
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be bool, got {mask.dtype}")
        if mask.shape != dense.shape:
            raise ValueError(f"mask must have the weight's shape {tuple(dense.shape)}, got {tuple(mask.shape)}")
        nn.Module.__init__(self)
        _take_settings(self, module)
        self.register_buffer("base", dense.clone(memory_format=torch.contiguous_format))
        self.register_buffer("index", mask.flatten().nonzero().squeeze(1).to(dense.device))
        self.values = nn.Parameter(self.base.flatten()[self.index])
        self.bias = module.bias

    @property
    def weight(self) -> Tensor:
        """The dense weight, with the selected entries as they are now. Gradients flow into ``values``."""
        return self.base.flatten().scatter(0, self.index, self.values).view(self.base.shape)

    def dense(self) -> nn.Conv2d | nn.Linear:
        """A dense module with the weights as they are now, and the same bias.

        Raises:
            ValueError: this module has hooks, which the dense one would not have.
        """
        _require_free(self)
        module = self.dense_type.__new__(self.dense_type)
        nn.Module.__init__(module)
        _take_settings(module, self)
        module.weight = nn.Parameter(self.weight.detach())
        module.bias = self.bias
        return module

    def extra_repr(self) -> str:
        """The dense module's, and how many weights are selected."""
        return f"{super().extra_repr()}, selected={self.index.numel()} of {self.base.numel()}"


def _require_free(module: nn.Module) -> None:
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        raise ValueError("module must have no hooks and no forward of its own: remove them first")


def _take_settings(module: nn.Module, other: nn.Module) -> None:
    """Everything but parameters, buffers, children and hooks."""
    own = set(vars(module)) - {"training"}
    vars(module).update({name: value for name, value in vars(other).items() if name not in own})


class SparseConv2d(_Sparse, nn.Conv2d):  # type: ignore[override]
    """An ``nn.Conv2d`` whose selected weights are a parameter, and the others a buffer.

    Attributes:
        base: the dense weight, a buffer. Its selected entries are not read.
        index: int64 [selected], a buffer: where the selected weights lie in the flattened weight, ascending.
        values: [selected], the trainable parameter. It requires a gradient whether or not the dense weight did.
        bias: the dense module's own, or None.

    Args:
        module: the dense module, of the very type and no subclass. It is left as it is.
        mask: bool in the weight's shape: true where the weight is trained. It may be true nowhere.

    Raises:
        ValueError, TypeError: the module is of another type or has hooks; the mask does not fit.
    """

    dense_type = nn.Conv2d


class SparseLinear(_Sparse, nn.Linear):  # type: ignore[override, misc]
    """An ``nn.Linear`` whose selected weights are a parameter; all else as :class:`SparseConv2d` has it."""

    dense_type = nn.Linear


class SelectedRule(Rule):
    """A convolution or a linear layer of which selected weights are trained.

    The gradients of these weights are stored with the norms where they are few, and from then on the record holds the
    gradients alone; else they are computed again for the sum, some at a time. Saves (input, entries), as a convolution
    sees them.
    """

    def __init__(self, rule: LinearRule | ConvRule) -> None:
        self._dense = rule

    def record(
        self, node: Any, grads: Sequence[Tensor | None], shapes: dict[str, tuple[int, ...]], owner: Ownership
    ) -> Record:
        record = self._dense.record(node, grads, shapes, owner)
        record.rule = self
        if isinstance(self._dense, LinearRule):  # a convolution of one tap over positions
            record.saved = tuple(t.transpose(1, 2) for t in record.saved)
            record.output_grad = record.output_grad.transpose(1, 2)
            record.settings = {"kernel_size": (1,), "stride": (1,), "padding": (0,), "dilation": (1,)}
        else:
            record.settings = {k: v for k, v in record.settings.items() if k not in ("transposed", "lifted")}
        return record

    def select(self, record: Record, entries: Tensor) -> None:
        """Say which weights are trained: int64 [selected], places in the flattened weight [out, in, *kernel]."""
        record.settings["entries"] = entries

    def squared_norms(self, record: Record, operands: frozenset[str]) -> Tensor:
        x, g, settings = self.convolution(record)
        norms, _none, bias_grads = conv_squared_norms(x, g, weight=False, bias="bias" in operands, **settings)
        if bias_grads is not None:
            record.per_example["bias"] = bias_grads
        parts = self._parts(record) if "weight" in operands else ()
        for part in parts:
            grads = sparse_gradients(x, g, part, **settings)
            norms = norms + row_squared_norms(grads)
        if len(parts) == 1:
            record.per_example["weight"] = grads
        if len(parts) <= 1:
            record.saved, record.output_grad = (), g.new_empty(g.size(0), 0)
        return norms

    def clipped_sums(self, record: Record, weights: Tensor, operands: frozenset[str]) -> dict[str, Tensor]:
        sums = {operand: weighted_row_sum(grads, weights) for operand, grads in record.per_example.items()}
        left = operands - sums.keys()
        if left:
            x, g, settings = self.convolution(record)
            if "bias" in left:
                sums["bias"] = conv_clipped_sums(x, g, weights, weight=False, **settings)[1]
            if "weight" in left:
                each = (sparse_gradients(x, g, part, **settings) for part in self._parts(record))
                sums["weight"] = torch.cat([weighted_row_sum(grads, weights) for grads in each])
        return sums

    def gradients(self, record: Record, operand: str) -> Tensor:
        if operand in record.per_example:
            return record.per_example[operand]
        x, g, settings = self.convolution(record)
        if operand == "bias":
            return g.flatten(2).sum(2, dtype=torch.float64)
        return sparse_gradients(x, g, record.settings["entries"], **settings)

    def convolution(self, record: Record) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Input and output gradient of the convolution, [batch, channels, *map], and its settings as keywords."""
        return record.saved[0], record.output_grad, {k: v for k, v in record.settings.items() if k != "entries"}

    def _parts(self, record: Record) -> tuple[Tensor, ...]:
        """The selected entries, as many at a time as an example's gradients of them may take memory."""
        x, g = record.saved[0], record.output_grad
        most = max(_SMALL, _TIMES_OPERANDS * (x[:1].numel() + g[:1].numel()))
        return record.settings["entries"].split(most)
