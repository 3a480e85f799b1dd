"""The noise multiplier for a target epsilon, certified by the bound that will be reported."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dpkernels.accounting.accountants import Accountant, bound, estimate
from dpkernels.accounting.mechanisms import Event, SampledGaussian, check_count, check_delta, check_events, check_number

_SMALLEST, _LARGEST = 1e-2, 1e8
PRECISION = 1e-4  # relative precision of the root, well inside the certificate's 1e-3


def noise_multiplier(
    *,
    target_epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    compose_with: Sequence[Event] = (),
    accountant: Accountant = "auto",
) -> float:
    """The smallest noise multiplier sigma, to 0.1%, whose epsilon at ``delta`` does not exceed the target.

    Certified: with the bound that ``epsilon`` reports, bound(sigma) <= target_epsilon < bound(0.999 sigma).

    Args:
        target_epsilon: > 0.
        delta: in (0, 1).
        sampling_rate: probability with which each example is in a step's batch, in (0, 1].
        steps: number of steps, >= 1.
        compose_with: other releases from the same data, which the target has to cover too.
        accountant: as for ``epsilon``.

    Raises:
        ValueError: an argument is out of range, ``compose_with`` alone exceeds the target, or no noise multiplier
            between 0.01 and 1e8 meets it.
    """
    what = "a finite number > 0"
    target = check_number("target_epsilon", target_epsilon, 0.0, math.inf, what)
    if target == 0.0:
        raise ValueError(f"target_epsilon must be {what}, got {target_epsilon!r}")
    delta = check_delta(delta)
    others = check_events("compose_with", compose_with)
    step = SampledGaussian(1.0, sampling_rate, check_count("steps", steps))
    alone = bound(others, delta, accountant).upper
    if alone >= target:
        raise ValueError(f"target_epsilon must exceed what compose_with costs alone, {alone:.6g}, got {target:.6g}")

    def excess(spent: Callable[[Sequence[Event]], float]) -> Callable[[float], float]:
        """log of (epsilon / target), a falling and nearly straight function of log sigma."""

        def of(log_sigma: float) -> float:
            event = SampledGaussian(math.exp(log_sigma), step.sampling_rate, step.count)
            return math.log(min(max(spent([*others, event]) / target, 1e-6), 1e6))

        return of

    def reported(events: Sequence[Event]) -> float:
        return bound(events, delta, accountant).upper

    guess, stride = 0.0, 0.7
    if accountant == "auto":
        # Rényi accounting is fast and never below, so it says where to look; the estimate finds the root to its
        # precision; the reported bound certifies.
        guess = root_of(excess(lambda events: bound(events, delta, "rdp").upper), 0.0, 0.7, target, 1e-2)
        guess, stride = root_of(excess(lambda events: estimate(events, delta)), guess, 0.05, target, PRECISION), 1e-3
        certified = _certify(excess(reported), guess)
        if certified is not None:
            return certified
    root = root_of(excess(reported), guess, stride, target, PRECISION)
    certified = _certify(excess(reported), root)
    if certified is None:
        raise RuntimeError(
            f"no certified noise multiplier for target_epsilon={target!r}: the bound jumps near {math.exp(root)!r}"
        )
    return certified


def root_of(excess: Callable[[float], float], guess: float, step: float, target: float, precision: float) -> float:
    """Where ``excess`` changes its sign, searched from ``guess`` in growing steps."""
    from scipy.optimize import brentq

    direction = 1 if excess(guess) > 0 else -1
    near = guess
    while math.log(_SMALLEST) <= near <= math.log(_LARGEST):
        far = near + direction * step
        if (excess(far) > 0) != (direction > 0):
            return float(brentq(excess, *sorted((near, far)), xtol=precision, rtol=1e-12))
        near, step = far, 2 * step
    limits = f"{_SMALLEST} and {_LARGEST:g}"
    raise ValueError(f"target_epsilon must be met by a noise multiplier between {limits}, got {target:.6g}")


def _certify(excess: Callable[[float], float], root: float) -> float | None:
    """A point next to the root that meets the target while its 0.999-fold does not."""
    log_sigma = root
    for _ in range(10):
        if excess(log_sigma) > 0:
            log_sigma += 3 * PRECISION
        elif excess(log_sigma + math.log(0.999)) <= 0:
            log_sigma += math.log(0.999)
        else:
            return math.exp(log_sigma)
    return None
