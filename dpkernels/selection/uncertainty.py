"""How uncertain a model is of an example: the higher the number, the more (Zhao, Papernot, Singh, Polyzotis & Odena
2019, section 3.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def entropy(logits: Tensor) -> Tensor:
    """Entropy of the predicted classes, in nats: float64 [rows] of logits [rows, classes].

    A row that is not finite is certain (-inf) by this and by `difference`: nobody asks for it.
    """
    logs = _checked(logits).log_softmax(1)
    return _finite(-(logs.exp() * logs.clamp(min=-1e300)).sum(1), logits)


def difference(logits: Tensor) -> Tensor:
    """The margin between the two largest logits, negated: float64 [rows] of logits [rows, classes], at most 0."""
    top = _checked(logits).topk(2, dim=1).values
    return _finite(top[:, 1] - top[:, 0], logits)


UNCERTAINTIES: dict[str, Callable[[Tensor], Tensor]] = {"entropy": entropy, "difference": difference}
"""By the names that the paper gives them."""


def most_uncertain(scores: Tensor, count: int) -> Tensor:
    """Indices, int64 [min(count, rows)], of the highest of scores [rows], the highest first and ties in their order.

    Of private scores this is no release: each example's place depends on all others.
    """
    if count < 0:
        raise ValueError(f"count must be 0 or more, got {count}")
    return scores.argsort(descending=True, stable=True)[:count]


def _checked(logits: Tensor) -> Tensor:
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.size(1) < 2 or not logits.is_floating_point():
        got = f"{logits.dtype} {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"logits must be floating point [rows, classes] with two classes or more, got {got}")
    return logits.double()


def _finite(scores: Tensor, logits: Tensor) -> Tensor:
    return torch.where(logits.isfinite().all(1), scores, -torch.inf)
