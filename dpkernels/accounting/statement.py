"""Privacy statements in words, fit for a model card."""

from __future__ import annotations

import decimal
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpkernels.accounting.bounds import Bound
from dpkernels.accounting.mechanisms import Event, is_within

if TYPE_CHECKING:
    from dpkernels.accounting.ledger import Entry
    from dpkernels.accounting.planning import Plan

_WIDTH = 110
_IDEAL_DELTA = 1e-10  # below, what an ideal generator leaves out is no longer small against delta

NOT_COVERED = (
    "choosing hyper-parameters on the same data, unless it was accounted as tuning",
    "what is reported about a test set, which is treated as public",
    "a second copy of the run folder that was trained on as well, which no ledger can detect",
    "runs with a seeded generator, whose noise can be recomputed: they are not private",
    "side channels such as time, memory, or the dates and sizes of files while a run goes on",
)

WITHOUT_PLAN = "Not private: there is no privacy plan, so that nothing is known of how batches were sampled."


def statement(
    bound: Bound,
    delta: float,
    spent: Sequence[Entry] | None = None,
    *,
    plan: Plan | None = None,
    seeded: bool = False,
    more: Sequence[str] = (),
) -> str:
    """The privacy statement for ``bound``, which is stated at ``delta``.

    ``spent`` is what a ledger knows of, None where there is none yet; ``plan`` the plan that ``bound`` is of, where it
    is not of ``spent`` alone. ``more`` is said before the mechanisms.
    """
    lines = [*_headline(bound, delta, seeded), _unit(bound, delta)]
    if plan is not None:
        lines += [
            f"Sampling: at each step each of {plan.dataset_size} examples (a public number) is drawn independently of "
            f"all others with probability {plan.batch_size}/{plan.dataset_size} (Poisson sampling), "
            f"{plan.batch_size} examples on average.",
            _steps(plan, spent),
        ]
    lines += more
    lines += _mechanisms(spent or (), None if plan is None else plan.events)
    proven = f"; no accountant can prove less than {bound.lower:.6g}" if 0 < bound.lower < math.inf else ""
    if bound.refusal:
        lines.append(f"Accounting: with ideal noise, by {bound.method}.")
    else:
        at = f" at delta {delta - bound.kept:.6g}" if bound.kept else ""
        lines.append(
            f"Accounting: epsilon <= {bound.upper:.6g}{at} by {bound.method}, numerical errors included{proven}."
        )
    if bound.notes:
        lines += ["By accountant:", *(f"  - {note}" for note in bound.notes)]
    lines += _noise(bound, spent)
    lines.append("Not covered:")
    lines += [f"  - {item}" for item in NOT_COVERED]
    if delta < _IDEAL_DELTA:
        lines.append(f"  - delta below {_IDEAL_DELTA:g} rests on an ideal random generator")
    return "\n".join(
        textwrap.fill(line, _WIDTH, subsequent_indent="    " if line.startswith("  -") else "  ") for line in lines
    )


def _headline(bound: Bound, delta: float, seeded: bool) -> list[str]:
    lines = []
    if seeded:
        lines.append(
            "NOT PRIVATE: the noise came from a seeded generator and can be recomputed. "
            "What follows would hold with secret noise."
        )
    if bound.refusal:
        lines.append(f"No epsilon can be stated at delta={delta:g}: {bound.refusal}.")
    elif math.isinf(bound.upper):
        lines.append("NOT PRIVATE: a release without noise has no finite epsilon.")
    else:
        lines.append(f"({rounded_up(bound.upper)}, {delta:g})-differentially private.")
    return lines


def _unit(bound: Bound, delta: float) -> str:
    epsilon = bound.upper
    replacing = "(2 epsilon, (1 + e^epsilon) delta)"
    if 0 < epsilon < 100 and (both := (1 + math.exp(epsilon)) * delta) < 1:
        replacing += f" = ({rounded_up(2 * epsilon)}, {rounded_up(both)})"
    return (
        "Unit of privacy: one example. Neighbouring data sets: one example added or removed (its record zeroed). "
        f"Replacing one is both, and costs {replacing}."
    )


def _steps(plan: Plan, spent: Sequence[Entry] | None) -> str:
    rule = "A run that ends early may have ended on something it saw: it costs what the plan allows."
    if spent is None:
        return f"Steps: {plan.steps} planned. {rule}"
    made = sum(entry.event.count for entry in spent if entry.is_step)
    return f"Steps: {made} of {plan.steps} planned." + ("" if made == plan.steps else f" {rule}")


def _mechanisms(spent: Sequence[Entry], planned: Sequence[Event] | None) -> list[str]:
    """What the bound is of, by the names that it has in the ledger: the plan, or what was spent."""
    names = {entry.event.times(1): entry.what for entry in spent}
    lines: list[str] = []
    if planned is not None:
        lines += _listed("Mechanisms", [(names.get(event.times(1), ""), event) for event in planned])
    if planned is None or not is_within([entry.event for entry in spent], planned):
        word = "Mechanisms" if planned is None else "Spent of it, or instead"
        lines += _listed(word, [(entry.what, entry.event) for entry in spent])
    return lines


def _listed(word: str, named: Sequence[tuple[str, Event]]) -> list[str]:
    lines = [f"  - {what + ': ' if what else ''}{event}" for what, event in named]
    return [f"{word}:", *lines] if lines else [f"{word}: none, nothing was released."]


def _noise(bound: Bound, spent: Sequence[Entry] | None) -> list[str]:
    """The share of delta for noise that is not ideal."""
    if not bound.kept:
        return []
    line = f"Noise: the rest of delta, {bound.kept:.3g}, covers how far the noise is from an ideal Gaussian."
    if spent and bound.noise_error:
        share = (1 + math.exp(min(bound.upper, 700.0))) * bound.noise_error
        line += (
            f" Over all releases that is a total variation of at most {bound.noise_error:.2g}, which counts "
            f"1 + e^epsilon times: {share:.2g}."
        )
    return [line]


def rounded_up(value: float) -> str:
    """Four significant digits, never below the value."""
    if math.isinf(value):
        return "inf"
    return f"{float(decimal.Context(prec=4, rounding=decimal.ROUND_CEILING).create_decimal_from_float(value)):g}"
