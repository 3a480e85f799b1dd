"""Whether the choice of a convolution's norm stays right over batch and map sizes, and its cost linear in the batch.

    python -m benchmarks.sweep [--threads 2] [--out benchmarks/results/sweep]

Each way to get norms and clipped sum of a 3x3 convolution is timed, interleaved, minimum of several: direct norms with
stored gradients, direct norms and a second pass, Gram norms and a second pass, and what the cost model chooses.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dpkernels.bench.machine import machine
from dpkernels.ops.clip import weighted_row_sum
from dpkernels.ops.conv import conv_clipped_sums, conv_squared_norms

GEOMETRY: dict[str, Any] = {"kernel_size": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
WAYS: dict[str, dict[str, Any]] = {
    "stored": {"store": True},
    "direct": {"store": False, "strategy": "direct"},
    "gram": {"store": False, "strategy": "gram"},
    "chosen": {"store": None},
}
BATCHES = [(batch, 64, 8) for batch in (1, 4, 16, 64, 256, 1024, 4096)]
MAPS = [
    (batch, channels, size)
    for channels in (16, 64, 256)
    for size, batch in ((4, 128), (8, 64), (16, 32), (32, 8), (64, 2))
]
MOST_PAIRS = 2**28  # of positions, over the batch: a Gram norm beyond them is not worth waiting for


def both_passes(batch: int, channels: int, size: int, way: dict[str, Any]) -> Callable[[], None]:
    x, g = torch.randn(batch, channels, size, size), torch.randn(batch, channels, size, size)
    weights = torch.rand(batch, dtype=torch.float64)

    def run() -> None:
        _, stored, _ = conv_squared_norms(x, g, bias=False, **way, **GEOMETRY)
        if stored is None:
            conv_clipped_sums(x, g, weights, bias=False, **GEOMETRY)
        else:
            weighted_row_sum(stored.movedim(1, -1).flatten(1), weights)

    return run


def measure(batch: int, channels: int, size: int, seconds: float) -> dict[str, float]:
    """Milliseconds of each way."""
    ways = {
        name: both_passes(batch, channels, size, way)
        for name, way in WAYS.items()
        if name != "gram" or batch * size**4 <= MOST_PAIRS
    }
    best = dict.fromkeys(ways, float("inf"))
    for run in ways.values():
        run()
    start, rounds = time.perf_counter(), 0
    while rounds < 5 or time.perf_counter() - start < seconds:
        rounds += 1
        for name, run in ways.items():
            begin = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - begin)
    return {name: 1e3 * value for name, value in best.items()}


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 4)
    groups = [("batch", [r for r in rows if r["sweep"] == "batch"], "64 channels, 8x8 map")]
    groups += [
        ("size", [r for r in rows if r["sweep"] == "map" and r["channels"] == c], f"{c} channels")
        for c in sorted({r["channels"] for r in rows if r["sweep"] == "map"})
    ]
    for axes, (x, points, name) in zip(panels, groups, strict=True):
        for way, style in zip(WAYS, ("C0-", "C1-", "C2-", "k:"), strict=True):
            known = [p for p in points if way in p]
            axes.loglog([p[x] for p in known], [1e3 * p[way] / p["batch"] for p in known], style, marker=".", label=way)
        axes.set_title(name, fontsize="medium")
        axes.set_xlabel("examples" if x == "batch" else "side of the map, pixels")
        axes.set_xticks([p[x] for p in points], [f"{p[x]:g}" for p in points])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(low / 3, high * 3)  # the lines are flat: no room for noise to look like a slope
    panels[0].set_ylabel("norms and clipped sum, us per example")
    panels[1].legend(frameon=False)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="for each point")
    parser.add_argument("--out", type=Path, help="results go to OUT.json and OUT.png")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for sweep, points in (("batch", BATCHES), ("map", MAPS)):
        for batch, channels, size in points:
            times = measure(batch, channels, size, options.seconds)
            fastest = min(times, key=times.__getitem__)
            rows.append({"sweep": sweep, "batch": batch, "channels": channels, "size": size} | times)
            shown = "  ".join(f"{name} {value:.3f}" for name, value in times.items())
            best = min(value for name, value in times.items() if name != "chosen")
            print(
                f"batch {batch:<5} channels {channels:<4} map {size}x{size:<3} ms: {shown}  fastest {fastest}, "
                f"chosen / best {times['chosen'] / best:.2f}",
                flush=True,
            )
    if options.out:
        options.out.with_suffix(".json").write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
        plot(rows, options.out.with_suffix(".png"), f"{machine()['processor']}, {options.threads} threads")


if __name__ == "__main__":
    main()
