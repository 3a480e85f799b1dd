"""Convolutions. The weight gradient of one example is
``G[o, c, k] = sum_t g[o, t] x[c, t * stride + k * dilation - padding]``,
with ``x`` and ``g`` swapped for a transposed convolution; that of its bias is ``sum_t g[o, t]``."""

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F


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
    grads = weight_grads(input, output_grads, kernel_size, stride, padding, dilation, groups, transposed)
    bias_grads = output_grads.double().flatten(2).sum(2)
    norms = weight * grads.double().flatten(1).square().sum(1) + bias * bias_grads.square().sum(1)
    return norms, grads if store and weight else None, bias_grads if bias else None


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
    kept = weights != 0
    x, g = input[kept], output_grads[kept]
    grads = weight_grads(x, g, kernel_size, stride, padding, dilation, groups, transposed)
    return (
        torch.einsum("b,b...->...", weights[kept], grads.double()) if weight else weights.new_empty(0),
        torch.einsum("b,bot->o", weights[kept], g.double().flatten(2)) if bias else weights.new_empty(0),
    )


def weight_grads(
    input: Tensor,
    output_grads: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    transposed: bool,
) -> Tensor:
    """[batch, out, in / groups, *kernel_size], one tap after the other."""
    x, g = (output_grads, input) if transposed else (input, output_grads)
    x = F.pad(x, [p for size in reversed(padding) for p in (size, size)])
    g = g.unflatten(1, (groups, -1)).flatten(3)  # [batch, groups, out / groups, positions]
    sizes = (input if transposed else output_grads).shape[2:]
    taps = []
    for tap in product(*map(range, kernel_size)):
        seen = x
        for i, (k, s, d, n) in enumerate(zip(tap, stride, dilation, sizes, strict=True)):
            seen = seen[(slice(None),) * (i + 2) + (slice(k * d, k * d + (n - 1) * s + 1, s),)]
        seen = seen.unflatten(1, (groups, -1)).flatten(3)
        taps.append(torch.einsum("bgot,bgct->bgoc", g, seen).flatten(1, 2))
    return torch.stack(taps, dim=-1).unflatten(-1, tuple(kernel_size))
