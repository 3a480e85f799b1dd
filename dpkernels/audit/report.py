"""What audits found, in words and in a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIMITS = (
    "A lower bound below the claim does not prove the claim: a better attack may find more. A lower bound above it "
    "refutes the claim, with the confidence stated."
)


@dataclass(frozen=True)
class Report:
    """What an audit found; ``str()`` says it in a sentence."""

    lower_bound: float
    """The claimed privacy costs no less than this epsilon, with probability ``confidence``."""
    claim: float
    """The claimed upper bound on epsilon."""
    delta: float
    """At which both hold."""
    confidence: float

    @property
    def refuted(self) -> bool:
        """Whether the lower bound contradicts the claim."""
        return self.lower_bound > self.claim

    def __str__(self) -> str:
        verdict = "REFUTES the claim" if self.refuted else "does not contradict the claim"
        bound = (
            f"epsilon >= {self.lower_bound:.3f} at delta = {self.delta:g} with {100 * self.confidence:g}% confidence"
        )
        return f"{bound}, which {verdict} of epsilon <= {self.claim:.3f}"


@dataclass(frozen=True)
class OneRunReport(Report):
    """Of :func:`dpkernels.audit.one_run`."""

    canaries: int
    """How many there were, each in the data with probability 1/2."""
    guesses: int
    """For how many of them the auditor guessed whether it was in."""
    correct: int
    """How many of the guesses were right."""

    def __str__(self) -> str:
        return f"{super().__str__()} ({self.correct} of {self.guesses} guesses right, {self.canaries} canaries)"


@dataclass(frozen=True)
class TwoWorldsReport(Report):
    """Of :func:`dpkernels.audit.two_worlds`."""

    runs: int
    """How many there were, half of which chose the event."""

    def __str__(self) -> str:
        return f"{super().__str__()} ({self.runs} runs)"


def plot(reports: Sequence[Report], path: str | Path, *, title: str = "") -> None:
    """Draw each audit's lower bound beside its claim, as a PNG file. Raises ValueError without reports."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not reports:
        raise ValueError("reports must hold at least one report, got none")
    reports = sorted(reports, key=lambda report: report.claim)
    places = range(len(reports))
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    claims = axes.bar([k - 0.2 for k in places], [r.claim for r in reports], 0.4, color="lightgray", label="claim")
    colors = ["tab:red" if r.refuted else "tab:blue" for r in reports]
    confidence = f"{min(r.confidence for r in reports):.4g}"
    bounds = axes.bar(
        [k + 0.2 for k in places],
        [r.lower_bound for r in reports],
        0.4,
        color=colors,
        label=f"lower bound of the audit, confidence {confidence}",
    )
    for bars in (claims, bounds):
        axes.bar_label(bars, fmt="%.2f", fontsize="small")
    axes.set_xticks(list(places), [f"{r.claim:.3g}" for r in reports])
    epsilon, delta = "\N{GREEK SMALL LETTER EPSILON}", "\N{GREEK SMALL LETTER DELTA}"
    axes.set_xlabel(f"claimed {epsilon}, at {delta} = {', '.join(sorted({f'{r.delta:g}' for r in reports}))}")
    axes.set_ylabel(epsilon)
    axes.set_title(title, fontsize="medium")
    axes.legend(loc="upper left", frameon=False)
    axes.margins(y=0.15)
    figure.savefig(path, format="png", dpi=150)
