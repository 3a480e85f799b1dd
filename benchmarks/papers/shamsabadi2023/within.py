"""Figures 3, 4 and 10 to 13 as a table: what each run had reached when a smaller epsilon was spent."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.papers.runner import Experiments, Results

EPSILONS = (0.5, 0.6, 0.7, 0.8, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0)


def within(experiments: Experiments, results: Results, epsilons: Sequence[float] = EPSILONS) -> str:
    """As Markdown: the accuracy at the last epoch within each epsilon, the mean over seeds; empty before the first."""
    lines = [
        f"| experiment | row | {' | '.join(f'{epsilon:g}' for epsilon in epsilons)} |",
        f"| --- | --- |{' --- |' * len(epsilons)}",
    ]
    for experiment, rows in experiments.items():
        for row in rows():
            curves = [run["curve"] for run in results.of(row)]
            cells = []
            for epsilon in epsilons:
                ends = epsilon > max((curve[-1][1] for curve in curves), default=0.0) + 0.1  # nothing was spent there
                reached = [[point[2] for point in curve if point[1] <= epsilon] for curve in curves]
                cells.append("" if ends or not all(reached) else f"{statistics.mean(one[-1] for one in reached):.1f}")
            if curves:
                lines.append(f"| {experiment} | {row.name} | {' | '.join(cells)} |")
    return "\n".join(lines)
