"""Broken optimizers, and for each an attack with worst-case data that tells D from D plus x.

A fault is a small patch of the real code, and every run of an attack goes through the real optimizer: one logical step
of a tiny model that is put back afterwards, so that what the step released is read off its parameters. Each step has
its own stream of noise, hence runs are independent. Where examples have disjoint gradients, a step is many runs.
"""

from __future__ import annotations

import copy
import itertools
import math
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
from dpkernels.audit import TwoWorldsReport, two_worlds_bound
from dpkernels.clipping import ClippedSum, GhostClipper
from dpkernels.clipping import engine as clipping_engine
from dpkernels.clipping.passes import Pass
from dpkernels.data import PoissonLoader
from dpkernels.layers import linear as linear_layer
from dpkernels.optim import DPSGD, PrivateOptimizer
from dpkernels.random import Key

SIGMA, C = 1.0, 1.0
DELTA = 0.05  # claims hold at every delta, and at a large one fewer runs refute a wrong one
CONFIDENCE = 0.999
Play = Callable[[bool], float]
Scores = tuple[NDArray[np.float64], NDArray[np.bool_]]  # of runs, and whether x was in the data
Attack = Callable[[int, int], Scores]  # (seed, runs)


class Probe:
    """A linear model without bias, or another one, with parameters 0 before each run, and its private optimizer."""

    def __init__(
        self,
        features: int = 1,
        *,
        model: nn.Module | None = None,
        plan: Plan | None = None,
        lr: float = 1.0,
        seed: int | None,
    ) -> None:
        self.model = model or nn.Linear(features, 1, bias=False, dtype=torch.float64)
        options: dict[str, Any] = {} if plan else {"noise_multiplier": SIGMA, "batch_size": 1}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of many runs together no epsilon can be stated
            self.optimizer = DPSGD(self.model, plan, lr=lr, max_grad_norm=C, seed=seed, **options)
        self.lr = lr
        self.reset()

    def reset(self, value: float = 0.0) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                p.fill_(value)

    def step(self, x: Tensor, losses: Callable[[Tensor], Tensor] = lambda outputs: outputs) -> Tensor:
        """One logical step on the rows x [rows, features]; returns what it released, the noised mean [parameters].

        With the outputs themselves as losses, an example's gradient in the linear model is the example.
        """
        before = self._parameters()
        if len(x):
            self.optimizer.backward(losses(self.model(x).flatten(1).sum(1)))
        elif self.optimizer.plan is None:  # a loader announces it otherwise
            self.optimizer.begin_physical_batch(0, True)
        self.optimizer.step()
        return (before - self._parameters()) / self.lr

    def _parameters(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


class Both(nn.Module):
    """The sum of two linear layers: an example x has the gradients first * x and second * x."""

    def __init__(self, features: int, first: float, second: float) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(features, 1, bias=False, dtype=torch.float64) for _ in range(2))
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.first * self.a(x) + self.second * self.b(x)


# ---- attacks: one run after the other ------------------------------------------------------------------------------


def one_by_one(make: Callable[[int, int], Play]) -> Attack:
    """An attack from what makes a single run from (seed, runs)."""

    def attack(seed: int, runs: int) -> Scores:
        coins, play = np.random.default_rng(seed).random(runs) < 0.5, make(seed, runs)
        return np.array([play(bool(coin)) for coin in coins], dtype=np.float64), coins

    return attack


def _rows(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).reshape(-1, 1)


@one_by_one
def _against(seed: int, runs: int) -> Play:
    """How far the release lies in the direction of x, which points against D's only example and is longer."""
    probe, worlds = Probe(seed=seed), (_rows(10.0), _rows(10.0, -30.0))

    def play(with_x: bool) -> float:
        probe.reset()
        return -float(probe.step(worlds[with_x]))

    return play


@one_by_one
def _contamination(seed: int, runs: int) -> Play:
    """Whether the release is a number."""
    probe, worlds = Probe(seed=seed), (_rows(1.0), _rows(1.0, float("nan")))

    def play(with_x: bool) -> float:
        probe.reset()
        return float(probe.step(worlds[with_x]).isnan())

    return play


