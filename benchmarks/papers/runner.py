"""What the papers' experiments share: runs a few seeds of each row, and tells how they compare.

A run lies in OUT/EXPERIMENT/ROW/SEED as `dpkernels train` leaves it. What is there is not run again, and what was
broken off is gone on with. Seeds make runs reproducible and not private: the data is public here.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpkernels.data import ImageDataset, load_dataset
from dpkernels.training import Execution, RunFolder, default_progress, resolve, train


@dataclass(frozen=True)
class Row:
    """One configuration. fields: of `dpkernels.training.TrainConfig`. paper: the test accuracy that the paper reports,
    in percent, and its standard deviation where it has one."""

    name: str
    fields: dict[str, Any] = field(hash=False)
    paper: tuple[float, float | None] | None = None


Experiments = Mapping[str, Callable[[], list[Row]]]


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


def summaries(experiments: Experiments, out: Path) -> Iterator[dict[str, Any]]:
    """What lies in `out`, a line a row: mean and standard deviation over seeds, in percent, beside the paper's."""
    for experiment, rows in experiments.items():
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
        paper = "-" if line["paper"] is None else _with_deviation(*line["paper"], digits=1)
        ours = _with_deviation(line["accuracy"], line["deviation"], digits=2)
        sigma, epsilon = f"{line['noise_multiplier']:.3f}", f"{line['epsilon']:.3f}"
        cells = [line["experiment"], line["row"], paper, ours, str(line["seeds"]), sigma, epsilon]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def _with_deviation(value: float, deviation: float | None, digits: int) -> str:
    return f"{value:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def main(description: str | None, name: str, experiments: Experiments) -> None:
    """The command line of the paper `name`, from the process's arguments to the table on the standard output."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", nargs="*", help=", ".join(experiments))
    parser.add_argument("--rows", nargs="+", default=[""], metavar="WORD", help="only rows whose name has one of these")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs") / name)
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what lies in --out as JSON")
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.experiment) - set(experiments):
        parser.error(f"experiment must be one of {', '.join(experiments)}, got {', '.join(sorted(unknown))}")
    data: dict[str, ImageDataset] = {}
    for seed in range(options.seeds):  # a first result of every row soon
        for experiment in options.experiment:
            for row in experiments[experiment]():
                if any(word in row.name for word in options.rows):
                    print(f"{experiment}: {row.name}, seed {seed}", flush=True)
                    if not run(row, seed, options.out / experiment / row.name / str(seed), data, options.quiet):
                        return
    lines = list(summaries(experiments, options.out))
    print(table(lines))
    if options.report:
        options.report.write_text(json.dumps(lines, indent=1) + "\n")
