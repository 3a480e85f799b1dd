"""The accountants against closed forms, against other implementations, and against each other."""

import math

import numpy as np
import pytest
from dp_accounting.gaussian_mechanism import get_epsilon_gaussian
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import rdp_privacy_accountant
from scipy.stats import norm

from dpkernels.accounting import (
    AccountantContradictionError,
    AccountantUnavailableError,
    Bound,
    Gaussian,
    Laplace,
    PureEpsilon,
    SampledGaussian,
    accountants,
    bound,
    epsilon,
)
from dpkernels.accounting.pld import pld_bound
from dpkernels.accounting.prv import _AddLoss, _RemoveLoss, prv_bound
from dpkernels.accounting.rdp import divergence, sampled_gaussian_divergence


def pure_delta(single: float, count: int, at: float) -> float:
    """Exact delta of ``count`` randomised responses (Kairouz, Oh & Viswanath 2015, theorem 3.3)."""
    losses = single * (2 * np.arange(count + 1) - count)
    log_binomial = [math.lgamma(count + 1) - math.lgamma(i + 1) - math.lgamma(count - i + 1) for i in range(count + 1)]
    log_p = np.array(log_binomial) + np.arange(count + 1) * single - count * math.log1p(math.exp(single))
    return float(np.sum(np.exp(log_p) * np.maximum(0, -np.expm1(at - losses))))


@pytest.mark.parametrize("steps", [100, 1_000_000])
@pytest.mark.parametrize("mu", [0.05, 5.0])
@pytest.mark.parametrize("delta", [0.01, 1e-6, 1e-18])
def test_pld_composes_to_the_closed_form(steps, mu, delta):
    """A sampling rate just below 1 hides that the composition is one Gaussian with mean mu (Balle & Wang 2018)."""
    exact = get_epsilon_gaussian(1 / mu, delta)
    answer = pld_bound([SampledGaussian(math.sqrt(steps) / mu, 1 - 1e-15, steps)], delta)
    assert answer.lower <= exact <= answer.upper
    assert answer.upper <= exact * (1 + 3e-4)
    assert answer.lower >= exact * (1 - 0.06)


def one_step_delta(sigma, rate, at):
    """Exact delta of one Poisson-subsampled Gaussian step at epsilon ``at``, the larger of both directions."""
    edge = sigma**2 * math.log(math.expm1(at) / rate + 1) + 0.5
    mixture = (1 - rate) * norm.sf(edge, scale=sigma) + rate * norm.sf(edge, loc=1, scale=sigma)
    remove = mixture - math.exp(at) * norm.sf(edge, scale=sigma)
    if math.expm1(-at) / rate + 1 <= 0:
        return remove
    edge = sigma**2 * math.log(math.expm1(-at) / rate + 1) + 0.5
    mixture = (1 - rate) * norm.cdf(edge, scale=sigma) + rate * norm.cdf(edge, loc=1, scale=sigma)
    return max(remove, norm.cdf(edge, scale=sigma) - math.exp(at) * mixture)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 10.0])
@pytest.mark.parametrize("rate", [1e-3, 0.1, 0.7])
def test_one_step_is_exact(sigma, rate):
    for delta in (1e-2, 1e-5, 1e-9):
        answer = bound([SampledGaussian(sigma, rate)], delta)
        assert one_step_delta(sigma, rate, answer.upper) <= delta
        assert answer.lower == 0 or one_step_delta(sigma, rate, answer.lower) >= delta
        if answer.upper > 1e-4:
            assert answer.lower > 0.9 * answer.upper


@pytest.mark.parametrize("steps", [1, 100, 10_000])
@pytest.mark.parametrize("mu", [20.0, 200.0, 600.0])
def test_pld_holds_for_absurd_epsilons_too(mu, steps):
    """Where a window spans more than floats can hold an exponential of."""
    for delta in (1e-5, 1e-15):
        exact = get_epsilon_gaussian(1 / mu, delta)
        answer = pld_bound([SampledGaussian(math.sqrt(steps) / mu, 1 - 1e-15, steps)], delta)
        assert answer.lower <= exact <= answer.upper <= exact * (1 + 1e-3)


@pytest.mark.parametrize(("single", "count", "delta"), [(0.1, 100, 1e-6), (1.0, 10, 1e-9), (0.01, 1000, 1e-3)])
def test_pure_mechanisms(single, count, delta):
    for accountant in ("auto", "pld", "rdp"):
        answer = bound([PureEpsilon(single, count)], delta, accountant)
        assert pure_delta(single, count, answer.upper) <= delta
        if answer.lower > 0:
            assert pure_delta(single, count, answer.lower) >= delta


def test_one_laplace_release():
    """delta(epsilon) = 1 - exp((epsilon - 1/b) / 2) for one release."""
    for scale, delta in ((0.5, 1e-3), (2.0, 0.01), (10.0, 1e-6)):
        exact = 1 / scale + 2 * math.log1p(-delta)
        for accountant in ("auto", "pld", "prv"):
            answer = bound([Laplace(scale)], delta, accountant)
            assert answer.lower <= exact <= answer.upper
        assert bound([Laplace(scale)], delta).upper <= exact * (1 + 1e-3)


