"""Private hyper-parameter selection, against exact distributions and the library."""

import math
from itertools import islice

import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant as library

from dpkernels.accounting import Gaussian, PureEpsilon, SampledGaussian, bound, claim, tuning
from dpkernels.accounting.rdp import divergence

SHAPES = [-0.5, 0.0, 0.5, 1.0, 3.0, math.inf]
ORDERS = [1 + x / 10 for x in range(1, 100)] + list(range(12, 512))


def generating_function(mean, shape, x):
    """E[x^K], from the distribution's definition."""
    return sum(p * x**k for k, p in enumerate(islice(tuning._probabilities(mean, shape), 20_000)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [1.5, 10.0])
def test_the_number_of_runs_has_its_mean_and_mass(mean, shape):
    probabilities = np.array(list(islice(tuning._probabilities(mean, shape), 20_000)))
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-9)
    assert probabilities @ np.arange(len(probabilities)) == pytest.approx(mean, rel=1e-6)


def test_shape_one_is_geometric_and_shape_zero_logarithmic():
    geometric = list(islice(tuning._probabilities(4.0, 1.0), 6))
    assert geometric == pytest.approx([0] + [0.25 * 0.75**k for k in range(5)])
    logarithmic = list(islice(tuning._probabilities(4.0, 0.0), 6))
    ratios = [logarithmic[k + 1] * (k + 1) / (logarithmic[k] * k) for k in range(1, 5)]
    assert ratios == pytest.approx([ratios[0]] * 4)


