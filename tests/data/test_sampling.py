"""Poisson sampling: the exact probability, and the distribution that independence gives.

The statistics run on seeded keys: a test that passes once passes always, and each bound is one that a right sampler
misses with probability below 1e-4.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from dpkernels.data import poisson_sample
from dpkernels.random import Domain, Key


class ScriptedKey(Key):
    """A key whose words are given."""

    def __init__(self, words: list[int]) -> None:
        super().__init__()
        self.words = torch.from_numpy(np.array(words, np.uint64).view(np.int64))

    def bits(self, domain: Domain, step: int, count: int, *, offset: int = 0) -> torch.Tensor:
        assert domain == Domain.SAMPLING
        return self.words[:count]


@pytest.mark.parametrize("rate", [0.5, 1 / 3, 512 / 60_000, 1 - 2**-53, 2**-60, 0.9999, 1e-6])
def test_the_probability_is_the_rate_to_two_to_the_minus_64(rate: float) -> None:
    threshold = int(Fraction(rate) * 2**64)
    assert 0 <= Fraction(rate) - Fraction(threshold, 2**64) < Fraction(1, 2**64)
    words = [threshold - 1, threshold, 0, 2**64 - 1, min(threshold + 1, 2**64 - 1), max(threshold - 2, 0)]
    drawn = poisson_sample(ScriptedKey(words), 0, len(words), rate)
    assert drawn.tolist() == [0, 2, 5]
    assert drawn.dtype == torch.int64


@pytest.mark.parametrize("word", [0, 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1])
def test_words_are_compared_as_unsigned(word: int) -> None:
    for threshold in (1, 2**63 - 2**10, 2**63, 2**63 + 2**12, 2**64 - 2**11):
        drawn = poisson_sample(ScriptedKey([word]), 0, 1, float(Fraction(threshold, 2**64)))
        assert drawn.tolist() == ([0] if word < threshold else [])


def test_rate_one_draws_everything() -> None:
    assert poisson_sample(ScriptedKey([2**64 - 1] * 3), 0, 3, 1.0).tolist() == [0, 1, 2]


def test_other_examples_make_no_difference() -> None:
    """Adding an example changes no other example's draw: the neighbouring relation of the privacy analysis."""
    key = Key.from_seed(1)
    for step in range(20):
        longer = poisson_sample(key, step, 1001, 0.1)
        assert torch.equal(poisson_sample(key, step, 1000, 0.1), longer[longer < 1000])


def test_the_draw_depends_on_key_and_step_alone() -> None:
    a, b, c = (poisson_sample(Key.from_seed(seed), 5, 2000, 0.2) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert not torch.equal(a, poisson_sample(Key.from_seed(1), 6, 2000, 0.2))
    assert not torch.equal(poisson_sample(Key.fresh(), 5, 2000, 0.2), poisson_sample(Key.fresh(), 5, 2000, 0.2))


SIZE, STEPS, RATE = 400, 2000, 0.05


@pytest.fixture(scope="module")
def drawn() -> np.ndarray:
    """bool [steps, examples]"""
    key = Key.from_seed(2026)
    table = np.zeros((STEPS, SIZE), bool)
    for step in range(STEPS):
        table[step, poisson_sample(key, step, SIZE, RATE)] = True
    return table


def assert_normal(z: float) -> None:
    assert abs(z) < 3.9  # two-sided 1e-4


def test_indices_come_in_order_without_repeats() -> None:
    key = Key.from_seed(3)
    for step in range(50):
        assert (poisson_sample(key, step, SIZE, 0.3).diff() > 0).all()


def test_inclusion_frequency(drawn: np.ndarray) -> None:
    total = STEPS * SIZE
    assert_normal((drawn.sum() - total * RATE) / np.sqrt(total * RATE * (1 - RATE)))
    for axis in (0, 1):  # of every example over the steps, of every step over the examples
        counts = drawn.sum(axis)
        trials = drawn.shape[axis]
        chi2 = ((counts - trials * RATE) ** 2).sum() / (trials * RATE * (1 - RATE))
        assert 1e-4 < stats.chi2.cdf(chi2, len(counts)) < 1 - 1e-4


def test_batch_sizes_are_binomial(drawn: np.ndarray) -> None:
    sizes = drawn.sum(1)
    law = stats.binom(SIZE, RATE)
    assert_normal((sizes.mean() - law.mean()) / (law.std() / np.sqrt(STEPS)))
    assert 0.87 < sizes.var() / law.var() < 1.13  # four standard errors of a variance, sqrt(2 / 2000)
    edges = law.ppf([0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9])
    expected = np.diff(np.concatenate([[0], law.cdf(edges), [1]])) * STEPS
    observed = np.bincount(np.searchsorted(edges, sizes), minlength=len(expected))
    assert stats.chisquare(observed, expected).pvalue > 1e-4


@pytest.mark.parametrize(("steps_apart", "examples_apart"), [(0, 1), (0, 7), (1, 0), (2, 0), (20, 0), (1, 1), (13, 5)])
def test_pairs_are_independent(drawn: np.ndarray, steps_apart: int, examples_apart: int) -> None:
    first = drawn[: STEPS - steps_apart, : SIZE - examples_apart]
    second = drawn[steps_apart:, examples_apart:]
    joint = RATE * RATE
    assert_normal(((first & second).sum() - first.size * joint) / np.sqrt(first.size * joint * (1 - joint)))


def test_correlation_of_all_pairs_of_examples(drawn: np.ndarray) -> None:
    standard = (drawn - RATE) / np.sqrt(RATE * (1 - RATE))
    correlation = standard.T @ standard / np.sqrt(STEPS)  # each entry off the diagonal is about standard normal
    pairs = correlation[np.triu_indices(SIZE, 1)]
    assert abs(pairs.var() - 1) < 0.05
    assert np.abs(pairs).max() < 6.5


def test_no_trace_of_shuffled_epochs(drawn: np.ndarray) -> None:
    """Passes over a shuffled data set would show each example once in 1 / rate steps; here the count is binomial."""
    epoch = round(1 / RATE)
    counts = drawn.reshape(-1, epoch, SIZE).sum(1).ravel()
    expected = stats.binom(epoch, RATE).pmf([0, 1, 2, 3])
    expected = np.append(expected, 1 - expected.sum()) * counts.size
    observed = np.bincount(np.minimum(counts, 4), minlength=5)
    assert stats.chisquare(observed, expected).pvalue > 1e-4
    waits = np.concatenate([np.diff(np.flatnonzero(drawn[:, example])) for example in range(SIZE)])
    assert waits.min() == 1  # also twice in a row, as often as it should
    assert_normal(((waits == 1).sum() - waits.size * RATE) / np.sqrt(waits.size * RATE * (1 - RATE)))
