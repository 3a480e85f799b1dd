"""The noise multiplier for a target epsilon, certified by the bound that will be reported."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dpkernels.accounting.accountants import Accountant, bound
from dpkernels.accounting.mechanisms import Event, SampledGaussian, check_count, check_delta, check_events, check_number

_SMALLEST, _LARGEST = 1e-2, 1e8
_PRECISION = 1e-4  # relative precision of the root, well inside the certificate's 1e-3


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

    def excess(by: Accountant) -> Callable[[float], float]:
        """log of (epsilon / target), a falling and nearly straight function of log sigma."""

        def of(log_sigma: float) -> float:
            event = SampledGaussian(math.exp(log_sigma), step.sampling_rate, step.count)
            return math.log(min(max(bound([*others, event], delta, by).upper / target, 1e-6), 1e6))

        return of

    guess = 0.0
    if accountant == "auto":  # Rényi accounting is fast and never below, so its answer brackets the other ones
        guess = _root(excess("rdp"), 0.0, target, 1e-2)
    return _certify(excess(accountant), _root(excess(accountant), guess, target, _PRECISION), target)


def _root(excess: Callable[[float], float], guess: float, target: float, precision: float) -> float:
    from scipy.optimize import brentq

    direction = 1 if excess(guess) > 0 else -1
    near, step = guess, 0.05 if guess else 0.7
    while math.log(_SMALLEST) <= near <= math.log(_LARGEST):
        far = near + direction * step
        if (excess(far) > 0) != (direction > 0):
            return float(brentq(excess, *sorted((near, far)), xtol=precision, rtol=1e-12))
        near, step = far, 2 * step
    limits = f"{_SMALLEST} and {_LARGEST:g}"
    raise ValueError(f"target_epsilon must be met by a noise multiplier between {limits}, got {target:.6g}")


def _certify(excess: Callable[[float], float], root: float, target: float) -> float:
    """A point next to the root that meets the target while its 0.999-fold does not."""
    log_sigma = root
    for _ in range(40):
        if excess(log_sigma) > 0:
            log_sigma += 2 * _PRECISION
        elif excess(log_sigma + math.log(0.999)) <= 0:
            log_sigma += math.log(0.999)
        else:
            return math.exp(log_sigma)
    raise RuntimeError(
        f"no certified noise multiplier for target_epsilon={target!r}: the bound jumps near {math.exp(root)!r}"
    )
