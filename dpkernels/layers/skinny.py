"""Linear layers with few outputs and many inputs, whose cost is reading the input.

One kernel reads it for the output and for the squared norms of its rows, which are the example's gradient norm up to
that of the output gradient: ``||g a^T||^2 = ||a||^2 ||g||^2``. It stands in for such a module's forward.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dpkernels.layers.base import Record
from dpkernels.layers.linear import LinearRule
from dpkernels.layers.ownership import Ownership
from dpkernels.ops.clip import row_squared_norms
from dpkernels.ops.linear import linear_forward

_FEW_OUTPUTS, _MANY_INPUTS = 32, 1024


def is_skinny(module: nn.Module) -> bool:
    """Whether a module is a linear layer that :func:`forward_of` makes faster."""
    if type(module) is not nn.Linear or "forward" in vars(module) or module.weight.device.type != "cpu":
        return False
    return module.out_features <= _FEW_OUTPUTS and module.in_features >= _MANY_INPUTS


def forward_of(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The forward that stands in for the module's own; where it does not fit, it calls that one."""
    own = module.forward

    def forward(input: Tensor) -> Tensor:
        plain = input.dim() == 2 and input.dtype == module.weight.dtype in (torch.float32, torch.float64)
        trains = torch.is_grad_enabled() and module.weight.requires_grad
        if not plain or not trains or torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling():
            return own(input)
        output: Tensor = _SkinnyLinear.apply(input, module.weight, module.bias)
        return output

    return forward


class _SkinnyLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output, squared_rows = linear_forward(x, weight, bias)
        ctx.save_for_backward(x, weight, squared_rows)
        ctx.clipped = False  # set where the engine has taken the parameters' part
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g,), (x, weight, _), wanted = grads, ctx.saved_tensors, ctx.needs_input_grad
        return (
            g @ weight if wanted[0] else None,
            g.mT @ x if wanted[1] and not ctx.clipped else None,
            g.sum(0) if wanted[2] and not ctx.clipped else None,
        )


class SkinnyLinearRule(LinearRule):
    """The same as for every linear layer, but that norms are made of the rows'. The operand is [out, in]."""

    nodes: ClassVar[dict[str, dict[int, str]]] = {"_SkinnyLinear": {1: "weight", 2: "bias"}}

    def serves(self, node: Any, shapes: dict[str, tuple[int, ...]], owner: Ownership) -> bool:
        return owner.plain

    def record(
        self, node: Any, grads: Sequence[Tensor | None], shapes: dict[str, tuple[int, ...]], owner: Ownership
    ) -> Record:
        (g,) = grads
        assert g is not None
        x, _, squared_rows = node.saved_tensors
        node.clipped = True
        return Record(self, (x.unsqueeze(1), squared_rows), g.unsqueeze(1), frozenset(shapes))

    def squared_norms(self, record: Record, operands: frozenset[str]) -> Tensor:
        x, squared_rows = record.saved
        # The bias is an input of 1. Squares of float64 may vanish below its range where the other factor is large.
        g, least = record.output_grad.squeeze(1), torch.finfo(torch.float64).tiny
        inputs = (squared_rows + x.size(2) * least) * ("weight" in operands) + ("bias" in operands)
        return inputs * (row_squared_norms(g) + g.size(1) * least)

    def clipped_sums(self, record: Record, weights: Tensor, operands: frozenset[str]) -> dict[str, Tensor]:
        sums = super().clipped_sums(_plain(record), weights, operands)
        return {operand: value.mT if operand == "weight" else value for operand, value in sums.items()}

    def gradients(self, record: Record, operand: str) -> Tensor:
        gradients = super().gradients(_plain(record), operand)
        return gradients.mT if operand == "weight" else gradients

    def joined(self, records: Sequence[Record], operand: str) -> Record | None:
        return None


def _plain(record: Record) -> Record:
    return Record(record.rule, record.saved[:1], record.output_grad, record.operands)
