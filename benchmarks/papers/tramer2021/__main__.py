"""Runs the paper's experiments, a few seeds each, and tells how they compare.

    python -m benchmarks.papers.tramer2021 accuracy --rows cifar10 --seeds 3 --out runs/tramer2021
    python -m benchmarks.papers.tramer2021 --report benchmarks/results/tramer2021.json --out runs/tramer2021

A run lies in OUT/EXPERIMENT/ROW/SEED as `dpkernels train` leaves it. What is there is not run again, and what was
broken off is gone on with. Seeds make runs reproducible and not private: the data is public here.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.papers.tramer2021.experiments import EXPERIMENTS, Row
from dpkernels.data import ImageDataset, load_dataset
from dpkernels.training import Execution, RunFolder, default_progress, resolve, train


def run(row: Row, seed: int, path: Path, data: dict[str, ImageDataset], quiet: bool) -> bool:
    """Train one row with one seed, or go on with it; False where it was stopped."""
    folder = RunFolder(path)
    if folder.metrics.exists() and json.loads(folder.metrics.read_text())["complete"]:
        return True
    name = row.fields["dataset"]
    if name not in data:
        data[name] = load_dataset(name)
    if folder.exists:
        folder.reclaim()
        config, plan = folder.read_config()
    else:
        config = resolve(data[name], row.fields | {"seed": seed})
        folder.claim()
        plan = config.plan()
    result = train(
        config,
        plan,
        data[name],
        folder,
        resume=folder.exists,
        execution=Execution(physical_batch_size=512),
        progress=default_progress(quiet),
    )
    return result.stopped_by is None


def summaries(out: Path) -> Iterator[dict[str, Any]]:
    """What lies in `out`, a line a row: mean and standard deviation over seeds, in percent, beside the paper's."""
    for experiment, rows in EXPERIMENTS.items():
        for row in rows():
            done = [
                json.loads(file.read_text()) for file in sorted((out / experiment / row.name).glob("*/metrics.json"))
            ]
            done = [metrics for metrics in done if metrics["complete"]]
            if done:
                accuracies = [100 * metrics["test_accuracy"] for metrics in done]
                yield {
                    "experiment": experiment,
                    "row": row.name,
                    "paper": row.paper,
                    "accuracy": round(statistics.mean(accuracies), 2),
                    "deviation": round(statistics.stdev(accuracies), 2) if len(done) > 1 else None,
                    "seeds": len(done),
                    "noise_multiplier": round(done[0]["noise_multiplier"], 4),
                    "epsilon": round(done[0]["epsilon"], 4),
                    "steps": done[0]["steps"],
                    "seconds": round(statistics.mean(metrics["seconds"] for metrics in done)),
                }


def table(lines: list[dict[str, Any]]) -> str:
    """As Markdown."""
    text = [
        "| experiment | row | paper | ours | seeds | sigma | epsilon |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for line in lines:
        paper = "-" if line["paper"] is None else f"{line['paper'][0]:.1f} ± {line['paper'][1]:.1f}"
        ours = f"{line['accuracy']:.2f}" + ("" if line["deviation"] is None else f" ± {line['deviation']:.2f}")
        sigma, epsilon = f"{line['noise_multiplier']:.3f}", f"{line['epsilon']:.3f}"
        cells = [line["experiment"], line["row"], paper, ours, str(line["seeds"]), sigma, epsilon]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", nargs="*", help=", ".join(EXPERIMENTS))
    parser.add_argument("--rows", nargs="+", default=[""], metavar="WORD", help="only rows whose name has one of these")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/tramer2021"))
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what lies in --out as JSON")
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.experiment) - set(EXPERIMENTS):
        parser.error(f"experiment must be one of {', '.join(EXPERIMENTS)}, got {', '.join(sorted(unknown))}")
    data: dict[str, ImageDataset] = {}
    for seed in range(options.seeds):  # a first result of every row soon
        for experiment in options.experiment:
            for row in EXPERIMENTS[experiment]():
                if any(word in row.name for word in options.rows):
                    print(f"{experiment}: {row.name}, seed {seed}", flush=True)
                    if not run(row, seed, options.out / experiment / row.name / str(seed), data, options.quiet):
                        return
    lines = list(summaries(options.out))
    print(table(lines))
    if options.report:
        options.report.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
