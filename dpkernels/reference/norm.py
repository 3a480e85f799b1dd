"""Affine normalization: the per-example gradient is ``sum g xhat`` for the weight and ``sum g`` for the bias.

The input's gradient, with means over the values that share a statistic:
``rstd (weight g - mean(weight g) - xhat mean(weight g xhat))``.
"""

import torch
from torch import Tensor


def group_norm_backward(
    x: Tensor,
    output_grads: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    *,
    fixed: bool = False,
    input_grads: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    batch, channels, spatial = x.shape
    groups = mean.size(1)
    mean, rstd = (t.repeat_interleave(channels // groups, 1).unsqueeze(-1) for t in (mean, rstd))
    xhat, g = (x - mean) * rstd, output_grads
    scaled = g if weight is None else g * weight.unsqueeze(-1)
    dx = scaled * rstd
    if not fixed:

        def group_mean(values: Tensor) -> Tensor:
            by_group = values.reshape(batch, groups, channels // groups * spatial)
            return by_group.mean(2).repeat_interleave(channels // groups, 1).unsqueeze(-1)

        dx = rstd * (scaled - group_mean(scaled) - xhat * group_mean(scaled * xhat))
    return dx if input_grads else None, (g.double() * xhat).sum(2), g.double().sum(2)


def layer_norm_backward(
    x: Tensor,
    output_grads: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    *,
    input_grads: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    rstd, g = rstd.unsqueeze(-1), output_grads
    xhat = (x if mean is None else x - mean.unsqueeze(-1)) * rstd
    scaled = g if weight is None else g * weight
    offset = torch.zeros_like(rstd) if mean is None else scaled.mean(2, keepdim=True)
    dx = rstd * (scaled - offset - xhat * (scaled * xhat).mean(2, keepdim=True))
    return dx if input_grads else None, (g.double() * xhat).sum(1), g.double().sum(1)
