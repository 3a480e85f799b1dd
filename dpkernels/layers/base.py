"""Capture and clipping of one type of module: the interface that every layer implements.

A captured module runs its forward inside :class:`_Capture`, an autograd function over (weight, bias, inputs) whose
backward returns the gradient of the inputs, no gradient of the parameters, and emits a :class:`Record` of what the
per-example gradients are made of.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


@dataclass
class Record:
    """One backward through one call of a module. Every tensor has the batch first."""

    rule: Rule
    slots: dict[str, nn.Parameter]  # the parameters that it is about
    saved: tuple[Tensor, ...]  # what the layer's forward kept
    output_grad: Tensor  # gradient of the summed losses with respect to the output; may be expanded (strides 0)
    per_example: dict[str, Tensor] = field(default_factory=dict)  # gradients [batch, ...] that the layer chose to store

    def example(self, index: int) -> Record:
        """The record of one example, as a batch of one."""
        one = slice(index, index + 1)
        return replace(
            self,
            saved=tuple(t[one] for t in self.saved),
            output_grad=self.output_grad[one],
            per_example={slot: t[one] for slot, t in self.per_example.items()},
        )


Emit = Callable[[Any, Record], None]  # (autograd context, record): how a record reaches the engine

#: Key in the metadata of an output's node: (the Emit of the module that puts it out, batch dimension of the output).
OUTPUT_OF = "dpkernels: output of"


class Rule(ABC):
    """How one module of a model is captured and clipped. A *slot* is the name of a parameter within the module."""

    def __init__(self, module: nn.Module, path: str) -> None:
        self.module = module
        self.path = path or "(the model)"

    def slots(self) -> dict[str, nn.Parameter]:
        """The module's own trainable parameters by slot."""
        return {name: p for name, p in self.module._parameters.items() if p is not None and p.requires_grad}

    def active(self) -> bool:
        """Whether a forward must go through :meth:`call` now."""
        return bool(self.slots())

    @abstractmethod
    def call(self, emit: Emit, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The module's forward with capture; ``forward`` is the module's own."""

    @abstractmethod
    def squared_norms(self, record: Record, slots: frozenset[str]) -> Tensor:
        """float64 [batch]: squared norm of each example's gradient over ``slots``, never below the true one. May fill
        ``record.per_example`` for :meth:`clipped_sums`."""

    @abstractmethod
    def clipped_sums(self, record: Record, weights: Tensor, slots: frozenset[str]) -> dict[str, Tensor]:
        """float64 sums over examples of weight times gradient, shaped as the parameters; weight 0 skips the example."""


class Layer(Rule):
    """Rule for one type of module.

    Subclasses list the module types they serve (not subclasses of these with a forward of their own), say what they
    refuse, and define the forward, the gradient of its inputs, the squared norms and the clipped sums.
    """

    module_types: ClassVar[tuple[type[nn.Module], ...]]
    #: The parameters that such a module has, or some of them: one with others is served as unknown.
    parameters: ClassVar[frozenset[str]] = frozenset({"weight", "bias"})
    #: What autocast does to this kind of operation: cast to its dtype ("lower"), to float32 ("float32"), or nothing.
    autocast: ClassVar[str | None] = "lower"

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        """Why this module cannot be trained privately, and the fix; None if it can."""
        return None

    def call(self, emit: Emit, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Capture of a forward that takes one tensor. Layers whose forward takes more override this."""
        (x,) = args if not kwargs else (*args, *kwargs.values())
        return self.capture(emit, x)

    def capture(self, emit: Emit, *inputs: Tensor) -> Tensor:
        """Run :meth:`run` under autograd so that its backward emits a record."""
        weight, bias = getattr(self.module, "weight", None), getattr(self.module, "bias", None)
        device = inputs[0].device.type
        if self.autocast is not None and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device) if self.autocast == "lower" else torch.float32
            weight, bias, *cast = (
                t.to(dtype) if t is not None and t.is_floating_point() else t for t in (weight, bias, *inputs)
            )
            with torch.autocast(device, enabled=False):
                return _Capture.apply(self, emit, weight, bias, *cast)
        return _Capture.apply(self, emit, weight, bias, *inputs)

    @abstractmethod
    def run(self, weight: Tensor | None, bias: Tensor | None, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The forward: its output, and the batch-first tensors that :meth:`input_grads` and the clipping need."""

    @abstractmethod
    def input_grads(self, record: Record, weight: Tensor | None, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Gradients with respect to the inputs, None where not needed."""


class _Capture(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, layer: Layer, emit: Emit, weight: Tensor | None, bias: Tensor | None, *inputs: Tensor
    ) -> Tensor:
        output, saved = layer.run(weight, bias, *inputs)
        if output._is_view():  # of what only this function has seen: torch forbids to change such a view in place
            output = torch.ops.aten._unsafe_view(output, output.shape)
        ctx.layer, ctx.emit, ctx.slots = layer, emit, layer.slots()
        ctx.save_for_backward(weight, *saved)
        return output

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"module {ctx.layer.path!r} was run backward with create_graph=True, as a gradient penalty does: the "
                "gradients of such a second backward cannot be clipped per example. Leave the penalty out; for input "
                "gradients alone call torch.autograd.grad without create_graph."
            )
        weight, *saved = ctx.saved_tensors
        record = Record(ctx.layer, ctx.slots, tuple(saved), output_grads[0])
        needed = ctx.needs_input_grad[4:]
        grads = ctx.layer.input_grads(record, weight, needed) if any(needed) else (None,) * len(needed)
        ctx.emit(ctx, record)
        return (None, None, None, None, *grads)
