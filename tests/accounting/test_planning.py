"""Plans and calibration."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import pytest

from dpkernels.accounting import (
    Gaussian,
    Ledger,
    Plan,
    SampledGaussian,
    bound,
    claim,
    epsilon,
    noise_multiplier,
    plan,
    statement,
)

RUN = {"dataset_size": 60_000, "batch_size": 512, "delta": 1e-5}


@pytest.mark.parametrize(
    ("size", "batch", "epochs", "steps"),
    [
        (60_000, 512, 40, 4688),  # 4687.5
        (60_000, 500, 40, 4800),
        (1000, 100, 0.1, 1),  # a tenth as written, although the float is a little more
        (1000, 100, 0.5, 5),
        (1000, 333, 1, 4),
        (10, 4, 1, 3),
        (50_000, 8192, 60, 367),
        (3, 3, 7, 7),
        (2**53 + 1, 1, 1, 2**53 + 1),  # beyond what a float holds
    ],
)
def test_steps_are_counted_in_integers(size, batch, epochs, steps):
    run = {"delta": 1e-18, "noise_multiplier": 1e6, "accountant": "rdp"}
    made = plan(dataset_size=size, batch_size=batch, epochs=epochs, **run)
    assert made.steps == steps


def test_a_plan_from_a_target():
    made = plan(**RUN, epochs=40, target_epsilon=3.0)
    assert 2.99 < made.epsilon <= 3.0
    assert made.sampling_rate == 512 / 60_000
    ideal = epsilon(noise_multiplier=made.noise_multiplier, sampling_rate=made.sampling_rate, steps=4688, delta=1e-5)
    assert ideal < made.epsilon < ideal * (1 + 1e-6)  # a millionth of delta is kept for the noise
    assert (made.epochs, made.target_epsilon, made.compose_with) == (40.0, 3.0, ())
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.steps = 1
    assert made == plan(**RUN, epochs=40, target_epsilon=3.0)


def test_rate_and_denominator_are_as_planned():
    """N = 10 and B = 4 mean 0.4 and 4, whatever data set turns up."""
    made = plan(dataset_size=10, batch_size=4, steps=1, delta=1e-5, noise_multiplier=1.0, accountant="rdp")
    assert (made.sampling_rate, made.batch_size) == (0.4, 4)
    assert made.step_event == SampledGaussian(1.0, 0.4)


def test_a_plan_from_noise_and_steps_composes():
    made = plan(**RUN, steps=100, noise_multiplier=1.0, compose_with=[Gaussian(8.0, 2)])
    assert made.epsilon == claim([Gaussian(8.0, 2), SampledGaussian(1.0, 512 / 60_000, 100)], 1e-5).upper
    assert made.events == (Gaussian(8.0, 2), made.step_event.times(100))
    assert made.epochs is made.target_epsilon is None


@pytest.mark.parametrize("target", [0.1, 20.0])
@pytest.mark.parametrize("accountant", ["auto", "rdp"])
def test_calibration_is_certified(target, accountant):
    query = {"delta": 1e-6, "sampling_rate": 0.004, "steps": 3000, "accountant": accountant}
    sigma = noise_multiplier(target_epsilon=target, **query)
    assert epsilon(noise_multiplier=sigma, **query) <= target < epsilon(noise_multiplier=0.999 * sigma, **query)


def test_calibration_covers_what_it_composes_with():
    query = {"delta": 1e-5, "sampling_rate": 0.01, "steps": 1000, "accountant": "pld"}
    alone = noise_multiplier(target_epsilon=2.0, **query)
    together = noise_multiplier(target_epsilon=2.0, compose_with=[Gaussian(4.0)], **query)
    assert together > alone
    assert epsilon(noise_multiplier=together, compose_with=[Gaussian(4.0)], **query) <= 2.0
    with pytest.raises(ValueError, match="compose_with costs alone"):
        noise_multiplier(target_epsilon=0.5, compose_with=[Gaussian(4.0)], **query)


def test_zero_noise_is_not_private():
    assert math.isinf(epsilon(noise_multiplier=0, sampling_rate=0.1, steps=1, delta=0.5))
    assert math.isinf(bound([Gaussian(0.0)], 1e-5, "rdp").upper)


def flat(text):
    assert max(map(len, text.splitlines())) <= 110
    return " ".join(text.split())


def test_the_plans_statement():
    text = flat(str(plan(**RUN, steps=100, noise_multiplier=1.0, compose_with=[Gaussian(8.0, 2)])))
    for words in (
        "1e-05)-differentially private",
        "Unit of privacy: one example",
        "one example added or removed",
        "each of 60000 examples (a public number) is drawn independently of all others with probability 512/60000",
        "Steps: 100 planned. A run that ends early may have ended on something it saw",
        "Gaussian mechanism, noise multiplier 8, 2 times",
        "Poisson-subsampled Gaussian mechanism, noise multiplier 1, sampling rate 0.00853333, 100 times",
        "numerical errors included; no accountant can prove less than",
        "pld: epsilon <=",
        "rdp: epsilon <=",
        "hyper-parameters",
        "test set",
        "second copy of the run folder",
        "seeded generator",
    ):
        assert words in text


def test_the_ledgers_statement_names_what_touched_the_data():
    made = plan(**RUN, steps=100, noise_multiplier=1.0, compose_with=[Gaussian(8.0, 2)])
    with Ledger(budget=made) as ledger:
        ledger.record(Gaussian(8.0, 2), "normalization")
        ledger.reserve_step(made.step_event)
        text = flat(ledger.statement(1e-11))
    assert "normalization: Gaussian mechanism, noise multiplier 8, 2 times" in text
    assert "training step: Poisson-subsampled Gaussian mechanism" in text
    assert "delta below 1e-10 rests on an ideal random generator" in text
    assert "NOT PRIVATE" not in text
    assert "Steps: 1 of 100 planned." in text


def test_statements_of_what_is_not_private():
    with Ledger() as ledger:
        assert "none, nothing was released" in ledger.statement(1e-5)
        ledger.record(Gaussian(0.0), "statistics")
        assert ledger.statement(1e-5).startswith("NOT PRIVATE: a release without noise")
    with Ledger(seeded=True) as ledger:
        assert ledger.statement(1e-5).startswith("NOT PRIVATE: the noise came from a seeded generator")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(3.0, "3"), (2.99951, "3"), (1.00001, "1.001"), (0.1, "0.1001"), (0.0, "0"), (12345.6, "12350")],
)
def test_epsilon_is_rounded_up(value, shown):
    assert statement.rounded_up(value) == shown


def test_delta_of_one_over_n_warns():
    with pytest.warns(UserWarning, match="not below 1/dataset_size"):
        plan(dataset_size=1000, batch_size=10, steps=1, delta=1e-3, noise_multiplier=1.0)


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"batch_size": 60_001}, ValueError, "batch_size must be at most dataset_size=60000, got 60001"),
        ({"batch_size": 0}, ValueError, "batch_size must be a positive integer, got 0"),
        ({"batch_size": 1.5}, TypeError, "batch_size must be a positive integer, got 1.5"),
        ({"dataset_size": -1}, ValueError, "dataset_size"),
        ({"dataset_size": True}, TypeError, "dataset_size"),
        ({"delta": 0}, ValueError, "delta must be a probability with 0 < delta < 1, got 0"),
        ({"delta": 1.0}, ValueError, "delta"),
        ({"delta": math.nan}, ValueError, "delta"),
        ({"delta": "small"}, TypeError, "delta"),
        ({"epochs": 0}, ValueError, "epochs must be a finite number > 0, got 0"),
        ({"epochs": math.inf}, ValueError, "epochs"),
        ({"epochs": None}, ValueError, "exactly one of epochs and steps"),
        ({"steps": 3}, ValueError, "exactly one of epochs and steps"),
        ({"epochs": None, "steps": 0}, ValueError, "steps"),
        ({"target_epsilon": 0.0}, ValueError, "target_epsilon must be a finite number > 0, got 0.0"),
        ({"target_epsilon": -1}, ValueError, "target_epsilon"),
        ({"target_epsilon": math.inf}, ValueError, "target_epsilon"),
        ({"target_epsilon": None}, ValueError, "exactly one of target_epsilon and noise_multiplier"),
        ({"noise_multiplier": 1.0}, ValueError, "exactly one of target_epsilon and noise_multiplier"),
        ({"target_epsilon": None, "noise_multiplier": 0.0}, ValueError, "noise_multiplier must be > 0 in a plan"),
        ({"target_epsilon": None, "noise_multiplier": -1.0}, ValueError, "noise_multiplier"),
        ({"compose_with": Gaussian(1.0)}, TypeError, "compose_with must be a sequence of events"),
        ({"compose_with": [3.0]}, TypeError, "compose_with"),
        ({"accountant": "moments"}, ValueError, "accountant must be one of"),
    ],
)
def test_bad_arguments_are_named(change, kind, words):
    with pytest.raises(kind, match=words):
        plan(**({**RUN, "epochs": 1, "target_epsilon": 3.0} | change))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Gaussian(-1.0), "noise_multiplier"),
        (lambda: Gaussian(math.inf), "noise_multiplier"),
        (lambda: Gaussian(1.0, 0), "count"),
        (lambda: SampledGaussian(1.0, 0.0), "sampling_rate"),
        (lambda: SampledGaussian(1.0, 1.5), "sampling_rate"),
        (lambda: epsilon(noise_multiplier=1.0, sampling_rate=0.1, steps=0, delta=1e-5), "steps"),
        (lambda: epsilon(noise_multiplier=-1.0, sampling_rate=0.1, steps=1, delta=1e-5), "noise_multiplier"),
    ],
)
def test_bad_events_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_plans_are_comparable_and_shown():
    made = plan(**RUN, steps=10, noise_multiplier=1.0)
    assert isinstance(made, Plan)
    assert made != plan(**RUN, steps=11, noise_multiplier=1.0)
    assert "noise_multiplier=1.0" in repr(made)


def test_accounting_never_imports_torch():
    folder = Path(__file__).parents[2] / "dpkernels"
    code = f"""
import sys, types
package = types.ModuleType("dpkernels")
package.__path__ = [{str(folder)!r}]
sys.modules["dpkernels"] = package
import dpkernels.accounting as accounting
assert not {{"scipy", "dp_accounting", "prv_accountant"}} & set(sys.modules), "these load on first use"
accounting.plan(dataset_size=100, batch_size=10, steps=10, delta=1e-5, noise_multiplier=2.0)
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
