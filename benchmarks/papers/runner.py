"""Makes the runs of a paper's experiments and keeps what came of them.

A paper's package calls `main` with its experiments. A run is a row of fields of `TrainConfig` and a seed. What comes of
it is a line in benchmarks/results/PAPER.jsonl; a run whose line is there, with the same fields and seed, is not made
again, whatever experiment asked for it. The run itself lies in OUT as `dpkernels train` leaves it, and one that was
broken off is gone on with. Several processes may work at once: each takes the next run that nobody has. Seeds make runs
reproducible and not private: the data is public here.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpkernels.accounting import LedgerLockedError
from dpkernels.data import ImageDataset, load_dataset
from dpkernels.training import RunFolder, default_progress, resolve, train

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Row:
    """One configuration.

    paper: the test accuracy that the paper reports, in percent, and its standard deviation where it has one. variant:
    how the run departs from what `dpkernels.training` does with these fields, by a name that the paper's package knows.
    """

    name: str
    fields: dict[str, Any] = field(hash=False)
    paper: tuple[float, float | None] | None = None
    variant: str = ""


Experiments = Mapping[str, Callable[[], list[Row]]]


class Results:
    """Runs that were made, by fields and seed, in a file of one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                self._records[_key(record["fields"], record["variant"], record["seed"])] = record

    def add(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(record) + "\n")
        self._records[_key(record["fields"], record["variant"], record["seed"])] = record

    def get(self, row: Row, seed: int) -> dict[str, Any] | None:
        return self._records.get(_key(row.fields, row.variant, seed))

    def of(self, row: Row) -> list[dict[str, Any]]:
        """All seeds of `row`, the first one first."""
        mine = [
            record
            for record in self._records.values()
            if (record["fields"], record["variant"]) == (row.fields, row.variant)
        ]
        return sorted(mine, key=lambda record: int(record["seed"]))


@dataclass(frozen=True)
class Summary:
    """Accuracies in percent: mean, and standard deviation where there are several seeds."""

    mean: float
    deviation: float | None
    seeds: int = 1

    @classmethod
    def of(cls, accuracies: Iterable[float | None]) -> Summary | None:
        values = [value for value in accuracies if value is not None]
        if not values:
            return None
        return cls(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.deviation is None else f" ± {self.deviation:.2f}")