def test_a_pure_release_never_costs_more_than_its_epsilon():
    assert bound([PureEpsilon(0.5)], 1e-18).upper <= 0.5
    assert bound([Laplace(0.25, 3)], 1e-18).upper <= 12.0
    assert epsilon(noise_multiplier=1, sampling_rate=0.5, steps=1, delta=1e-5) > 0


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "width"),
    [(1.5, 0.01, 1000, 4e-4), (0.5, 0.01, 500, 2e-3), (3.0, 0.2, 50, 1e-3), (30.0, 1e-3, 3000, 1e-6)],
)
def test_pld_against_the_library(sigma, rate, steps, width):
    """dp-accounting's own composition on a fine grid: above our lower bound, and our upper bound is no looser."""
    library = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=rate, value_discretization_interval=width
    ).self_compose(steps)
    for delta in (1e-3, 1e-6):
        expected = library.get_epsilon_for_delta(delta)
        answer = pld_bound([SampledGaussian(sigma, rate, steps)], delta)
        assert answer.lower <= expected
        assert 0.99 * expected <= answer.upper <= expected * (1 + 1e-4)


@pytest.mark.parametrize("rate", [1e-6, 1e-3, 0.2, 0.999])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 20.0])
@pytest.mark.parametrize("order", [2, 3, 16, 64])
def test_moments_equal_the_binomial_sum_at_integer_orders(rate, sigma, order):
    expected = rdp_privacy_accountant._compute_rdp_poisson_subsampled_gaussian(rate, sigma, [order])[0]
    # The library's sum of terms near 1 carries an absolute error.
    assert sampled_gaussian_divergence(sigma, rate, order) == pytest.approx(expected, rel=1e-7, abs=1e-14)


@pytest.mark.parametrize(("rate", "sigma", "order"), [(0.01, 0.5, 1.5), (0.3, 2.0, 7.3), (1e-3, 0.4, 2.9)])
def test_fractional_moments_equal_adaptive_quadrature(rate, sigma, order):
    from scipy.integrate import quad

    def density(z):
        ratio = (1 - rate) + rate * math.exp((2 * z - 1) / (2 * sigma**2))
        return ratio**order * math.exp(-(z**2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))

    points = [0.0, order / 2, order]
    moment = quad(density, -12 * sigma, order + 12 * sigma, points=points, epsabs=0, epsrel=1e-12, limit=500)[0]
    expected = math.log(moment) / (order - 1)
    assert sampled_gaussian_divergence(sigma, rate, order) == pytest.approx(expected, rel=1e-7)


def test_moments_far_out_stay_bounds():
    """Where quadrature would need too many nodes, convexity bounds the moment; it never exceeds the unsampled one."""
    for sigma, rate, order in ((0.01, 0.01, 3.0), (0.1, 0.5, 5000.0), (1e-3, 1e-6, 1.5)):
        value = sampled_gaussian_divergence(sigma, rate, order)
        assert 0 < value <= order / (2 * sigma**2) * (1 + 1e-12)


def test_divergences_of_the_other_mechanisms():
    """By sums and quadrature of their densities."""
    for a in (1.1, 2.0, 30.0):
        for eps in (1e-3, 1.0, 5.0):
            p = 1 / (1 + math.exp(-eps))
            expected = math.log(p**a * (1 - p) ** (1 - a) + (1 - p) ** a * p ** (1 - a)) / (a - 1)
            assert divergence([PureEpsilon(eps)], a) == pytest.approx(expected, rel=1e-6, abs=1e-12)
        for b in (0.5, 3.0, 100.0):
            weights = a / (2 * a - 1) * math.exp((a - 1) / b) + (a - 1) / (2 * a - 1) * math.exp(-a / b)
            assert divergence([Laplace(b, 2)], a) == pytest.approx(2 * math.log(weights) / (a - 1), rel=1e-6, abs=1e-12)
        assert divergence([Gaussian(2.0, 3)], a) == pytest.approx(3 * a / 8)


def test_both_directions_are_modelled():
    """prv-accountant models removal alone; for what follows, both directions are composed and the larger is taken."""
    from dpkernels.accounting.prv import _AddLoss, _RemoveLoss

    step = SampledGaussian(1.0, 0.1)
    add, remove = _AddLoss(step), _RemoveLoss(step)
    t = np.linspace(-3, 3, 61)
    # The densities mirror each other: Pr_P[log P/Q <= t] under adding is Pr_Q[log Q/P >= -t], tilted by the ratio.
    rng = np.random.default_rng(0)
    z = rng.normal(size=400_000)
    losses = -np.log(0.9 + 0.1 * np.exp(z - 0.5))
    for point in (-1.0, -0.1, 0.0, 0.05, 0.1):
        assert add.cdf(point) == pytest.approx((losses <= point).mean(), abs=4e-3)
    assert np.all(np.diff(add.cdf(t)) >= 0)
    assert np.all(np.diff(remove.cdf(t)) >= 0)
    assert add.cdf(-math.log(0.9) + 1e-12) == 1.0


