"""The zoo's rows as lines, as a table and as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.zoo.measure import CLIPPING, Row
from benchmarks.zoo.models import MODELS
from dpkernels.bench import StepResult
from dpkernels.bench.step import OURS
from dpkernels.training.files import write_atomically

PEERS = {"opacus-hooks": "Opacus, hooks", "opacus-ghost": "Opacus, ghost", "vmap": "vmap"}


def line(row: Row) -> str:
    """What is printed of a row once it is measured."""
    cells = [f"{row.model:<20}", f"{_ratio(row, OURS):>6}", f"{_ratio(row, CLIPPING):>6}", f"{_memory(row, OURS):>7}"]
    cells += [f"{name} {_ratio(row, name)}" for name in PEERS if name in row.results]
    ours = row.results.get(OURS)
    failure = row.failure or (ours.failure if ours else None)
    cells += [f"{_exact(row):>9}", _slow(row), f"failed: {failure}" if failure else ""]
    return "  ".join(cell for cell in cells if cell)


HEADER = f"{'model':<20}  {'ratio':>6}  {'clip':>6}  {'memory':>7}  deviation  slow operations"


def table(rows: Sequence[Row], document: dict[str, Any]) -> str:
    """Markdown: what the rows were measured on, with and how; the rows; and what they have in common."""
    machine, versions = document["machine"], document["versions"]
    peers = [name for name in PEERS if any(name in row.results for row in rows)]
    columns = ["model", "batch", "parameters", "ordinary, ms", "dpkernels", "quartiles", "no noise or update", "memory"]
    columns += [PEERS[name] for name in peers]
    columns += ["deviation", "slow operations"]
    lines = [
        f"{machine['processor']}, {machine['threads']} threads, {machine['instruction_set']}; "
        f"{document['repeats']} rounds; {document['date']}",
        "",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
        "",
        f"| {' | '.join(columns)} |",
        f"| {' | '.join(['---'] + ['---:'] * (len(columns) - 2) + ['---'])} |",
    ]
    for row in rows:
        ours = row.results.get(OURS)
        timed = ours is not None and ours.ratio is not None
        cells = [
            f"{row.model}: {MODELS[row.model].what}",
            f"{row.batch}",
            "" if row.parameters is None else f"{row.parameters:,}",
            f"{ours.ordinary_ms:.1f}" if timed else "",
            f"**{_ratio(row, OURS)}**",
            f"{ours.ratio_low:.2f} to {ours.ratio_high:.2f}" if timed else "",
            _ratio(row, CLIPPING),
            _memory(row, OURS),
            *(
                f"{_ratio(row, name)} ({_memory(row, name)})" if _done(row, name) else _ratio(row, name)
                for name in peers
            ),
            _exact(row),
            _slow(row),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *_summary(rows, peers)]) + "\n"


def _summary(rows: Sequence[Row], peers: Sequence[str]) -> list[str]:
    ratios = {row.model: result.ratio for row in rows if (result := _done(row, OURS)) and result.ratio is not None}
    if not ratios:
        return []
    best, worst = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
    text = [
        f"dpkernels, {len(ratios)} of {len(rows)} models: median {statistics.median(ratios.values()):.2f}, best "
        f"{ratios[best]:.2f} ({best}), worst {ratios[worst]:.2f} ({worst})."
    ]
    for name in peers:
        both = [(found.ratio, ratios[row.model]) for row in rows if (found := _done(row, name)) and row.model in ratios]
        quicker = sum(theirs < ours for theirs, ours in both)
        median = f", median {statistics.median(theirs for theirs, _ in both):.2f}" if both else ""
        text.append(f"{PEERS[name]} trains {len(both)} of them{median}, and is faster on {quicker}.")
    return text


def _done(row: Row, engine: str) -> StepResult | None:
    found = row.results.get(engine)
    return None if found is None or found.ratio is None else found


def _ratio(row: Row, engine: str) -> str:
    found = row.results.get(engine)
    if found is None:
        return ""
    return "fails" if found.ratio is None else f"{found.ratio:.2f}"


def _memory(row: Row, engine: str) -> str:
    found = row.results.get(engine)
    return "" if found is None or found.memory_ratio is None else f"{found.memory_ratio:.2f}"


def _exact(row: Row) -> str:
    if row.exact is None:
        return "fails" if row.failure else ""
    both = [row.exact["deviation"], row.exact["ordinary_deviation"]]
    if both[1] is None:
        return f"{both[0]:.0e} (losses alone)"
    return f"{max(both):.0e}"


def _slow(row: Row) -> str:
    return ", ".join(row.slow or [])


def plot(rows: Sequence[Row], path: Path, title: str = "") -> None:
    """A line for each model, the slowest below: its ratio with quartiles, without noise and update, and its memory; as
    a PNG file.

    Raises:
        ValueError: no row has a ratio.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    drawn = [(row, result) for row in rows if (result := _done(row, OURS))]
    if not drawn:
        raise ValueError("rows must hold a ratio, got none")
    drawn.sort(key=lambda pair: pair[1].ratio or 0.0)
    places = range(len(drawn))
    figure = Figure(figsize=(10, 1.8 + 0.2 * len(drawn)), layout="constrained")
    FigureCanvasAgg(figure)
    time, memory = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    ratios = [result.ratio or 0.0 for _, result in drawn]
    spread = [
        [result.ratio - low for _, result in drawn if result.ratio and (low := result.ratio_low or result.ratio)],
        [high - result.ratio for _, result in drawn if result.ratio and (high := result.ratio_high or result.ratio)],
    ]
    time.barh(places, ratios, 0.7, xerr=spread, color="C0", ecolor="dimgray", label="dpkernels")
    _dots(time, drawn, CLIPPING, "k|", "without noise and update")
    for k, (name, label) in enumerate(PEERS.items(), start=1):
        _dots(time, drawn, name, f"C{k}.", label)
    for axes in (time, memory):
        axes.axvline(1, color="black", linewidth=1, linestyle="--", zorder=0)
        axes.grid(axis="x", alpha=0.3)
    highest = max(found.ratio or 0.0 for row, _ in drawn for found in row.results.values())
    if highest > 5:
        time.set_xscale("log")
        time.xaxis.set_major_locator(FixedLocator([m * 10**power for power in range(-1, 4) for m in (1, 2, 5)]))
        time.xaxis.set_minor_locator(NullLocator())
        time.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        time.set_xlim(min(0.5, 0.8 * min(ratios)), 1.3 * highest)
    else:
        time.set_xlim(0, 1.1 * highest)
    memory.barh(places, [result.memory_ratio or 0.0 for _, result in drawn], 0.7, color="C0")
    time.set_yticks(places, [row.model for row, _ in drawn], fontsize=8)
    time.set_ylim(len(drawn) - 0.4, -0.6)
    time.set_xlabel("time of a step / ordinary step")
    memory.set_xlabel("peak memory / ordinary step")
    figure.suptitle(title, fontsize="medium")
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=130))


def _dots(axes: Any, drawn: Sequence[tuple[Row, StepResult]], engine: str, style: str, label: str) -> None:
    found = [(k, result.ratio) for k, (row, _) in enumerate(drawn) if (result := _done(row, engine))]
    if found:
        axes.plot([ratio for _, ratio in found], [k for k, _ in found], style, label=label)
