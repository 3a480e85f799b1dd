"""Measured steps as lines, as a JSON document and as a picture."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpkernels.bench.machine import machine, versions
from dpkernels.bench.step import StepResult
from dpkernels.training.files import write_atomically

HEADER = (
    f"{'model':<19}{'engine':<16}{'ordinary':>10}{'private':>10}{'ratio':>8}  {'quartiles':<14}{'memory':>8}"
    f"{'dpkernels is':>15}"
)


def line(result: StepResult) -> str:
    """A row of the table under :data:`HEADER`."""
    name = f"{result.model:<19}{result.engine:<16}"
    if result.failure is not None:
        return f"{name}failed: {result.failure}"
    memory = "-" if result.memory_ratio is None else f"{result.memory_ratio:.2f}x"
    speed_up = "" if result.speed_up is None else f"{result.speed_up:.2f}x as fast"
    quartiles = f"{result.ratio_low:.2f}-{result.ratio_high:.2f}"
    return (
        f"{name}{result.ordinary_ms:>8.1f}ms{result.ms:>8.1f}ms{result.ratio:>8.2f}  {quartiles:<14}{memory:>8}"
        f"{speed_up:>15}"
    ).rstrip()


def conditions(threads: int) -> dict[str, Any]:
    """What a measurement was taken on, with and when."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": {**machine(), "threads": threads},
        "versions": versions(),
    }


def document(
    results: Sequence[StepResult], *, threads: int, seconds: float, channels_last: bool = False
) -> dict[str, Any]:
    """What `step.json` holds."""
    rows = [{**dataclasses.asdict(result), "memory_ratio": result.memory_ratio} for result in results]
    return {**conditions(threads), "seconds": seconds, "channels_last": channels_last, "results": rows}


def plot(results: Sequence[StepResult], path: Path, *, title: str = "") -> None:
    """Bars of the ratio to the ordinary step with its quartiles, a group for each model, as a PNG file.

    Raises:
        ValueError: no result has a ratio.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    drawn = [r for r in results if r.ratio is not None and r.ratio_low is not None and r.ratio_high is not None]
    if not drawn:
        raise ValueError("results must hold a ratio, got none")
    models = list(dict.fromkeys(r.model for r in drawn))
    engines = list(dict.fromkeys(r.engine for r in drawn))
    highest = max(r.ratio_high or 0.0 for r in drawn)
    lowest = min(r.ratio_low or 1.0 for r in drawn)
    width = 0.84 / len(engines)
    inches = max(6.4, 1.2 + 0.44 * len(models) * (len(engines) + 0.6))
    figure = Figure(figsize=(inches, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if highest > 8:
        axes.set_yscale("log")
        ticks = [value * 10**power for power in range(-2, 4) for value in (1, 2, 5)]
        axes.yaxis.set_major_locator(FixedLocator(ticks))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_ylim(min(0.5, 0.8 * lowest), 1.6 * highest)
    else:
        axes.set_ylim(0, 1.2 * highest)
    for k, engine in enumerate(engines):
        mine = [r for r in drawn if r.engine == engine]
        heights = [r.ratio or 0.0 for r in mine]
        spread = [
            [h - (r.ratio_low or h) for h, r in zip(heights, mine, strict=True)],
            [(r.ratio_high or h) - h for h, r in zip(heights, mine, strict=True)],
        ]
        places = [models.index(r.model) + (k - (len(engines) - 1) / 2) * width for r in mine]
        bars = axes.bar(places, heights, 0.92 * width, yerr=spread, color=f"C{k}", label=engine, ecolor="dimgray")
        axes.bar_label(bars, labels=[f"{h:.2f}" if h < 10 else f"{h:.0f}" for h in heights], fontsize=7, padding=2)
    axes.axhline(1, color="black", linewidth=1, linestyle="--", zorder=0)
    axes.margins(x=0.02)
    axes.set_xticks(range(len(models)), [f"{m}\nbatch {_batch(drawn, m)}" for m in models])
    axes.set_ylabel("time of a step / ordinary step")
    axes.set_title(title, fontsize="medium")
    figure.legend(loc="outside lower center", ncols=min(len(engines), int(inches / 1.8)), frameon=False)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=150))


def _batch(results: Sequence[StepResult], model: str) -> int:
    return next(r.batch for r in results if r.model == model)
