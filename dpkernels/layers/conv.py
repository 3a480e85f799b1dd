"""Convolutions in 1, 2 and 3 dimensions, ordinary and transposed, on [batch, channels, *map].

Padding that is not zeros on both sides alike (other padding modes, ``same`` with an even kernel) is added before the
capture, so that every captured convolution pads with zeros, symmetrically.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from dpkernels.layers.base import Emit, Layer, Record
from dpkernels.ops.clip import weighted_row_sum
from dpkernels.ops.conv import ConvPlan, conv_clipped_sums, conv_plan, conv_squared_norms


class _Geometry(NamedTuple):
    """The captured convolution."""

    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool


class _Convolution(Layer):
    """Saves the (padded) input. Small weight gradients are stored with the norms, and from then on the record holds the
    gradients alone; else the clipped sum is computed from input and output gradients."""

    module: _ConvNd

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        base = next(b for b in type(module).__mro__ if b in cls.module_types)
        own = getattr(type(module), "_conv_forward", None) is not getattr(base, "_conv_forward", None)
        if own and type(module).forward is base.forward:
            return "it has a _conv_forward of its own, which forward calls. Give it a forward of its own instead"
        return None

    @abstractmethod
    def _padding(self) -> tuple[int, ...]:
        """Zeros on both sides of each dimension in the captured convolution."""

    @abstractmethod
    def _output_padding(self, x: Tensor, output_grad: Tensor) -> list[int]:
        """What torch's backward takes; zeros unless transposed."""

    def _geometry(self) -> _Geometry:
        m = self.module
        return _Geometry(m.kernel_size, m.stride, self._padding(), m.dilation, m.groups, m.transposed)

    def _require_batch(self, x: Tensor) -> None:
        dims = len(self.module.kernel_size) + 2
        if x.dim() != dims:
            raise ValueError(f"the input of {self.path!r} must be {dims}-D, batch first, got {x.dim()}-D")

    def input_grads(self, record: Record, weight: Tensor | None, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
        (x,), g = record.saved, record.output_grad
        q = self._geometry()
        grad, _, _ = torch.ops.aten.convolution_backward(
            *(g, x, weight, None, q.stride, q.padding, q.dilation),
            *(q.transposed, self._output_padding(x, g), q.groups, (True, False, False)),
        )
        return (grad,)

    def plan(self, record: Record) -> ConvPlan:
        """What the cost model chose for the convolution of a record."""
        (x,), g = record.saved, record.output_grad
        return conv_plan(tuple(x.shape[1:]), tuple(g.shape[1:]), self._geometry())

    def squared_norms(
        self, record: Record, slots: frozenset[str], *, store: bool | None = None, strategy: str = "auto"
    ) -> Tensor:
        """As every layer's; ``store`` and ``strategy`` force what the cost model chooses otherwise."""
        (x,), g = record.saved, record.output_grad
        weight, bias = "weight" in slots, "bias" in slots
        norms, weight_grads, bias_grads = conv_squared_norms(
            x, g, weight=weight, bias=bias, store=store, strategy=strategy, **self._geometry()._asdict()
        )
        if bias_grads is not None:
            record.per_example["bias"] = bias_grads
        if weight_grads is not None:
            record.per_example["weight"] = weight_grads
        if weight_grads is not None or not weight:
            record.saved, record.output_grad = (), g.new_empty(g.size(0), 0)
        return norms

    def clipped_sums(self, record: Record, weights: Tensor, slots: frozenset[str]) -> dict[str, Tensor]:
        sums: dict[str, Tensor] = {}
        stored = record.per_example
        if "bias" in stored:
            sums["bias"] = weighted_row_sum(stored["bias"], weights)
        if "weight" in stored:
            outputs_last = stored["weight"].movedim(1, -1)  # as in memory
            total = weighted_row_sum(outputs_last.flatten(1), weights).view(outputs_last.shape[1:])
            sums["weight"] = total.movedim(-1, 0).contiguous()
        left = slots - sums.keys()
        if left:
            weight, bias = conv_clipped_sums(
                *(*record.saved, record.output_grad, weights),
                weight="weight" in left,
                bias="bias" in left,
                **self._geometry()._asdict(),
            )
            sums |= {slot: value for slot, value in (("weight", weight), ("bias", bias)) if slot in left}
        return sums


class ConvLayer(_Convolution):
    """nn.Conv1d, nn.Conv2d and nn.Conv3d with every padding mode."""

    module_types: ClassVar[tuple[type[nn.Module], ...]] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

    def call(self, emit: Emit, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        (x,) = (*args, *kwargs.values())
        self._require_batch(x)
        if self._pads_before():
            mode = "constant" if self.module.padding_mode == "zeros" else self.module.padding_mode
            x = F.pad(x, self.module._reversed_padding_repeated_twice, mode)
        return self.capture(emit, x)

    def run(self, weight: Tensor | None, bias: Tensor | None, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        (x,) = inputs
        assert weight is not None
        q = self._geometry()
        return torch.convolution(x, weight, bias, q.stride, q.padding, q.dilation, False, [0], q.groups), (x,)

    def _padding(self) -> tuple[int, ...]:
        if self._pads_before():
            return (0,) * len(self.module.kernel_size)
        return tuple(self.module._reversed_padding_repeated_twice[::-2])

    def _pads_before(self) -> bool:
        sides = self.module._reversed_padding_repeated_twice
        return self.module.padding_mode != "zeros" or sides[::2] != sides[1::2]

    def _output_padding(self, x: Tensor, output_grad: Tensor) -> list[int]:
        return [0] * len(self.module.kernel_size)


class ConvTransposeLayer(_Convolution):
    """nn.ConvTranspose1d, nn.ConvTranspose2d and nn.ConvTranspose3d."""

    module_types = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    module: _ConvTransposeNd
    _extra: list[int]  # output padding of the call at hand

    def call(self, emit: Emit, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._call(emit, *args, **kwargs)

    def _call(self, emit: Emit, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        self._require_batch(input)
        m, q = self.module, self._geometry()
        dims = len(q.kernel_size)
        self._extra = m._output_padding(input, output_size, q.stride, q.padding, q.kernel_size, dims, q.dilation)  # type: ignore[arg-type]
        return self.capture(emit, input)

    def run(self, weight: Tensor | None, bias: Tensor | None, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        (x,) = inputs
        assert weight is not None
        q = self._geometry()
        return torch.convolution(x, weight, bias, q.stride, q.padding, q.dilation, True, self._extra, q.groups), (x,)

    def _padding(self) -> tuple[int, ...]:
        return tuple(map(int, self.module.padding))

    def _output_padding(self, x: Tensor, output_grad: Tensor) -> list[int]:
        q = self._geometry()
        return [
            n - ((m - 1) * s - 2 * p + d * (k - 1) + 1)
            for n, m, k, s, p, d in zip(output_grad.shape[2:], x.shape[2:], *q[:4], strict=True)
        ]
