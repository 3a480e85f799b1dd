"""Normalization layers: group, instance, layer and RMS norm, and batch norm in eval mode.

Their per-example parameter gradients are as small as the parameters, and made of the sums that the layer's own backward
needs: one operator computes both, and from then on the record holds these gradients alone.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dpkernels.layers.base import Layer, Record
from dpkernels.ops.clip import row_squared_norms, weighted_row_sum
from dpkernels.ops.norm import Grads, group_norm_backward, layer_norm_backward


class _AffineNorm(Layer):
    """``y = weight * xhat + bias``; subclasses say over what ``xhat`` is normalized. They save (x, statistics...)."""

    autocast: ClassVar[str | None] = None  # torch runs these layers in their input's dtype

    @abstractmethod
    def _backward(self, record: Record, weight: Tensor | None, *, input_grads: bool) -> Grads:
        """The input's gradient in any shape of its size, and the parameters', [batch, size] each."""

    def input_grads(self, record: Record, weight: Tensor | None, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
        dx, *grads = self._backward(record, weight, input_grads=True)
        self._keep(record, *grads)
        assert dx is not None
        return (dx.view(record.saved[0].shape),)

    def squared_norms(self, record: Record, slots: frozenset[str]) -> Tensor:
        grads = self._per_example(record)
        record.saved, record.output_grad = (), record.output_grad.new_empty(record.output_grad.size(0), 0)
        norms = [row_squared_norms(grads[slot].flatten(1)) for slot in sorted(slots)]
        return norms[0] if len(norms) == 1 else norms[0] + norms[1]

    def clipped_sums(self, record: Record, weights: Tensor, slots: frozenset[str]) -> dict[str, Tensor]:
        grads = self._per_example(record)
        return {slot: weighted_row_sum(grads[slot].flatten(1), weights).view(grads[slot].shape[1:]) for slot in slots}

    def _per_example(self, record: Record) -> dict[str, Tensor]:
        if not record.per_example:  # the input needed no gradient
            _, *grads = self._backward(record, None, input_grads=False)
            self._keep(record, *grads)
        return record.per_example

    def _keep(self, record: Record, weight_grads: Tensor, bias_grads: Tensor) -> None:
        """Store the gradients, each in its parameter's shape behind the batch."""
        grads = {"weight": weight_grads, "bias": bias_grads}
        record.per_example = {slot: grads[slot].view(len(grads[slot]), *p.shape) for slot, p in record.slots.items()}


class _ChannelNorm(_AffineNorm):
    """Channels in dimension 1. Saves (x, mean, rstd), the statistics as [batch, groups]."""

    fixed: ClassVar[bool] = False  # whether the statistics are constants

    def _backward(self, record: Record, weight: Tensor | None, *, input_grads: bool) -> Grads:
        x, mean, rstd = record.saved
        shape = (x.size(0), x.size(1), math.prod(x.shape[2:]))
        values = x.reshape(shape), record.output_grad.reshape(shape)
        return group_norm_backward(*values, mean, rstd, weight, fixed=self.fixed, input_grads=input_grads)