def table(experiments: Experiments, results: Results) -> str:
    """What is there, as Markdown: the last step's weights, and their moving average where the run kept one."""
    lines = [
        "| experiment | row | paper | ours | ours, averaged weights | seeds | sigma | epsilon |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for experiment, rows in experiments.items():
        for row in rows():
            if runs := results.of(row):
                paper = "-" if row.paper is None else str(Summary(*row.paper))
                last, averaged = (Summary.of(run[name] for run in runs) for name in ("last", "averaged"))
                sigma, epsilon = f"{runs[0]['noise_multiplier']:.3f}", f"{runs[0]['epsilon']:.3f}"
                cells = [experiment, row.name, paper, last, averaged or "-", len(runs), sigma, epsilon]
                lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def make(row: Row, seed: int, path: Path, data: ImageDataset, quiet: bool) -> dict[str, Any] | None:
    """Train one row with one seed in `path`, or go on with it; None where it was stopped."""
    folder = RunFolder(path)
    resume = folder.exists
    if resume:
        folder.reclaim()
        config, plan = folder.read_config()
    else:
        config = resolve(data, row.fields | {"seed": seed})
        folder.claim()
        plan = config.plan()
    result = train(config, plan, data, folder, resume=resume, progress=default_progress(quiet))
    if result.stopped_by is not None:
        return None
    history = folder.read_history(plan.steps)
    averages = config.averaging is not None
    return {
        "fields": row.fields,
        "variant": row.variant,
        "seed": seed,
        "last": _percent(history[-1].last_iterate_accuracy if averages else history[-1].test_accuracy),
        "averaged": _percent(history[-1].test_accuracy) if averages else None,
        "noise_multiplier": plan.noise_multiplier,
        "epsilon": result.metrics["epsilon"],
        "steps": plan.steps,
        "seconds": round(result.seconds),
        # epoch, epsilon, and both accuracies
        "curve": [
            [
                round(line.epoch, 2),
                None if line.epsilon is None else round(line.epsilon, 4),
                _percent(line.last_iterate_accuracy if averages else line.test_accuracy),
                _percent(line.test_accuracy) if averages else None,
            ]
            for line in history
        ],
    }


@dataclass(frozen=True)
class Paper:
    """What a paper's package brings beside its experiments.

    extras: other things to make from the results, by name, such as plots. variants: what holds while a row of that
    variant runs. datasets: readers of data sets that `load_dataset` does not know.
    """

    name: str
    experiments: Experiments
    extras: Mapping[str, Callable[[Results], object]] = field(default_factory=dict)
    variants: Mapping[str, Callable[[], AbstractContextManager[object]]] = field(default_factory=dict)
    datasets: Mapping[str, Callable[[], ImageDataset]] = field(default_factory=dict)


def main(paper: Paper, description: str | None) -> None:
    """The command line of a paper's package."""
    names = [*paper.experiments, *paper.extras]
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", nargs="*", metavar="EXPERIMENT", help=f"{', '.join(names)} (default: the table)")
    parser.add_argument("--rows", nargs="+", default=[""], metavar="WORD", help="only rows whose name has one of these")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs") / paper.name, help="where runs lie")
    parser.add_argument("--results", type=Path, default=RESULTS / f"{paper.name}.jsonl", help="what came of them")
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.experiment) - set(names):
        parser.error(f"experiment must be one of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    make_all(paper, options)
    results = Results(options.results)
    print(table(paper.experiments, results))
    for name, extra in paper.extras.items():
        if name in options.experiment:
            extra(results)


def make_all(paper: Paper, options: argparse.Namespace) -> None:
    """The runs that are asked for and were not made."""
    data: dict[str, ImageDataset] = {}
    for seed in range(1, options.seeds + 1):  # a first result of every row soon
        for experiment in options.experiment:
            for row in paper.experiments.get(experiment, list)():
                wanted = any(word in row.name for word in options.rows)
                if not wanted or Results(options.results).get(row, seed) is not None:
                    continue
                print(f"{experiment}: {row.name}, seed {seed}", flush=True)
                name = row.fields["dataset"]
                if name not in data:
                    data[name] = paper.datasets[name]() if name in paper.datasets else load_dataset(name)
                path = options.out / _key(row.fields, row.variant, seed)
                try:
                    with paper.variants[row.variant]() if row.variant else nullcontext():
                        record = make(row, seed, path, data[name], options.quiet)
                except (LedgerLockedError, FileExistsError):
                    print("another process makes this run", flush=True)
                    continue
                if record is None:
                    raise SystemExit("stopped: the same command goes on")
                Results(options.results).add(record)


def _key(fields: Mapping[str, Any], variant: str, seed: int) -> str:
    text = json.dumps(dict(sorted(fields.items()))) + variant
    return f"{fields['dataset']}-{hashlib.sha256(text.encode()).hexdigest()[:12]}-{seed}"


def _percent(accuracy: float | None) -> float | None:
    return None if accuracy is None else round(100 * accuracy, 2)


def curve(runs: Sequence[Mapping[str, Any]], which: int) -> tuple[list[float], list[float], list[float]]:
    """Mean over seeds at every epoch that all of them have: epsilon, accuracy, and its standard deviation. which: 2 for
    the last weights, 3 for their average, as in the record's curve."""
    epochs = set.intersection(*({point[0] for point in run["curve"]} for run in runs))
    points = list(zip(*([point for point in run["curve"] if point[0] in epochs] for run in runs), strict=True))
    epsilons = [point[0][1] for point in points]
    accuracies = [[seed[which] for seed in point] for point in points]
    deviations = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in accuracies]
    return epsilons, [statistics.mean(values) for values in accuracies], deviations
