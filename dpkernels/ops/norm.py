"""Affine normalization: the backward of group, layer, instance, RMS and frozen batch norm with per-example gradients.

The layer's own backward and the per-example parameter gradients are made of the same sums, so one operator returns
both. Norms and clipped sums of the parameter gradients are those of stored rows: :mod:`dpkernels.ops.clip`.
"""

import torch
from torch import Tensor

from dpkernels import _native  # noqa: F401  (loads the operators)
from dpkernels.ops._checks import as_they_lie, require_size, require_tensor

Grads = tuple[Tensor | None, Tensor, Tensor]


def _check_grads(output_grads: Tensor, x: Tensor, shape: str) -> None:
    require_tensor(output_grads, "output_grads", shape)
    for dim, name in enumerate(shape.strip("[]").split(", ")):
        require_size(output_grads, "output_grads", dim, x.size(dim), f"the {name} of x")


def _check_weight(weight: Tensor | None, size: int, name: str) -> None:
    if weight is not None:
        require_tensor(weight, "weight", f"[{name}]")
        require_size(weight, "weight", 0, size, f"the {name} of x")


def _widen(
    x: Tensor, output_grads: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, *, last: bool = False
) -> tuple[Tensor | None, ...]:
    """As the kernels take them: x, output_grads and weight in one dtype, the statistics in what it is computed with.
    Everything is contiguous, but with ``last`` the maps lie as [batch, spatial, channels]."""
    plain = as_they_lie(*(t for t in (x, output_grads, weight) if t is not None))
    maps = (t.mT.contiguous().mT if last else t.contiguous() for t in plain[:2])
    computed = torch.float64 if plain[0].dtype == torch.float64 else torch.float32
    statistics = (None if t is None else t.detach().to(computed).contiguous() for t in (mean, rstd))
    return *maps, *statistics, None if weight is None else plain[2].contiguous()


def _channels_last(x: Tensor) -> bool:
    """Whether a map [batch, channels, spatial] lies as [batch, spatial, channels], which the CPU's kernel takes."""
    return x.device.type == "cpu" and not x.is_contiguous() and x.mT.is_contiguous()


def group_norm_backward(
    x: Tensor,
    output_grads: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    *,
    fixed: bool = False,
    input_grads: bool = True,
) -> Grads:
    """Backward of ``y = weight * xhat + bias`` with ``xhat = (x - mean) * rstd`` over groups of channels.

    Args:
        x: [batch, channels, spatial], the layer's input.
        output_grads: [batch, channels, spatial], the gradient of the summed losses with respect to its output.
        mean, rstd: [batch, groups], the statistics (instance and batch norm: as many groups as channels).
        weight: [channels], or None for ones.
        fixed: whether the statistics are constants that do not depend on x (batch norm in eval mode).
        input_grads: whether the input's gradient is wanted.

    Returns:
        The gradient of x in its shape and dtype, or None; and the per-example gradients ``sum_s g xhat`` of the weight
        and ``sum_s g`` of the bias, float64 [batch, channels] each.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit.
    """
    require_tensor(x, "x", "[batch, channels, spatial]")
    _check_grads(output_grads, x, "[batch, channels, spatial]")
    batch, channels = x.size(0), x.size(1)
    for name, value in (("mean", mean), ("rstd", rstd)):
        require_tensor(value, name, "[batch, groups]")
        require_size(value, name, 0, batch, "the batch of x")
        require_size(value, name, 1, mean.size(1), "the groups of mean")
    if mean.size(1) == 0 or channels % mean.size(1):
        raise ValueError(f"mean must have groups that divide the {channels} channels of x, got {mean.size(1)}")
    _check_weight(weight, channels, "channels")
    values = _widen(x, output_grads, mean, rstd, weight, last=_channels_last(x))
    dx, weight_grads, bias_grads = torch.ops.dpkernels.group_norm_backward(*values, fixed, input_grads)
    return dx.to(x.dtype) if input_grads else None, weight_grads, bias_grads


def layer_norm_backward(
    x: Tensor,
    output_grads: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    *,
    input_grads: bool = True,
) -> Grads:
    """Backward of ``y = weight * xhat + bias`` with ``xhat = (x - mean) * rstd`` over the features of each position.

    Args:
        x: [batch, positions, features], the layer's input.
        output_grads: [batch, positions, features], the gradient of the summed losses with respect to its output.
        mean: [batch, positions]; None for RMS norm, which subtracts none.
        rstd: [batch, positions].
        weight: [features], or None for ones.
        input_grads: whether the input's gradient is wanted.

    Returns:
        The gradient of x in its shape and dtype, or None; and the per-example gradients ``sum_t g_t xhat_t`` of the
        weight and ``sum_t g_t`` of the bias, float64 [batch, features] each.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit.
    """
    require_tensor(x, "x", "[batch, positions, features]")
    _check_grads(output_grads, x, "[batch, positions, features]")
    for name, value in (("rstd", rstd),) if mean is None else (("mean", mean), ("rstd", rstd)):
        require_tensor(value, name, "[batch, positions]")
        require_size(value, name, 0, x.size(0), "the batch of x")
        require_size(value, name, 1, x.size(1), "the positions of x")
    _check_weight(weight, x.size(2), "features")
    values = _widen(x, output_grads, mean, rstd, weight)
    dx, weight_grads, bias_grads = torch.ops.dpkernels.layer_norm_backward(*values, input_grads)
    return dx.to(x.dtype) if input_grads else None, weight_grads, bias_grads


def _fake(x: Tensor, size: int, input_grads: bool) -> tuple[Tensor, Tensor, Tensor]:
    grads = [x.new_empty((x.size(0), size), dtype=torch.float64) for _ in range(2)]
    return torch.empty_like(x) if input_grads else x.new_empty((0, 0, 0)), grads[0], grads[1]


@torch.library.register_fake("dpkernels::group_norm_backward")
def _(
    x: Tensor, output_grads: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, fixed: bool, input_grads: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake(x, x.size(1), input_grads)


@torch.library.register_fake("dpkernels::layer_norm_backward")
def _(
    x: Tensor, output_grads: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None, input_grads: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake(x, x.size(2), input_grads)