FEATURES = 256
RATE = 0.5


@one_by_one
def _spread(seed: int, runs: int) -> Play:
    """How small the noise is over many coordinates. D has one example, and both gradients are 0."""
    plan = Plan(2, 1, None, runs, SIGMA, 1e-5, None, accountant="rdp")
    probe = Probe(FEATURES, plan=plan, seed=seed)
    worlds = []
    for size in (1, 2):
        data, key = torch.zeros(size, FEATURES, dtype=torch.float64), Key.from_seed(seed + size)
        worlds.append(_loader(data, plan, probe, key=key))

    def play(with_x: bool) -> float:
        probe.reset()
        return -float(probe.step(next(worlds[with_x])).square().mean())

    return play


def _loader(data: Tensor, plan: Plan, probe: Probe, **options: Any) -> PoissonLoader:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a data set that is not of the nominal size
        return PoissonLoader(data, plan, optimizer=probe.optimizer, **options)


# ---- attacks: many runs in one step --------------------------------------------------------------------------------


def at_once(make: Callable[[int, int], Callable[[Tensor], Tensor]], examples: int = 500) -> Attack:
    """An attack from what makes, from (seed, examples), the scores [examples] of one step of many runs, by their coins.

    Example j has gradients of its own coordinates alone, is in the data by a coin of its own, and is clipped on its
    own. To these coordinates the others are part of D, drawn alike in both worlds, and the noise of different
    coordinates is independent; so every example is a run of its own.
    """

    def attack(seed: int, runs: int) -> Scores:
        coins, play = np.random.default_rng(seed).random((-(-runs // examples), examples)) < 0.5, make(seed, examples)
        scores = np.stack([play(torch.from_numpy(round_)).numpy() for round_ in coins])
        return scores.ravel()[:runs], coins.ravel()[:runs]

    return attack


def shifts(length: float = 1.0, examples: int = 500) -> Attack:
    """How far the release lies in the direction of each example, a gradient of norm ``length``."""

    def make(seed: int, examples: int) -> Callable[[Tensor], Tensor]:
        probe, directions = Probe(examples, seed=seed), length * torch.eye(examples, dtype=torch.float64)

        def play(coins: Tensor) -> Tensor:
            probe.reset()
            return probe.step(directions[coins])

        return play

    return at_once(make, examples)


def _layers(first: float, second: float) -> Attack:
    """How far the release lies in the direction of each example's gradient in two layers."""

    def make(seed: int, examples: int) -> Callable[[Tensor], Tensor]:
        probe = Probe(model=Both(examples, first, second), seed=seed)
        directions = torch.eye(examples, dtype=torch.float64)

        def play(coins: Tensor) -> Tensor:
            probe.reset()
            a, b = probe.step(directions[coins]).chunk(2)
            return (first * a + second * b) / math.hypot(first, second)

        return play

    return at_once(make)


def _difference(*, reload: bool) -> Attack:
    """How far two releases differ: noise that both share drops out, and x's gradient is not the same in both.

    reload: the state dict from before the first step is loaded again between them; a seeded optimizer may then repeat
    its noise, so this one is not seeded.
    """

    def make(seed: int, examples: int) -> Callable[[Tensor], Tensor]:
        probe, directions = Probe(examples, seed=None if reload else seed), torch.eye(examples, dtype=torch.float64)

        def half_squares(outputs: Tensor) -> Tensor:
            return (outputs - 0.5).square() / 2

        def play(coins: Tensor) -> Tensor:
            probe.reset()
            state = copy.deepcopy(probe.optimizer.state_dict())
            first = probe.step(directions[coins], half_squares)
            if reload:
                probe.optimizer.load_state_dict(state)
            probe.reset(0.1)
            return (probe.step(directions[coins], half_squares) - first).abs()

        return play

    return at_once(make)


class _Positions(nn.Module):
    """A linear layer on two positions in float32, whose outputs weigh 1 and nearly -1."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).squeeze(2) * torch.tensor([1.0, 2.0**-20 - 1])


def _cancellation(seed: int, examples: int) -> Callable[[Tensor], Tensor]:
    """Gradients of two positions, 2^26 - (2^26 - 2^6): a Gram form in float32 loses what is left."""
    probe, directions = Probe(model=_Positions(examples), seed=seed), 2.0**26 * torch.eye(examples)

    def play(coins: Tensor) -> Tensor:
        probe.reset()
        return probe.step(directions[coins].unsqueeze(1).expand(-1, 2, -1)).double()

    return play


RARE, STEPS = 0.1, 16


@at_once
def _resampled(seed: int, examples: int) -> Callable[[Tensor], Tensor]:
    """The sum of the releases of a whole training: noise averages out if the sample is always the same one."""
    seeds, directions = itertools.count(1000 * seed), torch.eye(examples, dtype=torch.float64)
    plan = Plan(examples, int(RARE * examples), None, STEPS, SIGMA, 1e-5, None, accountant="rdp")

    def play(coins: Tensor) -> Tensor:
        probe = Probe(examples, plan=plan, seed=next(seeds))
        total = torch.zeros(examples, dtype=torch.float64)
        for batch in _loader(directions[coins], plan, probe):
            probe.reset()
            total += probe.step(batch)
        return total

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


def _with_rewound_nonce(patch: pytest.MonkeyPatch) -> None:
    """A loaded state brings back the nonces of the steps after it."""
    steps = [0]
    load, right = PrivateOptimizer.load_state_dict, DPSGD._update

    def rewind(self: PrivateOptimizer, state: dict[str, Any]) -> None:
        load(self, state)
        steps[0] = state["privacy"]["steps"]

    def update(self: DPSGD, sums: dict[nn.Parameter, Tensor], step: int) -> None:
        right(self, sums, steps[0])
        steps[0] += 1

    patch.setattr(PrivateOptimizer, "load_state_dict", rewind)
    patch.setattr(DPSGD, "_update", update)


def _with_noise_twice(patch: pytest.MonkeyPatch) -> None:
    """Each parameter is updated by the same sum once more, with other noise."""
    right = DPSGD._update

    def update(self: DPSGD, sums: dict[nn.Parameter, Tensor], step: int) -> None:
        for index in (step, step + 2**40):
            right(self, sums, index)

    patch.setattr(DPSGD, "_update", update)


def _with_one_sample(patch: pytest.MonkeyPatch) -> None:
    """Every step draws the sample of the first."""
    right = Key.sample
    patch.setattr(Key, "sample", lambda self, domain, step, size, rate: right(self, domain, 0, size, rate))


def without_clipping(patch: pytest.MonkeyPatch) -> None:
    right = clipping_engine.clip_factors

    def factors(squared: Any, *, max_grad_norm: float, loss_scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return right(squared, max_grad_norm=float("inf"), loss_scale=loss_scale)

    patch.setattr(clipping_engine, "clip_factors", factors)


def _with_norm_of_one_layer(patch: pytest.MonkeyPatch) -> None:
    right = clipping_engine.clip_factors
    patch.setattr(clipping_engine, "clip_factors", lambda squared, **options: right(squared[:1], **options))


def _with_clipped_layers(patch: pytest.MonkeyPatch) -> None:
    """Each layer's gradient is clipped to C on its own."""
    right = Pass.clipped_sums

    def sums(self: Pass, factors: Tensor) -> dict[int, Tensor]:
        layers, total = list(self._own), {}
        for layer in layers:
            self._own = [layer]
            total |= right(self, clipping_engine.clip_factors([layer[2]], max_grad_norm=C)[0])
        return total

    patch.setattr(Pass, "clipped_sums", sums)


def _with_rounded_norms(patch: pytest.MonkeyPatch) -> None:
    """The Gram form of a linear layer in float32, without what it may have rounded away."""

    def norms(activations: Tensor, output_grads: Tensor, **_: bool) -> Tensor:
        inputs, grads = (t.float() @ t.float().transpose(1, 2) for t in (activations, output_grads))
        return (inputs * grads).sum((1, 2)).clamp_min(0).double()

    patch.setattr(linear_layer, "linear_squared_norms", norms)


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
    add, right = PrivateOptimizer._add, DPSGD._update

    def count(self: PrivateOptimizer, result: ClippedSum) -> None:
        rows[0] += result.batch_size
        add(self, result)

    def update(self: DPSGD, sums: dict[nn.Parameter, Tensor], step: int) -> None:
        right(self, sums, step)
        rows[0] = 0

    patch.setattr(PrivateOptimizer, "_add", count)
    patch.setattr(DPSGD, "_update", update)
    _change_noise(lambda optimizer, noise: noise | {"denominator": max(1, rows[0])})(patch)


def _with_multiplied_nan(patch: pytest.MonkeyPatch) -> None:
    def sums(activations: Tensor, output_grads: Tensor, weights: Tensor, **_: bool) -> tuple[Tensor, Tensor]:
        total = torch.einsum("b,btd,btp->dp", weights, output_grads.double(), activations.double())
        return total, torch.empty(0, dtype=torch.float64)

    patch.setattr(linear_layer, "linear_clipped_sums", sums)


# ---- the table ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    """A fault, the attack that shows it, and the runs that suffice at 99.9%."""

    name: str
    fault: Fault
    attack: Attack
    runs: int
    rate: float = 1.0
    steps: int = 1  # optimizer steps in a run
    of_clipping: bool = False  # breaks the bound on one example's contribution

    def claim(self) -> float:
        """Epsilon of one run, as the library claims it."""
        return dpkernels.epsilon(noise_multiplier=SIGMA, sampling_rate=self.rate, steps=self.steps, delta=DELTA)

    def run(self, *, broken: bool, seed: int, runs: int) -> Scores:
        """The attack on the broken optimizer or on the real one."""
        with pytest.MonkeyPatch.context() as patch:
            if broken:
                self.fault(patch)
            return self.attack(seed, runs)

    def audit(self, *, broken: bool, seed: int, runs: int | None = None) -> TwoWorldsReport:
        """The two-world test, of the broken optimizer or of the real one."""
        runs = self.runs if runs is None else runs
        bound = two_worlds_bound(*self.run(broken=broken, seed=seed, runs=runs), delta=DELTA, confidence=CONFIDENCE)
        return TwoWorldsReport(bound, self.claim(), DELTA, CONFIDENCE, runs)


VARIANTS = (
    Variant("noise left out", _change_noise(_without_noise), shifts(), 1_000),
    Variant("half the noise", scaled_noise(0.5), shifts(), 10_000),
    Variant("noise / sqrt 2", scaled_noise(0.5**0.5), shifts(), 50_000),
    Variant("sum released twice with noise of its own", _with_noise_twice, shifts(), 50_000),
    Variant("noise stream reused", _change_noise(_with_one_stream), _difference(reload=False), 2_000, steps=2),
    Variant("clipping left out", without_clipping, shifts(1e6), 1_000, of_clipping=True),
    Variant("physical batch clipped instead of examples", _with_clipped_batches, _against, 4_000),
    Variant("one layer's norm for all", _with_norm_of_one_layer, _layers(1e3, 1e-3), 1_000, of_clipping=True),
    Variant("each layer clipped to C", _with_clipped_layers, _layers(1e3, 1e3), 50_000, of_clipping=True),
    Variant("rounding of norms not counted", _with_rounded_norms, at_once(_cancellation, 100), 1_000, of_clipping=True),
    Variant("NaN example multiplied by zero", _with_multiplied_nan, _contamination, 1_000, of_clipping=True),
    Variant("divided by the actual batch size", _with_actual_batch_size, _spread, 2_000, rate=RATE),
    Variant("one sample for all steps", _with_one_sample, _resampled, 40_000, rate=RARE, steps=STEPS),
)
