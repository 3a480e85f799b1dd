"""Epsilon of a composition: the smallest upper bound of several accountants, which must not contradict each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, TypeAlias

from dpkernels.accounting.bounds import AccountantContradictionError, AccountantUnavailableError, Bound
from dpkernels.accounting.mechanisms import Event, SampledGaussian, check_count, check_delta, check_events, merge

Accountant: TypeAlias = Literal["auto", "prv", "pld", "rdp", "rdp-classic"]
ACCOUNTANTS: tuple[Accountant, ...] = ("auto", "prv", "pld", "rdp", "rdp-classic")


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
