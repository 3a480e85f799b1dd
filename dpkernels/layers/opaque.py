"""Modules outside the registry: per-example gradients through expanded parameters.

Every trainable parameter below the module is expanded to [batch, ...] and the module runs on each example with its own
copy, under ``torch.func.vmap`` where that works and in a loop over examples otherwise. Autograd then delivers the
per-example gradients at the expansion, whatever the module computes. Slow and memory-hungry next to a layer of the
registry, but exact.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from dpkernels.layers.base import Emit, Record, Rule
from dpkernels.layers.state import unchanged_buffers
from dpkernels.ops.clip import row_squared_norms, weighted_row_sum

#: Arguments that all examples share, so that they have no batch dimension.
_SHARED_ARGUMENTS = {"attn_mask", "mask", "src_mask", "tgt_mask", "memory_mask"}


class OpaqueModule(Rule):
    """A module, with all that is below it, whose computation dpkernels does not know."""

    def __init__(self, module: nn.Module, path: str) -> None:
        super().__init__(module, path)
        self._signature = inspect.signature(module.forward)
        self._vmap = True  # until it fails

    def slots(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def call(self, emit: Emit, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = self._signature.bind(*args, **kwargs).arguments
        leaves, tree = tree_flatten(arguments)
        dims, _ = tree_flatten({name: self._argument_dims(name, value) for name, value in arguments.items()})
        batched = [i for i, dim in enumerate(dims) if dim >= 0]
        rows = self._rows([(leaves[i], dims[i]) for i in batched])
        body = _Body(self.module, forward)
        expanded = {slot: _Expand.apply(self, emit, slot, p, rows) for slot, p in self.slots().items()}
        shape: list[Any] = []  # the output's tree and batch dimensions, known after the first example

        def run(parameters: dict[str, Tensor], tensors: list[Tensor]) -> list[Tensor]:
            inputs = list(leaves)
            for i, t in zip(batched, tensors, strict=True):
                inputs[i] = t
            bound = inspect.BoundArguments(self._signature, tree_unflatten(inputs, tree))
            named = {f"module.{slot}": p for slot, p in parameters.items()}
            output = functional_call(body, named, bound.args, bound.kwargs)
            flat, output_tree = tree_flatten(output)
            shape[:] = [output_tree, [isinstance(t, Tensor) for t in flat], flat, self._output_dims(output)]
            return [t for t in flat if isinstance(t, Tensor)]

        def one(parameters: dict[str, Tensor], tensors: list[Tensor]) -> list[Tensor]:
            outputs = run(parameters, [t.unsqueeze(dims[i]) for i, t in zip(batched, tensors, strict=True)])
            return [t.squeeze(dim) for t, dim in zip(outputs, shape[3], strict=True)]

        tensors = [leaves[i] for i in batched]
        with unchanged_buffers(self.module, self.path):
            outputs = self._over_examples(one, expanded, tensors, [dims[i] for i in batched], rows, run)
        stacked = iter(t.movedim(0, dim) for t, dim in zip(outputs, shape[3], strict=True))
        flat = [next(stacked) if is_tensor else value for is_tensor, value in zip(shape[1], shape[2], strict=True)]
        return tree_unflatten(flat, shape[0])

    def _over_examples(
        self,
        one: Callable[..., list[Tensor]],
        expanded: dict[str, Tensor],
        tensors: list[Tensor],
        dims: list[int],
        rows: int,
        run: Callable[..., list[Tensor]],
    ) -> list[Tensor]:
        """The outputs with the batch in dimension 0."""
        if rows == 0:  # neither rung takes an empty batch: run on it as it is, tied to the expansions that will report
            nothing = sum(p.sum() for p in expanded.values())
            outputs = run({slot: p.detach() for slot, p in self.slots().items()}, tensors)
            return [
                t.movedim(dim, 0) + nothing for t, dim in zip(outputs, self._flat_output_dims(outputs), strict=True)
            ]
        if self._vmap:
            try:
                return vmap(one, in_dims=(0, dims), randomness="different")(expanded, tensors)
            except Exception:  # whatever torch.func cannot do; the loop raises what is the module's own fault
                self._vmap = False
        each = [
            one(
                {slot: p[i] for slot, p in expanded.items()},
                [t.select(d, i) for t, d in zip(tensors, dims, strict=True)],
            )
            for i in range(rows)
        ]
        return [torch.stack(parts) for parts in zip(*each, strict=True)]

    def _rows(self, tensors: list[tuple[Tensor, int]]) -> int:
        sizes = {t.size(dim) for t, dim in tensors}
        if len(sizes) != 1:
            raise ValueError(
                f"module {self.path!r} needs the batch first in every tensor argument, got shapes "
                f"{[tuple(t.shape) for t, _ in tensors]}"
            )
        return sizes.pop()

    def _argument_dims(self, name: str, value: Any) -> Any:
        """The tree of ``value`` with the batch dimension of each tensor, -1 where there is none."""
        if name in _SHARED_ARGUMENTS and isinstance(value, Tensor):
            if isinstance(self.module, nn.MultiheadAttention) and value.dim() != 2:
                raise ValueError(
                    f"attn_mask of module {self.path!r} must be 2-D (shared by all examples), got {value.dim()}-D"
                )
            return -1
        hidden = isinstance(self.module, nn.RNNBase) and name == "hx"
        return tree_map(lambda leaf: (1 if hidden else 0) if isinstance(leaf, Tensor) else -1, value)

    def _output_dims(self, output: Any) -> list[int]:
        if isinstance(self.module, nn.RNNBase):  # (output, hidden): hidden states are [layers, batch, features]
            return [0] + [1] * (len(tree_flatten(output)[0]) - 1)
        return [0 for t in tree_flatten(output)[0] if isinstance(t, Tensor)]

    def _flat_output_dims(self, outputs: list[Tensor]) -> list[int]:
        return self._output_dims(tuple(outputs))

    def squared_norms(self, record: Record, slots: frozenset[str]) -> Tensor:
        (grads,) = record.per_example.values()
        return row_squared_norms(grads.flatten(1))

    def clipped_sums(self, record: Record, weights: Tensor, slots: frozenset[str]) -> dict[str, Tensor]:
        ((slot, grads),) = record.per_example.items()
        return {slot: weighted_row_sum(grads.flatten(1), weights).view(grads.shape[1:])}


class _Body(nn.Module):
    """The module's own forward, without its hooks: these run once, around the call."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._own_forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._own_forward(*args, **kwargs)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: OpaqueModule, emit: Emit, slot: str, parameter: Tensor, rows: int) -> Tensor:
        ctx.rule, ctx.emit, ctx.slot, ctx.parameter = rule, emit, slot, parameter
        return parameter.expand(rows, *parameter.shape)

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor) -> tuple[None, ...]:
        (grads,) = output_grads
        ctx.emit(ctx, Record(ctx.rule, {ctx.slot: ctx.parameter}, (), grads, {ctx.slot: grads}))
        return (None,) * 5
