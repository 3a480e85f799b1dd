"""Embeddings and embedding bags: per-example squared gradient norms and clipped sums."""

import torch
from torch import Tensor

from dpkernels import _native  # noqa: F401  (loads the operators)
from dpkernels.ops._checks import require_size, require_tensor, require_weights, widen

_NO_PADDING = -1
_MODES = ("sum", "mean")


def _check(indices: Tensor, output_grads: Tensor, shape: str, padding_idx: int | None) -> Tensor:
    """Raise unless the arguments fit; returns the indices as the kernels take them, contiguous int64."""
    if not isinstance(indices, Tensor):
        raise TypeError(f"indices must be a tensor [batch, positions], got {type(indices).__name__}")
    if indices.dim() != 2:
        raise ValueError(f"indices must be [batch, positions], got {indices.dim()}-D of shape {tuple(indices.shape)}")
    if indices.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"indices must be int64 or int32, got {indices.dtype}")
    require_tensor(output_grads, "output_grads", shape)
    for dim, name in enumerate(shape.strip("[]").split(", ")[:-1]):
        require_size(output_grads, "output_grads", dim, indices.size(dim), f"the {name} of indices")
    if padding_idx is not None and padding_idx < 0:
        raise ValueError(f"padding_idx must be None or at least 0, got {padding_idx}")
    return indices.to(torch.int64).contiguous()


def _require_range(indices: Tensor, num_embeddings: int, padding_idx: int | None) -> None:
    if num_embeddings < 1:
        raise ValueError(f"num_embeddings must be at least 1, got {num_embeddings}")
    if padding_idx is not None and padding_idx >= num_embeddings:
        raise ValueError(f"padding_idx must be below num_embeddings, {num_embeddings}, got {padding_idx}")
    if indices.numel():
        low, high = (int(bound) for bound in indices.aminmax())
        if low < 0 or high >= num_embeddings:
            raise ValueError(f"indices must lie in [0, {num_embeddings}), got values from {low} to {high}")


def _padding(padding_idx: int | None) -> int:
    return _NO_PADDING if padding_idx is None else padding_idx


