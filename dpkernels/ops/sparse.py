"""Selected entries of the per-example weight gradients of convolutions: products sampled where a mask is set."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dpkernels import _native  # noqa: F401  (loads the operators)
from dpkernels.ops._maps import dense, settings_of


def sparse_gradients(
    input: Tensor,
    output_grads: Tensor,
    entries: Tensor,
    *,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
) -> Tensor:
    """Selected entries of each example's weight gradient:
    ``G[b, n] = sum_t g[b, o, t] x[b, c, t * stride + k * dilation - padding]`` for the n-th entry (o, c, k).

    Neither the unfolded input nor any other entry is formed. :func:`~dpkernels.ops.clip.row_squared_norms` and
    :func:`~dpkernels.ops.clip.weighted_row_sum` make norms and clipped sums of the result. It may be asked for a few
    entries at a time: their bits depend on no other entry and no other example.

    Args:
        input: [batch, in_channels, *map], the layer's input, with 1, 2 or 3 spatial dimensions. For a linear layer
            [batch, in_features, positions], a convolution of one tap.
        output_grads: [batch, out_channels, *map], the gradient of the summed losses with respect to its output.
        entries: int64 [selected], places in the flattened weight [out_channels, in_channels / groups, *kernel_size].
            In ascending order those that share an input channel are computed together.
        kernel_size, stride, padding, dilation: one number per spatial dimension; padding is zeros on both sides.
        groups: of channels.

    Returns:
        [batch, selected] in the input's dtype (float32 for half precision). Products accumulate in that dtype over at
        most 256 positions, then in float64.

    Raises:
        ValueError, TypeError: shapes, dtypes or settings do not fit, or (on the CPU) an entry lies outside the weight.
    """
    *settings, _ = settings_of(input, output_grads, kernel_size, stride, padding, dilation, groups, False)
    if not isinstance(entries, Tensor):
        raise TypeError(f"entries must be a tensor [selected], got {type(entries).__name__}")
    if entries.dim() != 1:
        raise ValueError(f"entries must be [selected], got {entries.dim()}-D of shape {tuple(entries.shape)}")
    if entries.dtype != torch.int64:
        raise TypeError(f"entries must be int64, got {entries.dtype}")
    maps = dense(input, output_grads)
    try:
        return torch.ops.dpkernels.sparse_gradients(*maps, entries.contiguous(), *settings)
    except RuntimeError:
        weights = output_grads.size(1) * (input.size(1) // groups) * torch.Size(kernel_size).numel()
        low, high = (int(entries.min()), int(entries.max())) if len(entries) else (0, 0)
        if low < 0 or high >= weights:
            raise ValueError(f"entries must lie in [0, {weights}), got values from {low} to {high}") from None
        raise


@torch.library.register_fake("dpkernels::sparse_gradients")
def _(
    input: Tensor,
    output_grads: Tensor,
    entries: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    return input.new_empty((input.size(0), entries.size(0)), dtype=dtype)
