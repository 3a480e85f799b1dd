"""Backwards that are not the engine's: they may ask for gradients of inputs, and of no parameter."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from dpkernels.clipping.walk import operation


def require_inputs_alone(ctx: Any, parameters: Collection[int]) -> None:
    """A backward that is not the engine's may ask for gradients of inputs, as an attack on the model does."""
    for below, _ in ctx.next_functions:
        node = below
        while node is not None and operation(node) == "ToCopy":  # autocast
            ((node, _),) = node.next_functions
        variable = getattr(node, "variable", None)
        if id(variable) in parameters and _is_wanted(node):
            raise RuntimeError(
                "gradients of the model's parameters came by another way than loss.backward(), so that the loss "
                "was not seen: by torch.autograd.grad, under reentrant checkpointing (set use_reentrant=False), or "
                "by the loss of a model with another private optimizer (freeze this model for it, or detach() its "
                "output; the parts of one model take one optimizer). Call optimizer.backward(losses) with one loss per "
                "example (reduction='none'); for gradients of an input alone call torch.autograd.grad(output, input)."
            )


def _is_wanted(leaf: Any) -> bool:
    """Whether the backward at hand computes the gradient of a leaf's node."""
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # what torch raises for a leaf that torch.autograd.grad was asked for
        return True
