"""What is stated holds for noise that comes from a real sampler, is one figure everywhere, and is said in words."""

import math
import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as some
from torch import nn

import dpkernels as dpk
from dpkernels.accounting import Gaussian, Laplace, Ledger, SampledGaussian, accountants, bound, claim, plan

RUN = {"dataset_size": 1000, "batch_size": 50, "delta": 1e-5}


def run(made, model=None, steps=None):
    """The optimizer of a run by the plan, ended after some of its steps."""
    model = nn.Linear(4, 2) if model is None else model
    optimizer = dpk.DPSGD(model, made, lr=0.1, max_grad_norm=1.0)
    data = (torch.randn(made.dataset_size, 4), torch.randint(0, 2, (made.dataset_size,)))
    loader = dpk.PoissonLoader(data, made, optimizer=optimizer)
    for x, y in loader.take(made.steps if steps is None else steps):
        optimizer.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def stated(text):
    """Epsilon of the first line, None where none is stated."""
    found = re.match(r"\(([0-9.e+]+), [0-9.e-]+\)-differentially private\.\n", text)
    return None if found is None else float(found[1])


@settings(deadline=None, max_examples=60)
@given(
    sigma=some.floats(0.25, 20),
    rate=some.floats(1e-3, 1),
    steps=some.integers(1, 3000),
    delta=some.floats(-12, -2).map(lambda power: 10.0**power),
    error=some.floats(-30, -3).map(lambda power: 10.0**power),
    laplace=some.booleans(),
)
@example(sigma=0.25, rate=1.0, steps=64, delta=1e-8, error=1e-3, laplace=False)  # a share beyond all numbers
def test_noise_is_inside_the_stated_delta(sigma, rate, steps, delta, error, laplace):
    """(epsilon, d) of ideal noise with d = delta - (1 + e^epsilon) error, or no epsilon at all."""
    events = [SampledGaussian(sigma, rate, steps), *([Laplace(3.0)] if laplace else [])]
    made = claim(events, delta, "rdp", noise_error=error)
    ideal = bound(events, delta, "rdp").upper
    if made.refusal:
        assert math.isinf(made.upper)
        assert not math.isinf(ideal)
        half = bound(events, delta / 2, "rdp").upper
        assert (1 + math.exp(min(half, 700))) * error > delta / 4  # near half of delta, or beyond
        return
    assert made.upper >= ideal
    share = (1 + math.exp(made.upper)) * error
    assert share <= made.kept <= delta / 2
    assert bound(events, delta - share, "rdp").upper <= made.upper
    assert made.kept <= max(4 * share, delta * accountants.KEPT)  # and not much more than is needed


@pytest.mark.parametrize("target", [0.5, 3.0, 10.0])
def test_usual_figures_do_not_move(target):
    made = plan(**RUN, steps=20, target_epsilon=target)
    optimizer = run(made)
    ideal = bound(made.events, made.delta).upper
    assert ideal < optimizer.epsilon() <= ideal * (1 + 1e-6)
    assert optimizer.epsilon() == made.epsilon <= target
    assert stated(optimizer.privacy_statement()) == stated(str(made))
    assert made.epsilon <= stated(str(made)) <= made.epsilon * 1.001


def test_an_epsilon_that_noise_cannot_carry_is_not_stated():
    made = plan(**RUN, steps=20, target_epsilon=48.0)  # room for 20 values, but not for 20 times as many
    assert stated(str(made)) is not None
    with pytest.warns(UserWarning, match="no epsilon will be stated at the plan's delta: with ideal noise"):
        optimizer = run(made)
    text = " ".join(optimizer.privacy_statement().split())
    assert stated(optimizer.privacy_statement()) is None
    assert "differentially private" not in text
    assert text.startswith("No epsilon can be stated at delta=1e-05: with ideal noise epsilon would be 4")
    assert math.isinf(optimizer.epsilon())
    largest = float(re.search(r"an epsilon of up to ([0-9]+) can be stated with this noise\.", text)[1])
    assert 30 < largest < 48
    smaller = run(plan(**RUN, steps=20, target_epsilon=largest))
    assert largest - 1 < stated(smaller.privacy_statement()) <= largest + 0.2
    assert math.isfinite(optimizer.epsilon(delta=0.1))


