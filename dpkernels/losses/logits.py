"""Losses of logits [batch, classes] and labels int64 [batch]: one value per example, [batch].

Shamsabadi & Papernot 2023, equations 7, 8, 13 and 14, with y the label's one-hot vector. Half precision is widened to
float32, as torch's own losses do it under autocast. Each raises ValueError for other shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F


def sum_squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    """Equation 7: 1/2 sum_d (h_d - y_d)^2."""
    logits, target = _with_target(logits, labels)
    return 0.5 * (logits - target).square().sum(1)


def sum_absolute_error(logits: Tensor, labels: Tensor) -> Tensor:
    """Equation 13: sum_d |h_d - y_d|."""
    logits, target = _with_target(logits, labels)
    return (logits - target).abs().sum(1)


def huber(logits: Tensor, labels: Tensor, beta: float) -> Tensor:
    """Equation 14, summed over classes: (h_d - y_d)^2 / (2 beta) below beta > 0, |h_d - y_d| - beta / 2 from there."""
    require("beta", beta, "a finite number > 0", lambda value: 0 < value < math.inf)
    logits, target = _with_target(logits, labels)
    return F.smooth_l1_loss(logits, target, beta=beta, reduction="none").sum(1)


def focal(logits: Tensor, labels: Tensor, gamma: float) -> Tensor:
    """Equation 8: -(1 - p_t)^gamma log p_t, with p_t the label's probability; gamma 0 is cross entropy.

    1 - p_t is the sum of the other probabilities: where p_t rounds to 1 it keeps its digits, and its power a gradient.
    """
    require("gamma", gamma, "a finite number >= 0", lambda value: 0 <= value < math.inf)
    logits = _checked(logits, labels)
    log_p = F.log_softmax(logits, dim=1)
    label = labels.unsqueeze(1)
    own = log_p.gather(1, label).squeeze(1)
    if gamma == 0:
        return -own
    others = log_p.scatter(1, label, -math.inf).logsumexp(1)
    return -(gamma * others).exp() * own


def require(name: str, value: object, wanted: str, fits: Callable[[float], bool]) -> None:
    """Raise TypeError or ValueError unless ``value`` is a number that fits."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be {wanted}, got {type(value).__name__}")
    if not fits(value):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")


def _checked(logits: Tensor, labels: Tensor) -> Tensor:
    """The logits, not in half precision."""
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            "logits must be [batch, classes] and labels int64 [batch], got "
            f"{tuple(logits.shape)} and {labels.dtype} {tuple(labels.shape)}"
        )
    return wide(logits)


def _with_target(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = _checked(logits, labels)
    return logits, F.one_hot(labels, logits.size(1)).to(logits.dtype)


def wide(values: Tensor) -> Tensor:
    """The values, half precision as float32: squares of activations leave its range."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
