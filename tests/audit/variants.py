"""Broken optimizers, and for each an attack with worst-case data that tells D from D plus x.

A fault is a small patch of the real code, and every run of an attack goes through the real optimizer: one logical step
of a tiny model in float64 that is put back afterwards, so that what the step released is read off its parameters. Each
step has its own stream of noise, hence runs are independent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import dpkernels
from dpkernels.accounting import Plan
from dpkernels.audit import TwoWorldsReport, two_worlds
from dpkernels.clipping import ClippedSum, GhostClipper
from dpkernels.clipping import engine as clipping_engine
from dpkernels.data import PoissonLoader
from dpkernels.layers import linear as linear_layer
from dpkernels.optim import DPSGD, PrivateOptimizer
from dpkernels.random import Key

SIGMA, C = 1.0, 1.0
DELTA = 0.05  # claims hold at every delta, and at a large one fewer runs refute a wrong one
CONFIDENCE = 0.999
Play = Callable[[bool], float]


class Probe:
    """A linear model without bias whose parameters are 0 before each run, and its private optimizer."""

    def __init__(self, features: int = 1, *, plan: Plan | None = None, lr: float = 1.0, seed: int) -> None:
        self.model = nn.Linear(features, 1, bias=False, dtype=torch.float64)
        options: dict[str, Any] = {} if plan else {"noise_multiplier": SIGMA, "batch_size": 1}
        self.optimizer = DPSGD(self.model, plan, lr=lr, max_grad_norm=C, seed=seed, **options)
        self.lr = lr
        self.reset()

    def reset(self) -> None:
        with torch.no_grad():
            self.model.weight.zero_()

    def step(self, x: Tensor, losses: Callable[[Tensor], Tensor] = lambda outputs: outputs) -> Tensor:
        """One logical step on the rows x [rows, features]; returns what it released, the noised mean [features].

        With the outputs themselves as losses, an example's gradient is the example.
        """
        before = self.model.weight.detach().clone()
        if len(x):
            self.optimizer.backward(losses(self.model(x).squeeze(1)))
        elif self.optimizer.plan is None:  # a loader announces it otherwise
            self.optimizer.begin_physical_batch(0, True)
        self.optimizer.step()
        return ((before - self.model.weight.detach()) / self.lr)[0]


def _rows(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).reshape(-1, 1)


def _shift(x: float, others: tuple[float, ...] = ()) -> Callable[[int, int], Play]:
    """How far the release lies in the direction of x."""

    def attack(seed: int, runs: int) -> Play:
        probe, worlds = Probe(seed=seed), (_rows(*others), _rows(*others, x))

        def play(with_x: bool) -> float:
            probe.reset()
            released = float(probe.step(worlds[with_x]))
            return released if x > 0 else -released

        return play

    return attack


def _contamination(seed: int, runs: int) -> Play:
    """Whether the release is a number."""
    probe, worlds = Probe(seed=seed), (_rows(1.0), _rows(1.0, float("nan")))

    def play(with_x: bool) -> float:
        probe.reset()
        return float(probe.step(worlds[with_x]).isnan())

    return play


def _difference(seed: int, runs: int) -> Play:
    """How far two steps' releases differ: noise that both share drops out, and x's gradient is not the same in both."""
    probe, worlds = Probe(lr=0.1, seed=seed), (_rows(), _rows(1.0))

    def play(with_x: bool) -> float:
        probe.reset()
        first, second = (probe.step(worlds[with_x], lambda outputs: (outputs - 0.5).square() / 2) for _ in range(2))
        return float((second - first).abs())

    return play


FEATURES = 256
RATE = 0.5


def _spread(seed: int, runs: int) -> Play:
    """How small the noise is over many coordinates. D has one example, and both gradients are 0."""
    plan = Plan(2, 1, None, runs, SIGMA, 1e-5, None, accountant="rdp")
    probe = Probe(FEATURES, plan=plan, seed=seed)
    worlds = []
    for size in (1, 2):
        data, key = torch.zeros(size, FEATURES, dtype=torch.float64), Key.from_seed(seed + size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of a data set that is not of the nominal size
            worlds.append(PoissonLoader(data, plan, optimizer=probe.optimizer, key=key))

    def play(with_x: bool) -> float:
        probe.reset()
        return -float(probe.step(next(worlds[with_x])).square().mean())

    return play


# ---- faults -------------------------------------------------------------------------------------------------------

Fault = Callable[[pytest.MonkeyPatch], None]


def _change_noise(change: Callable[[PrivateOptimizer, dict[str, Any]], dict[str, Any]]) -> Fault:
    def fault(patch: pytest.MonkeyPatch) -> None:
        right = PrivateOptimizer._noise
        patch.setattr(PrivateOptimizer, "_noise", lambda self, step: change(self, right(self, step)))

    return fault


def _without_noise(optimizer: PrivateOptimizer, noise: dict[str, Any]) -> dict[str, Any]:
    return {"denominator": noise["denominator"]}


def scaled_noise(factor: float) -> Fault:
    """Noise of ``factor`` times the standard deviation that it should have."""
    return _change_noise(lambda optimizer, noise: noise | {"noise_std": factor * noise["noise_std"]})


def _with_one_stream(optimizer: PrivateOptimizer, noise: dict[str, Any]) -> dict[str, Any]:
    return noise | {"step": noise["step"] // 2}  # the two steps of a run share theirs; runs do not


def without_clipping(patch: pytest.MonkeyPatch) -> None:
    right = clipping_engine.clip_factors

    def factors(squared: Any, *, max_grad_norm: float, loss_scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return right(squared, max_grad_norm=float("inf"), loss_scale=loss_scale)

    patch.setattr(clipping_engine, "clip_factors", factors)


def _with_clipped_batches(patch: pytest.MonkeyPatch) -> None:
    without_clipping(patch)
    right = GhostClipper.backward

    def backward(self: GhostClipper, losses: Tensor) -> ClippedSum:
        result = right(self, losses)
        norm = torch.cat([g.flatten() for g in result.grads.values()]).norm()
        for g in result.grads.values():
            g.mul_(min(1.0, self.max_grad_norm / float(norm)))
        return result

    patch.setattr(GhostClipper, "backward", backward)


def _with_actual_batch_size(patch: pytest.MonkeyPatch) -> None:
    rows = [0]
    right = PrivateOptimizer._add

    def add(self: PrivateOptimizer, result: ClippedSum) -> None:
        rows[0] += result.batch_size
        right(self, result)

    def divide(optimizer: PrivateOptimizer, noise: dict[str, Any]) -> dict[str, Any]:
        actual, rows[0] = max(1, rows[0]), 0
        return noise | {"denominator": actual}

    patch.setattr(PrivateOptimizer, "_add", add)
    _change_noise(divide)(patch)


def _with_multiplied_nan(patch: pytest.MonkeyPatch) -> None:
    def sums(activations: Tensor, output_grads: Tensor, weights: Tensor, **_: bool) -> tuple[Tensor, Tensor]:
        total = torch.einsum("b,btd,btp->dp", weights, output_grads.double(), activations.double())
        return total, torch.empty(0, dtype=torch.float64)

    patch.setattr(linear_layer, "linear_clipped_sums", sums)


# ---- many releases in one step --------------------------------------------------------------------------------------


def releases_at_once(steps: int, examples: int, seed: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Scores and coins of steps * examples releases: in each step, one coordinate for each example.

    Example j has the gradient e_j, is in the data by a coin of its own, and is clipped on its own. To coordinate j the
    others are part of D, drawn alike in both worlds, and the noise of different coordinates is independent; so every
    coordinate is a run of its own.
    """
    probe, directions = Probe(examples, seed=seed), torch.eye(examples, dtype=torch.float64)
    coins = np.random.default_rng(seed).random((steps, examples)) < 0.5
    scores = np.empty((steps, examples))
    for step in range(steps):
        probe.reset()
        scores[step] = probe.step(directions[torch.from_numpy(coins[step])]).numpy()
    return scores.ravel(), coins.ravel()


