"""Convolutions in 1, 2 and 3 dimensions: per-example squared gradient norms and clipped sums."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dpkernels import _native
from dpkernels.ops._checks import require_weights
from dpkernels.ops._maps import Ints, Settings, dense, settings_of

_STRATEGIES = ("auto", "direct", "gram")


def conv_squared_norms(
    input: Tensor,
    output_grads: Tensor,
    *,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    transposed: bool = False,
    weight: bool = True,
    bias: bool = True,
    store: bool | None = False,
    strategy: str = "auto",
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Squared norm of each example's gradient of the weight and the bias, and the gradients themselves where stored.

    The weight gradient of an example is ``G[o, c, k] = sum_t g[o, t] x[c, t * stride + k * dilation - padding]``. For a
    transposed convolution ``x`` and ``g`` swap their roles.

    Args:
        input: [batch, in_channels, *map], the layer's input, with 1, 2 or 3 spatial dimensions.
        output_grads: [batch, out_channels, *map], the gradient of the summed losses with respect to its output.
        kernel_size, stride, padding, dilation: one number per spatial dimension; padding is zeros on both sides.
        groups: of channels.
        transposed: whether the layer is a transposed convolution.
        weight, bias: which parameters count.
        store: also return the weight gradients; the norms are then of these very numbers. None: where they are small
            and the clipped sum is cheaper from them.
        strategy: how norms are computed: ``direct`` (the gradient itself), ``gram`` (pairs of positions; cannot store),
            or ``auto``.

    Returns:
        Squared norms, float64 [batch]: never below that of what :func:`conv_clipped_sums` adds, which in float32 may be
        a rounding away from the exact gradient. Weight gradients [batch, *weight.shape] in the input's dtype (float32
        for half precision), None unless stored; in memory the outputs come last. Bias gradients, float64
        [batch, out_channels], None unless ``bias``.

    Raises:
        ValueError, TypeError: shapes, dtypes or settings do not fit.
    """
    settings = settings_of(input, output_grads, kernel_size, stride, padding, dilation, groups, transposed)
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy must be one of {_STRATEGIES}, got {strategy!r}")
    if store and strategy == "gram":
        raise ValueError("strategy must be 'direct' or 'auto' where store is true, got 'gram'")
    if store is None:
        plan = conv_plan(tuple(input.shape[1:]), tuple(output_grads.shape[1:]), settings)
        store = strategy != "gram" and plan.way == "stored"
    norms, weight_grads, bias_grads = torch.ops.dpkernels.conv_squared_norms(
        *dense(input, output_grads), *settings, weight, bias, store, _STRATEGIES.index(strategy), _tf32(input)
    )
    return norms, weight_grads.movedim(-1, 1) if store and weight else None, bias_grads if bias else None


def conv_clipped_sums(
    input: Tensor,
    output_grads: Tensor,
    weights: Tensor,
    *,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
    transposed: bool = False,
    weight: bool = True,
    bias: bool = True,
) -> tuple[Tensor, Tensor]:
    """Weighted sums over examples of the weight gradients and of the bias gradients.

    Args:
        input, output_grads, kernel_size, stride, padding, dilation, groups, transposed: as in
            :func:`conv_squared_norms`.
        weights: float64 [batch]; an example of weight 0 is skipped, whatever its values.
        weight, bias: which sums are wanted; the other comes back empty.

    Returns:
        float64 in the weight's shape and float64 [out_channels]. Within an example products accumulate in the input's
        dtype (float32 for half precision; float64 where they could leave its range), across examples in float64.

    Raises:
        ValueError, TypeError: shapes, dtypes or settings do not fit.
    """
    settings = settings_of(input, output_grads, kernel_size, stride, padding, dilation, groups, transposed)
    require_weights(weights, input.size(0))
    return torch.ops.dpkernels.conv_clipped_sums(
        *dense(input, output_grads), weights.contiguous(), *settings, weight, bias, _tf32(input)
    )


def _tf32(input: Tensor) -> bool:
    """Whether products may be rounded to TF32: torch's own setting, by whichever switch, which is of CUDA alone."""
    return input.is_cuda and torch.backends.cudnn.conv.fp32_precision == "tf32"  # type: ignore[attr-defined]


class ConvPlan(NamedTuple):
    """What the cost model thinks of a shape. A *way* to norms and clipped sum is ``stored`` (the gradients are kept for
    the sum), ``direct`` (they are computed twice) or ``gram`` (norms from pairs of positions)."""

    way: str  #: the one that is taken
    costs: dict[str, float]  #: of each way for one example; only their ratios mean something


@lru_cache(maxsize=1024)
def conv_plan(input_shape: Ints, output_shape: Ints, settings: Settings) -> ConvPlan:
    """What :func:`conv_squared_norms` does with ``store=None`` and ``strategy="auto"``.

    Args:
        input_shape, output_shape: [channels, *map] of the layer's input and output.
        settings: kernel_size, stride, padding, dilation, groups, transposed.
    """
    *geometry, groups, transposed = settings
    maps = (output_shape, input_shape) if transposed else (input_shape, output_shape)
    missing = 4 - len(input_shape)
    sizes = [(1,) * missing + m[1:] for m in maps]
    lifted = [(fill,) * missing + g for fill, g in zip((1, 1, 0, 1), geometry, strict=True)]
    return ConvPlan(*_native.host.conv_plan(maps[0][0], maps[1][0], groups, *sizes, *lifted))


@torch.library.register_fake("dpkernels::conv_squared_norms")
def _(
    input: Tensor,
    output_grads: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    transposed: bool,
    weight: bool,
    bias: bool,
    store: bool,
    strategy: int,
    tf32: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    outputs, *rows = _weight_shape(input, output_grads, kernel_size, groups, transposed)
    batch, stored = input.size(0), store and weight
    return (
        input.new_empty(batch, dtype=torch.float64),
        input.new_empty((batch, *rows, outputs) if stored else 0),
        input.new_empty((batch, output_grads.size(1)) if bias else 0, dtype=torch.float64),
    )


@torch.library.register_fake("dpkernels::conv_clipped_sums")
def _(
    input: Tensor,
    output_grads: Tensor,
    weights: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    transposed: bool,
    weight: bool,
    bias: bool,
    tf32: bool = False,
) -> tuple[Tensor, Tensor]:
    shape = _weight_shape(input, output_grads, kernel_size, groups, transposed)
    return (
        input.new_empty(shape if weight else 0, dtype=torch.float64),
        input.new_empty(output_grads.size(1) if bias else 0, dtype=torch.float64),
    )


def _weight_shape(
    input: Tensor, output_grads: Tensor, kernel_size: list[int], groups: int, transposed: bool
) -> tuple[int, ...]:
    first, second = (input, output_grads) if transposed else (output_grads, input)
    return first.size(1), second.size(1) // groups, *kernel_size
