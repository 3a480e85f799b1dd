"""Bounds from guesses and from counts: published values, closed forms, and how often they are right."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import binom, binomtest

from dpkernels.audit import one_run_bound, one_run_p_value
from dpkernels.audit.bounds import two_probabilities_bound


@pytest.mark.parametrize(
    ("canaries", "guesses", "correct", "delta", "printed"),
    [
        (100, 100, 75, 0.0, 0.702),
        (100, 100, 75, 1e-4, 0.699),
        (1000, 100, 75, 1e-4, 0.673),
        (100_000, 1510, 1439, 1e-5, 2.675),
    ],
)
def test_printed_bounds(canaries: int, guesses: int, correct: int, delta: float, printed: float) -> None:
    """Steinke, Nasr & Jagielski (2023), appendix D and section 7: three digits, some rounded and some cut off."""
    bound = one_run_bound(guesses=guesses, correct=correct, canaries=canaries, delta=delta, confidence=0.95)
    assert abs(bound - printed) < 1e-3


def test_printed_p_value() -> None:
    """Appendix D."""
    found = one_run_p_value(guesses=100, correct=75, canaries=100, epsilon=math.log(3), delta=0.0)
    assert abs(found - 0.553) < 1e-3


@pytest.mark.parametrize("guesses", [1, 16, 1000])
def test_all_guesses_right(guesses: int) -> None:
    """Without delta the p-value is (e^epsilon / (e^epsilon + 1))^guesses."""
    bound = one_run_bound(guesses=guesses, correct=guesses, canaries=guesses, delta=0.0, confidence=0.95)
    assert bound == pytest.approx(max(0.0, -math.log(0.05 ** (-1 / guesses) - 1)), abs=1e-9)


@pytest.mark.parametrize(("guesses", "correct"), [(40, 31), (500, 300), (1000, 1000)])
def test_pure_privacy_is_clopper_and_pearson(guesses: int, correct: int) -> None:
    bound = one_run_bound(guesses=guesses, correct=correct, canaries=guesses, delta=0.0, confidence=0.9)
    least = binomtest(correct, guesses, alternative="greater").proportion_ci(0.9, method="exact").low
    assert expit(bound) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize(
    ("guesses", "correct", "epsilon", "delta"), [(1, 1, 0.0, 0.1), (7, 5, 0.5, 1e-3), (60, 44, 1, 1e-4)]
)
def test_p_value_is_the_formula(guesses: int, correct: int, epsilon: float, delta: float) -> None:
    """Term by term: P[W >= v] + 2 m delta max_i P[v > W >= v - i] / i."""
    canaries, q = 2 * guesses, expit(epsilon)
    pmf = [binom.pmf(k, guesses, q) for k in range(guesses + 1)]
    slack = max(sum(pmf[correct - i : correct]) / i for i in range(1, correct + 1))
    expected = min(1.0, sum(pmf[correct:]) + 2 * canaries * delta * slack)
    found = one_run_p_value(guesses=guesses, correct=correct, canaries=canaries, epsilon=epsilon, delta=delta)
    assert found == pytest.approx(expected, rel=1e-12)


def test_bound_moves_as_it_must() -> None:
    common = {"guesses": 200, "canaries": 1000}
    by_correct = [one_run_bound(correct=v, delta=1e-5, **common) for v in range(90, 201, 10)]
    assert by_correct == sorted(by_correct)
    assert by_correct[0] == 0.0
    by_delta = [one_run_bound(correct=180, delta=d, **common) for d in (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 0.5)]
    assert by_delta == sorted(by_delta, reverse=True)
    assert by_delta[-1] == 0.0


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 0.0), (2.0, 0.0), (1.0, 1e-3)])
def test_randomized_response(epsilon: float, delta: float) -> None:
    """A bit is told with probability delta, else by epsilon-randomized response: right in 95 of 100 runs, and close.

    The slack of delta costs most where delta is far above 1 / canaries, so closeness is asked for where it is 0.
    """
    rng, canaries, trials = np.random.default_rng(5), 4000, 1000
    correct = rng.binomial(canaries, delta + (1 - delta) * expit(epsilon), trials)
    common = {"guesses": canaries, "canaries": canaries, "delta": delta}
    values, counts = np.unique(correct, return_counts=True)
    refuted = [one_run_p_value(correct=int(v), epsilon=epsilon, **common) < 0.05 for v in values]
    wrong = float((counts * refuted).sum() / trials)
    assert wrong <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / trials)
    if delta == 0:
        assert wrong > 0.02  # neither too careful
        assert epsilon - 0.15 < one_run_bound(correct=int(np.median(correct)), **common) < epsilon


def test_two_probabilities() -> None:
    def interval(hits: int, runs: int) -> Any:
        return binomtest(hits, runs).proportion_ci(0.999, method="exact")

    hits, misses = np.array([0, 60, 480, 500]), np.array([0, 2, 100, 400])
    found = two_probabilities_bound((hits, 500), (misses, 400), delta=0.01, confidence=0.999)
    for bound, k, j in zip(found, hits, misses, strict=True):
        least, most = interval(int(k), 500).low, interval(int(j), 400).high
        expected = max(0.0, math.log((least - 0.01) / most)) if least > 0.01 else 0.0
        assert bound == pytest.approx(expected, rel=1e-9)
    assert found[0] == 0.0
    assert found[1] > 0.5


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"correct": 11}, ValueError, "0 <= correct <= guesses <= canaries"),
        ({"guesses": 21}, ValueError, "0 <= correct <= guesses <= canaries"),
        ({"correct": -1}, ValueError, "0 <= correct <= guesses <= canaries"),
        ({"correct": 1.5}, TypeError, "correct must be an integer, got float"),
        ({"delta": 1.0}, ValueError, "delta must be a probability with 0 <= delta < 1, got 1.0"),
        ({"delta": math.nan}, ValueError, "delta must be"),
        ({"confidence": 1.0}, ValueError, "confidence must lie strictly between 0 and 1, got 1.0"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments = {"guesses": 10, "correct": 8, "canaries": 20, "delta": 1e-5, "confidence": 0.95}
    with pytest.raises(error, match=words):
        one_run_bound(**{**arguments, **changes})


def test_bad_epsilon() -> None:
    with pytest.raises(ValueError, match="epsilon must be a number >= 0, got -1"):
        one_run_p_value(guesses=1, correct=1, canaries=1, epsilon=-1, delta=0.0)
