"""Rényi differential privacy: moments of each event, added up, and converted to epsilon at delta.

For a dominating pair (P, Q) and an order alpha > 1, A(alpha) = E_Q[(P/Q)^alpha] and the divergence is log A / (alpha -
1). Divergences of composed mechanisms add. Moments are exact for every real order: dp-accounting bounds fractional ones
by a series of absolute values, which is 9% loose in epsilon for a sampling rate of 0.01 and a noise multiplier of 0.5.

Conversions: "improved" is Canonne, Kamath & Steinke 2020, Proposition 12 (as dp-accounting has it), "classic" is
Mironov 2017, Proposition 3, which most papers before 2021 printed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dpkernels.accounting.bounds import Bound
from dpkernels.accounting.mechanisms import (
    Event,
    Gaussian,
    Laplace,
    PureEpsilon,
    SampledGaussian,
    is_unprotected,
    merge,
)

Array = np.ndarray[Any, np.dtype[np.float64]]

ORDERS = tuple(float(1.0 + x) for x in np.geomspace(0.0105, 1e5, 48))  # searched first; then around the best one

_REACH = 13.0  # standard deviations of the Gaussian that the quadrature covers: what lies outside is below e^-84
_MAX_NODES = (
    1 << 16
)  # an order that needs more nodes has a moment too large to be of use, and gets a closed-form bound instead
_RELATIVE_ROUNDING = 1e-9  # added to every moment; quadrature and rounding stay far below it


def sampled_gaussian_divergence(noise_multiplier: float, sampling_rate: float, order: float) -> float:
    """Rényi divergence of the Poisson-subsampled Gaussian mechanism at any real order > 1.

    With x = (2 z - 1) / (2 sigma^2) and u = q (e^x - 1), A - 1 = E_{z ~ N(0, sigma^2)}[(1 + u)^alpha - 1 - alpha u]:
    the last term has mean zero, every value is positive and nothing cancels. The integrand is analytic in |Im z| < pi
    sigma^2 and decays like a Gaussian, so that the trapezoid rule converges geometrically. The other direction, D(Q ||
    P), is never larger (Mironov, Talwar & Zhang 2019, section 3.1).
    """
    sigma, q = noise_multiplier, sampling_rate
    if q == 1.0:
        return order / (2 * sigma**2)
    step = min(sigma / 2, 0.4 * sigma**2)
    count = math.ceil((order + 2 * _REACH * sigma) / step) + 1
    if count > _MAX_NODES:  # convexity: ((1 - q) + q X)^alpha <= (1 - q) + q X^alpha
        exponent = order * (order - 1) / (2 * sigma**2)
        return float(np.logaddexp(math.log1p(-q), math.log(q) + exponent)) / (order - 1)
    z = np.linspace(-_REACH * sigma, order + _REACH * sigma, count)
    log_weight = -(z**2) / (2 * sigma**2) + math.log((z[1] - z[0]) / (sigma * math.sqrt(2 * math.pi)))
    log_excess = float(np.logaddexp.reduce(log_weight + _log_convexity_gap((2 * z - 1) / (2 * sigma**2), q, order)))
    log_moment = float(np.logaddexp(0.0, log_excess)) if log_excess > -30.0 else math.exp(log_excess)
    return log_moment * (1 + _RELATIVE_ROUNDING) / (order - 1)


def _log_convexity_gap(x: Array, q: float, order: float) -> Array:
    """log((1 + u)^order - 1 - order u) for u = q (e^x - 1), elementwise, without cancellation or overflow."""
    with np.errstate(divide="ignore", over="ignore", invalid="ignore", under="ignore"):
        u = q * np.expm1(np.minimum(x, 600.0))
        log1p_u = np.where(x < 600.0, np.log1p(u), x + math.log(q))
        power = order * log1p_u
        direct = np.log(np.maximum(np.expm1(np.minimum(power, 600.0)) - order * u, 0.0))
        large = power + np.log1p(-(1 + order * u) * np.exp(-np.minimum(power, 600.0)))
        series = _binomial_tail(u, order)
    gap = np.where(power > 30.0, np.where(power > 600.0, power, large), direct)
    return np.where(np.abs(order * u) < 1e-3, series, gap)


def _binomial_tail(u: Array, order: float) -> Array:
    """log of sum_{k >= 2} binom(order, k) u^k for |order u| < 1e-3, from the first terms of the series."""
    ratio = 1 + (order - 2) / 3 * u * (1 + (order - 3) / 4 * u * (1 + (order - 4) / 5 * u * (1 + (order - 5) / 6 * u)))
    return np.log(order * (order - 1) / 2 * u**2 * np.maximum(ratio, 0.0))


def _laplace_divergence(noise_multiplier: float, order: float) -> float:
    """Mironov 2017, Proposition 6, with scale/sensitivity b."""
    b, a = noise_multiplier, order
    if (a - 1) / b < 1.0:
        excess = a / (2 * a - 1) * math.expm1((a - 1) / b) + (a - 1) / (2 * a - 1) * math.expm1(-a / b)
        log_moment = math.log1p(max(excess, 0.0) + 4e-16)
    else:
        log_moment = float(
            np.logaddexp(math.log(a / (2 * a - 1)) + (a - 1) / b, math.log((a - 1) / (2 * a - 1)) - a / b)
        )
    return min(log_moment * (1 + _RELATIVE_ROUNDING) / (a - 1), 1 / b)


def _pure_divergence(epsilon: float, order: float) -> float:
    """Randomized response with probability e^epsilon / (1 + e^epsilon) dominates every pure mechanism."""
    p, scaled = 1 / (1 + math.exp(-epsilon)), (order - 1) * epsilon
    if scaled < 1.0:
        log_moment = math.log1p(p * math.expm1(scaled) + (1 - p) * math.expm1(-scaled) + 4e-16)
    else:
        log_moment = float(
            np.logaddexp(scaled - math.log1p(math.exp(-epsilon)), -scaled - epsilon - math.log1p(math.exp(-epsilon)))
        )
    return min(log_moment * (1 + _RELATIVE_ROUNDING) / (order - 1), epsilon)


@lru_cache(maxsize=1 << 15)
def single_divergence(event: Event, order: float) -> float:
    """Rényi divergence of order ``order`` > 1 of one run of ``event``, the larger of both directions."""
    if is_unprotected(event):
        return math.inf
    if isinstance(event, Gaussian):
        return order / (2 * event.noise_multiplier**2)
    if isinstance(event, SampledGaussian):
        return sampled_gaussian_divergence(event.noise_multiplier, event.sampling_rate, order)
    if isinstance(event, Laplace):
        return _laplace_divergence(event.noise_multiplier, order)
    return _pure_divergence(event.epsilon, order)


def divergence(events: Sequence[Event], order: float) -> float:
    """Rényi divergence of order ``order`` > 1 of the composition of ``events``."""
    return sum(event.count * single_divergence(event.times(1), order) for event in events)


def convert(order: float, rdp: float, delta: float, *, classic: bool = False) -> float:
    """Epsilon at ``delta`` that follows from a divergence ``rdp`` at one order."""
    if not math.isfinite(rdp):
        return math.inf
    if classic:
        return rdp - math.log(delta) / (order - 1)
    if delta**2 + math.expm1(-rdp) > 0:  # total variation is at most sqrt(1 - exp(-KL)), and KL <= rdp
        return 0.0
    if order <= 1.01:
        return math.inf
    return max(0.0, rdp + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1))


def minimise_over_orders(function: Callable[[float], float]) -> tuple[float, float]:
    """(value, order) at the smallest value of ``function`` over real orders > 1."""
    from scipy.optimize import minimize_scalar

    def finite(log_excess: float) -> float:
        return min(function(1 + math.exp(log_excess)), 1e300)

    value, order = min((min(function(order), 1e300), order) for order in ORDERS)
    place = math.log(order - 1)
    step = math.log((ORDERS[1] - 1) / (ORDERS[0] - 1))
    found = minimize_scalar(finite, bounds=(place - step, place + step), method="bounded", options={"xatol": 0.01})
    return min((value, order), (float(found.fun), 1 + math.exp(float(found.x))))


def best_order(events: Sequence[Event], delta: float, *, classic: bool = False) -> tuple[float, float]:
    """(epsilon, order) minimised over real orders, for events that ``merge`` returned."""
    return minimise_over_orders(lambda order: convert(order, divergence(events, order), delta, classic=classic))


def rdp_bound(
    events: Sequence[Event], delta: float, *, classic: bool = False, orders: Sequence[float] | None = None
) -> Bound:
    """Upper bound on epsilon at ``delta`` by Rényi differential privacy; the lower end is 0, for moments bound from
    above only.

    ``orders`` replaces the search over real orders by a fixed list, as printed values need.
    """
    events = merge(events)
    name = "rdp-classic" if classic else "rdp"
    rule = "rdp + log(1/delta)/(alpha - 1)" if classic else "the conversion of Canonne et al. 2020"
    if not events:
        return Bound(0.0, 0.0, name, "no event")
    if any(is_unprotected(event) for event in events):
        return Bound(math.inf, math.inf, name, "a mechanism without noise")
    if orders is None:
        epsilon, order = best_order(events, delta, classic=classic)
    else:
        epsilon, order = min((convert(a, divergence(events, a), delta, classic=classic), a) for a in orders)
    if not classic and all(isinstance(event, PureEpsilon | Laplace) for event in events):
        epsilon = min(epsilon, sum(_pure_epsilon(event) for event in events))
    return Bound(epsilon, 0.0, name, f"Rényi differential privacy with exact moments, order {order:.4g}, {rule}")


def _pure_epsilon(event: Event) -> float:
    """Epsilon of the event at delta 0, for a Laplace or pure event."""
    assert isinstance(event, PureEpsilon | Laplace)
    return event.count * (event.epsilon if isinstance(event, PureEpsilon) else 1 / event.noise_multiplier)
