"""Privacy loss distributions (dp-accounting): discretised losses, composed by FFT, rounded so that epsilon is an upper
bound.

Connect-the-dots rounding (Doroshenko et al. 2022) of losses to a grid of width h adds about T h^2 alpha / 12 to
epsilon, with T compositions and alpha the best Rényi order. The library's fixed h = 1e-4 is therefore looser than Rényi
accounting for long runs of small steps and slow for short runs of large ones; here h follows from the target. The FFT's
rounding, which the library leaves out, is added to delta.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as library

from dpkernels.accounting.bounds import AccountantUnavailableError, Bound
from dpkernels.accounting.mechanisms import (
    Event,
    Gaussian,
    Laplace,
    PureEpsilon,
    SampledGaussian,
    is_unprotected,
    merge,
)
from dpkernels.accounting.rdp import best_order

_RELATIVE_ERROR = 5e-4  # of epsilon, aimed at by the choice of the grid
_MAX_SINGLE = 60_000  # grid points of one step: the library takes about 10 microseconds for each
_MAX_COMPOSED = 1 << 22  # grid points of the composition: 64 MiB per FFT buffer


def pld_bound(events: Sequence[Event], delta: float) -> Bound:
    """Upper bound on epsilon at ``delta``, the larger of both directions, by the privacy loss distribution.

    Raises AccountantUnavailableError where floating point cannot resolve ``delta``: below about 1e-15 times the number
    of steps.
    """
    events = merge(events)
    if not events:
        return Bound(0.0, 0.0, "pld", "no event")
    if any(is_unprotected(event) for event in events):
        return Bound(math.inf, math.inf, "pld", "a mechanism without noise")
    composed = sum(1 if isinstance(event, Gaussian) else event.count for event in events)
    rounding = 1e-15 * (composed + 10)
    if delta < 10 * rounding:
        raise AccountantUnavailableError(
            f"pld resolves delta >= {10 * rounding:.1g} for {composed} compositions, got {delta:g}"
        )
    target, order = best_order(events, delta)
    if target == 0.0:
        return Bound(0.0, 0.0, "pld", "delta above the total variation distance")
    width = math.sqrt(12 * _RELATIVE_ERROR * target / (composed * order))
    single = max(_largest_loss(event, delta / composed) for event in events)
    width = max(width, 2 * single / _MAX_SINGLE, (4 * single + 4 * target + 20) / _MAX_COMPOSED)
    tail = min(1e-15, delta * 1e-6)
    total: library.PrivacyLossDistribution | None = None
    for event in events:
        part = _discretise(event, width, math.log(delta * 1e-6 / composed))
        if event.count > 1:
            part = part.self_compose(event.count, tail_mass_truncation=tail)
        total = part if total is None else total.compose(part, tail_mass_truncation=tail)
    assert total is not None
    epsilon = total.get_epsilon_for_delta(delta - rounding)
    return Bound(
        float(epsilon),
        0.0,
        "pld",
        f"a privacy loss distribution on a grid of {width:.2g}, {rounding:.1g} of delta kept for rounding",
    )


def _largest_loss(event: Event, tail: float) -> float:
    """Privacy loss that one run of the event exceeds with probability about ``tail`` at most."""
    if isinstance(event, PureEpsilon):
        return event.epsilon
    if isinstance(event, Laplace):
        return 1 / event.noise_multiplier
    sigma = event.noise_multiplier
    rate = event.sampling_rate if isinstance(event, SampledGaussian) else 1.0
    reach = math.sqrt(2 * math.log(1 / tail) + 28)
    loss = (reach + 0.5 / sigma) / sigma
    return float(np.logaddexp(math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) + loss)) if loss > 0 else 0.0


def _discretise(event: Event, width: float, log_tail: float) -> library.PrivacyLossDistribution:
    if isinstance(event, Gaussian | SampledGaussian):
        return library.from_gaussian_mechanism(
            event.noise_multiplier,
            value_discretization_interval=width,
            log_mass_truncation_bound=log_tail,
            sampling_prob=event.sampling_rate if isinstance(event, SampledGaussian) else 1.0,
        )
    if isinstance(event, Laplace):
        return library.from_laplace_mechanism(event.noise_multiplier, value_discretization_interval=width)
    return _randomised_response(event.epsilon, width)


def _randomised_response(epsilon: float, width: float) -> library.PrivacyLossDistribution:
    """The pair that dominates every pure mechanism, by connect-the-dots: the library would round its two losses up."""
    exact = np.array([-epsilon, epsilon]) / width
    grid = np.unique(np.concatenate([np.floor(exact), np.ceil(exact)]).astype(int))
    losses = np.clip(grid * width, -epsilon, epsilon)
    p = 1 / (1 + math.exp(-epsilon))
    deltas = np.where(grid * width <= -epsilon, -np.expm1(grid * width), np.maximum(p - np.exp(losses) * (1 - p), 0.0))
    return library.PrivacyLossDistribution(
        pld_pmf.create_pmf_pessimistic_connect_dots(width, grid, np.where(grid * width >= epsilon, 0.0, deltas))
    )