def test_drawing_follows_the_distribution():
    draws = [tuning.draw_number_of_runs(mean_runs=3.0) for _ in range(4000)]
    assert min(draws) == 1
    assert np.mean(draws) == pytest.approx(3.0, abs=0.3)  # standard error 0.04
    assert 0 in [tuning.draw_number_of_runs(mean_runs=1.0, shape=math.inf) for _ in range(200)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("single", [0.1, 1.0])
@pytest.mark.parametrize("mean", [2.0, 20.0])
def test_the_bound_holds_for_the_best_of_randomised_responses(shape, single, mean):
    """A run is "good" with probability p or 1 - p; the best of K is bad only when all are, so its law is exact."""
    p = math.exp(single) / (1 + math.exp(single))

    def law(good):
        none = generating_function(mean, shape, 0.0)
        all_bad = generating_function(mean, shape, 1 - good) - none
        return np.array([1 - all_bad - none, all_bad, none])

    for delta in (1e-6, 1e-2):
        epsilon = tuning.best_of_random_runs([PureEpsilon(single)], delta, mean_runs=mean, shape=shape).upper
        for first, second in ((law(p), law(1 - p)), (law(1 - p), law(p))):
            assert np.maximum(first - math.exp(epsilon) * second, 0).sum() <= delta


@pytest.mark.parametrize("shape", [0.0, 1.0, 3.0])
def test_a_pure_run_costs_two_plus_shape_times_its_epsilon(shape):
    """Papernot & Steinke 2022, corollary 3; Liu & Talwar's factor 3 for the geometric distribution."""
    answer = tuning.best_of_random_runs([PureEpsilon(0.1)], 1e-9, mean_runs=10, shape=shape)
    assert answer.upper <= (2 + shape) * 0.1 * 1.01
    assert tuning.random_stopping([PureEpsilon(0.1)], 1e-6, stopping_probability=0.1).upper == pytest.approx(
        0.3, rel=1e-3
    )


@pytest.mark.parametrize("shape", [0.0, 1.0, 2.5, math.inf])
def test_against_the_library(shape):
    """At the library's orders; ours are all of them, so at most as large, and not far below."""
    run = [SampledGaussian(1.1, 0.01, 1000)]
    rdp = [divergence(run, order) for order in ORDERS]
    selected = library._compute_rdp_repeat_and_select(ORDERS, rdp, 10.0, shape)
    expected = library.compute_epsilon(ORDERS, selected, 1e-5)[0]
    got = tuning.best_of_random_runs(run, 1e-5, mean_runs=10.0, shape=shape).upper
    assert 0.98 * expected <= got <= expected * (1 + 1e-4)


def test_costs_are_ordered():
    """One run costs least, the best of a few more, keeping all of as many the most."""
    run = [SampledGaussian(1.0, 0.01, 1000)]
    one = bound(run, 1e-5).upper
    best = tuning.best_of_random_runs(run, 1e-5, mean_runs=10).upper
    everything = tuning.all_runs(run, 1e-5, runs=10)
    assert one < best < everything.upper
    assert everything == claim([SampledGaussian(1.0, 0.01, 10_000)], 1e-5)
    noisy = tuning.all_runs(run, 1e-5, runs=10, noise_error=1e-12)
    assert noisy.noise_error == 1e-11
    assert noisy.upper > everything.upper
    assert tuning.best_of_random_runs(run, 1e-5, mean_runs=10, compose_with=[Gaussian(4.0)]).upper > best
    assert best < tuning.random_stopping(run, 1e-5, stopping_probability=0.1).upper


def test_a_run_that_draws_what_it_costs_costs_the_dearest():
    """The best of K mixtures of two randomised responses, whose law is exact: which one was drawn is seen."""
    cheap, dear, mean = 0.2, 1.0, 5.0
    one, other = [PureEpsilon(cheap)], [PureEpsilon(dear)]
    both = tuning.best_of_random_runs(one, 1e-5, mean_runs=mean, alternatives=[other])
    assert both.upper == tuning.best_of_random_runs(other, 1e-5, mean_runs=mean).upper

    def law(sign):
        good = [0.5 / (1 + math.exp(sign * single)) for single in (cheap, dear)]
        bad = [0.5 - p for p in good]
        chances = [*bad, *good]  # from the worst outcome to the best
        below = [generating_function(mean, 1.0, sum(chances[:k])) for k in range(5)]
        return np.diff(below)

    first, second = law(1), law(-1)
    for p, q in ((first, second), (second, first)):
        assert np.maximum(p - math.exp(both.upper) * q, 0).sum() <= 1e-5


def test_noise_for_the_best_of_random_runs():
    short, long = tuning.TrainingRun(0.01, 100), tuning.TrainingRun(0.02, 1000, (Gaussian(9.0),))
    target = {"target_epsilon": 2.0, "delta": 1e-5, "mean_runs": 4}
    (alone,) = tuning.noise_multipliers([short], **target)
    assert tuning.best_of_random_runs(short.events(alone), 1e-5, mean_runs=4).upper <= 2.0
    assert tuning.best_of_random_runs(short.events(0.998 * alone), 1e-5, mean_runs=4).upper > 2.0
    first, second, third = tuning.noise_multipliers([short, long, short], **target)
    assert first == third >= alone * (1 - 2e-3)
    both = tuning.best_of_random_runs(short.events(first), 1e-5, mean_runs=4, alternatives=[long.events(second)])
    assert 2.0 * (1 - 2e-3) < both.upper <= 2.0
    (poisson,) = tuning.noise_multipliers([short], **target, shape=math.inf)
    assert 1.99 < tuning.best_of_random_runs(short.events(poisson), 1e-5, mean_runs=4, shape=math.inf).upper <= 2.0


def test_the_most_runs_leave_little_out():
    assert tuning.most_runs(mean_runs=4.0, tail=0.5) == 3  # Pr[K > 2] = 0.75^2
    assert tuning.most_runs(mean_runs=4.0, tail=1e-6) == math.ceil(math.log(1e-6) / math.log(0.75))
    assert tuning.most_runs(mean_runs=1.0, shape=math.inf, tail=0.5) == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda run: tuning.best_of_random_runs(run, 1e-5, mean_runs=0.5), "mean_runs"),
        (lambda run: tuning.best_of_random_runs(run, 1e-5, mean_runs=1), "mean_runs must be above 1"),
        (lambda run: tuning.best_of_random_runs(run, 1e-5, mean_runs=2, shape=-1), "shape"),
        (lambda run: tuning.best_of_random_runs(run, 0, mean_runs=2), "delta"),
        (lambda run: tuning.random_stopping(run, 1e-5, stopping_probability=0), "stopping_probability"),
        (lambda run: tuning.all_runs(run, 1e-5, runs=0), "runs"),
        (lambda run: tuning.most_runs(mean_runs=2, tail=0), "tail"),
        (
            lambda run: tuning.noise_multipliers(
                [tuning.TrainingRun(0.1, 10, tuple(run))], target_epsilon=2, delta=1e-5, mean_runs=2
            ),
            "target_epsilon must exceed what runs cost besides their steps",
        ),
    ],
)
def test_bad_arguments(call, words):
    with pytest.raises(ValueError, match=words):
        call([Gaussian(1.0)])
