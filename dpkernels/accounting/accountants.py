"""Epsilon of a composition: the smallest upper bound of several accountants, which must not contradict each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal, TypeAlias

from dpkernels.accounting.bounds import AccountantContradictionError, AccountantUnavailableError, Bound
from dpkernels.accounting.mechanisms import Event, SampledGaussian, check_count, check_delta, check_events, merge

Accountant: TypeAlias = Literal["auto", "prv", "pld", "rdp", "rdp-classic"]
ACCOUNTANTS: tuple[Accountant, ...] = ("auto", "prv", "pld", "rdp", "rdp-classic")
KEPT = 2.0**-20
"""The part of delta that a claim keeps for its noise, at least. It moves epsilon by less than a millionth, and is more
than the noise of small models needs, so that a plan and all that is made by it state one figure."""
LEAST_NOISE_ERROR = 2.0**-99
"""Total variation from ideal of one value of the package's noise, at least (``dpkernels.ops.noise``)."""


def epsilon(
    *,
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    delta: float,
    accountant: Accountant = "auto",
    compose_with: Sequence[Event] = (),
) -> float:
    """Epsilon at ``delta`` of ``steps`` Poisson-subsampled Gaussian steps, together with the events of
    ``compose_with``.

    Neighbouring data sets differ by one example added or removed. The value is an upper bound with the accountant's
    numerical error added; it is infinite for ``noise_multiplier`` 0.

    Args:
        noise_multiplier: noise standard deviation divided by the clipping bound, >= 0.
        sampling_rate: probability with which each example is in a step's batch, in (0, 1].
        steps: number of steps, >= 1.
        delta: in (0, 1).
        accountant: "auto" (the smallest bound of the applicable accountants, cross-checked), "pld", "prv", "rdp", or
            "rdp-classic" (the conversion rdp + log(1/delta)/(alpha - 1), only to reproduce printed values).
        compose_with: other releases from the same data.

    Raises:
        ValueError, TypeError: an argument is out of range.
        AccountantUnavailableError (a ValueError): the accountant that was named cannot answer; "auto" always answers.
        AccountantContradictionError: accountants disagree beyond their errors.
    """
    step = SampledGaussian(noise_multiplier, sampling_rate, check_count("steps", steps))
    return bound([*check_events("compose_with", compose_with), step], delta, accountant).upper


def bound(events: Sequence[Event], delta: float, accountant: Accountant = "auto") -> Bound:
    """Lower and upper bound on epsilon at ``delta`` of the composition of ``events``; no event costs 0."""
    if accountant not in ACCOUNTANTS:
        raise ValueError(f"accountant must be one of {', '.join(ACCOUNTANTS)}, got {accountant!r}")
    return _bound(merge(check_events("events", events)), check_delta(delta), accountant)


def claim(events: Sequence[Event], delta: float, accountant: Accountant = "auto", *, noise_error: float = 0.0) -> Bound:
    """The bound on epsilon that may be stated at ``delta``, where noise comes from a real sampler.

    Accountants take noise to be ideal. Where all releases together are within a total variation of ``noise_error`` of
    those with ideal noise, and these are (epsilon, d)-private, they are (epsilon, d + (1 + e^epsilon) noise_error)-
    private. So accountants are asked at delta less that share, for which a power of two of delta is kept: ``KEPT``, or
    more where the share is larger. Where it would exceed half of delta no epsilon is stated: ``upper`` is infinite, and
    ``refusal`` says why.
    """
    events, delta = check_events("events", events), check_delta(delta)
    ideal = bound(events, delta * (1 - KEPT), accountant)
    found, part = ideal, KEPT
    while (share := _share(found.upper, noise_error)) > part * delta and not math.isinf(found.upper):
        part = 1.0 if share >= delta else 2.0 ** math.ceil(math.log2(share / delta))
        if part > 0.5:
            return replace(found, upper=math.inf, noise_error=noise_error, refusal=_refusal(ideal, delta, noise_error))
        found = bound(events, delta * (1 - part), accountant)
    return replace(found, kept=part * delta, noise_error=noise_error)


def _share(epsilon: float, noise_error: float) -> float:
    """What ``noise_error`` adds to delta. Beyond 700 it is more than any delta."""
    return (1 + math.exp(min(epsilon, 700.0))) * noise_error


def _refusal(ideal: Bound, delta: float, noise_error: float) -> str:
    share = _share(ideal.upper, noise_error)
    largest = math.floor(math.log(delta / noise_error) - 4)  # what it adds is a fiftieth of delta then
    advice = f"an epsilon of up to {largest} can be" if largest > 0 else "nothing can be"
    return (
        f"with ideal noise epsilon would be {ideal.upper:.6g}, but the noise is within a total variation of "
        f"{noise_error:.2g} of ideal, and 1 + e^epsilon times as much "
        f"({f'{share:.2g}' if share < 1 else 'more than 1'}) has to be added to delta; at delta={delta:g} {advice} "
        f"stated with this noise"
    )


def estimate(events: Sequence[Event], delta: float) -> float:
    """What "auto" will report, to about 0.1% and in a fraction of the time: for searching, not for reporting."""
    from dpkernels.accounting.pld import pld_bound

    events, delta = merge(events), check_delta(delta)
    upper = _accountant("rdp")(events, delta).upper
    try:
        return min(upper, pld_bound(events, delta, quick=True).upper)
    except AccountantUnavailableError:
        return upper


@lru_cache(maxsize=1024)
def _bound(events: tuple[Event, ...], delta: float, accountant: Accountant) -> Bound:
    return _auto(events, delta) if accountant == "auto" else _accountant(accountant)(events, delta)


def _accountant(name: str) -> Callable[[Sequence[Event], float], Bound]:
    """Imported on first use: the numerical libraries take seconds, and the ledger must open in milliseconds."""
    if name == "pld":
        from dpkernels.accounting.pld import pld_bound

        return pld_bound
    if name == "prv":
        from dpkernels.accounting.prv import prv_bound

        return prv_bound
    from dpkernels.accounting.rdp import rdp_bound

    return lambda events, delta: rdp_bound(events, delta, classic=name == "rdp-classic")


def _auto(events: tuple[Event, ...], delta: float) -> Bound:
    found: list[Bound] = []
    notes: list[str] = []
    for name in ("pld", "prv", "rdp"):
        try:
            found.append(_accountant(name)(events, delta))
        except AccountantUnavailableError as reason:
            notes.append(f"{name}: not available ({reason})")
    best = min(found, key=lambda answer: answer.upper)
    lowest = max(found, key=lambda answer: answer.lower)
    if lowest.lower > best.upper * (1 + 1e-12):
        raise AccountantContradictionError(
            f"{lowest.accountant} proves epsilon >= {lowest.lower!r} and {best.accountant} proves epsilon <= "
            f"{best.upper!r} at delta={delta!r} for {events}"
        )
    notes += [f"{answer.accountant}: {_interval(answer)}" for answer in found]
    return Bound(best.upper, lowest.lower, best.accountant, best.method, tuple(notes))


def _interval(answer: Bound) -> str:
    if math.isinf(answer.upper):
        return "infinite"
    return f"epsilon <= {answer.upper:.6g}" + (f", and >= {answer.lower:.6g}" if answer.lower > 0 else "")
