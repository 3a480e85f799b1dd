"""Clipped gradients of a small model against a loop over single examples with plain autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.zoo.models import SMALL, Model
from dpkernels.clipping import GhostClipper
from tests.clipping.oracle import deviation, one_example_loop

ROWS = 3
#: A parameter's largest entry counts as no less than this part of the largest of all.
FLOOR = 1e-6


@dataclass(frozen=True)
class Exactness:
    """How far the sums lie from the loop's, relative to each parameter's largest entry, for one batch size."""

    rows: int
    clipped: int  #: of the rows; the others have a norm below the bound
    deviation: float  #: by `optimizer.backward(losses)`
    ordinary_deviation: float | None  #: by `losses.mean().backward()`; None where that is refused
    refusal: str | None = None  #: why


def exactness(model: Model, rows: int = ROWS, dtype: torch.dtype = torch.float64) -> Exactness:
    """Both doors of the engine, at a bound between the smallest norm and the median.

    Args:
        model: whose small size is taken.
        rows: examples of the batch.
        dtype: of the model; the loop is in float64.

    Raises:
        RuntimeError, ValueError: the engine refuses the model, or `backward(losses)`.
    """
    network, x, y = model.make(SMALL, rows)
    network = network.to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    _, norms = one_example_loop(network, model.losses, x, y, float("inf"))
    bound = float((norms.min() + norms.median()) / 2)
    expected, _ = one_example_loop(network, model.losses, x, y, bound)
    with GhostClipper(network, bound) as clipper:
        sums = clipper.backward(model.losses(network, x, y)).grads
    off, refusal = None, None
    with GhostClipper(network, bound) as clipper:
        try:
            model.losses(network, x, y).mean().backward()
            off = deviation(clipper.take().grads, expected, floor=FLOOR)
        except RuntimeError as error:
            refusal = str(error)
    clipped = int((norms > bound).sum())
    return Exactness(rows, clipped, deviation(sums, expected, floor=FLOOR), off, refusal)


def slow_nodes(network: nn.Module, losses: Tensor) -> list[str]:
    """The kinds of operations for which the engine has no rule, so that their own backward runs for each example."""
    with GhostClipper(network, 1.0) as clipper:
        clipper.backward(losses)
        return sorted({use.kind for plan in clipper._plans.values() for use in plan.uses if use.rule is None})
