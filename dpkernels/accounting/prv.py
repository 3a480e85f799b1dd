"""Numerical composition of privacy random variables (Gopi, Lee & Wutschitz 2021, prv-accountant), with bounds from both
sides.

The library models one direction of the Poisson-subsampled Gaussian mechanism, removing an example; adding one is
modelled here and the larger epsilon is taken. It shifts the grid by the error of the discrete mean, once for every
composition. Two of its assumptions fail for many steps, and are mended here: its quadrature of the mean misses narrow
losses (2e-5 at sigma = 0.3, q = 0.01, which 1e5 steps make 2 in epsilon), so means are exact here; and all the shifts
together may leave its domain (sigma = 0.5, q = 1e-3, 1e5 steps: epsilon 36 for 13), so they are added to it.

Its grid has 2 L sqrt(T/2 log(12/delta_error)) / epsilon_error points, and it builds whatever that is: here the error is
chosen so that the grid fits a budget, and where it does not fit, the accountant declines.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from prv_accountant import privacy_random_variables as library
from prv_accountant.accountant import compute_safe_domain_size
from prv_accountant.composers import Heterogeneous
from prv_accountant.discrete_privacy_random_variable import DiscretePrivacyRandomVariable
from prv_accountant.discretisers import CellCentred
from prv_accountant.domain import Domain
from scipy.special import ndtr

from dpkernels.accounting.bounds import AccountantUnavailableError, Bound
from dpkernels.accounting.mechanisms import Event, Gaussian, Laplace, SampledGaussian, is_unprotected, merge
from dpkernels.accounting.rdp import best_order, single_divergence

_GRID = 1 << 16  # points aimed at: some 0.2 seconds for each direction and event
_MAX_RELATIVE_ERROR = 0.25  # of epsilon: a bound looser than this says nothing
_MIN_RELATIVE_ERROR = 2e-3
_ROUNDING = 1e-14  # of delta per composition: distribution functions are subtracted in double precision


class _Exact(library.PrivacyRandomVariable):
    """A privacy random variable with the exact divergences of its event, from which the library sizes its domain, and
    an exact mean."""

    def __init__(self, event: Event) -> None:
        self._event = event.times(1)

    def rdp(self, alpha: float) -> float:
        return single_divergence(self._event, float(alpha))


class _GaussianLoss(_Exact, library.GaussianMechanism):
    def __init__(self, event: Gaussian) -> None:
        _Exact.__init__(self, event)
        library.GaussianMechanism.__init__(self, event.noise_multiplier)

    def mean(self) -> float:
        return 0.5 / self._event.noise_multiplier**2  # type: ignore[union-attr]


class _LaplaceLoss(_Exact, library.LaplaceMechanism):
    def __init__(self, event: Laplace) -> None:
        _Exact.__init__(self, event)
        library.LaplaceMechanism.__init__(self, 1 / event.noise_multiplier)

    def mean(self) -> float:
        shift = 1 / self._event.noise_multiplier  # type: ignore[union-attr]
        return shift + math.expm1(-shift)


class _PureLoss(_Exact, library.PureDPMechanism):
    def __init__(self, event: Event) -> None:
        _Exact.__init__(self, event)
        library.PureDPMechanism.__init__(self, event.epsilon)  # type: ignore[union-attr]

    def mean(self) -> float:
        epsilon = self._event.epsilon  # type: ignore[union-attr]
        return float(epsilon * math.tanh(epsilon / 2))


class _RemoveLoss(_Exact, library.PoissonSubsampledGaussianMechanism):
    def __init__(self, event: SampledGaussian) -> None:
        _Exact.__init__(self, event)
        library.PoissonSubsampledGaussianMechanism.__init__(self, event.sampling_rate, event.noise_multiplier)

    def mean(self) -> float:
        return _subsampled_mean(self._event, adding=False)


class _AddLoss(_Exact):
    """log(P/Q) under P = N(0, sigma^2), with Q the mixture (1 - q) N(0, sigma^2) + q N(1, sigma^2)."""

    def __init__(self, event: SampledGaussian) -> None:
        _Exact.__init__(self, event)
        self._sigma, self._rate = event.noise_multiplier, event.sampling_rate

    def cdf(self, t: Any) -> Any:
        """Pr[loss <= t]: the loss falls as z grows, and is below -log(1 - q)."""
        t = np.asarray(t, dtype=np.float64)
        excess = np.expm1(-t) + self._rate  # e^-t - (1 - q), positive below the largest loss
        with np.errstate(divide="ignore", invalid="ignore"):
            z = self._sigma * np.log(excess / self._rate) + 0.5 / self._sigma
        return np.where(excess > 0, ndtr(-z), 1.0)

    def mean(self) -> float:
        return _subsampled_mean(self._event, adding=True)


def _subsampled_mean(event: Event, adding: bool) -> float:
    """The expected loss, integrated over the standardized output: log(1 + q (e^((2 z - 1) / (2 sigma^2)) - 1)) under
    the mixture, or its negative under the Gaussian alone."""
    assert isinstance(event, SampledGaussian)
    sigma, rate = event.noise_multiplier, event.sampling_rate
    shift = 1 / sigma
    nodes, weights = np.polynomial.legendre.leggauss(16)
    bulk = np.linspace(-12.0, 12.0, 97)
    bend = (math.log((1 - rate) / rate) / shift if rate < 1 else 0.0) + 0.5 * shift  # as wide as 1 / shift
    edges = np.unique(
        np.clip(np.concatenate([bulk, bulk + shift, bend + sigma * np.linspace(-40, 40, 161)]), -12.0, shift + 12.0)
    )
    middle, half = (edges[1:] + edges[:-1]) / 2, (edges[1:] - edges[:-1]) / 2
    u = (middle[:, None] + half[:, None] * nodes).ravel()
    density = (half[:, None] * weights).ravel() / math.sqrt(2 * math.pi)
    ratio = u * shift - 0.5 * shift * shift  # log of N(1, sigma^2) to N(0, sigma^2)
    loss = np.logaddexp(math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) + ratio)
    small = np.abs(ratio) < 1
    loss[small] = np.log1p(rate * np.expm1(ratio[small]))
    outside = density * np.exp(-0.5 * u**2)
    if adding:
        return float(-(outside @ loss))
    inside = density * np.exp(-0.5 * (u - shift) ** 2)
    return float(((1 - rate) * outside + rate * inside) @ loss)


class _Truncated(library.PrivacyRandomVariableTruncated):
    """The library's truncation, whose tails have next to no mass, with the exact mean."""

    def mean(self) -> float:
        return float(self.prv.mean())


