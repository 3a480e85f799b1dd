"""What a sweep leaves beside its runs: `sweep.json`, a table in Markdown, and a plot of accuracy by each value."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpkernels.accounting import Plan
from dpkernels.accounting.statement import rounded_up
from dpkernels.search.workers import Outcome
from dpkernels.training.config import TrainConfig
from dpkernels.training.files import write_atomically, write_json, write_text
from dpkernels.training.report import finite

RELEASED = (
    "Every result of a grid is released: whoever reads this table has seen all runs. The composed epsilon holds for "
    "all of them together, and for the best one, if it was chosen here. That of a single run holds only for a run "
    "whose hyper-parameters were fixed without looking at this data."
)
NOT_PRIVATE = "NOT PRIVATE: the noise of seeded runs can be recomputed. These figures would hold with secret noise."


@dataclass(frozen=True)
class Row:
    """A run of a sweep. state: "done", "broken off", "not begun" or "failed". metrics: as in `metrics.json`."""

    name: str
    state: str
    config: TrainConfig
    plan: Plan
    metrics: dict[str, Any] | None = None
    failure: str | None = None

    def after(self, outcome: Outcome) -> Row:
        """The row once its run ended so."""
        if outcome.failure is not None:
            return replace(self, state="failed", failure=outcome.failure)
        if outcome.metrics is None:
            return self
        return replace(self, state="done" if outcome.complete else "broken off", metrics=outcome.metrics, failure=None)

    @property
    def epsilon(self) -> float | None:
        """As the run states it, and before it ended as its plan does; None where none can be stated."""
        stated: float | None = self.metrics["epsilon"] if self.metrics is not None else self.plan.epsilon
        return None if stated is None or math.isinf(stated) else stated

    @property
    def noise_error(self) -> float:
        """Total variation of the run's noise from ideal; before it ended the least that it can be."""
        return float(self.metrics["noise_error"]) if self.metrics is not None else self.plan.bound.noise_error

    @property
    def accuracy(self) -> float | None:
        """On the test set, in [0, 1], of a run that is done."""
        return self.metrics["test_accuracy"] if self.metrics is not None and self.state == "done" else None


@dataclass(frozen=True)
class Cost:
    """What the runs on one data set cost: the dearest of them alone, and all of them together."""

    dataset: str
    runs: int
    epsilon_of_one: float
    epsilon_of_all: float
    delta: float
    method: str
    seeded: bool

    def __str__(self) -> str:
        of_one = rounded_up(self.epsilon_of_one)
        one = f"epsilon {of_one}" if self.runs == 1 else f"at most epsilon {of_one}"
        runs = "1 run" if self.runs == 1 else f"{self.runs} runs"
        return (
            f"{self.dataset}: a single run costs {one}, all {runs} together epsilon {rounded_up(self.epsilon_of_all)}, "
            f"at delta {self.delta:g}"
        )


def varying(rows: Sequence[Row]) -> list[str]:
    """The fields in which the runs differ."""
    if not rows:
        return []
    configs = [row.config.to_dict() for row in rows]
    return [name for name in configs[0] if len({config[name] for config in configs}) > 1]


def document(rows: Sequence[Row], costs: Sequence[Cost]) -> dict[str, Any]:
    """What `sweep.json` holds."""
    names = varying(rows)
    runs: list[dict[str, Any]] = []
    for row in rows:
        config, metrics = row.config.to_dict(), row.metrics or {}
        shown = ("test_accuracy", "train_accuracy", "steps")
        measured = {name: metrics[name] for name in shown if name in metrics}
        failure = {"failure": row.failure} if row.failure else {}
        runs.append(
            {
                "name": row.name,
                "state": row.state,
                **{name: config[name] for name in names},
                **measured,
                "epsilon": row.epsilon,
                "delta": row.plan.delta,
                "noise_multiplier": row.plan.noise_multiplier,
                "planned_steps": row.plan.steps,
                **failure,
            }
        )
    cost = [
        {
            name: finite(value) if name.startswith("epsilon") else value
            for name, value in vars(cost).items()
            if name != "seeded"
        }
        for cost in costs
    ]
    return {"runs": runs, "cost": cost, "private": not any(cost.seeded for cost in costs), "note": notes(costs)}


def notes(costs: Sequence[Cost]) -> str:
    """What must be said of the figures."""
    return " ".join(([NOT_PRIVATE] if any(cost.seeded for cost in costs) else []) + [RELEASED])


