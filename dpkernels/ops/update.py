"""From clipped sums to parameters in one pass over all of them: noise, mean over the expected batch, update.

Every function takes the sums of one logical step, all of them in one call: the noise of parameter k starts at the index
where the sizes of the parameters before it end, so two calls with the same key and step would use the same noise twice.
With ``noise_std`` > 0 the sums are rounded to multiples of ``grid``, the noise is drawn as
:func:`dpkernels.ops.noise.grid_gaussian`, and their addition is exact. With 0 there is neither noise nor rounding.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dpkernels import _native  # noqa: F401  (loads the operators)
from dpkernels.ops.noise import require_grid, require_stream

Scalars = float | Sequence[float]
Flags = bool | Sequence[bool]
_COMPUTED = (torch.float32, torch.float64)


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
    """Write ``(round(sum) + noise) / denominator`` into ``outs``, such as the gradients of a torch optimizer.

    Args:
        outs: floating-point tensors of the sums' shapes, overwritten.
        sums: float64 clipped sums of one logical step.
        denominator: the expected batch size.
        key, domain, step: the noise's stream, see :mod:`dpkernels.ops.noise`.
        noise_std, grid: standard deviation of the noise on the sum, and the power of two that it is rounded to.

    Raises:
        ValueError, TypeError: a shape, dtype or value does not fit; nothing was written then.
    """
    key = _check(outs, sums, denominator, key, domain, step, noise_std, grid)
    with _plain(outs=outs) as (plain,):
        torch.ops.dpkernels.noised_mean(
            plain, [s.contiguous() for s in sums], denominator, key, domain, step, noise_std, grid
        )


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
    """``torch.optim.SGD`` on the noised means, in place: parameters and momentum buffers change.

    Args:
        params: the parameters, in any floating-point dtype; computed in float64.
        sums: as for :func:`noised_mean`, in the parameters' shapes.
        momentum_buffers: of the parameters' shapes and dtypes; empty tensors where momentum is 0.
        lr, momentum, dampening, weight_decay, nesterov: as for ``torch.optim.SGD``, one value or one per parameter.
        first: the momentum buffer starts as the gradient, whatever it holds, as at torch's first step.
        denominator, key, domain, step, noise_std, grid: as for :func:`noised_mean`.

    Raises:
        ValueError, TypeError: a shape, dtype or value does not fit; nothing was changed then.
    """
    key = _check(params, sums, denominator, key, domain, step, noise_std, grid)
    momenta = _scalars(momentum, "momentum", len(params))
    _check_partners(momentum_buffers, "momentum_buffers", params, [m == 0 for m in momenta])
    with _plain(params=params, momentum_buffers=momentum_buffers) as (plain, buffers):
        torch.ops.dpkernels.sgd_update(
            plain,
            [s.contiguous() for s in sums],
            buffers,
            _scalars(lr, "lr", len(params)),
            momenta,
            _scalars(dampening, "dampening", len(params)),
            _scalars(weight_decay, "weight_decay", len(params)),
            _flags(nesterov, "nesterov", len(params)),
            _flags(first, "first", len(params)),
            denominator,
            key,
            domain,
            step,
            noise_std,
            grid,
        )


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
    """``torch.optim.Adam`` or ``AdamW`` on the noised means, in place: parameters and moments change.

    Args:
        params: the parameters, in any floating-point dtype; computed in float64.
        sums: as for :func:`noised_mean`, in the parameters' shapes.
        exp_avgs, exp_avg_sqs: of the parameters' shapes and dtypes.
        max_exp_avg_sqs: likewise with AMSGrad; empty tensors without.
        steps: how often each parameter was updated, this time included (bias correction), from 1.
        lr, beta1, beta2, eps, weight_decay: as for ``torch.optim.Adam``, one value or one per parameter.
        decoupled: weight decay as in ``AdamW``.
        denominator, key, domain, step, noise_std, grid: as for :func:`noised_mean`.

    Raises:
        ValueError, TypeError: a shape, dtype or value does not fit; nothing was changed then.
    """
    key = _check(params, sums, denominator, key, domain, step, noise_std, grid)
    count = len(params)
    _check_partners(exp_avgs, "exp_avgs", params, [False] * count)
    _check_partners(exp_avg_sqs, "exp_avg_sqs", params, [False] * count)
    _check_partners(max_exp_avg_sqs, "max_exp_avg_sqs", params, [True] * count)
    times = [steps] * count if isinstance(steps, int) else [int(t) for t in steps]
    if len(times) != count or any(t < 1 for t in times):
        raise ValueError(f"steps must be one count >= 1, or one for each of {count} parameters, got {steps}")
    with _plain(params=params, exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs, max_exp_avg_sqs=max_exp_avg_sqs) as (
        plain,
        firsts,
        seconds,
        largest,
    ):
        torch.ops.dpkernels.adam_update(
            plain,
            [s.contiguous() for s in sums],
            firsts,
            seconds,
            largest,
            times,
            _scalars(lr, "lr", count),
            _scalars(beta1, "beta1", count),
            _scalars(beta2, "beta2", count),
            _scalars(eps, "eps", count),
            _scalars(weight_decay, "weight_decay", count),
            _flags(decoupled, "decoupled", count),
            denominator,
            key,
            domain,
            step,
            noise_std,
            grid,
        )


def _check(
    params: Sequence[Tensor],
    sums: Sequence[Tensor],
    denominator: float,
    key: Tensor | None,
    domain: int,
    step: int,
    noise_std: float,
    grid: float,
) -> Tensor:
    """The key that the operator takes, after all that the three have in common was checked."""
    if len(sums) != len(params):
        raise ValueError(f"sums must hold one tensor for each of {len(params)} parameters, got {len(sums)}")
    for k, (p, s) in enumerate(zip(params, sums, strict=True)):
        if not p.is_floating_point() or p.device != params[0].device:
            raise TypeError(
                f"params[{k}] must be floating-point on {params[0].device} like the first, got {p.dtype} on {p.device}"
            )
        if s.dtype != torch.float64 or s.device != p.device:
            raise TypeError(f"sums[{k}] must be float64 on {p.device} as its parameter, got {s.dtype} on {s.device}")
        if s.shape != p.shape:
            raise ValueError(f"sums[{k}] must have the shape {tuple(p.shape)} of its parameter, got {tuple(s.shape)}")
    if not 0 < denominator < math.inf:
        raise ValueError(f"denominator must be a positive number, got {denominator}")
    if noise_std == 0:
        return torch.empty(0, dtype=torch.uint8)
    if params and params[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph would repeat the noise: leave step() out of the capture")
    require_grid(noise_std, grid)
    if key is None:
        raise TypeError("key must be given where noise_std is not 0, got None")
    require_stream(key, domain, step, 0, sum(p.numel() for p in params))
    return key.contiguous()


def _check_partners(
    tensors: Sequence[Tensor], name: str, params: Sequence[Tensor], may_be_empty: Sequence[bool]
) -> None:
    if len(tensors) != len(params):
        raise ValueError(f"{name} must hold one tensor for each of {len(params)} parameters, got {len(tensors)}")
    for k, (t, p, empty) in enumerate(zip(tensors, params, may_be_empty, strict=True)):
        if t.dtype != p.dtype or t.device != p.device:
            raise TypeError(
                f"{name}[{k}] must be {p.dtype} on {p.device} as its parameter, got {t.dtype} on {t.device}"
            )
        if t.shape != p.shape and not (empty and t.numel() == 0):
            raise ValueError(f"{name}[{k}] must have the shape {tuple(p.shape)} of its parameter, got {tuple(t.shape)}")


def _scalars(value: Scalars, name: str, count: int) -> list[float]:
    values = [float(v) for v in value] if isinstance(value, Sequence) else [float(value)] * count
    if len(values) != count:
        raise ValueError(f"{name} must be one number, or one for each of {count} parameters, got {len(values)}")
    return values


def _flags(value: Flags, name: str, count: int) -> list[int]:
    return [int(v) for v in _scalars(value, name, count)]


@contextmanager
def _plain(**lists: Sequence[Tensor]) -> Iterator[list[list[Tensor]]]:
    """The tensors as the operators take them, contiguous float32 or float64; what stands in for one is copied back."""
    plain = [[_stand_in(t) for t in tensors] for tensors in lists.values()]
    yield plain
    changed = [t for tensors in lists.values() for t in tensors]
    with torch.no_grad():
        for t, p in zip(changed, (p for tensors in plain for p in tensors), strict=True):
            if p is not t:
                t.copy_(p)
    torch.autograd.graph.increment_version(changed)


def _stand_in(tensor: Tensor) -> Tensor:
    if (tensor.dtype in _COMPUTED or tensor.is_cuda) and tensor.is_contiguous():
        return tensor
    return tensor.detach().to(torch.float64 if tensor.dtype == torch.float64 else torch.float32).contiguous()


for _name in ("noised_mean", "sgd_update", "adam_update"):

    @torch.library.register_fake(f"dpkernels::{_name}")
    def _(*_: object) -> None:
        return None
