"""Zhao et al. 2019: private models, labels that each method asks for, fine-tuning, and how the methods compare.

python -m benchmarks.papers.zhao2019 --seeds 3         what was not made yet, then the table
python -m benchmarks.papers.zhao2019 --plots           the table, and the pictures of docs/results/zhao2019.md

What comes of a pool, method, number of labels and seed is a line in benchmarks/results/zhao2019.jsonl and is not made
again; private models lie in OUT. A run that was broken off goes on with the next line.
"""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path

from benchmarks.papers.runner import RESULTS, Results, Summary
from benchmarks.papers.zhao2019 import plots
from benchmarks.papers.zhao2019.experiments import (
    DELTA,
    LABELS,
    METHODS,
    POOLS,
    Data,
    Seen,
    checkpoint_rows,
    checkpoints,
    features,
    measure,
    rows,
)
from dpkernels.accounting import bound


def run(seeds: int, out: Path, results: Results) -> None:
    """Everything that is not there yet."""
    missing = {seed: [row for row in rows() if results.get(row, seed) is None] for seed in range(1, seeds + 1)}
    if not any(missing.values()):
        return
    sets = features()
    for seed, left in missing.items():
        if not left:
            continue
        data = Data.of(seed, *sets)
        models = checkpoints(seed, data, out / f"private-{seed}.pt")
        for name, row in checkpoint_rows().items():
            if results.get(row, seed) is None:
                epsilon = bound([models[name].spent], DELTA).upper
                line = {"fields": row.fields, "variant": "", "seed": seed, "epsilon": round(epsilon, 4)}
                results.add(line | {"accuracy": round(100 * models[name].accuracy, 2)})

        @cache
        def seen(name: str, pool: str, models=models, data=data) -> Seen:
            return Seen(models[name].model, data.pools[pool], data.private)

        for row in left:
            name = "near" if row.fields["method"].startswith("Near") else "free"
            record = measure(row, seed, models[name], lambda name=name, row=row: seen(name, row.fields["pool"]), data)
            results.add(record)
            print(f"seed {seed}: {row.name} labels: {record['accuracy']:.2f}", flush=True)


def table(results: Results) -> str:
    """What is there, as Markdown."""
    lines = []
    for name, row in checkpoint_rows().items():
        if runs := results.of(row):
            accuracy = Summary.of(run["accuracy"] for run in runs)
            lines.append(f"checkpoint {name}: {accuracy} at epsilon {runs[0]['epsilon']:.3f}, {len(runs)} seeds")
    lines += ["", f"| pool | method | epsilon |{''.join(f' {count} |' for count in LABELS)} not digits, of 1000 |"]
    lines.append("| --- " * (len(LABELS) + 4) + "|")
    found = {(row.fields["pool"], row.fields["method"], row.fields["labels"]): results.of(row) for row in rows()}
    for pool in POOLS:
        for method in METHODS:
            cells = [found[pool, method, count] for count in LABELS]
            if all(cells):
                means = [str(Summary.of(run["accuracy"] for run in runs)) for runs in cells]
                dirt = Summary.of(run["pollution"] for run in cells[LABELS.index(1000)])
                epsilon = max(run["epsilon"] for run in cells[0])
                shown = [pool, method, f"{epsilon:.3f}", *means, "-" if dirt is None else f"{dirt.mean:.1f}%"]
                lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/zhao2019"), help="where private models lie")
    parser.add_argument("--results", type=Path, default=RESULTS / "zhao2019.jsonl", help="what came of the runs")
    parser.add_argument("--plots", action="store_true", help="make the pictures too")
    options = parser.parse_args()
    results = Results(options.results)
    run(options.seeds, options.out, results)
    print(table(results))
    if options.plots:
        plots.curves(results)
        plots.chosen(options.out)


if __name__ == "__main__":
    main()
