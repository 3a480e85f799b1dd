"""Privacy statements in words, fit for a model card."""

from __future__ import annotations

import decimal
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpkernels.accounting.bounds import Bound
from dpkernels.accounting.mechanisms import Event

if TYPE_CHECKING:
    from dpkernels.accounting.planning import Plan

_IDEAL_DELTA = 1e-10  # below, what the ideal mechanisms leave out is no longer small against delta

_NOT_COVERED = (
    "choosing hyper-parameters on the same data, unless it was accounted as tuning",
    "what is reported about a test set, which is treated as public",
    "a second copy of the run folder that was trained on as well, which no ledger can detect",
    "runs with a seeded generator, whose noise can be recomputed: they are not private",
    "side channels such as time, memory or the size of a physical batch",
)


def statement(
    events: Sequence[Event],
    bound: Bound,
    delta: float,
    *,
    planned: Plan | None = None,
    releases: Sequence[tuple[str, Event]] = (),
    seeded: bool = False,
    more: Sequence[str] = (),
) -> str:
    """The privacy statement of ``events`` at ``delta``.

    ``releases`` names what touched the data, for what really happened; ``planned`` adds the planned sampling, and
    ``more`` is said before the mechanisms.
    """
    lines: list[str] = []
    if seeded:
        lines.append(
            "NOT PRIVATE: the noise came from a seeded generator and can be recomputed. "
            "What follows would hold with secret noise."
        )
    if math.isinf(bound.upper):
        lines.append("NOT PRIVATE: a release without noise has no finite epsilon.")
    else:
        lines.append(f"({_rounded_up(bound.upper)}, {delta:g})-differentially private.")
    lines.append(
        "Unit of privacy: one example. Neighbouring data sets: one example added or removed (its record zeroed). "
        "Replacing one is both, and costs (2 epsilon, (1 + e^epsilon) delta)."
    )
    if planned is not None:
        lines.append(
            f"Sampling: each step draws each of {planned.dataset_size} examples (a public number) independently "
            f"with probability {planned.batch_size}/{planned.dataset_size} (Poisson), expected batch "
            f"{planned.batch_size}; {planned.steps} steps planned."
        )
    lines += more
    lines.append("Mechanisms:" if events else "Mechanisms: none, nothing was released.")
    named = releases or [("", event) for event in events]
    lines += [f"  - {what + ': ' if what else ''}{event}" for what, event in named]
    proven = f"; no accountant can prove less than {bound.lower:.6g}" if 0 < bound.lower < math.inf else ""
    lines.append(f"Accounting: epsilon <= {bound.upper:.6g} by {bound.method}, numerical errors included{proven}.")
    lines += [f"  - {note}" for note in bound.notes]
    if planned is not None:
        quoted = f"({_rounded_up(planned.epsilon)}, {planned.delta:g})"
        lines.append(
            f"A run that stops on something it saw costs the plan's {quoted}, "
            f"not the smaller epsilon of the steps it made."
        )
    lines.append("Not covered:")
    lines += [f"  - {item}" for item in _NOT_COVERED]
    if delta < _IDEAL_DELTA:
        lines.append(
            f"  - delta below {_IDEAL_DELTA:g} rests on ideal mechanisms: an ideal generator and exact arithmetic"
        )
    return "\n".join(
        textwrap.fill(line, 110, subsequent_indent="    " if line.startswith("  -") else "  ") for line in lines
    )


def _rounded_up(epsilon: float) -> str:
    """Four significant digits, never below the value."""
    return f"{float(decimal.Context(prec=4, rounding=decimal.ROUND_CEILING).create_decimal_from_float(epsilon)):g}"
