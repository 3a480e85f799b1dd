"""The two-world test: many runs of a mechanism on D and on D plus x, and one event that tells them apart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from dpkernels.audit.bounds import require_confidence, require_delta, two_probabilities_bound
from dpkernels.audit.report import TwoWorldsReport

_THRESHOLDS = 1000


def two_worlds(
    play: Callable[[bool], float],
    runs: int,
    *,
    claim: float,
    delta: float,
    confidence: float = 0.999,
    seed: int | None = None,
) -> TwoWorldsReport:
    """Lower bound on the epsilon of a mechanism at ``delta``, from independent runs of it in two worlds.

    A coin decides for each run whether x is in the data. The first half of the runs chooses an event, score >= t or
    score < t, the other half counts how often it happened in each world. The bound follows from
    P[event in one] <= e^epsilon P[event in the other] + delta (Dwork & Roth 2014, Definition 2.4) with a
    Clopper-Pearson interval for each probability.

    Args:
        play: runs the mechanism once, on D plus x if its argument is true, else on D, and returns the attack's score of
            what was released: anything that tends to differ between the worlds.
        runs: how many, at least 4. With n runs no bound exceeds about log(n / 40) at 99.9%.
        claim: the epsilon that is claimed at ``delta`` for what ``play`` releases. A mechanism's claims at several
            deltas are all true or it is broken; at a large delta fewer runs refute them.
        confidence: probability, at least, with which the true epsilon is not below the bound.
        seed: of the coins; by default they differ from call to call.

    Raises:
        ValueError: an argument is out of range, or a score is not a number.
    """
    if isinstance(runs, bool) or not isinstance(runs, int) or runs < 4:
        raise ValueError(f"runs must be an integer of at least 4, got {runs!r}")
    require_delta(delta)  # before the runs, which take their time
    require_confidence(confidence)
    coins = np.random.default_rng(seed).random(runs) < 0.5
    scores = np.array([play(bool(coin)) for coin in coins], dtype=np.float64)
    bound = two_worlds_bound(scores, coins, delta=delta, confidence=confidence)
    return TwoWorldsReport(bound, claim, delta, confidence, runs)


def two_worlds_bound(
    scores: NDArray[np.float64], coins: NDArray[np.bool_], *, delta: float, confidence: float = 0.999
) -> float:
    """The bound of :func:`two_worlds` from the scores of runs that were made elsewhere.

    Args:
        scores: [runs], in the order of the runs: the first half chooses the event.
        coins: [runs], whether x was in the data: independent fair coins.
        delta, confidence: as for :func:`two_worlds`.

    Raises:
        ValueError: an argument is out of range, a score is not a number, or there are fewer than 4 runs.
    """
    require_delta(delta)
    require_confidence(confidence)
    if scores.shape != coins.shape or scores.ndim != 1 or len(scores) < 4:
        raise ValueError(f"scores and coins must be [runs], at least 4 runs, got {scores.shape} and {coins.shape}")
    if np.isnan(scores).any():
        raise ValueError("scores must be numbers, got NaN: let the attack score 1.0 for what it means")
    half = len(scores) // 2
    event = _choose(scores[:half], coins[:half], delta, confidence)
    return float(_bounds(scores[half:], coins[half:], event, delta, confidence)[0])


@dataclass(frozen=True)
class _Event:
    """A score of at least a threshold, or below it; and the world where it is the likelier, for several thresholds."""

    thresholds: NDArray[np.float64]
    above: bool
    likelier_with_x: bool

    def count(self, scores: NDArray[np.float64]) -> tuple[NDArray[np.int64], int]:
        """How often it happened, for each threshold, and out of how many."""
        below = np.searchsorted(np.sort(scores), self.thresholds, side="left")
        return (len(scores) - below if self.above else below), len(scores)


def _bounds(
    scores: NDArray[np.float64], coins: NDArray[np.bool_], event: _Event, delta: float, confidence: float
) -> NDArray[np.float64]:
    likelier = coins == event.likelier_with_x
    return two_probabilities_bound(
        event.count(scores[likelier]), event.count(scores[~likelier]), delta=delta, confidence=confidence
    )


def _choose(scores: NDArray[np.float64], coins: NDArray[np.bool_], delta: float, confidence: float) -> _Event:
    """The event with the largest bound on these runs. Thresholds are dense at both ends, where events are rare."""
    reach = math.log(len(scores))
    places = expit(np.linspace(-reach, reach, _THRESHOLDS)) * (len(scores) - 1)
    thresholds = np.sort(scores)[np.unique(places.round().astype(np.int64))]
    found = []
    for above, likelier_with_x in itertools.product((True, False), (True, False)):
        bounds = _bounds(scores, coins, _Event(thresholds, above, likelier_with_x), delta, confidence)
        best = int(bounds.argmax())
        found.append((float(bounds[best]), _Event(thresholds[best : best + 1], above, likelier_with_x)))
    return max(found, key=lambda pair: pair[0])[1]