@pytest.mark.parametrize(
    ("sigma", "rate", "mean"),
    [  # 30 digits of the integral by mpmath 1.3
        (0.3, 0.01, 0.00497969033118746121632677887971),
        (0.2, 0.5, 0.675942577380979868403144995475),
        (0.28, 0.0008, 0.000268617963664320343554233531579),
    ],
)
def test_the_mean_of_a_subsampled_loss(sigma, rate, mean):
    event = SampledGaussian(sigma, rate)
    assert _AddLoss(event).mean() == pytest.approx(mean, rel=1e-12)
    assert _RemoveLoss(event).mean() > mean
    assert _RemoveLoss(SampledGaussian(sigma, 1.0)).mean() == pytest.approx(0.5 / sigma**2, rel=1e-12)


@pytest.mark.parametrize("sigma", [0.4, 0.5, 0.6, 1.0])
@pytest.mark.parametrize("rate", [1e-4, 1e-3, 1e-2])
def test_prv_agrees_over_many_steps(sigma, rate):
    """Where its grid, shifted once a step, would leave its domain (epsilon 36 for 13 at 0.5, 1e-3)."""
    event = SampledGaussian(sigma, rate, 100_000)
    try:
        got = prv_bound([event], 1e-5)
    except AccountantUnavailableError:
        assert (sigma, rate) not in {(0.5, 1e-3), (0.6, 1e-3), (1.0, 1e-3), (1.0, 1e-2)}
        return
    other = pld_bound([event], 1e-5)
    assert got.lower <= other.upper
    assert other.lower <= got.upper


def test_ranges_end_in_a_named_bound():
    """Outside the usual range something always answers, in little time and memory."""
    extreme = [
        (SampledGaussian(30.0, 1e-3, 100_000), 1e-5),
        (SampledGaussian(0.28, 8e-4, 12_511), 1e-6),  # a grid of its own choice takes prv-accountant more than a minute
        (SampledGaussian(1.0, 1e-6, 1_000_000), 1e-8),
        (SampledGaussian(400.0, 0.01, 1_000_000), 1e-18),
        (SampledGaussian(0.3, 0.01, 1_000_000), 1e-18),
        (SampledGaussian(0.05, 1.0, 1_000_000), 1e-18),
        (SampledGaussian(1e-4, 0.5, 10), 1e-5),
        (SampledGaussian(1e7, 1e-6, 1), 1e-18),
        (PureEpsilon(200.0, 10), 1e-10),
        (Laplace(1e-3, 1_000_000), 1e-18),
    ]
    for event, delta in extreme:
        answer = bound([event], delta)
        assert 0 <= answer.lower <= answer.upper < math.inf
        assert answer.accountant in {"pld", "prv", "rdp"}
        assert any(note.startswith("rdp") for note in answer.notes)


def test_a_named_accountant_says_why_it_cannot_answer():
    with pytest.raises(AccountantUnavailableError, match="prv resolves delta"):
        epsilon(noise_multiplier=1, sampling_rate=0.01, steps=1000, delta=1e-12, accountant="prv")
    with pytest.raises(AccountantUnavailableError, match="prv needs a grid"):
        epsilon(noise_multiplier=30, sampling_rate=1e-3, steps=100_000, delta=1e-5, accountant="prv")
    with pytest.raises(ValueError, match="accountant must be one of"):
        epsilon(noise_multiplier=1, sampling_rate=0.01, steps=10, delta=1e-5, accountant="gdp")


def test_a_contradiction_is_an_error(monkeypatch):
    """A lower bound above another's upper bound; differing upper bounds alone are none."""
    answers = {"pld": Bound(1.0, 0.9, "pld", ""), "prv": Bound(1.2, 0.95, "prv", ""), "rdp": Bound(1.5, 0.0, "rdp", "")}
    monkeypatch.setattr(accountants, "_accountant", lambda name: lambda events, delta: answers[name])
    answer = accountants._auto((Gaussian(1.0),), 1e-5)
    assert (answer.upper, answer.lower, answer.accountant) == (1.0, 0.95, "pld")
    answers["prv"] = Bound(1.3, 1.1, "prv", "")
    with pytest.raises(
        AccountantContradictionError, match=r"prv proves epsilon >= 1\.1 and pld proves epsilon <= 1\.0"
    ):
        accountants._auto((Gaussian(1.0),), 1e-5)


def test_equal_compositions_have_equal_bounds():
    a = bound([SampledGaussian(1.0, 0.01, 30), Gaussian(4.0, 2), SampledGaussian(1.0, 0.01, 70)], 1e-5)
    b = bound([Gaussian(4.0), Gaussian(4.0), SampledGaussian(1.0, 0.01, 100), PureEpsilon(0.0)], 1e-5)
    assert a == b
    assert bound([SampledGaussian(5.0, 1.0, 4)], 1e-5) == bound([Gaussian(5.0, 4)], 1e-5)
    assert bound([], 1e-5).upper == 0.0
