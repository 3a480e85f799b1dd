"""Whether the choice of a convolution's way stays right over batch and map sizes, and its cost linear in the batch.

    python -m benchmarks.sweep [--threads 2] [--out benchmarks/results/sweep]

Norms and clipped sum of a 3x3 convolution by every way, interleaved, as `dpkernels bench --explain` measures them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpkernels.bench import LayerChoice
from dpkernels.bench.choices import choice
from dpkernels.bench.machine import machine
from dpkernels.clipping import GhostClipper
from dpkernels.layers import Record
from dpkernels.training.files import write_atomically, write_json

STYLES = {"stored": "C0-", "direct": "C1-", "gram": "C2-"}
BATCHES = [(batch, 64, 8) for batch in (1, 4, 16, 64, 256, 1024, 4096)]
MAPS = [
    (batch, channels, size)
    for channels in (16, 64, 256)
    for size, batch in ((4, 128), (8, 64), (16, 32), (32, 8), (64, 2))
]


def measure(batch: int, channels: int, size: int, seconds: float) -> LayerChoice:
    """What is chosen for a convolution on [batch, channels, size, size], and what each way takes."""
    model, x = (
        nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False)),
        torch.randn(batch, channels, size, size),
    )
    seen: list[Record] = []
    with GhostClipper(model, 1.0) as clipper:
        clipper.observer = lambda record, names: seen.append(record)
        clipper.backward((model(x) * torch.randn_like(x)).sum((1, 2, 3)))
    return choice(seen[0], seconds)


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
        for way, style in {**STYLES, "chosen": "k:"}.items():
            times = [1e3 * p["ms"][p["chosen"] if way == "chosen" else way] / p["batch"] for p in points]
            axes.loglog([p[x] for p in points], times, style, marker=".", label=way)
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
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=130))


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
            found = measure(batch, channels, size, options.seconds)
            ms = {name: way.ms for name, way in found.ways.items()}
            point = {"sweep": sweep, "batch": batch, "channels": channels, "size": size}
            rows.append({**point, "chosen": found.chosen, "ms": ms})
            shown = "  ".join(f"{'*' if name == found.chosen else ''}{name} {value:.3f}" for name, value in ms.items())
            print(
                f"batch {batch:<5} channels {channels:<4} map {size}x{size:<3} ms: {shown}  "
                f"chosen / best {1 + found.excess:.2f}",
                flush=True,
            )
    if options.out:
        write_json(options.out.with_suffix(".json"), {"machine": machine(), "rows": rows})
        plot(rows, options.out.with_suffix(".png"), f"{machine()['processor']}, {options.threads} threads")


if __name__ == "__main__":
    main()