class GroupNormLayer(_ChannelNorm):
    """nn.GroupNorm: [batch, channels, ...], normalized over groups of channels."""

    module_types = (nn.GroupNorm,)
    module: nn.GroupNorm

    def run(self, weight: Tensor | None, bias: Tensor | None, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return _group_norm(inputs[0], self.module.num_groups, weight, bias, self.module.eps)


class InstanceNormLayer(_ChannelNorm):
    """nn.InstanceNorm: group norm with a group for each channel."""

    module_types = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    module: _InstanceNorm

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        if module.running_mean is None or not (module.training or _trains(module)):
            return None
        return (
            "instance norm with running statistics keeps averages over private examples. Construct it with "
            "track_running_stats=False, or put it in eval mode and freeze its parameters"
        )

    def run(self, weight: Tensor | None, bias: Tensor | None, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        (x,) = inputs
        dims = self.module._get_no_batch_dim() + 1
        if x.dim() != dims:
            raise ValueError(f"the input of {self.path!r} must be {dims}-D, batch first, got {x.dim()}-D")
        if math.prod(x.shape[2:]) == 1:
            raise ValueError(f"the input of {self.path!r} must have several values to normalize, got {tuple(x.shape)}")
        return _group_norm(x, x.size(1), weight, bias, self.module.eps)


class BatchNormLayer(_ChannelNorm):
    """nn.BatchNorm in eval mode: a scale and an offset for each channel."""

    module_types = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, _BatchNorm)
    module: _BatchNorm
    fixed = True

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        if not module.training and module.running_mean is not None:
            return None
        mode = "in training mode" if module.training else "without running statistics"
        plain = type(module).__module__.startswith("torch.nn.")
        fix = (
            "Replace it with dpkernels.models.replace_batch_norm(model)"
            if plain
            else f"Replace this {type(module).__name__} by hand with a group norm, and what else its forward does"
        )
        return (
            f"batch norm {mode} normalizes each example with the others' values. {fix}, or put it in eval mode with "
            "public running statistics"
        )

    def run(self, weight: Tensor | None, bias: Tensor | None, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        (x,) = inputs
        self.module._check_input_dim(x)
        mean, variance, eps = self.module.running_mean, self.module.running_var, self.module.eps
        assert mean is not None
        assert variance is not None
        y = F.batch_norm(x, mean, variance, weight, bias, eps=eps)
        return y, (x, mean.expand(x.shape[:2]), (variance + eps).rsqrt().expand(x.shape[:2]))


class _PositionNorm(_AffineNorm):
    """The last dimensions of each position. Saves (x, mean, rstd) or (x, rstd); a statistic has size 1 in these."""

    module: nn.LayerNorm | nn.RMSNorm

    def _features(self, x: Tensor) -> list[int]:
        shape = list(self.module.normalized_shape)
        if x.dim() <= len(shape):
            raise ValueError(
                f"the input of {self.path!r} must have the batch before its normalized shape {tuple(shape)}, got "
                f"{tuple(x.shape)}"
            )
        return shape

    def _backward(self, record: Record, weight: Tensor | None, *, input_grads: bool) -> Grads:
        x, *statistics = record.saved
        positions, features = math.prod(statistics[0].shape[1:]), math.prod(self.module.normalized_shape)
        shape = (x.size(0), positions, features)
        *means, rstd = (t.reshape(shape[:2]) for t in statistics)
        return layer_norm_backward(
            x.reshape(shape),
            record.output_grad.reshape(shape),
            means[0] if means else None,
            rstd,
            None if weight is None else weight.flatten(),
            input_grads=input_grads,
        )


class LayerNormLayer(_PositionNorm):
    """nn.LayerNorm on [batch, ..., *normalized_shape]."""

    module_types = (nn.LayerNorm,)
    module: nn.LayerNorm

    def run(self, weight: Tensor | None, bias: Tensor | None, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        (x,) = inputs
        y, mean, rstd = torch.native_layer_norm(x, self._features(x), weight, bias, self.module.eps)
        return y, (x, mean, rstd)


class RMSNormLayer(_PositionNorm):
    """nn.RMSNorm on [batch, ..., *normalized_shape]."""

    module_types = (nn.RMSNorm,)
    module: nn.RMSNorm

    def run(self, weight: Tensor | None, bias: Tensor | None, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        (x,) = inputs
        features, wide = self._features(x), x.double() if x.dtype == torch.float64 else x.float()
        eps = torch.finfo(wide.dtype).eps if self.module.eps is None else self.module.eps
        dims = tuple(range(-len(features), 0))
        rstd = (wide.square().mean(dims, keepdim=True) + eps).rsqrt()
        return F.rms_norm(x, features, weight, self.module.eps), (x, rstd)


def _group_norm(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    if not any(x.is_contiguous(memory_format=layout) for layout in _LAYOUTS.get(x.dim(), (torch.contiguous_format,))):
        x = x.contiguous()
    y, mean, rstd = torch.native_group_norm(x, weight, bias, x.size(0), x.size(1), math.prod(x.shape[2:]), groups, eps)
    return y, (x, mean, rstd)


_LAYOUTS = {
    4: (torch.contiguous_format, torch.channels_last),
    5: (torch.contiguous_format, torch.channels_last_3d),
}


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())
