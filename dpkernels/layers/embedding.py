"""nn.Embedding and nn.EmbeddingBag: the gradient of a table, of which an example touches a few rows."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from dpkernels.layers.base import Emit, Layer, Record
from dpkernels.ops.embedding import (
    embedding_bag_clipped_sums,
    embedding_bag_squared_norms,
    embedding_clipped_sums,
    embedding_squared_norms,
)


class _Table(Layer):
    autocast: ClassVar[str | None] = None  # torch looks rows up in the table's dtype

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        if module.max_norm is not None:
            return "max_norm changes the table in the forward, by the rows that private examples use. Set max_norm=None"
        if module.scale_grad_by_freq:
            return (
                "scale_grad_by_freq divides an example's gradient by counts over the whole batch. Set "
                "scale_grad_by_freq=False"
            )
        if module.sparse:
            return "sparse=True cannot hold a private gradient: noise reaches every row. Set sparse=False"
        return None


class EmbeddingLayer(_Table):
    """nn.Embedding on indices of any rank: [batch, ...] to [batch, ..., dim]."""

    module_types = (nn.Embedding,)
    module: nn.Embedding

    def run(self, weight: Tensor | None, bias: Tensor | None, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        (indices,) = inputs
        assert weight is not None
        return F.embedding(indices, weight, self.module.padding_idx), (indices,)

    def input_grads(self, record: Record, weight: Tensor | None, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
        return (None,)

    def squared_norms(self, record: Record, slots: frozenset[str]) -> Tensor:
        return embedding_squared_norms(*_positions(record), padding_idx=self.module.padding_idx)

    def clipped_sums(self, record: Record, weights: Tensor, slots: frozenset[str]) -> dict[str, Tensor]:
        rows, padding_idx = self.module.weight.size(0), self.module.padding_idx
        indices, g = _positions(record)
        return {"weight": embedding_clipped_sums(indices, g, weights, num_embeddings=rows, padding_idx=padding_idx)}


class EmbeddingBagLayer(_Table):
    """nn.EmbeddingBag on [batch, positions], one bag per example. Saves (indices,) or (indices, per_sample_weights)."""

    module_types = (nn.EmbeddingBag,)
    module: nn.EmbeddingBag

    @classmethod
    def refusal(cls, module: nn.Module) -> str | None:
        if module.mode == "max":
            return "an embedding bag of mode 'max' is not supported. Use mode 'sum' or 'mean'"
        return super().refusal(module)

    def call(self, emit: Emit, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._call(emit, *args, **kwargs)

    def _call(
        self, emit: Emit, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        if input.dim() != 2 or offsets is not None:
            raise ValueError(
                f"the input of {self.path!r} must be [batch, positions] without offsets, one bag per example, got "
                f"{input.dim()}-D{'' if offsets is None else ' with offsets'}: pad to one length and set padding_idx"
            )
        return self.capture(emit, input, *(() if per_sample_weights is None else (per_sample_weights,)))

    def run(self, weight: Tensor | None, bias: Tensor | None, *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        indices, *scales = inputs
        assert weight is not None
        output = F.embedding_bag(
            indices,
            weight,
            mode=self.module.mode,
            per_sample_weights=scales[0] if scales else None,
            padding_idx=self.module.padding_idx,
        )
        return output, inputs

    def input_grads(self, record: Record, weight: Tensor | None, needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
        indices, scales = record.saved  # only per_sample_weights can need a gradient
        assert weight is not None
        grads = (F.embedding(indices, weight) @ record.output_grad.unsqueeze(-1)).squeeze(-1)
        if self.module.padding_idx is not None:
            grads = grads.masked_fill(indices == self.module.padding_idx, 0)
        return None, grads.to(scales.dtype)

    def squared_norms(self, record: Record, slots: frozenset[str]) -> Tensor:
        return embedding_bag_squared_norms(record.saved[0], record.output_grad, **self._options(record))

    def clipped_sums(self, record: Record, weights: Tensor, slots: frozenset[str]) -> dict[str, Tensor]:
        rows = self.module.weight.size(0)
        options = self._options(record)
        return {
            "weight": embedding_bag_clipped_sums(
                record.saved[0], record.output_grad, weights, num_embeddings=rows, **options
            )
        }

    def _options(self, record: Record) -> dict[str, Any]:
        scales = record.saved[1] if len(record.saved) == 2 else None
        return {"mode": self.module.mode, "per_sample_weights": scales, "padding_idx": self.module.padding_idx}


def _positions(record: Record) -> tuple[Tensor, Tensor]:
    """Indices as [batch, positions] and output gradients as [batch, positions, dim]."""
    (indices,), g = record.saved, record.output_grad
    shape = (indices.size(0), math.prod(indices.shape[1:]))
    return indices.reshape(shape), g.reshape(*shape, g.size(-1))