def embedding_squared_norms(indices: Tensor, output_grads: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """Squared norm of each example's gradient: ``sum_v ||sum_{t: indices_t = v} g_t||^2`` over the rows v of the table.

    Args:
        indices: int64 or int32 [batch, positions], rows of the table.
        output_grads: [batch, positions, dim], the gradient of the summed losses with respect to the output.
        padding_idx: the row that receives no gradient, or None.

    Returns:
        float64 [batch], squared norms of the very rows that the clipped sum adds.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit.
    """
    indices = _check(indices, output_grads, "[batch, positions, dim]", padding_idx)
    return torch.ops.dpkernels.embedding_squared_norms(indices, *widen(output_grads), _padding(padding_idx))


def embedding_clipped_sums(
    indices: Tensor, output_grads: Tensor, weights: Tensor, *, num_embeddings: int, padding_idx: int | None = None
) -> Tensor:
    """Weighted sum over examples: row v is ``sum_b w_b sum_{t: indices_bt = v} g_bt``.

    Args:
        indices: int64 or int32 [batch, positions], rows of the table.
        output_grads: [batch, positions, dim].
        weights: float64 [batch]; an example of weight 0 is skipped, whatever its values.
        num_embeddings: rows of the table.
        padding_idx: the row that receives no gradient, or None.

    Returns:
        float64 [num_embeddings, dim], accumulated in float64.

    Raises:
        ValueError, TypeError: shapes or dtypes do not fit, or an index lies outside the table.
    """
    indices = _check(indices, output_grads, "[batch, positions, dim]", padding_idx)
    require_weights(weights, indices.size(0))
    _require_range(indices, num_embeddings, padding_idx)
    return torch.ops.dpkernels.embedding_clipped_sums(
        indices, *widen(output_grads), weights.contiguous(), num_embeddings, _padding(padding_idx)
    )


def _scales(indices: Tensor, mode: str, per_sample_weights: Tensor | None, padding_idx: int | None) -> Tensor:
    """What each position's row is multiplied with in its bag, float64 [batch, positions]; 0 for padding."""
    if mode not in _MODES:
        raise ValueError(f"mode must be one of {_MODES}, got {mode!r}")
    kept = torch.ones_like(indices, dtype=torch.bool) if padding_idx is None else indices != padding_idx
    if per_sample_weights is None:
        scales = kept.double()
        return scales / scales.sum(1, keepdim=True).clamp(min=1) if mode == "mean" else scales
    if mode != "sum":
        raise ValueError(f"per_sample_weights must be None for mode {mode!r}: only mode 'sum' takes them")
    require_tensor(per_sample_weights, "per_sample_weights", "[batch, positions]")
    for dim, name in enumerate(("batch", "positions")):
        require_size(per_sample_weights, "per_sample_weights", dim, indices.size(dim), f"the {name} of indices")
    return torch.where(kept, per_sample_weights.detach().double(), 0.0)


def embedding_bag_squared_norms(
    indices: Tensor,
    output_grads: Tensor,
    *,
    mode: str,
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    """Squared norm of each example's gradient where its one bag is ``sum_t s_t table[indices_t]``.

    The scale s_t is 0 for padding, and otherwise 1 or ``per_sample_weights`` (mode sum) or one over the number of
    positions that are no padding (mode mean): ``||g||^2 sum_v (sum_{t: indices_t = v} s_t)^2``.

    Args:
        indices: int64 or int32 [batch, positions], one bag per example.
        output_grads: [batch, dim].
        mode: "sum" or "mean".
        per_sample_weights: [batch, positions], mode sum only, or None.
        padding_idx: the row that is left out of every bag, or None.

    Returns:
        float64 [batch], squared norms of the very rows that the clipped sum adds.

    Raises:
        ValueError, TypeError: shapes, dtypes or the mode do not fit.
    """
    indices = _check(indices, output_grads, "[batch, dim]", padding_idx)
    scales = _scales(indices, mode, per_sample_weights, padding_idx)
    return torch.ops.dpkernels.embedding_bag_squared_norms(indices, *widen(output_grads), scales)


def embedding_bag_clipped_sums(
    indices: Tensor,
    output_grads: Tensor,
    weights: Tensor,
    *,
    num_embeddings: int,
    mode: str,
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    """Weighted sum over examples: row v is ``sum_b w_b (sum_{t: indices_bt = v} s_bt) g_b``, with the scales s of
    :func:`embedding_bag_squared_norms`.

    Args:
        indices: int64 or int32 [batch, positions], one bag per example.
        output_grads: [batch, dim].
        weights: float64 [batch]; an example of weight 0 is skipped, whatever its values.
        num_embeddings: rows of the table.
        mode: "sum" or "mean".
        per_sample_weights: [batch, positions], mode sum only, or None.
        padding_idx: the row that is left out of every bag, or None.

    Returns:
        float64 [num_embeddings, dim], accumulated in float64.

    Raises:
        ValueError, TypeError: shapes, dtypes or the mode do not fit, or an index lies outside the table.
    """
    indices = _check(indices, output_grads, "[batch, dim]", padding_idx)
    scales = _scales(indices, mode, per_sample_weights, padding_idx)
    require_weights(weights, indices.size(0))
    _require_range(indices, num_embeddings, padding_idx)
    return torch.ops.dpkernels.embedding_bag_clipped_sums(
        indices, *widen(output_grads), scales, weights.contiguous(), num_embeddings
    )


@torch.library.register_fake("dpkernels::embedding_squared_norms")
def _(indices: Tensor, output_grads: Tensor, padding_idx: int) -> Tensor:
    return output_grads.new_empty(indices.size(0), dtype=torch.float64)


@torch.library.register_fake("dpkernels::embedding_clipped_sums")
def _(indices: Tensor, output_grads: Tensor, weights: Tensor, num_embeddings: int, padding_idx: int) -> Tensor:
    return output_grads.new_empty((num_embeddings, output_grads.size(2)), dtype=torch.float64)


@torch.library.register_fake("dpkernels::embedding_bag_squared_norms")
def _(indices: Tensor, output_grads: Tensor, scales: Tensor) -> Tensor:
    return output_grads.new_empty(indices.size(0), dtype=torch.float64)


@torch.library.register_fake("dpkernels::embedding_bag_clipped_sums")
def _(indices: Tensor, output_grads: Tensor, scales: Tensor, weights: Tensor, num_embeddings: int) -> Tensor:
    return output_grads.new_empty((num_embeddings, output_grads.size(1)), dtype=torch.float64)
