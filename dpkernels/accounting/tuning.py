"""The cost of choosing hyper-parameters on the private data.

Two cases, which cost very differently:

- Only the best of a *random number* K of independent runs is released, each with hyper-parameters drawn independently
  from a fixed distribution: ``best_of_random_runs`` (Papernot & Steinke 2022) and ``random_stopping`` (Liu & Talwar
  2019). The score that decides which run is best is part of a run: it is computed on public data, or its own release is
  among the run's events. K comes from the stated distribution (``draw_number_of_runs``), nobody sees it or any other
  run, and no run is looked at before the end.
  The runs may differ in what they cost, where the hyper-parameters decide it: then at every order the dearest counts,
  and ``noise_multipliers`` finds the noise of each for one target.
- A grid, or a search that looks at results: every result is released in effect. That is not covered by the first case
  however few results are published; it costs the composition of all runs, ``all_runs``.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dpkernels.accounting.accountants import Accountant, bound, claim
from dpkernels.accounting.bounds import Bound
from dpkernels.accounting.calibration import PRECISION, root_of
from dpkernels.accounting.mechanisms import (
    Event,
    SampledGaussian,
    check_count,
    check_delta,
    check_events,
    check_number,
    merge,
)
from dpkernels.accounting.rdp import convert, divergence, minimise_over_orders


def all_runs(
    run: Sequence[Event], delta: float, *, runs: int, accountant: Accountant = "auto", noise_error: float = 0.0
) -> Bound:
    """Epsilon at ``delta`` of ``runs`` runs whose results are all kept, such as a grid: their composition.

    noise_error: total variation of the noise of one run from ideal, which ``claim`` counts.
    """
    count = check_count("runs", runs)
    events = [event.times(event.count * count) for event in check_events("run", run)]
    return claim(events, delta, accountant, noise_error=count * noise_error)


def best_of_random_runs(
    run: Sequence[Event],
    delta: float,
    *,
    mean_runs: float,
    shape: float = 1.0,
    compose_with: Sequence[Event] = (),
    alternatives: Sequence[Sequence[Event]] = (),
) -> Bound:
    """Epsilon at ``delta`` of releasing the best of K independent runs, from the Rényi divergence of one.

    Args:
        run: what one run costs, scoring included.
        delta: in (0, 1).
        mean_runs: expected number of runs, >= 1.
        shape: of K's distribution. ``math.inf`` is Poisson with that mean (with probability exp(-mean_runs) there is no
            run, and nothing is released), 1 geometric, 0 logarithmic, any other value > -1 truncated negative binomial
            (Papernot & Steinke 2022, definition 1). Smaller shapes vary more and cost less.
        compose_with: other releases from the same data.
        alternatives: what a run costs with other hyper-parameters that may be drawn. A run that draws them is a
            mixture, and its divergence is at most the largest of theirs.

    For the truncated negative binomial, theorem 2 there: at orders a and b, with eps the divergence of one run and
    gamma the parameter of K, eps(a) + (1 + shape) ((1 - 1/b) eps(b) + log(1/gamma) / b) + log(E K) / (a - 1). For
    Poisson, theorem 6: eps(a) + mean_runs d + log(mean_runs) / (a - 1), where one run is (log(1 + 1/(a - 1)),
    d)-private.
    """
    delta = check_delta(delta)
    kinds = [merge(check_events("run", run))]
    kinds += [merge(check_events(f"alternatives[{i}]", events)) for i, events in enumerate(alternatives)]
    others = merge(check_events("compose_with", compose_with))
    mean, shape = _check_distribution(mean_runs, shape)

    def one(order: float) -> float:
        return max(divergence(events, order) for events in kinds)

    if shape == math.inf:

        def selected(order: float) -> float:
            chance = max(_delta_of_one_run(events, math.log1p(1 / (order - 1))) for events in kinds)
            return one(order) + mean * chance + math.log(mean) / (order - 1)

        name = f"Poisson number of runs with mean {mean:g}"
    else:
        log_gamma = _log_gamma(mean, shape)
        repeated, _ = minimise_over_orders(lambda b: (1 - 1 / b) * one(b) - log_gamma / b)

        def selected(order: float) -> float:
            return one(order) + (1 + shape) * repeated + math.log(mean) / (order - 1)

        name = f"truncated negative binomial number of runs with mean {mean:g} and shape {shape:g}"
    epsilon, _ = minimise_over_orders(lambda a: convert(a, selected(a) + divergence(others, a), delta))
    upper = epsilon if epsilon < 1e300 else math.inf
    return Bound(upper, 0.0, "rdp", f"Rényi differential privacy of the best of a {name}")


@dataclass(frozen=True)
class TrainingRun:
    """What decides the cost of one training run, but for its noise."""

    sampling_rate: float
    steps: int
    compose_with: tuple[Event, ...] = ()
    """What it releases besides its steps."""

    def events(self, noise_multiplier: float) -> tuple[Event, ...]:
        """Everything that it releases."""
        return (*self.compose_with, SampledGaussian(noise_multiplier, self.sampling_rate, self.steps))


def noise_multipliers(
    runs: Sequence[TrainingRun], *, target_epsilon: float, delta: float, mean_runs: float, shape: float = 1.0
) -> tuple[float, ...]:
    """The noise multiplier of each of ``runs``, so that the best of a random number of them costs ``target_epsilon``.

    Each is what it would be if all runs were of its kind. Their divergences are largest at different orders, so that
    together they may cost a little more: then all are raised by one factor. Certified by ``best_of_random_runs``.

    Raises ValueError where no noise meets the target, the releases besides the steps among the reasons.
    """
    if not runs:
        raise ValueError("runs must hold at least one run, got none")
    target = check_number("target_epsilon", target_epsilon, 0.0, math.inf, "a finite number > 0")
    if target == 0.0:
        raise ValueError(f"target_epsilon must be a finite number > 0, got {target_epsilon!r}")

    def excess(kinds: Sequence[TrainingRun], sigmas: Sequence[float]) -> float:
        """log of (epsilon / target)."""
        first, *rest = [kind.events(sigma) for kind, sigma in zip(kinds, sigmas, strict=True)]
        found = best_of_random_runs(first, delta, mean_runs=mean_runs, shape=shape, alternatives=rest)
        return math.log(min(max(found.upper / target, 1e-6), 1e6))

    def alone(kind: TrainingRun) -> float:
        if excess([kind], [1e8]) > 0:
            others = ", ".join(map(str, kind.compose_with)) or "nothing"
            raise ValueError(
                f"target_epsilon must exceed what runs cost besides their steps ({others}), got {target:.6g}"
            )
        precision = PRECISION if len(distinct) == 1 else 10 * PRECISION  # several are raised anyway
        return math.exp(root_of(lambda log_sigma: excess([kind], [math.exp(log_sigma)]), 0.0, 0.7, target, precision))

    distinct = dict.fromkeys(runs)
    found = {kind: alone(kind) for kind in distinct}
    kinds, sigmas = list(found), list(found.values())
    if (together := excess(kinds, sigmas)) > 2 * PRECISION:

        def raised(log_factor: float) -> float:
            return excess(kinds, [sigma * math.exp(log_factor) for sigma in sigmas])

        factor = math.exp(root_of(raised, 0.0, 2 * together, target, PRECISION))
        sigmas = [factor * sigma for sigma in sigmas]
    while excess(kinds, sigmas) > 0:
        sigmas = [sigma * (1 + PRECISION) for sigma in sigmas]
    found = dict(zip(kinds, sigmas, strict=True))
    return tuple(found[kind] for kind in runs)


def random_stopping(run: Sequence[Event], delta: float, *, stopping_probability: float) -> Bound:
    """Epsilon at ``delta`` of the best run, stopping after each with ``stopping_probability`` (Liu & Talwar 2019,
    theorem 3.5).

    At most T = log(1/d2) / stopping_probability runs are made; where one run is (e1, d1)-private, the best one is
    (3 e1 + 3 sqrt(2 d1), sqrt(2 d1) T + d2)-private. The best split of ``delta`` between d1 and d2 is searched. Rényi
    accounting, ``best_of_random_runs`` with shape 1, is nearly always better.
    """
    delta = check_delta(delta)
    events = check_events("run", run)
    gamma = _check_probability("stopping_probability", stopping_probability)
    best = Bound(math.inf, 0.0, "rdp", "")
    for share in (0.5, 0.1, 0.01, 1e-4):
        most_runs = math.log(1 / (share * delta)) / gamma
        one_delta = ((1 - share) * delta / most_runs) ** 2 / 2
        one = bound(events, one_delta)
        upper = 3 * one.upper + 3 * math.sqrt(2 * one_delta)
        if upper < best.upper:
            method = (
                f"random stopping after at most {most_runs:.0f} runs; one run by {one.method} at delta={one_delta:.3g}"
            )
            best = Bound(upper, 0.0, one.accountant, method)
    return best


def draw_number_of_runs(*, mean_runs: float, shape: float = 1.0) -> int:
    """K, from the operating system's entropy, by inversion of the distribution that ``best_of_random_runs`` accounts
    for.

    The number is private: do not print or log it, and do not let the running time tell it.
    """
    uniform = secrets.SystemRandom().random()
    number = 0
    for number, probability in enumerate(_probabilities(*_check_distribution(mean_runs, shape))):  # noqa: B007
        uniform -= probability
        if uniform < 0:
            break
    return number


def most_runs(*, mean_runs: float, shape: float = 1.0, tail: float) -> int:
    """The least M with Pr[K > M] <= ``tail``.

    Who never makes more than M runs is within total variation ``tail`` of who does: an (epsilon, delta) guarantee
    becomes (epsilon, delta + (1 + e^epsilon) tail).
    """
    left = 1 - _check_probability("tail", tail)
    number = 0
    for number, probability in enumerate(_probabilities(*_check_distribution(mean_runs, shape))):  # noqa: B007
        left -= probability
        if left <= 0:
            break
    return number


def _probabilities(mean: float, shape: float) -> Iterator[float]:
    """Pr[K = 0], Pr[K = 1], ... as far as floats tell them from 0 (Papernot & Steinke 2022, definition 1)."""
    number = 0
    if shape == math.inf:
        value = math.exp(-mean)
        while value > 0:
            yield value
            number += 1
            value *= mean / number
        return
    log_gamma = _log_gamma(mean, shape)
    yield 0.0
    value = -math.expm1(log_gamma) * (shape / math.expm1(-shape * log_gamma) if shape else -1 / log_gamma)
    while value > 0:
        yield value
        number += 1
        value *= -math.expm1(log_gamma) * (number + shape) / (number + 1)


def _log_gamma(mean: float, shape: float) -> float:
    """log of the parameter gamma at which E K is ``mean``."""
    from scipy.optimize import brentq

    def excess(log_gamma: float) -> float:
        spread = -math.expm1(shape * log_gamma) / shape if shape else -log_gamma
        return math.log(math.expm1(-log_gamma) / spread / mean)

    return float(brentq(excess, -200.0, -1e-9, xtol=1e-14))


def _delta_of_one_run(events: Sequence[Event], epsilon: float) -> float:
    """Delta of the composition of ``events`` at ``epsilon`` (Canonne et al. 2020, proposition 12, and by total
    variation)."""

    def log_delta(order: float) -> float:
        rdp = divergence(events, order)
        if not math.isfinite(rdp):
            return 0.0
        by_order = (order - 1) * (rdp - epsilon + math.log1p(-1 / order)) - math.log(order)
        return min(by_order, 0.5 * math.log(-math.expm1(-rdp)) if rdp > 0 else -math.inf, 0.0)

    return math.exp(minimise_over_orders(log_delta)[0])


def _check_distribution(mean_runs: float, shape: float) -> tuple[float, float]:
    mean = check_number("mean_runs", mean_runs, 1.0, 1e12, "a number of at least 1, and above 1 unless shape is inf")
    if shape != math.inf:
        what = "a number above -1, or inf for a Poisson number of runs"
        shape = check_number("shape", shape, -1.0, 1e6, what)
        if shape == -1.0:
            raise ValueError(f"shape must be {what}, got {shape!r}")
        if mean == 1.0:
            raise ValueError("mean_runs must be above 1 unless shape is inf, got 1: a single run costs what it costs")
    return mean, shape


def _check_probability(name: str, value: float) -> float:
    what = "a probability above 0 and at most 1"
    probability = check_number(name, value, 0.0, 1.0, what)
    if probability == 0.0:
        raise ValueError(f"{name} must be {what}, got {value!r}")
    return probability