# ---- the table ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A fault, the attack that shows it, and the runs that suffice at 99.9%."""

    name: str
    fault: Fault
    attack: Callable[[int, int], Play]
    runs: int
    rate: float = 1.0
    steps: int = 1  # optimizer steps in a run

    def claim(self) -> float:
        """Epsilon of one run, as the library claims it."""
        return dpkernels.epsilon(noise_multiplier=SIGMA, sampling_rate=self.rate, steps=self.steps, delta=DELTA)

    def audit(self, *, broken: bool, seed: int, runs: int | None = None) -> TwoWorldsReport:
        """The two-world test, of the broken optimizer or of the real one."""
        runs = self.runs if runs is None else runs
        with pytest.MonkeyPatch.context() as patch:
            if broken:
                self.fault(patch)
            play = self.attack(seed, runs * self.steps)
            return two_worlds(play, runs, claim=self.claim(), delta=DELTA, confidence=CONFIDENCE, seed=seed)


VARIANTS = (
    Variant("noise left out", _change_noise(_without_noise), _shift(1.0), 1_000),
    Variant("half the noise", scaled_noise(0.5), _shift(1.0), 4_000),
    Variant("clipping left out", without_clipping, _shift(1e6), 1_000),
    Variant("physical batch clipped instead of examples", _with_clipped_batches, _shift(-30.0, (10.0,)), 4_000),
    Variant("noise stream reused", _change_noise(_with_one_stream), _difference, 1_000, steps=2),
    Variant("divided by the actual batch size", _with_actual_batch_size, _spread, 1_000, rate=RATE),
    Variant("NaN example multiplied by zero", _with_multiplied_nan, _contamination, 1_000),
)
