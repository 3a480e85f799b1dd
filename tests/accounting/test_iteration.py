"""Privacy amplification by iteration."""

import math

import pytest

from dpkernels.accounting import Gaussian, bound, noise_multiplier
from dpkernels.accounting.iteration import iteration_bound, iteration_noise_multiplier

FIGURE_9 = {
    "dataset_size": 50_000,
    "batch_size": 512,
    "epochs": 10,
    "delta": 1e-5,
    "learning_rate": 1.0,
    "smoothness": 1.0,
}


def share(**change):
    """The divergence relative to one Gaussian release, read off the bound."""
    query = {"dataset_size": 1000, "batch_size": 10, "epochs": 1, "coverage": 1.0} | change
    got = iteration_bound(noise_multiplier=1.0, delta=1e-5, learning_rate=1.0, smoothness=1.0, **query).upper
    low, high = 1e-6, 1e2
    for _ in range(60):
        middle = math.sqrt(low * high)
        value = bound([Gaussian(middle**-0.5)], 1e-5, "rdp").upper
        low, high = (middle, high) if value < got else (low, middle)
    return low


def test_one_epoch_is_the_theorem():
    """1 / (n + 1 - t) of a step for batch t of n (Feldman et al. 2018, the noisy stochastic gradient theorem)."""
    assert share(coverage=1.0) == pytest.approx(1.0, rel=1e-3)
    assert share(coverage=0.99) == pytest.approx(1 / 2, rel=1e-3)
    assert share(coverage=0.01) == pytest.approx(1 / 100, rel=1e-3)


def test_more_epochs_add_what_a_whole_epoch_hides():
    assert share(epochs=5, coverage=0.5) == pytest.approx(4 / 100 + 1 / 51, rel=1e-3)


@pytest.mark.parametrize("epochs", [1, 4])
def test_linear_losses_meet_the_bound(epochs):
    """With linear losses the exact shift meets the noise of all steps: the first batch attains the bound."""
    assert share(epochs=epochs, coverage=0.01) == pytest.approx(epochs**2 / (epochs * 100), rel=1e-3)
    assert share(epochs=epochs, coverage=0.7) > epochs / 100


def test_figure_9():
    """Ten epochs at 512 of 50,000, delta 1e-5, 99% of the examples: more noise than DP-SGD but for large budgets."""
    for target, more in ((1.0, True), (3.0, True), (10.0, False), (50.0, False)):
        iterated = iteration_noise_multiplier(target_epsilon=target, **FIGURE_9)
        sampled = noise_multiplier(
            target_epsilon=target, delta=1e-5, sampling_rate=512 / 50_000, steps=977, accountant="rdp"
        )
        assert (iterated > sampled) is more
        assert iteration_bound(noise_multiplier=iterated, **FIGURE_9).upper <= target * (1 + 1e-9)
        assert iteration_bound(noise_multiplier=0.999 * iterated, **FIGURE_9).upper > target


def test_figure_9_as_published():
    """With the epochs composed, and the accountant of the paper, less noise than DP-SGD only above epsilon = 40."""
    for target, more in ((0.5, True), (3.0, True), (30.0, True), (50.0, False)):
        iterated = iteration_noise_multiplier(target_epsilon=target, every_epoch=True, **FIGURE_9)
        sampled = noise_multiplier(
            target_epsilon=target, delta=1e-5, sampling_rate=512 / 50_000, steps=977, accountant="rdp-classic"
        )
        assert (iterated > sampled) is more
    assert share(epochs=5, every_epoch=True) == pytest.approx(5.0, rel=1e-3)
    assert "of every epoch" in iteration_bound(noise_multiplier=1.0, every_epoch=True, **FIGURE_9).method


def test_the_bound_says_for_whom_it_holds():
    text = iteration_bound(noise_multiplier=1.0, **FIGURE_9).method
    assert "first 97 of 98 batches" in text
    assert "last iterate alone" in text
    assert math.isinf(iteration_bound(noise_multiplier=0.0, **FIGURE_9).upper)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"learning_rate": 2.1}, "at most 2 / smoothness = 2, got 2.1"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"smoothness": -1.0}, "smoothness"),
        ({"coverage": 0.0}, "coverage"),
        ({"coverage": 1.1}, "coverage"),
        ({"batch_size": 50_001}, "batch_size"),
        ({"epochs": 0}, "epochs"),
        ({"delta": 1.0}, "delta"),
    ],
)
def test_bad_arguments(change, words):
    with pytest.raises(ValueError, match=words):
        iteration_bound(noise_multiplier=1.0, **(FIGURE_9 | change))