def test_a_target_beyond_all_noise_is_refused():
    with pytest.raises(ValueError, match="target_epsilon must be smaller, got 1000: with ideal noise"):
        plan(**RUN, steps=20, target_epsilon=1000.0)
    made = plan(**RUN, steps=20, noise_multiplier=0.03)
    assert math.isinf(made.epsilon)
    assert stated(str(made)) is None


def test_plans_between_meet_their_target():
    """Where noise takes a visible part of delta, calibration leaves it that part."""
    made = plan(**RUN, steps=20, target_epsilon=45.0)
    assert made.bound.kept > 2 * accountants.KEPT * made.delta
    assert bound(made.events, made.delta).upper < made.epsilon <= 45.0


def test_a_run_that_ended_early_states_its_plan():
    made = plan(**RUN, steps=20, target_epsilon=2.0, compose_with=[Gaussian(30.0)])
    optimizer = run(made, steps=4)
    assert optimizer.epsilon() < 0.9 * made.epsilon
    text = " ".join(optimizer.privacy_statement().split())
    assert stated(optimizer.privacy_statement()) == stated(str(made))
    assert "Steps: 4 of 20 planned. A run that ends early" in text
    assert "training step: Poisson-subsampled Gaussian mechanism" in text
    assert "20 times" in text
    assert f"{optimizer.epsilon():.4g}" not in text
    assert optimizer.ledger.claim(made.delta).upper == made.epsilon


def test_every_release_counts_its_noise(tmp_path):
    """Errors are kept with the entries, survive the file, and add up."""
    path, step = tmp_path / "ledger.json", SampledGaussian(1.0, 0.05)
    for _ in range(2):
        with Ledger(path) as ledger:
            for _ in range(3):
                ledger.reserve_step(step, 1e-12)
            ledger.record(Gaussian(5.0, 2), "statistics", 1e-11)
    with Ledger(path) as ledger:
        assert [(entry.event.count, entry.noise_error) for entry in ledger.entries()] == [(3, 1e-12), (2, 1e-11)] * 2
        assert ledger.bound(1e-5).noise_error == pytest.approx(6e-12 + 4e-11)
        ledger.reserve_step(step, 1e-6)  # another kind of step
        assert ledger.entries()[-1].noise_error == 1e-6
        with pytest.raises(ValueError, match="noise_error must be a number from 0 to 1, got -1"):
            ledger.reserve_step(step, -1)
    with Ledger(budget=plan(**RUN, steps=10, noise_multiplier=1.0)) as ledger:
        ledger.reserve_step(step, 1e-10)
        assert ledger.bound(1e-5).noise_error == 1e-10
        assert ledger.claim(1e-5).noise_error == 1e-9  # of all steps that are planned


def test_what_was_spent_beside_the_plan_is_stated():
    made = plan(**RUN, steps=10, noise_multiplier=1.0)
    with Ledger(budget=made) as ledger:
        ledger.record(Gaussian(50.0), "statistics")
        assert "statistics: Gaussian mechanism, noise multiplier 50" in ledger.statement(made.delta)
        other = Ledger()
        for _ in range(3):
            other.record(Gaussian(1.0), "statistics")
    assert "statistics: Gaussian mechanism, noise multiplier 1, 3 times" in other.statement(1e-5)


def test_replacing_an_example_is_said_in_figures():
    text = " ".join(str(plan(**RUN, steps=10, noise_multiplier=1.0)).split())
    found = re.search(r"delta\) = \(([0-9.]+), ([0-9.e-]+)\)", text)
    made = plan(**RUN, steps=10, noise_multiplier=1.0)
    assert 2 * made.epsilon <= float(found[1]) <= 2.002 * made.epsilon
    assert (1 + math.exp(made.epsilon)) * 1e-5 <= float(found[2]) < 1e-3
