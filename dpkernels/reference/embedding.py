"""Embeddings: the per-example gradient adds ``g_t`` (a bag: ``s_t g``) to row ``indices_t`` of the table."""

import torch
from torch import Tensor
from torch.nn import functional as F


def _kept(indices: Tensor, padding_idx: int | None) -> Tensor:
    return torch.ones_like(indices, dtype=torch.bool) if padding_idx is None else indices != padding_idx


def _rows(indices: Tensor, num_embeddings: int, padding_idx: int | None) -> Tensor:
    """One-hot rows, float64 [batch, positions, num_embeddings]; zero for padding."""
    return F.one_hot(indices.long(), num_embeddings).double() * _kept(indices, padding_idx).unsqueeze(-1)


def _size(indices: Tensor) -> int:
    return int(indices.max()) + 1 if indices.numel() else 1


def embedding_squared_norms(indices: Tensor, output_grads: Tensor, *, padding_idx: int | None = None) -> Tensor:
    rows = _rows(indices, _size(indices), padding_idx)
    return torch.einsum("btv,btd->bvd", rows, output_grads.double()).square().sum((1, 2))


def embedding_clipped_sums(
    indices: Tensor, output_grads: Tensor, weights: Tensor, *, num_embeddings: int, padding_idx: int | None = None
) -> Tensor:
    used = weights != 0
    rows = _rows(indices[used], num_embeddings, padding_idx)
    return torch.einsum("b,btv,btd->vd", weights[used], rows, output_grads[used].double())


def _scaled_rows(
    indices: Tensor, num_embeddings: int, mode: str, per_sample_weights: Tensor | None, padding_idx: int | None
) -> Tensor:
    """What each row of the table is multiplied with in an example's bag, float64 [batch, num_embeddings]."""
    rows = _rows(indices, num_embeddings, padding_idx)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.double().unsqueeze(-1)
    total = rows.sum(1)
    return total / _kept(indices, padding_idx).sum(1, keepdim=True).clamp(min=1) if mode == "mean" else total


def embedding_bag_squared_norms(
    indices: Tensor,
    output_grads: Tensor,
    *,
    mode: str,
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
) -> Tensor:
    rows = _scaled_rows(indices, _size(indices), mode, per_sample_weights, padding_idx)
    return torch.einsum("bv,bd->bvd", rows, output_grads.double()).square().sum((1, 2))


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
    used = weights != 0
    scales = None if per_sample_weights is None else per_sample_weights[used]
    rows = _scaled_rows(indices[used], num_embeddings, mode, scales, padding_idx)
    return torch.einsum("b,bv,bd->vd", weights[used], rows, output_grads[used].double())