def _losses(event: Event, adding: bool) -> library.PrivacyRandomVariable:
    if isinstance(event, SampledGaussian):
        return _AddLoss(event) if adding else _RemoveLoss(event)
    if isinstance(event, Gaussian):
        return _GaussianLoss(event)
    return _LaplaceLoss(event) if isinstance(event, Laplace) else _PureLoss(event)


def prv_bound(events: Sequence[Event], delta: float) -> Bound:
    """Lower and upper bound on epsilon at ``delta``, each the larger of both directions.

    Raises AccountantUnavailableError where the library's grid exceeds its budget or its floating point fails.
    """
    events = merge(events)
    if not events:
        return Bound(0.0, 0.0, "prv", "no event")
    if any(is_unprotected(event) for event in events):
        return Bound(math.inf, math.inf, "prv", "a mechanism without noise")
    target, _ = best_order(events, delta)
    if target == 0.0:
        return Bound(0.0, 0.0, "prv", "delta above the total variation distance")
    counts = [event.count for event in events]
    delta_error = delta * 1e-2
    if delta_error < _ROUNDING * sum(counts):
        least = 100 * _ROUNDING * sum(counts)
        raise AccountantUnavailableError(
            f"prv resolves delta >= {least:.2g} for {sum(counts)} compositions, got {delta:g}"
        )
    directions = (False, True) if any(isinstance(event, SampledGaussian) for event in events) else (False,)
    losses = [[_losses(event, adding) for event in events] for adding in directions]
    domain = compute_safe_domain_size(losses[0], counts, eps_error=0.0, delta_error=delta_error)
    per_error = 2 * domain * math.sqrt(sum(counts) / 2 * math.log(12 / delta_error))  # grid points times the error
    error = max(per_error / _GRID, _MIN_RELATIVE_ERROR * target)
    if error > _MAX_RELATIVE_ERROR * target:
        points = per_error / (_MAX_RELATIVE_ERROR * target)
        raise AccountantUnavailableError(
            f"prv needs a grid of {points:.2g} points for an error of 25%, and has a budget of {_GRID}"
        )
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            ends = [_both_ends(one, counts, domain, delta, error, delta_error) for one in losses]
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError) as failure:
        raise AccountantUnavailableError(f"prv failed: {failure or type(failure).__name__}") from failure
    lower, upper = max(low for low, _ in ends), max(high for _, high in ends)
    if not (math.isfinite(upper) and lower <= upper):
        raise AccountantUnavailableError(f"prv returned [{lower}, {upper}]")
    return Bound(
        max(upper, 0.0),
        max(lower, 0.0),
        "prv",
        f"numerical composition of privacy random variables, error {error:.2g} in epsilon",
    )


def _discrete(loss: library.PrivacyRandomVariable, size: float, mesh: float) -> DiscretePrivacyRandomVariable:
    domain = Domain.create_aligned(-size, size, mesh)
    return CellCentred().discretise(_Truncated(loss, domain.t_min(), domain.t_max()), domain)


def _both_ends(
    losses: list[library.PrivacyRandomVariable],
    counts: list[int],
    size: float,
    delta: float,
    error: float,
    delta_error: float,
) -> tuple[float, float]:
    """On a grid over [-size, size], and the shifts, of the mesh that theorem 5.5 of Gopi et al. asks for."""
    mesh = error / math.sqrt(sum(counts) / 2 * math.log(12 / delta_error))
    discrete = [_discrete(loss, size, mesh) for loss in losses]
    shift = sum(count * abs(float(one.domain.shifts())) for count, one in zip(counts, discrete, strict=True))
    if shift > size:
        raise AccountantUnavailableError(f"prv shifts its grid by {shift:.2g}, out of its domain of {size:.2g}")
    if shift > mesh:
        discrete = [_discrete(loss, size + shift, mesh) for loss in losses]
    composed = Heterogeneous(discrete).compute_composition(counts)
    lower, _, upper = composed.compute_epsilon(delta, delta_error, error)
    return lower, upper
