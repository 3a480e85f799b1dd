"""Linear layers: per-example squared gradient norms and clipped sums."""

import torch
from torch import Tensor

from dpkernels import _native  # noqa: F401  (loads the operators)
from dpkernels.ops._checks import require_size, require_tensor, require_weights, widen

_squared_norms = torch.ops.dpkernels.linear_squared_norms.default
_clipped_sums = torch.ops.dpkernels.linear_clipped_sums.default
# What an operator refuses itself is looked at again, in words for users: small models are bound by checks in Python.
_REFUSED = (RuntimeError, TypeError)


def _tf32(activations: Tensor) -> bool:
    """Whether products may be rounded to TF32: torch's own setting, by whichever switch, which is of CUDA alone."""
    return activations.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"


def _check(activations: Tensor, output_grads: Tensor) -> None:
    require_tensor(activations, "activations", "[batch, positions, in_features]")
    require_tensor(output_grads, "output_grads", "[batch, positions, out_features]")
    for dim, what in enumerate(("batch", "positions")):
        require_size(output_grads, "output_grads", dim, activations.size(dim), f"the {what} of activations")


def linear_squared_norms(
    activations: Tensor, output_grads: Tensor, *, weight: bool = True, bias: bool = True
) -> Tensor:
    """Squared norm of each example's gradient: ``||sum_t g_t a_t^T||^2`` (weight) plus ``||sum_t g_t||^2`` (bias).

    Args:
        activations: [batch, positions, in_features], the layer's input.
        output_grads: [batch, positions, out_features], the gradient of the summed losses with respect to its output.
        weight, bias: which parameters count.

    Returns:
        float64 [batch]: never below the squared norm of what :func:`linear_clipped_sums` adds for the example.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit.
    """
    try:
        return _squared_norms(activations, output_grads, weight, bias, _tf32(activations))
    except _REFUSED:
        _check(activations, output_grads)
        return _squared_norms(*widen(activations, output_grads), weight, bias, _tf32(activations))


def linear_forward(activations: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """``activations @ weight.T + bias`` and the squared norm of every row of activations, from one read of them.

    For layers with few outputs, whose cost is that read.

    Args:
        activations: [rows, in_features], float32 or float64.
        weight: [out_features, in_features] of the same dtype.
        bias: [out_features] of the same dtype, or None.

    Returns:
        [rows, out_features] in the dtype of the inputs, and float64 [rows].

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit.
    """
    require_tensor(activations, "activations", "[rows, in_features]")
    require_tensor(weight, "weight", "[out_features, in_features]")
    require_size(weight, "weight", 1, activations.size(1), "the in_features of activations")
    if activations.dtype not in (torch.float32, torch.float64) or weight.dtype != activations.dtype:
        raise TypeError(
            f"activations and weight must both be float32 or float64, got {activations.dtype}, {weight.dtype}"
        )
    if bias is not None:
        require_tensor(bias, "bias", "[out_features]")
        require_size(bias, "bias", 0, weight.size(0), "the out_features of weight")
        bias = bias.detach().to(activations.dtype).contiguous()
    return torch.ops.dpkernels.linear_forward(*widen(activations, weight), bias)


def linear_clipped_sums(
    activations: Tensor, output_grads: Tensor, weights: Tensor, *, weight: bool = True, bias: bool = True
) -> tuple[Tensor, Tensor]:
    """Weighted sums over examples: ``sum_b w_b sum_t g_bt a_bt^T`` and ``sum_b w_b sum_t g_bt``.

    Args:
        activations: [batch, positions, in_features].
        output_grads: [batch, positions, out_features].
        weights: float64 [batch]; an example of weight 0 is skipped, whatever its values.
        weight, bias: which sums are wanted; the other comes back empty.

    Returns:
        float64 [out_features, in_features] and float64 [out_features], accumulated in float64.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit.
    """
    try:
        return _clipped_sums(activations, output_grads, weights, weight, bias, _tf32(activations))
    except _REFUSED:
        _check(activations, output_grads)
        require_weights(weights, activations.size(0))
        tensors = *widen(activations, output_grads), weights.contiguous()
        return _clipped_sums(*tensors, weight, bias, _tf32(activations))


@torch.library.register_fake("dpkernels::linear_squared_norms")
def _(activations: Tensor, output_grads: Tensor, weight: bool, bias: bool, tf32: bool = False) -> Tensor:
    return activations.new_empty(activations.size(0), dtype=torch.float64)


@torch.library.register_fake("dpkernels::linear_forward")
def _(activations: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = activations.size(0)
    return activations.new_empty(rows, weight.size(0)), activations.new_empty(rows, dtype=torch.float64)


@torch.library.register_fake("dpkernels::linear_clipped_sums")
def _(
    activations: Tensor, output_grads: Tensor, weights: Tensor, weight: bool, bias: bool, tf32: bool = False
) -> tuple[Tensor, Tensor]:
    p, d = activations.size(2), output_grads.size(2)
    new = lambda *shape: activations.new_empty(shape, dtype=torch.float64)  # noqa: E731
    return new(d if weight else 0, p if weight else 0), new(d if bias else 0)
