"""From right and wrong guesses to a lower bound on epsilon that holds with a stated confidence."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit
from scipy.stats import beta, binom

_BISECTIONS = 40


def one_run_p_value(*, guesses: int, correct: int, canaries: int, epsilon: float, delta: float) -> float:
    """How probable so many correct guesses are at most, where one run is (epsilon, delta)-private.

    Steinke, Nasr & Jagielski (2023), Theorem 5.2 in the form of Corollary 5.4: with f the upper tail of
    W ~ Binomial(guesses, e^epsilon / (e^epsilon + 1)), f(v) = P[W >= v],

        P[correct >= v]  <=  f(v) + 2 canaries delta max_i (f(v - i) - f(v)) / i.

    Each canary must have been in the data with probability 1/2, independently of the others.

    Args:
        guesses: number r of canaries that a guess was made for; the auditor may abstain on the others.
        correct: number v of the guesses that are right.
        canaries: number m of canaries, those without a guess included.
        epsilon, delta: the claim.

    Returns:
        A probability; (epsilon, delta) is refuted with confidence 1 minus it.

    Raises:
        ValueError, TypeError: the counts are not 0 <= correct <= guesses <= canaries, or epsilon or delta is out of
            range.
    """
    require_counts(guesses, correct, canaries)
    require_delta(delta)
    if not epsilon >= 0:
        raise ValueError(f"epsilon must be a number >= 0, got {epsilon!r}")
    accuracy = float(expit(epsilon))
    tail = float(binom.sf(correct - 1, guesses, accuracy))
    if delta == 0 or correct == 0:
        return tail
    shifts = np.arange(1, correct + 1)
    slack = float(((binom.sf(correct - shifts - 1, guesses, accuracy) - tail) / shifts).max())
    return min(1.0, tail + 2 * canaries * delta * slack)


def one_run_bound(*, guesses: int, correct: int, canaries: int, delta: float, confidence: float = 0.95) -> float:
    """The largest epsilon that one run's guesses refute: a lower bound on epsilon at ``delta``, 0 where none is.

    Args:
        guesses, correct, canaries, delta: see :func:`one_run_p_value`. The number of guesses must not depend on which
            of them are right.
        confidence: probability, at least, with which the true epsilon is not below the bound.

    Raises:
        ValueError, TypeError: as for :func:`one_run_p_value`, or confidence is not in (0, 1).
    """
    require_confidence(confidence)
    level = 1 - confidence

    def refuted(epsilon: float) -> bool:
        found = one_run_p_value(guesses=guesses, correct=correct, canaries=canaries, epsilon=epsilon, delta=delta)
        return found < level

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def two_probabilities_bound(
    more: tuple[Any, int], fewer: tuple[Any, int], *, delta: float, confidence: float
) -> NDArray[np.float64]:
    """Lower bound on epsilon from how often one event happened in two worlds that differ by one example.

    (epsilon, delta)-privacy means P[event in one] <= e^epsilon P[event in the other] + delta. Both probabilities are
    bounded by Clopper & Pearson (1934), each with half of the allowed error.

    Args:
        more: how often the event happened in the world where it is the likelier, a count or an array of counts, and out
            of how many runs. The runs are independent, and what the event is was fixed without them.
        fewer: likewise in the other world.
        delta, confidence: the claim's delta; the probability, at least, with which the bound is right.

    Returns:
        The bound for each count, 0 where nothing is refuted.
    """
    error = (1 - confidence) / 2
    (hits, runs), (misses, others) = more, fewer
    hits, misses = np.asarray(hits, float), np.asarray(misses, float)
    with np.errstate(invalid="ignore", divide="ignore"):
        least = np.where(hits > 0, beta.ppf(error, hits, runs - hits + 1), 0.0)
        most = np.where(misses < others, beta.ppf(1 - error, misses + 1, others - misses), 1.0)
        bound = np.log(np.maximum(least - delta, 0.0)) - np.log(most)
    return np.maximum(bound, 0.0)


def require_counts(guesses: int, correct: int, canaries: int) -> None:
    """Raise unless they are counts of guesses about canaries."""
    counts = {"correct": correct, "guesses": guesses, "canaries": canaries}
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(f"counts must satisfy 0 <= correct <= guesses <= canaries, got {counts}")


def require_delta(delta: float) -> None:
    """Raise unless ``delta`` is a probability below 1."""
    if not 0 <= delta < 1:
        raise ValueError(f"delta must be a probability with 0 <= delta < 1, got {delta!r}")


def require_confidence(confidence: float) -> None:
    """Raise unless ``confidence`` lies strictly between 0 and 1."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie strictly between 0 and 1, got {confidence!r}")
