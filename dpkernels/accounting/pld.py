"""Privacy loss distributions, discretised by connect-the-dots and composed by FFT under an exponential tilt.

The loss L = log(P/Q) of a dominating pair is put on a grid: the mass of each cell moves to the cell's ends so that its
mass under P and under Q stays (Doroshenko et al. 2022), which bounds every hockey-stick divergence from above.

dp-accounting supplies the distribution functions. Its own composition is wrong or loose at the ends of the range: an
FFT resolves about 1e-17 of the largest mass per composition, which the library does not count (sigma = 100, T = 10,000,
delta = 1e-12 comes out 2.4% below the true delta, and every epsilon below delta = 1e-15 is infinite), and on its fixed
grid long runs of small steps come out looser than by Rényi accounting. Here the masses are multiplied by exp(lambda L)
first, with lambda + 1 the best Rényi order, and the grid follows from the target: the masses that decide delta become
the largest ones, and rounding is relative to delta. What is left of it, of wrap-around, and of what lies beyond the
grid, is added.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from dp_accounting.pld import privacy_loss_mechanism as library
from numpy.typing import NDArray
from scipy import fft, optimize, signal

from dpkernels.accounting.bounds import AccountantUnavailableError, Bound
from dpkernels.accounting.mechanisms import Event, Laplace, PureEpsilon, SampledGaussian, is_unprotected, merge
from dpkernels.accounting.rdp import best_order

Array: TypeAlias = NDArray[np.floating[Any]]
Tails: TypeAlias = Callable[[Array], tuple[Array, Array]]  # losses t -> (P[L >= t], Q[L >= t])

_UPPER_ERROR, _LOWER_ERROR, _QUICK_ERROR = 1e-4, 1e-2, 4e-4  # of epsilon, aimed at by the choice of the grid
_MAX_CELLS = 1 << 18  # of one event
_MAX_POINTS = 1 << 21  # of the composition: 16 MiB per buffer
_WRAPPED = 1e-15  # tilted mass that may wrap around
_UNIT = 2.0**-53


def pld_bound(events: Sequence[Event], delta: float, *, quick: bool = False) -> Bound:
    """Lower and upper bound on epsilon at ``delta``, each the larger of both directions.

    ``quick`` looks at removing an example only, which nearly always costs more than adding one, and leaves the lower
    bound out: a search may start from its upper bound, which is no guarantee.

    Raises AccountantUnavailableError where epsilon lies off the grid.
    """
    events = merge(events)
    if not events:
        return Bound(0.0, 0.0, "pld", "no event")
    if any(is_unprotected(event) for event in events):
        return Bound(math.inf, math.inf, "pld", "a mechanism without noise")
    target, order = best_order(events, delta)
    if target == 0.0:
        return Bound(0.0, 0.0, "pld", "delta above the total variation distance")
    symmetric = not any(isinstance(event, SampledGaussian) for event in events)
    sides = (False,) if symmetric or quick else (False, True)
    for _ in range(2):
        width = _width(target, order, sum(event.count for event in events), delta, quick)
        composed = [_compose(events, adding, delta, width) for adding in sides]
        upper = max(one.upper(delta) for one in composed)
        if upper > target / 2:
            break
        target = max(upper, target / 30)  # Rényi accounting was far off: the grid is too coarse for what is found
    lower = 0.0 if quick else max(one.lower(delta) for one in composed)
    grid = max(one.width for one in composed)
    return Bound(float(upper), float(lower), "pld", f"privacy loss distributions on a grid of {grid:.2g}")


def _width(target: float, order: float, compositions: int, delta: float, quick: bool) -> float:
    """Grid width at which both bounds are as close to epsilon as aimed at.

    Connect-the-dots adds about compositions * width^2 * order / 12 to the upper bound; for the lower one see ``lower``.
    """
    for_upper = math.sqrt(12 * (_QUICK_ERROR if quick else _UPPER_ERROR) * target / (compositions * order))
    return for_upper if quick else min(for_upper, _LOWER_ERROR * target / _deviation(compositions, delta))


def _deviation(compositions: int, delta: float) -> float:
    """Grid widths by which discretisation may have moved the composed loss up, but for a chance of delta / 100.

    Bernstein's inequality for independent moves of at most one width, with variance at most a quarter of its square.
    """
    log_chance = math.log(100 / delta)
    return log_chance / 3 + math.sqrt((log_chance / 3) ** 2 + compositions * log_chance / 2)


def _compose(events: Sequence[Event], adding: bool, delta: float, width: float) -> _Composition:
    """The composed loss of adding or of removing an example, on the finest grid within the budget."""
    tails = [_tails(event, adding) for event in events]
    missing = 1e-7 * delta / sum(event.count for event in events)
    spans = [_span(tail, missing) for tail in tails]
    width = max(width, *((high - low) / _MAX_CELLS for low, high in spans))
    while True:
        losses = [
            _discretise(event.count, tail, span, width) for event, tail, span in zip(events, tails, spans, strict=True)
        ]
        tilt = _best_tilt(losses, delta, width)
        parts = [loss.tilted(tilt) for loss in losses]
        window = _window(parts)
        if window[1] - window[0] < _MAX_POINTS:
            return _Composition(parts, window, width, tilt)
        width *= 2


def _best_tilt(losses: Sequence[_Loss], delta: float, width: float) -> float:
    """The order alpha - 1 at which Rényi accounting of the losses is best: epsilon then lies near the tilted mean.

    A bounded loss may have its best order at infinity; a factor of e^20 from one grid point to the next is enough.
    """
    coarse = [loss.coarse() for loss in losses]

    def epsilon(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        moment = sum(loss.count * loss.log_moment(tilt) for loss in coarse)
        return (moment - math.log(delta) - math.log1p(tilt)) / tilt + math.log1p(-1 / (1 + tilt))

    limits = (math.log(1e-3), math.log(20 / width))
    return math.exp(float(optimize.minimize_scalar(epsilon, bounds=limits, method="bounded").x))


# ---- the loss of one run


def _tails(event: Event, adding: bool) -> Tails:
    """Distribution functions of the loss of one run of ``event``, for adding an example or for removing one."""
    if isinstance(event, PureEpsilon):
        return _randomised_response_tails(event.epsilon)
    mechanism: library.AdditiveNoisePrivacyLoss
    if isinstance(event, Laplace):
        mechanism = library.LaplacePrivacyLoss(event.noise_multiplier)
        outcome = _laplace_outcome(event.noise_multiplier)
    else:
        rate = event.sampling_rate if isinstance(event, SampledGaussian) else 1.0
        direction = library.AdjacencyType.ADD if adding else library.AdjacencyType.REMOVE
        mechanism = library.GaussianPrivacyLoss(event.noise_multiplier, sampling_prob=rate, adjacency_type=direction)
        outcome = _gaussian_outcome(event.noise_multiplier, rate, adding)

    def tails(t: Array) -> tuple[Array, Array]:
        x = outcome(t)
        return mechanism.mu_upper_cdf(x), np.exp(mechanism.mu_lower_log_cdf(x))

    return tails


def _gaussian_outcome(sigma: float, rate: float, adding: bool) -> Callable[[Array], Array]:
    """The largest outcome whose loss is at least t, which the library finds one at a time."""
    sign = -1.0 if adding else 1.0

    def outcome(t: Array) -> Array:
        s = sign * t
        with np.errstate(divide="ignore"):
            small = np.log1p(np.maximum(np.expm1(np.minimum(s, 30.0)) / rate, -1.0))
            large = s - math.log(rate) + np.log1p(-(1 - rate) * np.exp(-np.maximum(s, 30.0)))
        return -sign * (sigma**2 * np.where(s < 30.0, small, large) + 0.5)

    return outcome


def _laplace_outcome(scale: float) -> Callable[[Array], Array]:
    """As for the Gaussian. The loss is constant beyond both centres: P and Q have atoms at its ends."""

    def outcome(t: Array) -> Array:
        inside = -(1 + t * scale) / 2
        return np.where(t * scale > 1, -np.inf, np.where(t * scale <= -1, np.inf, inside))

    return outcome


def _randomised_response_tails(epsilon: float) -> Tails:
    """The pair that dominates every pure mechanism: loss epsilon with P-probability e^epsilon / (1 + e^epsilon)."""
    p = 1 / (1 + math.exp(-epsilon))

    def tails(t: Array) -> tuple[Array, Array]:
        certain, likely = t <= -epsilon, t <= epsilon
        return np.where(certain, 1.0, likely * p), np.where(certain, 1.0, likely * (1 - p))

    return tails


def _span(tails: Tails, missing: float) -> tuple[float, float]:
    """Losses that P exceeds with probability at most ``missing``, and falls below with none that floats resolve."""
    reach = np.geomspace(1e-12, 1e7, 2000)
    above, _ = tails(reach)
    below, _ = tails(-reach)
    if above[-1] > missing or below[-1] < 1.0:
        raise AccountantUnavailableError("pld covers losses up to 1e7 in one run, and here they are larger")
    return -float(reach[np.argmax(below >= 1.0)]), float(reach[np.argmax(above <= missing)])


@dataclass(frozen=True)
class _Loss:
    """The discretised loss of one event: mass exp(log_mass[i]) at losses[i] = (first + i) * width."""

    count: int
    first: int
    losses: Array  # [points]
    log_mass: Array  # [points]
    above: float  # mass above the grid
    below: float  # mass below the grid, which was moved up to its first point

    def log_moment(self, tilt: float) -> float:
        """log E[exp(tilt L)] under P."""
        exponents = self.log_mass + tilt * self.losses
        top = float(exponents.max())
        return top + math.log(float(np.exp(exponents - top).sum()))

    def coarse(self) -> _Loss:
        """The same loss on at most some thousand points: enough to choose the tilt, which need not be exact."""
        step = len(self.losses) // 2000 + 1
        starts = np.arange(0, len(self.losses), step)
        mass = np.add.reduceat(np.exp(self.log_mass), starts)
        middles = np.minimum(starts + step // 2, len(self.losses) - 1)
        with np.errstate(divide="ignore"):
            return replace(self, losses=self.losses[middles], log_mass=np.log(mass))

    def tilted(self, tilt: float) -> _Part:
        log_scale = self.log_moment(tilt)
        weights = np.exp(self.log_mass + tilt * self.losses - log_scale)
        stray = self.below * math.exp(min(tilt * float(self.losses[0]) - log_scale, 0.0))
        return _Part(self.count, self.first, weights, log_scale, self.above, stray)


def _discretise(count: int, tails: Tails, span: tuple[float, float], width: float) -> _Loss:
    first, last = math.floor(span[0] / width), math.ceil(span[1] / width) + 1
    losses = np.arange(first, last + 1) * width
    p, q = tails(losses)
    mass_p, mass_q = np.maximum(p[:-1] - p[1:], 0.0), np.maximum(q[:-1] - q[1:], 0.0)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # What the cell's loss would be if it were one outcome, from its lower end; rounding errors are rounded up.
        noise = 8 * _UNIT * (p[:-1] / mass_p + (1 - np.log(q[:-1])) * q[:-1] / mass_q)
        place = np.log(mass_p / mass_q) - losses[:-1] + noise
    place = np.clip(np.nan_to_num(place, nan=width, posinf=width), 0.0, width)
    at_lower_end = mass_p * (np.expm1(width - place) / math.expm1(width))
    mass = np.append(at_lower_end, 0.0)
    mass[1:] += mass_p - at_lower_end
    mass[0] += 1.0 - p[0]
    with np.errstate(divide="ignore"):
        return _Loss(count, first, losses, np.log(mass), float(p[-1]), 1.0 - float(p[0]) + _UNIT)


@dataclass(frozen=True)
class _Part:
    """The tilted loss of one event: mass exp(log_scale) * weights[i] at loss (first + i) * width."""

    count: int
    first: int
    weights: Array  # [points], sums to 1
    log_scale: float
    above: float  # untilted mass above the grid
    stray: float  # tilted mass that came from below the grid


# ---- the composition


def _window(parts: Sequence[_Part]) -> tuple[int, int]:
    """Grid indices of the composed loss beyond which at most ``_WRAPPED`` of the tilted mass lies (Chernoff's
    bound)."""
    mean = variance = 0.0
    moments = []
    for part in parts:
        kept = np.flatnonzero(part.weights)
        index, weights = kept.astype(np.float64), part.weights[kept]
        centre = float(np.dot(index, weights))
        index -= centre
        mean += part.count * (part.first + centre)
        variance += part.count * float(np.dot(index**2, weights))
        moments.append((part.count, index, np.log(weights)))
    reach = {-1.0: math.inf, 1.0: math.inf}
    for sign in (-1.0, 1.0):
        for rate in np.array([1.0, 3.0, 6.0, 9.0]) / (math.sqrt(variance) + 1.0):
            log_moment = 0.0
            for count, index, log_weights in moments:
                exponents = sign * rate * index + log_weights
                top = float(exponents.max())
                log_moment += count * (top + math.log(float(np.exp(exponents - top).sum())))
            reach[sign] = min(reach[sign], (log_moment - math.log(_WRAPPED / 2)) / rate)
    return math.floor(mean - reach[-1.0]), math.ceil(mean + reach[1.0])


class _Composition:
    """Tilted weights of the composed loss on a window of the grid, and the epsilon they give."""

    def __init__(self, parts: Sequence[_Part], window: tuple[int, int], width: float, tilt: float) -> None:
        low, high = window
        size = fft.next_fast_len(high - low + 1, real=True)
        spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
        for part in parts:
            folded = np.bincount(np.arange(len(part.weights)) % size, part.weights, size)
            spectrum *= fft.rfft(folded) ** part.count
        weights = np.roll(fft.irfft(spectrum, size), (sum(part.count * part.first for part in parts) - low) % size)
        self.width = width
        self._tilt = tilt
        self._compositions = sum(part.count for part in parts)
        self._losses = (low + np.arange(size)) * width
        self._log_scale = sum(part.count * part.log_scale for part in parts)
        self._missing = sum(part.count * part.above for part in parts)
        # Of delta at epsilon, times exp(tilt * epsilon - log_scale): a unit of tilted mass adds at most 1 / (1 + tilt).
        terms = size if tilt * width * size < 1 else 1 + 1 / (2 * tilt * width)
        energy = math.sqrt(terms * float(np.dot(weights, weights)))
        rounding = 8 * _UNIT * (self._compositions + math.log2(size)) * energy
        self._error = (_WRAPPED + rounding) / (1 + tilt)
        self._stray = sum(part.count * part.stray for part in parts) / (1 + tilt)
        # Between t and the point below, delta(epsilon) = exp(log_scale - tilt t) (A - exp(epsilon - t) B), with A and B
        # the masses from t on under P and under Q, relative to their sizes at t: nothing overflows in a wide window.
        downwards = np.maximum(weights, 0.0)[::-1]
        self._p = signal.lfilter([1.0], [1.0, -math.exp(-tilt * width)], downwards)[::-1]
        self._q = signal.lfilter([1.0], [1.0, -math.exp(-(tilt + 1) * width)], downwards)[::-1]
        exponents = abs(self._log_scale) + tilt * float(np.abs(self._losses).max())
        self._slack = 4 * _UNIT * (1 + exponents + min(size, 1 / (tilt * width)))  # relative rounding of A

    def upper(self, delta: float) -> float:
        """Epsilon at ``delta``, bounded from above."""
        return self._epsilon(delta - self._missing, self._error)

    def lower(self, delta: float) -> float:
        """Epsilon at ``delta``, bounded from below.

        Each loss moved to an end of its cell at random, upwards by at most width^2 / 8 in the mean.
        """
        mean = self._compositions * self.width**2 / 8 * math.exp(self.width)
        deduction = mean + self.width * _deviation(self._compositions, delta)
        return max(0.0, self._epsilon(1.01 * delta, -self._error - self._stray) - deduction)

    def _epsilon(self, delta: float, error: float) -> float:
        """The epsilon at which the computed delta, with its error, is ``delta``; 0 where that is negative."""
        wanted = np.exp(np.minimum(math.log(delta) - self._log_scale + self._tilt * self._losses, 700.0))
        above = self._p * (1 + math.copysign(self._slack, error))
        exceeds = np.flatnonzero(above - self._q + error > wanted)
        if not len(exceeds):
            return max(0.0, float(self._losses[0])) if error > 0 else 0.0
        here = int(exceeds[-1]) + 1
        if here == len(self._losses):
            raise AccountantUnavailableError(f"pld's grid ends below the epsilon of delta={delta:g}")
        low, high = float(self._losses[here - 1]), float(self._losses[here])
        p = float(above[here]) + error * math.exp(self._tilt * self.width) - float(wanted[here])
        exact = high + math.log(p / float(self._q[here])) if p > 0 and self._q[here] > 0 else low
        return max(0.0, min(max(exact, low), high))
