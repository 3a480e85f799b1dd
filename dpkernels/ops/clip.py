"""Clip factors, and norms and weighted sums of stored per-example gradients."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dpkernels import _native  # noqa: F401  (loads the operators)
from dpkernels.ops._checks import require_size, require_tensor, require_weights, widen

MAX_GRAD_NORM_RANGE = (1e-10, 1e10)
_LOSS_SCALE_RANGE = (1e-30, 1e30)


def require_max_grad_norm(max_grad_norm: float) -> None:
    """Raise unless ``max_grad_norm`` is infinite or within [1e-10, 1e10], where floating point keeps its promises."""
    low, high = MAX_GRAD_NORM_RANGE
    if not (low <= max_grad_norm <= high or max_grad_norm == math.inf):
        raise ValueError(f"max_grad_norm must be in [{low:g}, {high:g}], or inf for no clipping, got {max_grad_norm}")


def clip_factors(
    squared_norms: Sequence[Tensor], *, max_grad_norm: float, loss_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """What each example's captured gradient is multiplied with in the clipped sum, and each example's norm.

    With ``norm_i = loss_scale * sqrt(sum_k squared_norms[k][i])``, the weight is
    ``loss_scale * min(1, max_grad_norm / norm_i)``, rounded so that the weight times the captured gradient's norm is at
    most ``max_grad_norm`` in floating point. An example whose norm is not finite gets weight 0: sums skip it.

    Args:
        squared_norms: float64 [batch] each, one per group of parameters; squared norms of the captured gradients.
        max_grad_norm: the bound C, in [1e-10, 1e10] or inf.
        loss_scale: what turns a captured gradient into the gradient of the example's own loss: the batch size where the
            loss was a mean, 1 where it was a sum.

    Returns:
        weights float64 [batch] and norms float64 [batch], the latter rounded upward.

    Raises:
        ValueError, TypeError: a value, shape or dtype does not fit.
    """
    require_max_grad_norm(max_grad_norm)
    low, high = _LOSS_SCALE_RANGE
    if not low <= loss_scale <= high:
        raise ValueError(f"loss_scale must be in [{low:g}, {high:g}], got {loss_scale}")
    parts = list(squared_norms)
    if not parts:
        raise ValueError("squared_norms must hold at least one tensor [batch], got none")
    for k, part in enumerate(parts):
        require_tensor(part, f"squared_norms[{k}]", "[batch]")
        require_size(part, f"squared_norms[{k}]", 0, parts[0].size(0), "the batch of squared_norms[0]")
        if part.dtype != torch.float64:
            raise TypeError(f"squared_norms[{k}] must be float64, got {part.dtype}")
    return torch.ops.dpkernels.clip_factors([part.contiguous() for part in parts], max_grad_norm, loss_scale)


def row_squared_norms(per_example: Tensor) -> Tensor:
    """Squared norm of every row: float64 [batch] from stored per-example gradients [batch, size], rounded upward.

    Raises:
        ValueError, TypeError: ``per_example`` is no floating-point matrix.
    """
    require_tensor(per_example, "per_example", "[batch, size]")
    return torch.ops.dpkernels.row_squared_norms(*widen(per_example))


def weighted_row_sum(per_example: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over examples, ``sum_b weights[b] * per_example[b]``, accumulated in float64.

    Args:
        per_example: [batch, size], stored per-example gradients.
        weights: float64 [batch]; an example of weight 0 is skipped, whatever its values.

    Returns:
        float64 [size]; the same bits for any number of threads.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit.
    """
    require_tensor(per_example, "per_example", "[batch, size]")
    require_weights(weights, per_example.size(0))
    return torch.ops.dpkernels.weighted_row_sum(*widen(per_example), weights.contiguous())


@torch.library.register_fake("dpkernels::clip_factors")
def _(squared_norms: list[Tensor], max_grad_norm: float, loss_scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(squared_norms[0]), torch.empty_like(squared_norms[0])


@torch.library.register_fake("dpkernels::row_squared_norms")
def _(per_example: Tensor) -> Tensor:
    return per_example.new_empty(per_example.size(0), dtype=torch.float64)


@torch.library.register_fake("dpkernels::weighted_row_sum")
def _(per_example: Tensor, weights: Tensor) -> Tensor:
    return per_example.new_empty(per_example.size(1), dtype=torch.float64)
