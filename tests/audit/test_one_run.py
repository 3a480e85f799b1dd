"""One-run audits of real training: the real optimizer is acquitted, and what is grossly wrong is convicted."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import norm
from torch import Tensor, nn

import dpkernels as dpk
from dpkernels.accounting import Plan
from dpkernels.audit import OneRunReport, one_run, plot
from dpkernels.audit.canaries import log_likelihood_ratio
from dpkernels.audit.single_run import GUESSED_FRACTIONS, bound_from_scores
from dpkernels.optim import PrivateOptimizer

from .variants import without_clipping

N, FEATURES, CLASSES, CANARIES = 300, 12, 3, 400


def data(rows: int = N, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = scale * torch.randn(rows, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (rows,), generator=generator)


def a_plan(sigma: float = 1.0, steps: int = 12) -> Plan:
    return Plan(N + CANARIES // 2, 250, None, steps, sigma, 1e-5, None, accountant="rdp")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def audit(sigma: float = 1.0, optimizer: type = dpk.DPSGD, lr: float = 1.0, **options: Any) -> OneRunReport:
    options = {"canaries": CANARIES, "seed": 4, "plan": a_plan(sigma), "lr": lr, **options}
    plan, keywords = options.pop("plan"), options.pop("keywords", {})
    lr = options.pop("lr")
    return one_run(
        network(),
        data(),
        lambda model: optimizer(model, plan, lr=lr, max_grad_norm=0.5, seed=7, **keywords),
        **options,
    )


def leave_noise_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrivateOptimizer, "_noise", lambda self, step: {"denominator": self._privacy.denominator})


def test_real_optimizer_is_acquitted() -> None:
    plan = a_plan()
    report = audit(plan=plan)
    assert report.claim == pytest.approx(plan.epsilon, rel=0.2)  # of another accountant
    assert report.claim > 5
    assert 1.0 < report.lower_bound < report.claim
    assert not report.refuted
    assert (report.canaries, report.delta, report.confidence) == (CANARIES, 1e-5, 0.95)
    assert 0 <= report.correct <= report.guesses <= CANARIES


def test_noise_lowers_the_bound() -> None:
    loud, quiet = audit(sigma=8.0), audit(sigma=1.0)
    assert loud.claim < 1.5
    assert loud.lower_bound < loud.claim
    assert loud.lower_bound < quiet.lower_bound - 0.5


def test_missing_noise_is_convicted(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_noise_out(monkeypatch)
    report = audit(sigma=4.0)
    assert report.refuted, str(report)
    assert report.lower_bound > 3


def test_missing_clipping_is_convicted(monkeypatch: pytest.MonkeyPatch) -> None:
    without_clipping(monkeypatch)
    report = audit(sigma=4.0)
    assert report.refuted, str(report)


def test_physical_batches_make_no_difference() -> None:
    whole, parts = (audit(physical_batch_size=size) for size in (1000, 37))
    assert whole == parts


def test_example_canaries() -> None:
    """Losses before and after training, with an optimizer whose steps nobody reads."""
    canaries = data(CANARIES, scale=30.0)
    options: dict[str, Any] = {"canaries": canaries, "optimizer": dpk.DPAdam, "lr": 0.05, "sigma": 4.0}
    real = audit(**options)
    assert real.lower_bound < real.claim
    assert real.canaries == CANARIES


def test_memorized_examples_are_convicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise and clipping a canary with a pixel of its own is learned by heart."""
    leave_noise_out(monkeypatch)
    without_clipping(monkeypatch)
    features, canaries = 200, 180
    x, y = torch.zeros(50, features), torch.zeros(50, dtype=torch.int64)
    planted = (torch.eye(features)[:canaries] * 30, torch.ones(canaries, dtype=torch.int64))
    plan = Plan(50 + canaries // 2, 70, None, 10, 10.0, 1e-5, None, accountant="rdp")
    report = one_run(
        nn.Linear(features, 2, bias=False),
        (x, y),
        lambda model: dpk.DPSGD(model, plan, lr=1.0, max_grad_norm=0.5, seed=7),
        canaries=planted,
        seed=1,
    )
    assert report.refuted, str(report)


def test_log_likelihood_ratio() -> None:
    x = np.linspace(-4, 6, 41)
    for sigma, rate in ((1.3, 0.05), (0.4, 0.6), (2.0, 1.0)):
        without, with_it = norm.pdf(x, 0, sigma), norm.pdf(x, 1, sigma)
        expected = np.log(rate * with_it + (1 - rate) * without) - np.log(without)
        np.testing.assert_allclose(log_likelihood_ratio(x, sigma, rate), expected, atol=1e-9)
    assert np.isfinite(log_likelihood_ratio(np.array([-1e3, 1e3]), 0.01, 0.5)).all()


def test_released_sums_are_read_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every example in every batch, an included canary adds 1 to a release of standard deviation sigma."""
    seen = []

    def record(released: np.ndarray, sigma: float, rate: float) -> np.ndarray:
        seen.append(released)
        return log_likelihood_ratio(released, sigma, rate)

    monkeypatch.setattr("dpkernels.audit.single_run.log_likelihood_ratio", record)
    size = N + CANARIES // 2
    plan = Plan(size, size, None, 5, 0.3, 1e-5, None, accountant="rdp")
    audit(plan=plan)
    included = np.random.default_rng(4).random(CANARIES) < 0.5
    released = np.stack(seen)
    assert released.shape == (5, CANARIES)
    rest = released - included
    assert abs(rest.mean()) < 4 * 0.3 / math.sqrt(rest.size)
    assert rest.std() == pytest.approx(0.3, rel=0.05)


def test_scores_are_guessed_at_both_ends() -> None:
    included = np.arange(128) >= 64
    bound, guesses, correct = bound_from_scores(np.arange(128.0), included, delta=0.0, confidence=0.95)
    assert guesses == correct == 128
    assert bound == pytest.approx(-math.log((0.05 / len(GUESSED_FRACTIONS)) ** (-1 / 128) - 1), abs=1e-6)
    assert bound_from_scores(np.arange(128.0), ~included, delta=0.0, confidence=0.95)[0] == 0.0
    with pytest.raises(ValueError, match="scores must be finite"):
        bound_from_scores(np.full(128, math.nan), included, delta=0.0, confidence=0.95)


def test_choosing_the_best_guesses_is_paid_for() -> None:
    """Scores that know nothing: the best of all choices is above 0 in at most 20% of all audits."""
    rng = np.random.default_rng(0)
    found = [
        bound_from_scores(rng.random(200), rng.random(200) < 0.5, delta=0.0, confidence=0.8)[0] for _ in range(300)
    ]
    assert 0 < np.mean(np.array(found) > 0) <= 0.2 + 4 * math.sqrt(0.16 / 300)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"canaries": 0}, "canaries must be a positive number, or"),
        ({"canaries": True}, "canaries must be a positive number, or"),
        ({"confidence": 2.0}, "confidence must lie strictly between 0 and 1"),
        ({"keywords": {"momentum": 0.9}}, "make_optimizer must return a DPSGD without momentum"),
        ({"optimizer": dpk.DPAdam}, "make_optimizer must return a DPSGD without momentum"),
        (
            {"plan": None, "keywords": {"noise_multiplier": 1.0, "batch_size": 5}},
            "make_optimizer must return an optimizer with a plan",
        ),
    ],
)
def test_bad_arguments(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        audit(**changes)


def test_report_and_plot(tmp_path: Path) -> None:
    report = OneRunReport(1.25, 4.0, 1e-5, 0.95, canaries=100, guesses=60, correct=51)
    assert str(report) == (
        "epsilon >= 1.250 at delta = 1e-05 with 95% confidence, which does not contradict the claim of epsilon <= "
        "4.000 (51 of 60 guesses right, 100 canaries)"
    )
    worse = dataclasses.replace(report, lower_bound=4.5)
    assert worse.refuted
    plot([worse, report], tmp_path / "audit.png", title="title")
    with Image.open(tmp_path / "audit.png") as image:
        assert image.format == "PNG"
        assert image.size[0] > 500
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 3
    with pytest.raises(ValueError, match="reports must hold at least one report"):
        plot([], tmp_path / "none.png")