def table(rows: Sequence[Row]) -> str:
    """In Markdown, the best run first and what is not done last."""
    names = varying(rows)
    lines = [[*names, "test accuracy", "epsilon", "sigma", "steps", "state"]]
    for row in sorted(rows, key=lambda row: -1.0 if row.accuracy is None else row.accuracy, reverse=True):
        config, metrics = row.config.to_dict(), row.metrics or {}
        accuracy = "-" if row.accuracy is None else f"{row.accuracy:.2%}"
        state = row.state + (f": {row.failure}" if row.failure else "")
        if lost := metrics.get("lost_steps"):
            state += f", {lost} steps lost to a kill"
        figures = [
            accuracy,
            "-" if row.epsilon is None else rounded_up(row.epsilon),
            f"{row.plan.noise_multiplier:.4g}",
            str(row.plan.steps),
        ]
        lines.append([*(_word(config[name]) for name in names), *figures, state.replace("|", "/")])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |" for line in lines
    )


def summary(rows: Sequence[Row]) -> str | None:
    """Spread of the accuracies of runs that are done; None of fewer than two."""
    accuracies = [row.accuracy for row in rows if row.accuracy is not None]
    if len(accuracies) < 2:
        return None
    low, middle, high = statistics.quantiles(accuracies, n=4, method="inclusive")
    return (
        f"test accuracy of {len(accuracies)} runs: {min(accuracies):.2%} to {max(accuracies):.2%}, "
        f"median {middle:.2%}, quartiles {low:.2%} and {high:.2%}"
    )


def write_state(out: Path, rows: Sequence[Row], costs: Sequence[Cost]) -> None:
    """`sweep.json`, whole or not at all."""
    write_json(out / "sweep.json", document(rows, costs))


def write_pictures(out: Path, rows: Sequence[Row], costs: Sequence[Cost]) -> None:
    """`sweep.md`, and `sweep.png` where two runs at least are done."""
    parts = ["# Sweep", table(rows), summary(rows), *(f"{cost}." for cost in costs), notes(costs)]
    write_text(out / "sweep.md", "\n\n".join(part for part in parts if part) + "\n")
    names = [name for name in varying(rows) if name != "seed"]
    done = [row for row in rows if row.accuracy is not None]
    if len(done) > 1 and names:
        _plot(out / "sweep.png", done, names, costs)


def _plot(path: Path, done: Sequence[Row], names: Sequence[str], costs: Sequence[Cost]) -> None:
    """A panel for every field: each run a point, and the median over all other fields."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(1.2 + 3.6 * max(columns, 1.7), 0.9 + 3.0 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for axes in list(grid.flat)[len(names) :]:
        axes.remove()
    for axes, name in zip(grid.flat, names, strict=False):
        values = sorted({_value(row, name) for row in done}, key=_order)
        groups = [[100 * (row.accuracy or 0.0) for row in done if _value(row, name) == value] for value in values]
        for place, group in enumerate(groups):
            spread = [place + 0.24 * (i + 0.5) / len(group) - 0.12 for i in range(len(group))]
            axes.plot(spread, group, "o", color="tab:blue", markersize=3.5, alpha=0.6)
        middles = [statistics.median(group) for group in groups]
        axes.plot(range(len(values)), middles, color="tab:orange", linewidth=1.5, label="median", zorder=0)
        axes.set_xticks(range(len(values)), [_word(value) for value in values])
        axes.set_xlim(-0.5, len(values) - 0.5)
        axes.set_xlabel(name)
        axes.yaxis.set_major_formatter(PercentFormatter(decimals=None))
        axes.grid(alpha=0.3)
    for line in grid:
        line[0].set_ylabel("test accuracy")
    grid.flat[0].legend(frameon=False, fontsize="small")
    title = "\n".join(map(str, costs))
    seeded = any(cost.seeded for cost in costs)
    if seeded:
        title += "\nNOT PRIVATE: the noise is seeded"
    figure.suptitle(title, fontsize="small", color="tab:red" if seeded else "black")
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=130))


def _value(row: Row, name: str) -> Any:
    return row.config.to_dict()[name]


def _order(value: Any) -> tuple[int, float, str]:
    """None first, then numbers, then words."""
    if value is None:
        return (0, 0.0, "")
    return (1, float(value), "") if isinstance(value, (int, float)) else (2, 0.0, str(value))


def _word(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
