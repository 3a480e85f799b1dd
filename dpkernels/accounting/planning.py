"""The privacy plan of a training run: how many steps, at which rate, with how much noise, and what that guarantees."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from dpkernels.accounting.accountants import KEPT, LEAST_NOISE_ERROR, Accountant, claim
from dpkernels.accounting.bounds import Bound
from dpkernels.accounting.calibration import noise_multiplier as calibrate
from dpkernels.accounting.mechanisms import (
    Event,
    SampledGaussian,
    check_count,
    check_delta,
    check_events,
    check_number,
)
from dpkernels.accounting.statement import statement


@dataclass(frozen=True)
class Plan:
    """A training run's privacy, fixed before it starts. Made by ``plan``; ``str()`` is the privacy statement."""

    dataset_size: int
    """Public nominal number of examples N."""
    batch_size: int
    """Expected batch size B: the denominator of every step, and B / N is the sampling rate."""
    epochs: float | None
    """As asked for, or None where ``steps`` was given."""
    steps: int
    noise_multiplier: float
    """Noise standard deviation divided by the sensitivity of the clipped sum."""
    delta: float
    target_epsilon: float | None
    """As asked for, or None where ``noise_multiplier`` was given."""
    compose_with: tuple[Event, ...] = ()
    """Other releases from the same data that the guarantee covers."""
    accountant: Accountant = "auto"
    bound: Bound = field(init=False, compare=False, repr=False)
    """Epsilon at ``delta`` from both sides, with the least that noise differs from ideal; computed when the plan is
    made."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", self.claim(self.steps * LEAST_NOISE_ERROR))

    def claim(self, noise_error: float) -> Bound:
        """Epsilon at ``delta`` of all that the plan allows, where its noise is within a total variation of
        ``noise_error`` of ideal, over all releases; see ``dpkernels.accounting.claim``."""
        return claim(self.events, self.delta, self.accountant, noise_error=noise_error)

    @property
    def sampling_rate(self) -> float:
        """Probability with which each example is in a step's batch."""
        return self.batch_size / self.dataset_size

    @property
    def epsilon(self) -> float:
        """Upper bound on epsilon at ``delta`` of all steps together with ``compose_with``; infinite where none can be
        stated, and ``bound.refusal`` says why."""
        return self.bound.upper

    @property
    def step_event(self) -> SampledGaussian:
        """What one step costs."""
        return SampledGaussian(self.noise_multiplier, self.sampling_rate)

    @property
    def events(self) -> tuple[Event, ...]:
        """Everything that the plan allows."""
        return (*self.compose_with, SampledGaussian(self.noise_multiplier, self.sampling_rate, self.steps))

    def __str__(self) -> str:
        return statement(self.bound, self.delta, plan=self)


def planned_steps(epochs: float, dataset_size: int, batch_size: int) -> int:
    """ceil(epochs * dataset_size / batch_size), in exact arithmetic. Raises ValueError unless epochs are positive."""
    passes = check_number("epochs", epochs, 0.0, math.inf, "a finite number > 0")
    if passes == 0.0:
        raise ValueError(f"epochs must be a finite number > 0, got {epochs!r}")
    return math.ceil(Fraction(str(epochs)) * dataset_size / batch_size)  # as written: 0.1 is a tenth


def plan(
    *,
    dataset_size: int,
    batch_size: int,
    delta: float,
    epochs: float | None = None,
    steps: int | None = None,
    target_epsilon: float | None = None,
    noise_multiplier: float | None = None,
    compose_with: Sequence[Event] = (),
    accountant: Accountant = "auto",
) -> Plan:
    """Plan a training run: give ``epochs`` or ``steps``, and ``target_epsilon`` or ``noise_multiplier``.

    Args:
        dataset_size: public nominal number of examples. It is part of the guarantee's description and must not be
            computed from private data: neighbouring data sets differ in their true size.
        batch_size: expected number of examples in a batch; each example is drawn with probability batch_size /
            dataset_size.
        delta: in (0, 1); a value of 1 / dataset_size or more warns, since it would allow releasing one example
            outright.
        epochs: > 0, also a fraction of one; steps = ceil(epochs * dataset_size / batch_size), in exact arithmetic.
        steps: number of steps, instead of ``epochs``.
        target_epsilon: the noise multiplier is the smallest, to 0.1%, that meets it.
        noise_multiplier: > 0, instead of ``target_epsilon``.
        compose_with: other releases from the same data (normalization statistics, selections), which epsilon covers
            too.
        accountant: as for ``epsilon``.

    Raises:
        ValueError, TypeError: an argument is missing, given twice over, or out of range; or the target is beyond what
            real noise can carry at this delta, about 50.
    """
    size = check_count("dataset_size", dataset_size)
    batch = check_count("batch_size", batch_size)
    if batch > size:
        raise ValueError(f"batch_size must be at most dataset_size={size}, got {batch}")
    delta = check_delta(delta)
    others = check_events("compose_with", compose_with)
    if (epochs is None) == (steps is None):
        raise ValueError(f"exactly one of epochs and steps must be given, got epochs={epochs!r}, steps={steps!r}")
    if (target_epsilon is None) == (noise_multiplier is None):
        got = f"target_epsilon={target_epsilon!r}, noise_multiplier={noise_multiplier!r}"
        raise ValueError(f"exactly one of target_epsilon and noise_multiplier must be given, got {got}")
    count = check_count("steps", steps) if epochs is None else planned_steps(epochs, size, batch)
    if delta * size >= 1:
        warnings.warn(
            f"delta={delta:g} is not below 1/dataset_size={1 / size:g}: such a delta allows releasing a random example "
            f"outright",
            stacklevel=2,
        )
    passes = None if epochs is None else float(epochs)
    if noise_multiplier is not None:
        sigma = check_number("noise_multiplier", noise_multiplier, 0.0, math.inf, "a finite number > 0")
        if sigma == 0.0:
            raise ValueError("noise_multiplier must be > 0 in a plan, got 0: without noise there is no privacy to plan")
        return Plan(size, batch, passes, count, sigma, delta, None, others, accountant)
    assert target_epsilon is not None
    part = KEPT
    while True:
        sigma = calibrate(
            target_epsilon=target_epsilon,
            delta=delta * (1 - part),
            sampling_rate=batch / size,
            steps=count,
            compose_with=others,
            accountant=accountant,
        )
        made = Plan(size, batch, passes, count, sigma, delta, float(target_epsilon), others, accountant)
        if made.bound.refusal:
            raise ValueError(f"target_epsilon must be smaller, got {target_epsilon:g}: {made.bound.refusal}")
        if made.epsilon <= target_epsilon or made.bound.kept <= part * delta:
            return made
        part = made.bound.kept / delta
