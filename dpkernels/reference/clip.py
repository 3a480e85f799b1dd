"""Clip factors ``min(1, C / ||g_i||)``, and norms and weighted sums of stored per-example gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor


def clip_factors(
    squared_norms: Sequence[Tensor], *, max_grad_norm: float, loss_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    norms = loss_scale * torch.stack(list(squared_norms)).sum(0).sqrt()
    weights = loss_scale * (max_grad_norm / norms).clamp(max=1)
    return torch.where(norms.isfinite(), weights, 0), norms


def row_squared_norms(per_example: Tensor) -> Tensor:
    return per_example.double().square().sum(1)


def weighted_row_sum(per_example: Tensor, weights: Tensor) -> Tensor:
    kept = weights != 0
    return weights[kept] @ per_example[kept].double()
