"""A grid of training runs in one folder, and what all of them cost together.

A run lies in OUT/NAME as `train` leaves it. What is complete is not run again, what was broken off is gone on with. The
results of a grid are all looked at, so that all of them are released, however few are published: beside the epsilon of
a run stands that of their composition. It counts every run that lies in OUT, those that stopped early by their plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpkernels.accounting import Plan
from dpkernels.accounting.tuning import all_runs
from dpkernels.data import ImageDataset, load_dataset
from dpkernels.search.sweep_report import Cost, Row, document, write_pictures, write_state
from dpkernels.search.workers import Job, Outcome, Watcher, run_jobs
from dpkernels.training import report
from dpkernels.training.build import features_of
from dpkernels.training.config import TrainConfig, resolve
from dpkernels.training.loop import Execution
from dpkernels.training.run_folder import RunFolder


@dataclass(frozen=True)
class Point:
    """One run of a sweep. name: of its folder. fields: of `TrainConfig`, `dataset` among them."""

    name: str
    fields: Mapping[str, Any]


@dataclass(frozen=True)
class SweepResult:
    """What a sweep left. document: as in `sweep.json`. stopped_by: the signal that ended it early, else None."""

    document: dict[str, Any]
    rows: list[Row]
    costs: list[Cost]
    stopped_by: int | None


def grid(base: Mapping[str, Any], axes: Mapping[str, Sequence[Any]]) -> list[Point]:
    """Every combination of the values of `axes`, over the fields of `base`.

    Raises ValueError for an axis without values or with one value twice.
    """
    for name, values in axes.items():
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name} must have different values to try, one at least, got {list(values)}")
    return [
        Point(",".join(f"{name}={_word(value)}" for name, value in zip(axes, chosen, strict=True)) or "run", fields)
        for chosen in itertools.product(*axes.values())
        for fields in [{**base, **dict(zip(axes, chosen, strict=True))}]
    ]


def _word(value: Any) -> str:
    """A value in the name of a folder."""
    return f"{value:.12g}" if isinstance(value, float) else str(value).strip("/").replace("/", "-")


def run_sweep(
    points: Sequence[Point],
    out: Path,
    *,
    processes: int,
    threads: int = 1,
    data_root: Path | None = None,
    execution: Execution | None = None,
    begin: Callable[[list[Row], list[Cost]], Watcher] | None = None,
    planning: Callable[[int, int], None] | None = None,
) -> SweepResult:
    """Make every run of `points` in `out`, `processes` at a time, and write the table.

    begin: makes what hears how the runs get on, from those that are to be made and what all cost. planning: hears the
    number of the run that is planned, of how many, since calibrating noise takes seconds.

    Raises ValueError where a run lies in `out` under the name of a point but with other values; whatever makes a
    configuration impossible is raised before the first run. A run that fails is reported and does not stop the others.
    """
    jobs = _lay_down(points, out, data_root, execution or Execution(), planning)
    rows = read_rows(out)
    costs = composed(rows)
    waiting = [index for index, row in enumerate(rows) if row.name in jobs and row.state != "done"]
    chosen = [jobs[rows[index].name] for index in waiting]
    prepare_features(chosen)
    shown = begin([rows[index] for index in waiting], costs) if begin else Watcher()
    write_state(out, rows, costs)
    keeper = _Keeper(out, rows, costs, waiting, shown)
    _, stopped_by = run_jobs(chosen, processes=processes, threads=threads, watcher=keeper)
    costs = composed(rows)  # by now all models are known, and how far their noise is from ideal
    write_state(out, rows, costs)
    write_pictures(out, rows, costs)
    complete = all(row.state == "done" for row in rows)
    return SweepResult(document(rows, costs), rows, costs, None if complete else stopped_by)


def _lay_down(
    points: Sequence[Point],
    out: Path,
    data_root: Path | None,
    execution: Execution,
    planning: Callable[[int, int], None] | None,
) -> dict[str, Job]:
    """Folders with a configuration for all `points`; every one is checked before the first is made."""
    if len({point.name for point in points}) < len(points):
        raise ValueError(f"points must have names of their own, got {[point.name for point in points]}")
    data: dict[tuple[str, int | None], ImageDataset] = {}
    configs: list[TrainConfig] = []
    for point in points:
        name, size = key = point.fields["dataset"], point.fields.get("image_size")
        if key not in data:
            data[key] = load_dataset(name, data_root, image_size=size)
        configs.append(resolve(data[key], point.fields))
    jobs: dict[str, Job] = {}
    fresh: list[RunFolder] = []
    plans: dict[tuple[object, ...], Plan] = {}
    for number, (point, config) in enumerate(zip(points, configs, strict=True)):
        if planning:
            planning(number, len(points))
        folder = RunFolder(out / point.name)
        if folder.exists:
            begun, plan = folder.read_config()
            if begun != config:
                old, new = begun.to_dict(), config.to_dict()
                other = ", ".join(f"{name}={new[name]!r} (was {old[name]!r})" for name in new if new[name] != old[name])
                raise ValueError(f"{folder.path} holds a run that keeps what it began with, got {other}")
        else:
            fresh.append(folder)
            plan = plans.get(_decides_plan(config)) or config.plan()
        plans[_decides_plan(config)] = plan
        jobs[point.name] = Job(folder.path, config, plan, data_root, execution)
    for folder in fresh:
        job = jobs[folder.path.name]
        folder.claim()
        folder.write_config(job.config, job.plan, report.versions())
    return jobs


def _decides_plan(config: TrainConfig) -> tuple[object, ...]:
    target = (config.epsilon, config.noise_multiplier, config.delta, config.compose_with)
    return (config.dataset_size, config.batch_size, config.epochs, *target)


def prepare_features(jobs: Sequence[Job]) -> None:
    """Put the features that `jobs` train on into the cache, once, before many processes want them."""
    for name, features, root in dict.fromkeys((it.config.dataset, it.config.features, it.data_root) for it in jobs):
        if features != "none":
            dataset = load_dataset(name, root)
            features_of(features, dataset.input_shape).of(dataset)


def read_rows(out: Path) -> list[Row]:
    """Every run that lies in `out`, by name."""
    rows = []
    for file in sorted(out.glob("*/config.json")):
        folder = RunFolder(file.parent)
        config, plan = folder.read_config()
        metrics = folder.read_metrics()
        if metrics is not None and metrics["complete"]:
            state = "done"
        else:
            state = "broken off" if folder.ledger.exists() else "not begun"
        rows.append(Row(folder.path.name, state, config, plan, metrics))
    return rows


def composed(rows: Sequence[Row]) -> list[Cost]:
    """What all runs cost together by their plans, for every data set; at the smallest delta of its runs."""
    costs = []
    for dataset in dict.fromkeys(row.config.dataset for row in rows):
        own = [row for row in rows if row.config.dataset == dataset]
        delta = min(row.plan.delta for row in own)
        error = sum(row.noise_error for row in own)
        bound = all_runs([event for row in own for event in row.plan.events], delta, runs=1, noise_error=error)
        dearest = max(math.inf if row.epsilon is None else row.epsilon for row in own)
        seeded = any(row.config.seeded for row in own)
        costs.append(Cost(dataset, len(own), dearest, bound.upper, delta, bound.method, seeded))
    return costs


class _Keeper(Watcher):
    """Keeps rows and `sweep.json` up to date, and passes on what it hears."""

    def __init__(self, out: Path, rows: list[Row], costs: list[Cost], places: list[int], shown: Watcher) -> None:
        self._out, self._rows, self._costs, self._places, self._shown = out, rows, costs, places, shown

    def step(self, index: int, step: int) -> None:
        self._shown.step(index, step)

    def ended(self, index: int, outcome: Outcome) -> None:
        place = self._places[index]
        self._rows[place] = self._rows[place].after(outcome)
        write_state(self._out, self._rows, self._costs)
        self._shown.ended(index, outcome)

    def tick(self) -> None:
        self._shown.tick()
