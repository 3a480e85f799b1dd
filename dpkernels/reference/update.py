"""Noised means of clipped sums, and the updates of torch's optimizers on them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dpkernels.reference.noise import grid_gaussian

Scalars = float | Sequence[float]
Flags = bool | Sequence[bool]


def _means(
    sums: Sequence[Tensor],
    denominator: float,
    key: Tensor | None,
    domain: int,
    step: int,
    noise_std: float,
    grid: float,
) -> list[Tensor]:
    if noise_std == 0 or key is None:
        return [s / denominator for s in sums]
    sizes = [s.numel() for s in sums]
    noise = grid_gaussian(key, domain, step, 0, sum(sizes), noise_std=noise_std, grid=grid).split(sizes)
    return [((s / grid).round() * grid + z.view_as(s)) / denominator for s, z in zip(sums, noise, strict=True)]


def _each(value: Scalars, count: int) -> list[float]:
    return list(value) if isinstance(value, Sequence) else [value] * count


def noised_mean(
    outs: Sequence[Tensor],
    sums: Sequence[Tensor],
    *,
    denominator: float,
    key: Tensor | None = None,
    domain: int = 0,
    step: int = 0,
    noise_std: float = 0.0,
    grid: float = 0.0,
) -> None:
    for out, mean in zip(outs, _means(sums, denominator, key, domain, step, noise_std, grid), strict=True):
        out.copy_(mean)


@torch.no_grad()
def sgd_update(
    params: Sequence[Tensor],
    sums: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    *,
    lr: Scalars,
    momentum: Scalars = 0.0,
    dampening: Scalars = 0.0,
    weight_decay: Scalars = 0.0,
    nesterov: Flags = False,
    first: Flags = False,
    denominator: float,
    key: Tensor | None = None,
    domain: int = 0,
    step: int = 0,
    noise_std: float = 0.0,
    grid: float = 0.0,
) -> None:
    n = len(params)
    means = _means(sums, denominator, key, domain, step, noise_std, grid)
    scalars = [_each(v, n) for v in (lr, momentum, dampening, weight_decay, nesterov, first)]
    for p, mean, b, rate, keep, damp, decay, ahead, start in zip(
        params, means, momentum_buffers, *scalars, strict=True
    ):
        g = mean + decay * p.double()
        if keep:
            new = g if start else keep * b.double() + (1 - damp) * g
            b.copy_(new)
            g = g + keep * new if ahead else new
        p.copy_(p.double() - rate * g)


@torch.no_grad()
def adam_update(
    params: Sequence[Tensor],
    sums: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    *,
    steps: int | Sequence[int],
    lr: Scalars,
    beta1: Scalars = 0.9,
    beta2: Scalars = 0.999,
    eps: Scalars = 1e-8,
    weight_decay: Scalars = 0.0,
    decoupled: Flags = False,
    denominator: float,
    key: Tensor | None = None,
    domain: int = 0,
    step: int = 0,
    noise_std: float = 0.0,
    grid: float = 0.0,
) -> None:
    n = len(params)
    means = _means(sums, denominator, key, domain, step, noise_std, grid)
    scalars = [_each(v, n) for v in (steps, lr, beta1, beta2, eps, weight_decay, decoupled)]
    for p, mean, m, v, largest, t, rate, b1, b2, small, decay, apart in zip(
        params, means, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, *scalars, strict=True
    ):
        old = p.double()
        g = mean if apart else mean + decay * old
        if apart:
            old = old * (1 - rate * decay)
        first = b1 * m.double() + (1 - b1) * g
        second = b2 * v.double() + (1 - b2) * g.square()
        m.copy_(first)
        v.copy_(second)
        if largest.numel():
            second = torch.maximum(second, largest.double())
            largest.copy_(second)
        root = second.sqrt() / (1 - b2**t) ** 0.5
        p.copy_(old - rate / (1 - b1**t) * first / (root + small))
