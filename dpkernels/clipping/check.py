"""Compares what the engine computes for each parameter with plain autograd, one example at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dpkernels.clipping.engine import GhostClipper


@dataclass(frozen=True)
class CheckReport:
    """Outcome of :func:`check`: for each parameter, the largest deviation relative to its largest gradient entry."""

    deviations: dict[str, float]
    tolerance: float

    @property
    def wrong(self) -> list[str]:
        """Parameters whose per-example gradients are off."""
        return [name for name, deviation in self.deviations.items() if not deviation <= self.tolerance]

    @property
    def ok(self) -> bool:
        """Whether every parameter agrees."""
        return not self.wrong

    def __str__(self) -> str:
        width = max(map(len, self.deviations))
        return "\n".join(
            f"{name:<{width}}  {deviation:.1e}  {'WRONG' if name in self.wrong else 'ok'}"
            for name, deviation in self.deviations.items()
        )


def check(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    x: Any,
    y: Any,
    *,
    max_grad_norm: float = 1.0,
    tolerance: float = 1e-4,
) -> CheckReport:
    """Compare clipped gradients of the whole batch with a loop of plain autograd over its examples.

    Both run on copies of ``model``, so that a stray gradient or a clipper on it does no harm. A deviation means that a
    module computes something that depends on several examples, that the loss does, or that a rule is wrong.

    Args:
        model: a module that draws no random numbers in its forward (put dropout in eval mode).
        loss_fn: ``loss_fn(model(x), y)`` gives one loss per example, [batch].
        x, y: a batch, examples first: tensors, or tuples, lists and dictionaries of tensors.
        max_grad_norm: the bound C at which to compare.
        tolerance: largest relative deviation that counts as rounding.

    Raises:
        UnsupportedModelError, ValueError, RuntimeError: as :class:`GhostClipper` and its ``backward``.
    """
    plain = copy.deepcopy(model)
    plain.zero_grad(set_to_none=True)
    with GhostClipper(copy.deepcopy(plain), max_grad_norm) as clipper:
        clipper.proving = False  # the comparison tells more
        result = clipper.backward(loss_fn(clipper.model(x), y))
    trainable = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    expected = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in trainable.items()}
    for i in range(result.batch_size):
        one, label = (tree_map(lambda t: t[i : i + 1] if isinstance(t, Tensor) else t, batch) for batch in (x, y))  # noqa: B023
        loss = loss_fn(plain(one), label).sum()
        grads = [g.double() for g in torch.autograd.grad(loss, list(trainable.values()))]
        norm = torch.stack([g.norm() for g in grads]).norm()
        for name, gradient in zip(trainable, grads, strict=True):
            expected[name] += gradient * (max_grad_norm / norm).clamp(max=1)
    deviations = {
        name: float((result.grads[name] - want).abs().max() / want.abs().max().clamp_min(1e-30))
        if want.numel()
        else 0.0
        for name, want in expected.items()
    }
    return CheckReport(deviations, tolerance)
