"""Published and hand-checked values. The accountant that gives each number is named with it."""

import math

import pytest

from dpkernels.accounting import Gaussian, SampledGaussian, bound, epsilon
from dpkernels.accounting.rdp import rdp_bound

# The two lists of Rényi orders that TensorFlow Privacy has searched: its tutorials' and its DP-SGD script's.
TENTHS = (*(1 + x / 10 for x in range(1, 100)), *range(12, 64))
SCRIPT = (1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5, *range(5, 64), 128, 256, 512)


def test_rate_one_is_the_plain_gaussian_mechanism():
    """mu = sqrt(T) / sigma; closed form of Balle & Wang 2018."""
    for mu, expected in ((1.0, 4.3772), (0.5, 1.9931), (2.0, 9.9973), (0.1, 0.3407)):
        for accountant in ("auto", "pld", "prv"):
            got = epsilon(noise_multiplier=10 / mu, sampling_rate=1, steps=100, delta=1e-5, accountant=accountant)
            assert expected - 5e-5 <= got <= expected * 1.004


def test_large_epsilon_is_finite():
    answer = bound([SampledGaussian(1.0, 0.2, 500)], 1e-5)
    assert 38.0 < answer.lower < answer.upper < 38.3


def test_delta_near_and_above_the_total_variation():
    """One step at q = 0.01, sigma = 10 has total variation 3.99e-4 (prv and pld)."""
    at = {
        delta: epsilon(noise_multiplier=10, sampling_rate=0.01, steps=1, delta=delta)
        for delta in (1e-5, 3.98e-4, 3.99e-4, 0.5)
    }
    assert at[1e-5] == pytest.approx(0.00218, rel=5e-3)
    assert 0 < at[3.98e-4] < 1e-5
    assert at[3.99e-4] == at[0.5] == 0.0


def test_tight_accountant_is_below_renyi():
    events, delta = [SampledGaussian(3.0, 0.2, 50)], 1 / 48000
    assert bound(events, delta, "rdp").upper == pytest.approx(2.16, abs=0.01)
    assert bound(events, delta).upper == pytest.approx(1.961, abs=2e-3)


@pytest.mark.parametrize(
    ("sigma", "expected", "printed"), [(0.5, 47.415, 47.41), (1.5, 3.459, 3.45), (3.5, 1.205, 1.20)]
)
def test_kurakin_appendix_h(sigma, expected, printed):
    """Improved conversion over orders in tenths with exact fractional moments."""
    events = [SampledGaussian(sigma, 0.01, 10_000)]
    got = rdp_bound(events, 1e-5, orders=TENTHS).upper
    assert got == pytest.approx(expected, rel=2e-4)
    assert math.floor(got * 100) / 100 == printed
    assert bound(events, 1e-5, "rdp").upper <= got


def test_fractional_moments_are_exact_where_the_library_is_loose():
    """sigma = 0.5: dp-accounting gives 49.43 with its bound on fractional moments, exact moments 47.42, the tight value
    is 43.37."""
    from dp_accounting.rdp import rdp_privacy_accountant as library

    loose = 10_000 * library._compute_rdp_poisson_subsampled_gaussian(0.01, 0.5, TENTHS)
    assert library.compute_epsilon(TENTHS, loose, 1e-5)[0] == pytest.approx(49.43, abs=0.01)
    answer = bound([SampledGaussian(0.5, 0.01, 10_000)], 1e-5)
    assert answer.lower <= answer.upper == pytest.approx(43.37, abs=0.005)


@pytest.mark.parametrize(("scale", "tight"), [(0.2, 3.63), (0.15, 11.2), (0.1, 56.3)])
def test_kurakin_table_4_tight(scale, tight):
    answer = bound([SampledGaussian(scale * math.sqrt(8), 1024 / 1_281_167, 12_511)], 1e-6)
    assert answer.upper == pytest.approx(tight, rel=2e-3)
    assert answer.lower <= tight


@pytest.mark.parametrize(
    ("scale", "expected", "best"), [(0.2, 4.567, 4.562), (0.15, 13.22, 13.208), (0.1, 71.50, 64.11)]
)
def test_kurakin_table_4_renyi(scale, expected, best):
    """Exact moments and the improved conversion: over the script's orders, and over all orders."""
    events = [SampledGaussian(scale * math.sqrt(8), 1024 / 1_281_167, 13_010)]
    assert rdp_bound(events, 1e-6, orders=SCRIPT).upper == pytest.approx(expected, rel=5e-4)
    assert rdp_bound(events, 1e-6).upper == pytest.approx(best, rel=5e-4)


@pytest.mark.parametrize(
    ("sigma", "batch", "size", "steps", "expected"),
    [
        (1.54, 1024, 50_000, 1464, 3.03),
        (2.15, 2048, 60_000, 1171, 3.02),
        (1.23, 512, 60_000, 4687, 2.99),
        (1.35, 1024, 60_000, 1464, 3.01),
    ],
)
def test_losing_less_table_5(sigma, batch, size, steps, expected):
    """The classic conversion."""
    got = epsilon(noise_multiplier=sigma, sampling_rate=batch / size, steps=steps, delta=1e-5, accountant="rdp-classic")
    assert got == pytest.approx(expected, abs=6e-3)


def test_losing_less_with_normalization():
    """The classic conversion, alone and with two Gaussian releases; tight for the table's first row."""
    run = {
        "noise_multiplier": 5.67,
        "sampling_rate": 8192 / 50_000,
        "steps": 366,
        "delta": 1e-5,
        "accountant": "rdp-classic",
    }
    assert epsilon(**run) == pytest.approx(2.878, abs=1e-3)
    assert epsilon(**run, compose_with=[Gaussian(8.0, 2)]) == pytest.approx(3.020, abs=1e-3)
    answer = bound([SampledGaussian(1.54, 1024 / 50_000, 1464)], 1e-5)
    assert answer.lower <= 2.386 <= answer.upper <= 2.386 * 1.001


def test_luo():
    """1.481 by the classic conversion, 1.128 tight."""
    run = {"noise_multiplier": 15.0, "sampling_rate": 0.1, "steps": 2000, "delta": 1e-5}
    assert epsilon(**run, accountant="rdp-classic") == pytest.approx(1.481, abs=1e-3)
    assert epsilon(**run) == pytest.approx(1.128, rel=1e-3)
