"""What an accountant answers, and the two ways in which it can fail to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bound:
    """Epsilon at a delta lies in [lower, upper]; every numerical error of the accountant is counted in both ends.

    ``upper`` is the guarantee that may be quoted. ``lower`` says how loose it can be: no accountant can prove an
    epsilon below it.
    """

    upper: float
    lower: float
    accountant: str
    method: str
    """How the bound was computed, in words fit for a privacy statement."""

    notes: tuple[str, ...] = ()
    """What the other accountants said, one line each."""

    kept: float = 0.0
    """The part of delta that ``claim`` keeps for what the noise differs from ideal: accountants got the rest."""

    noise_error: float = 0.0
    """Total variation of the noise of all releases from ideal, which that part covers."""

    refusal: str = ""
    """Why no epsilon can be stated, where that is due to the noise and ``upper`` is infinite for it."""

    def __str__(self) -> str:
        return f"epsilon in [{self.lower:.6g}, {self.upper:.6g}] by {self.method}"


class AccountantUnavailableError(ValueError):
    """The accountant cannot answer this query within its range or its budget of time and memory; the message says
    why."""


class AccountantContradictionError(RuntimeError):
    """A lower bound of one accountant exceeds an upper bound of another: one of them is wrong and no epsilon may be
    quoted."""
