"""The two-world test: convicts every broken optimizer, acquits the real one, and is as often right as it says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import expit

import dpkernels
from dpkernels.audit import two_worlds, two_worlds_bound, worlds
from dpkernels.audit.bounds import two_probabilities_bound

from .variants import CONFIDENCE, DELTA, SIGMA, VARIANTS, Variant, scaled_noise, shifts

POOL, EVENTS, COUNTS = 10_000, 30, 1000
named = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)


@named
def test_broken_optimizer_is_convicted(variant: Variant) -> None:
    report = variant.audit(broken=True, seed=1)
    assert report.refuted, str(report)


@named
def test_real_optimizer_is_acquitted(variant: Variant) -> None:
    report = variant.audit(broken=False, seed=1)
    assert not report.refuted, str(report)


@pytest.mark.parametrize(("factor", "convicted"), [(1.0, False), (0.9, True)])
def test_a_tenth_of_the_noise(factor: float, convicted: bool) -> None:
    """400,000 releases suffice to see that a tenth of the noise is missing, and acquit the real optimizer."""
    claim = dpkernels.epsilon(noise_multiplier=SIGMA, sampling_rate=1.0, steps=1, delta=DELTA)
    with pytest.MonkeyPatch.context() as patch:
        if factor != 1.0:
            scaled_noise(factor)(patch)
        bound = two_worlds_bound(*shifts(examples=400)(1, 400_000), delta=DELTA, confidence=CONFIDENCE)
    assert (bound > claim) == convicted, (bound, claim)
    assert bound > 0.9 * claim  # nearly tight


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_right_as_often_as_it_says(sign: float) -> None:
    """Randomized response: at 80% confidence at most a fifth of all bounds lie above the true epsilon, whatever sign
    the scores have."""
    true, rng, bounds = 1.5, np.random.default_rng(3), []
    for _ in range(400):
        coins = rng.random(1000) < 0.5
        told = rng.random(1000) < expit(true)
        bounds.append(two_worlds_bound(sign * (coins == told), coins, delta=0.0, confidence=0.8))
    wrong = np.mean(np.array(bounds) > true)
    assert 0.0 < wrong <= 0.2 + 4 * math.sqrt(0.16 / 400)
    assert np.median(bounds) > true - 0.4


def test_perfect_attack_is_bounded_by_the_number_of_runs() -> None:
    report = two_worlds(float, 2000, claim=0.0, delta=0.0, confidence=0.999, seed=0)
    assert 3.9 < report.lower_bound < math.log(2000 / 30)
    assert report.refuted
    assert "REFUTES the claim of epsilon <= 0.000 (2000 runs)" in str(report)


def test_useless_attack_finds_nothing() -> None:
    report = two_worlds(lambda with_x: 0.0, 1000, claim=0.0, delta=0.0, seed=0)
    assert report.lower_bound == 0.0
    assert not report.refuted
    assert "does not contradict" in str(report)


def test_one_world_alone_shows_nothing() -> None:
    scores = np.arange(10.0)
    assert two_worlds_bound(scores, np.zeros(10, dtype=bool), delta=0.0) == 0.0


def test_infinite_scores_are_scores() -> None:
    report = two_worlds(lambda with_x: math.inf if with_x else -math.inf, 1000, claim=0.0, delta=0.0, seed=0)
    assert report.lower_bound > 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"runs": 3}, "runs must be an integer of at least 4, got 3"),
        ({"runs": 10.0}, "runs must be an integer"),
        ({"delta": -0.1}, "delta must be a probability"),
        ({"confidence": 0.0}, "confidence must lie strictly between 0 and 1"),
        ({"play": lambda with_x: math.nan}, "scores must be numbers, got NaN"),
    ],
)
def test_bad_arguments(changes: dict[str, object], words: str) -> None:
    arguments: dict[str, object] = {"play": float, "runs": 10, "claim": 1.0, "delta": 0.0, **changes}
    with pytest.raises(ValueError, match=words):
        two_worlds(**arguments)  # type: ignore[arg-type]


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"scores and coins must be \[runs\]"):
        two_worlds_bound(np.zeros(5), np.zeros(6, dtype=bool), delta=0.0)


@pytest.mark.slow
@named
def test_a_fault_is_missed_once_in_a_thousand_audits_at_most(variant: Variant) -> None:
    """From many runs of the broken optimizer: which events audits choose, and how often the counts then convict.

    What is right is convicted as rarely: that is the confidence of 99.9%.
    """
    scores, coins = variant.run(broken=True, seed=2, runs=max(POOL, 2 * variant.runs))
    rng, half, missed = np.random.default_rng(0), variant.runs // 2, []
    for _ in range(EVENTS):
        chosen = rng.choice(len(scores), half, replace=False)
        event = worlds._choose(scores[chosen], coins[chosen], DELTA, CONFIDENCE)
        likelier = coins == event.likelier_with_x
        more, fewer = (
            float(count[0]) / runs for count, runs in map(event.count, (scores[likelier], scores[~likelier]))
        )
        runs = rng.binomial(half, 0.5, COUNTS)
        hits, misses = rng.binomial(runs, more), rng.binomial(half - runs, fewer)
        bounds = two_probabilities_bound((hits, runs), (misses, half - runs), delta=DELTA, confidence=CONFIDENCE)
        missed.append(float(np.mean(bounds <= variant.claim())))
    assert np.mean(missed) < 1e-3
