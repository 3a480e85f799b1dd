"""nn.Linear on input of any rank: [batch, ..., in_features]."""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkernels.layers.base import Layer, Record
from dpkernels.ops.clip import row_squared_norms
from dpkernels.ops.linear import linear_clipped_sums, linear_forward, linear_squared_norms

#: A layer with at most so many outputs and at least so many inputs is bound by reading its input: there the forward
#: takes the row norms along.
_FEW_OUTPUTS, _MANY_INPUTS = 32, 1024


class LinearLayer(Layer):
    """The positions between the batch and the features are flattened into one."""

    module_types: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)

    def run(self, weight: Tensor | None, bias: Tensor | None, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        (x,) = inputs
        assert weight is not None
        skinny = weight.size(0) <= _FEW_OUTPUTS and weight.size(1) >= _MANY_INPUTS
        if skinny and x.dim() == 2 and x.dtype in (torch.float32, torch.float64) and x.device.type == "cpu":
            output, squared_rows = linear_forward(x, weight, bias)
            return output, (x, squared_rows)
        return F.linear(x, weight, bias), (x,)

    def input_grads(self, record: Record, weight: Tensor | None, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
        assert weight is not None
        return (record.output_grad @ weight,)

    def squared_norms(self, record: Record, slots: frozenset[str]) -> Tensor:
        if len(record.saved) == 2:  # ||g a^T||^2 = ||a||^2 ||g||^2, and the bias is an input of 1
            # Squares of float64 may vanish below its range where the other factor is large.
            x, least = record.saved[0], torch.finfo(torch.float64).tiny
            inputs = (record.saved[1] + x.size(1) * least) * ("weight" in slots) + ("bias" in slots)
            return inputs * (row_squared_norms(record.output_grad) + record.output_grad.size(1) * least)
        return linear_squared_norms(*rows_of(record), weight="weight" in slots, bias="bias" in slots)

    def clipped_sums(self, record: Record, weights: Tensor, slots: frozenset[str]) -> dict[str, Tensor]:
        weight, bias = linear_clipped_sums(*rows_of(record), weights, weight="weight" in slots, bias="bias" in slots)
        return {slot: value for slot, value in (("weight", weight), ("bias", bias)) if slot in slots}


def rows_of(record: Record) -> tuple[Tensor, Tensor]:
    """Activations and output gradients as [batch, positions, features]."""
    x, g = record.saved[0], record.output_grad
    if x.dim() == 3:
        return x, g
    positions = math.prod(x.shape[1:-1])
    return x.reshape(x.size(0), positions, x.size(-1)), g.reshape(x.size(0), positions, g.size(-1))
