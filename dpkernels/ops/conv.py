"""Convolutions in 1, 2 and 3 dimensions: per-example squared gradient norms and clipped sums."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dpkernels import _native
from dpkernels.ops._checks import require_size, require_tensor, require_weights, widen

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
        Squared norms, float64 [batch], rounded upward: below neither the norm of the exact gradient nor that of what
        :func:`conv_clipped_sums` adds. Weight gradients [batch, *weight.shape] in the input's dtype (float32 for half
        precision), None unless stored; in memory the outputs come last. Bias gradients, float64 [batch, out_channels],
        None unless ``bias``.

    Raises:
        ValueError, TypeError: shapes, dtypes or settings do not fit.
    """
    geometry = _geometry(input, output_grads, kernel_size, stride, padding, dilation, groups, transposed)
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy must be one of {_STRATEGIES}, got {strategy!r}")
    if store and strategy == "gram":
        raise ValueError("strategy must be 'direct' or 'auto' where store is true, got 'gram'")
    if store is None:
        store = strategy != "gram" and _stores(tuple(input.shape[1:]), tuple(output_grads.shape[1:]), geometry)
    norms, grads, bias_grads = torch.ops.dpkernels.conv_squared_norms(
        *_lift(input, output_grads), *geometry, weight, bias, store, _STRATEGIES.index(strategy)
    )
    # In memory: [batch, rows, out_channels].
    weight_grads = grads.transpose(1, 2).unflatten(2, (-1, *kernel_size)) if store and weight else None
    return norms, weight_grads, bias_grads if bias else None


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
    geometry = _geometry(input, output_grads, kernel_size, stride, padding, dilation, groups, transposed)
    require_weights(weights, input.size(0))
    weight_sum, bias_sum = torch.ops.dpkernels.conv_clipped_sums(
        *_lift(input, output_grads), weights.contiguous(), *geometry, weight, bias
    )
    return weight_sum.unflatten(1, (-1, *kernel_size)) if weight else weight_sum, bias_sum


_NAMES = ("kernel_size", "stride", "padding", "dilation")
_Triple = tuple[int, ...]
_Geometry = tuple[_Triple, _Triple, _Triple, _Triple, int, bool]


def _geometry(
    input: Tensor,
    output_grads: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    transposed: bool,
) -> _Geometry:
    """The settings, checked and lifted to three dimensions."""
    dims = len(kernel_size)
    if not 1 <= dims <= 3:
        raise ValueError(f"kernel_size must hold 1, 2 or 3 numbers, got {tuple(kernel_size)}")
    maps = ["depth", "height", "width"][3 - dims :]
    require_tensor(input, "input", f"[batch, in_channels, {', '.join(maps)}]")
    require_tensor(output_grads, "output_grads", f"[batch, out_channels, {', '.join(maps)}]")
    require_size(output_grads, "output_grads", 0, input.size(0), "the batch of input")
    settings = (kernel_size, stride, padding, dilation)
    for name, values, least in zip(_NAMES, settings, (1, 1, 0, 1), strict=True):
        if len(values) != dims:
            raise ValueError(f"{name} must hold {dims} numbers like kernel_size, got {tuple(values)}")
        if min(values) < least:
            raise ValueError(f"{name} must hold numbers of at least {least}, got {tuple(values)}")
    for name, tensor in (("input", input), ("output_grads", output_grads)):
        if groups < 1 or tensor.size(1) < 1 or tensor.size(1) % groups:
            raise ValueError(f"groups must divide the {tensor.size(1)} channels of {name}, got {groups}")
    source, result = ("output_grads", "input") if transposed else ("input", "output_grads")
    big, small = (output_grads, input) if transposed else (input, output_grads)
    for i, (k, s, p, d) in enumerate(zip(*settings, strict=True)):
        size = (big.size(i + 2) + 2 * p - d * (k - 1) - 1) // s + 1
        if transposed and 0 < size - small.size(i + 2) <= (d - 1) // s:
            continue  # output padding within the dilation: rows that no input reaches
        if size < 1:
            raise ValueError(
                f"kernel_size must fit into {source}: dimension {i + 2} of size {big.size(i + 2)} with padding {p} is "
                f"shorter than {k} taps with dilation {d}"
            )
        require_size(small, result, i + 2, size, f"what these settings make of {big.size(i + 2)} in {source}")
    lifted = [(fill,) * (3 - dims) + tuple(values) for values, fill in zip(settings, (1, 1, 0, 1), strict=True)]
    return lifted[0], lifted[1], lifted[2], lifted[3], groups, transposed


@lru_cache(maxsize=1024)
def _stores(input_shape: tuple[int, ...], output_shape: tuple[int, ...], geometry: _Geometry) -> bool:
    """Whether the cost model stores the weight gradients."""
    *settings, groups, transposed = geometry
    shapes = (output_shape, input_shape) if transposed else (input_shape, output_shape)
    channels, sizes = [s[0] for s in shapes], [[1] * (4 - len(s)) + list(s[1:]) for s in shapes]
    return bool(_native.host.conv_plan(*channels, groups, *sizes, *settings)[1])


def _lift(*maps: Tensor) -> tuple[Tensor, ...]:
    """[batch, channels, depth, height, width], contiguous, in a dtype that the kernels take."""
    return tuple(t.reshape(*t.shape[:2], *(1,) * (5 - t.dim()), *t.shape[2:]) for t in widen(*maps))


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
) -> tuple[Tensor, Tensor, Tensor]:
    outputs, rows = _weight_matrix(input, output_grads, kernel_size, groups, transposed)
    batch, stored = input.size(0), store and weight
    return (
        input.new_empty(batch, dtype=torch.float64),
        input.new_empty((batch, rows, outputs) if stored else (0, 0, 0)),
        input.new_empty((batch, output_grads.size(1)) if bias else (0, 0), dtype=torch.float64),
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
) -> tuple[Tensor, Tensor]:
    matrix = _weight_matrix(input, output_grads, kernel_size, groups, transposed)
    return (
        input.new_empty(matrix if weight else (0, 0), dtype=torch.float64),
        input.new_empty(output_grads.size(1) if bias else 0, dtype=torch.float64),
    )


def _weight_matrix(
    input: Tensor, output_grads: Tensor, kernel_size: list[int], groups: int, transposed: bool
) -> tuple[int, int]:
    big, small = (output_grads, input) if transposed else (input, output_grads)
    rows = big.size(1) // groups
    for k in kernel_size:
        rows *= k
    return small.size(1), rows
