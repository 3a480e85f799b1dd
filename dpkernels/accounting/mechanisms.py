"""Frozen privacy events: what one touch of the private data costs, and how often it happened.

An event describes a randomised release by the parameters that its privacy depends on, and nothing else. Neighbouring
data sets differ by one example that is added or removed; noise multipliers are standard deviation (Gaussian) or scale
(Laplace) divided by the sensitivity under that relation. Events are hashable, so that a composition can be a dictionary
key and a cache key.

This module and the ledger import the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias


def check_number(name: str, value: object, low: float, high: float, what: str) -> float:
    """Return ``value`` as a finite float in [low, high], or raise an error that names the argument."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be {what}, got {value!r}")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be {what}, got {value!r} of type {type(value).__name__}") from None
    if not (math.isfinite(number) and low <= number <= high):
        raise ValueError(f"{name} must be {what}, got {value!r}")
    return number


def check_count(name: str, value: object, what: str = "a positive integer") -> int:
    """Return ``value`` as an int of at least 1, or raise an error that names the argument."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be {what}, got {value!r} of type {type(value).__name__}")
    count = int(value.__index__())
    if count < 1:
        raise ValueError(f"{name} must be {what}, got {count}")
    return count


def check_delta(value: object) -> float:
    """Return ``value`` as a float in (0, 1), or raise."""
    what = "a probability with 0 < delta < 1"
    delta = check_number("delta", value, 0.0, 1.0, what)
    if delta in {0.0, 1.0}:
        raise ValueError(f"delta must be {what}, got {value!r}")
    return delta


@dataclass(frozen=True)
class _Mechanism:
    def _normalise(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def times(self, count: int) -> Event:
        """The same mechanism, run ``count`` times in all."""
        return replace(self, count=count)  # type: ignore[return-value, call-arg]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ``mechanism`` first: what the ledger writes."""
        return {"mechanism": type(self).__name__} | {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Gaussian(_Mechanism):
    """A release with Gaussian noise of standard deviation ``noise_multiplier`` times the L2 sensitivity, ``count``
    times.

    ``noise_multiplier`` 0 means that nothing is protected: epsilon is infinite.
    """

    noise_multiplier: float
    count: int = 1

    def __post_init__(self) -> None:
        self._normalise(
            noise_multiplier=check_number(
                "noise_multiplier", self.noise_multiplier, 0.0, math.inf, "a finite number >= 0"
            ),
            count=check_count("count", self.count),
        )

    def __str__(self) -> str:
        return f"Gaussian mechanism, noise multiplier {self.noise_multiplier:.6g}{_times(self.count)}"


@dataclass(frozen=True)
class SampledGaussian(_Mechanism):
    """A Gaussian release on a Poisson sample that holds each example independently with probability
    ``sampling_rate``."""

    noise_multiplier: float
    sampling_rate: float
    count: int = 1

    def __post_init__(self) -> None:
        what = "a probability with 0 < sampling_rate <= 1"
        rate = check_number("sampling_rate", self.sampling_rate, 0.0, 1.0, what)
        if rate == 0.0:
            raise ValueError(f"sampling_rate must be {what}, got {self.sampling_rate!r}")
        self._normalise(
            noise_multiplier=check_number(
                "noise_multiplier", self.noise_multiplier, 0.0, math.inf, "a finite number >= 0"
            ),
            sampling_rate=rate,
            count=check_count("count", self.count),
        )

    def __str__(self) -> str:
        return (
            f"Poisson-subsampled Gaussian mechanism, noise multiplier {self.noise_multiplier:.6g}, "
            f"sampling rate {self.sampling_rate:.6g}{_times(self.count)}"
        )


@dataclass(frozen=True)
class Laplace(_Mechanism):
    """A release with Laplace noise of scale ``noise_multiplier`` times the L1 sensitivity, ``count`` times."""

    noise_multiplier: float
    count: int = 1

    def __post_init__(self) -> None:
        self._normalise(
            noise_multiplier=check_number(
                "noise_multiplier", self.noise_multiplier, 0.0, math.inf, "a finite number >= 0"
            ),
            count=check_count("count", self.count),
        )

    def __str__(self) -> str:
        return f"Laplace mechanism, scale/sensitivity {self.noise_multiplier:.6g}{_times(self.count)}"


@dataclass(frozen=True)
class PureEpsilon(_Mechanism):
    """Any (epsilon, 0)-differentially private release, ``count`` times."""

    epsilon: float
    count: int = 1

    def __post_init__(self) -> None:
        self._normalise(
            epsilon=check_number("epsilon", self.epsilon, 0.0, math.inf, "a finite number >= 0"),
            count=check_count("count", self.count),
        )

    def __str__(self) -> str:
        return f"pure differential privacy, epsilon {self.epsilon:.6g}{_times(self.count)}"


Event: TypeAlias = Gaussian | SampledGaussian | Laplace | PureEpsilon
EVENT_TYPES = (Gaussian, SampledGaussian, Laplace, PureEpsilon)


def _times(count: int) -> str:
    return "" if count == 1 else f", {count} times"


def event_from_dict(values: dict[str, Any]) -> Event:
    """The event that ``to_dict`` described. Raises ValueError for an unknown mechanism."""
    kinds = {kind.__name__: kind for kind in EVENT_TYPES}
    values = dict(values)
    name = values.pop("mechanism", None)
    if name not in kinds:
        raise ValueError(f"mechanism must be one of {sorted(kinds)}, got {name!r}")
    return kinds[name](**values)


def check_events(name: str, events: Iterable[Event]) -> tuple[Event, ...]:
    """``events`` as a tuple, or TypeError naming the argument and the entry that is not an event."""
    if isinstance(events, EVENT_TYPES):
        raise TypeError(f"{name} must be a sequence of events, got a single {type(events).__name__}: write [event]")
    checked = tuple(events)
    for index, event in enumerate(checked):
        if not isinstance(event, EVENT_TYPES):
            kinds = ", ".join(kind.__name__ for kind in EVENT_TYPES)
            raise TypeError(f"{name}[{index}] must be an event ({kinds}), got {type(event).__name__}")
    return checked


def merge(events: Iterable[Event]) -> tuple[Event, ...]:
    """The same composition with as few events as possible, in a fixed order.

    Equal mechanisms add their counts; Gaussian releases, a subsampled one with rate 1 among them, become one with
    1/sigma^2 = sum_i count_i / sigma_i^2; events that cost nothing vanish. A mechanism without noise stays one.
    """
    counts: dict[Event, int] = {}
    precision = 0.0
    for event in events:
        if isinstance(event, SampledGaussian) and event.sampling_rate == 1.0:
            event = Gaussian(event.noise_multiplier, event.count)  # noqa: PLW2901
        if isinstance(event, PureEpsilon) and event.epsilon == 0.0:
            continue
        if isinstance(event, Gaussian) and event.noise_multiplier > 0.0:
            precision += event.count / event.noise_multiplier**2
            continue
        single = event.times(1)
        counts[single] = counts.get(single, 0) + event.count
    merged: list[Event] = [event.times(count) for event, count in counts.items()]
    if precision > 0.0:
        merged.append(Gaussian(precision**-0.5))
    return tuple(sorted(merged, key=lambda event: (type(event).__name__, *event.to_dict().values())))


def is_unprotected(event: Event) -> bool:
    """Whether the event adds no noise at all, so that no finite epsilon holds."""
    return not isinstance(event, PureEpsilon) and event.noise_multiplier == 0.0


def is_within(events: Iterable[Event], allowed: Iterable[Event]) -> bool:
    """Whether the events are part of what is allowed, mechanism by mechanism: then no accounting is needed."""
    left: dict[Event, int] = {}
    for event in allowed:
        left[event.times(1)] = left.get(event.times(1), 0) + event.count
    for event in events:
        left[event.times(1)] = left.get(event.times(1), 0) - event.count
    return all(count >= 0 for count in left.values())
