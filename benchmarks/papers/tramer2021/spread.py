"""Table 3: how far the test accuracy of one model spreads over the hyper-parameters of a search.

    python -m benchmarks.papers.tramer2021.spread --out runs/tramer2021-spread                  # a sample of the grid
    python -m benchmarks.papers.tramer2021.spread --full --processes 16 --out runs/...          # all of it

The grid is that of Table 12. The sample is drawn from it at random, and with `--epochs` every run is shortened to as
many, at the same epsilon of 3. Runs lie in OUT as `dpkernels sweep` leaves them: the same command goes on, and a larger
sample keeps what a smaller one has.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpkernels.search import Point, run_sweep
from dpkernels.search.sweep_progress import SweepProgress
from dpkernels.search.sweep_report import Cost, Row, table
from dpkernels.training import Execution, recipe

BATCH_SIZES = (512, 1024, 2048, 4096, 8192, 16384)
BASE_RATES = {"mnist": (1 / 4, 1 / 2, 1, 2), "fashion-mnist": (1 / 4, 1 / 2, 1, 2), "cifar10": (1 / 8, 1 / 4, 1 / 2, 1)}
EPOCHS = {"mnist": (15, 25, 40), "fashion-mnist": (15, 25, 40), "cifar10": (30, 60, 120)}
NORMALIZATIONS: dict[str, dict[str, Any]] = {
    **{f"groups={g}": {"normalization": "group", "groups": g} for g in (9, 27, 81)},
    **{f"norm={s}": {"normalization": "private", "norm_noise_multiplier": float(s)} for s in (6, 8)},
}
PAPER = {  # minimum, maximum, median and median absolute deviation, in percent
    ("mnist", "scatternet-linear"): (96.8, 98.8, 98.4, 0.2),
    ("mnist", "scatternet-cnn"): (95.6, 98.8, 98.1, 0.3),
    ("mnist", "cnn"): (86.1, 98.2, 97.4, 0.5),
    ("fashion-mnist", "scatternet-linear"): (85.3, 89.8, 88.7, 0.5),
    ("fashion-mnist", "scatternet-cnn"): (77.8, 89.1, 87.2, 1.0),
    ("fashion-mnist", "cnn"): (20.2, 86.2, 83.6, 1.8),
    ("cifar10", "scatternet-linear"): (59.5, 67.0, 65.4, 0.9),
    ("cifar10", "scatternet-cnn"): (57.3, 69.5, 66.9, 1.6),
    ("cifar10", "cnn"): (39.4, 59.2, 52.5, 5.4),
}


def points(dataset: str, kind: str, *, epochs: float | None = None, seed: int = 0) -> list[Point]:
    """The whole grid in an order that is random and always the same: its beginning is a sample of it."""
    base = recipe(f"tramer2021-{dataset}-{kind}")
    for name in ("normalization", "groups", "norm_noise_multiplier"):
        base.pop(name, None)
    norms = {"": {}} if kind == "cnn" else NORMALIZATIONS
    found = []
    for batch, rate, length, norm in itertools.product(BATCH_SIZES, BASE_RATES[dataset], EPOCHS[dataset], norms):
        fields = base | norms[norm] | {"batch_size": batch, "lr": rate * batch / 512, "seed": seed}
        passes = length if epochs is None else epochs
        name = ",".join(part for part in (f"batch={batch}", f"rate={rate:g}", f"epochs={passes:g}", norm) if part)
        found.append(Point(name, fields | {"epochs": float(passes)}))
    found = list({point.name: point for point in found}.values())  # one length leaves a third of them
    random.Random(0).shuffle(found)
    return found


def spread(accuracies: Sequence[float]) -> dict[str, float]:
    """Minimum, maximum, median, median absolute deviation and quartiles, in percent."""
    low, middle, high = statistics.quantiles(accuracies, n=4, method="inclusive")
    away = statistics.median(abs(value - middle) for value in accuracies)
    values = {"min": min(accuracies), "max": max(accuracies), "median": middle, "MAD": away, "q1": low, "q3": high}
    return {name: round(100 * value, 2) for name, value in values.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="mnist", choices=EPOCHS)
    parser.add_argument("--model", default="scatternet-linear", choices=("scatternet-linear", "scatternet-cnn", "cnn"))
    parser.add_argument("--sample", type=int, default=16, metavar="N", help="points of the grid (default 16)")
    parser.add_argument("--full", action="store_true", help="the whole grid")
    parser.add_argument("--epochs", type=float, metavar="E", help="of every run, instead of those of the grid")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/tramer2021-spread"))
    options = parser.parse_args(arguments)
    chosen = points(options.dataset, options.model, epochs=options.epochs)
    if not options.full:
        chosen = chosen[: options.sample]

    def begin(rows: Sequence[Row], costs: Sequence[Cost]) -> SweepProgress:
        return SweepProgress(rows, bar=sys.stderr.isatty())

    execution = Execution(physical_batch_size=512)
    options.out.mkdir(parents=True, exist_ok=True)
    result = run_sweep(chosen, options.out, processes=options.processes, execution=execution, begin=begin)
    names = {point.name for point in chosen}
    rows = [row for row in result.rows if row.name in names]
    accuracies = [row.accuracy for row in rows if row.accuracy is not None]
    print(table(rows))
    if len(accuracies) > 1:
        print(f"ours, {len(accuracies)} runs: {spread(accuracies)}")
    low, high, middle, away = PAPER[options.dataset, options.model]
    print(f"paper, the whole grid: min {low}, max {high}, median {middle}, MAD {away}")
    return 0 if len(accuracies) == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
