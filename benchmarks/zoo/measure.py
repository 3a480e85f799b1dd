"""What is measured of a model, each thing in a process of its own: ``python -m benchmarks.zoo.measure TASK`` prints it.

The private step is timed in turns with an ordinary one, and with the same step without noise and update; every peer in
turns with an ordinary step of its own. Memory is that of one kind of step in one process.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.zoo.exactness import exactness, slow_nodes
from benchmarks.zoo.models import FULL, MODELS
from dpkernels.bench import StepResult, worker
from dpkernels.bench.engines import BOUND, ENGINES, Losses, Step, cross_entropy
from dpkernels.bench.step import OURS
from dpkernels.bench.worker import WorkerError
from dpkernels.clipping import GhostClipper

CLIPPING = "clipping"


def clipping(model: nn.Module, x: Tensor, y: Tensor, losses: Losses = cross_entropy) -> Step:
    """dpkernels' step without noise and update."""
    clipper = GhostClipper(model, BOUND)
    return lambda: clipper.backward(losses(model, x, y)) and None


@dataclass(frozen=True)
class Task:
    """What one process measures of a model."""

    kind: Literal["time", "memory", "check"]
    model: str
    engines: tuple[str, ...] = ()  #: take turns ("time"), or the only one ("memory")
    repeats: int = 0
    threads: int = 1


@dataclass(frozen=True)
class Row:
    """All that is known of a model."""

    model: str
    batch: int
    parameters: int | None = None  #: trained
    exact: dict[str, Any] | None = None  #: see :class:`benchmarks.zoo.exactness.Exactness`
    slow: list[str] | None = None  #: operations without a rule
    failure: str | None = None  #: why those are missing
    results: dict[str, StepResult] = field(default_factory=dict)  #: by engine

    def as_json(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        for engine, result in self.results.items():
            found["results"][engine]["memory_ratio"] = result.memory_ratio
        return found


def row_of(document: dict[str, Any]) -> Row:
    """The row that :meth:`Row.as_json` gave."""
    results = {}
    for engine, figures in document["results"].items():
        results[engine] = StepResult(**{name: value for name, value in figures.items() if name != "memory_ratio"})
    return Row(**{**document, "results": results})


def measure(row: Row, peers: Sequence[str], *, repeats: int, threads: int) -> Row:
    """The row with what it lacks; what failed is tried again.

    Args:
        row: of a model in :data:`MODELS`, maybe of an earlier run.
        peers: names in dpkernels.bench's ENGINES, to be measured too.
        repeats: rounds of steps that are timed.
        threads: of torch and the kernels.
    """
    common = {"model": row.model, "repeats": repeats, "threads": threads}
    if row.exact is None:
        try:
            found = _run(Task("check", **common))
            row = dataclasses.replace(row, failure=None, **found)
        except WorkerError as error:
            row = dataclasses.replace(row, failure=str(error))
    missing = [engine for engine in (OURS, *peers) if _is_missing(row, engine)]
    ordinary_mib = None
    if missing:
        ordinary_mib = _extra_mib(Task("memory", engines=("ordinary",), **common))
    for engine in missing:
        engines = (OURS, CLIPPING) if engine == OURS else (engine,)
        timed = _timed(Task("time", engines=("ordinary", *engines), **common), row.batch)
        extra = None if timed[0].failure else _extra_mib(Task("memory", engines=(engine,), **common))
        timed[0] = dataclasses.replace(timed[0], extra_mib=extra, ordinary_extra_mib=ordinary_mib)
        row = dataclasses.replace(row, results={**row.results, **{result.engine: result for result in timed}})
    return row


def _is_missing(row: Row, engine: str) -> bool:
    return engine not in row.results or row.results[engine].failure is not None


def _run(task: Task) -> Any:
    return worker.run(task, "benchmarks.zoo.measure")


def _timed(task: Task, batch: int) -> list[StepResult]:
    engines = task.engines[1:]
    try:
        return [
            StepResult(task.model, engine, batch, **figures)
            for engine, figures in zip(engines, _run(task), strict=True)
        ]
    except WorkerError as error:
        return [StepResult(task.model, engine, batch, failure=str(error)) for engine in engines]


def _extra_mib(task: Task) -> float | None:
    try:
        found: float | None = _run(task).get("extra_mib")
    except WorkerError:
        return None
    return found


# ---- in the process that measures ------------------------------------------------------------------------------------


def step(name: str, engine: str) -> Step:
    """A step of an engine on a fresh model; every engine gets the same weights and examples."""
    model = MODELS[name]
    make = clipping if engine == CLIPPING else ENGINES[engine]
    return make(*model.make(), model.losses)


def times(task: Task) -> list[dict[str, float]]:
    """The figures of every engine but the first, which the others are compared with."""
    rounds = worker.interleaved([step(task.model, engine) for engine in task.engines], rounds=task.repeats)
    return [worker.summary([(each[0], each[k]) for each in rounds]) for k in range(1, len(task.engines))]


def check(task: Task) -> dict[str, Any]:
    """How exact the small model's gradients are, and what the engine has no rule for in the model of full size."""
    model = MODELS[task.model]
    exact = exactness(model)
    if not math.isfinite(exact.deviation):
        raise ValueError(f"the deviation is {exact.deviation}")
    network, x, y = model.make(FULL, min(2, model.examples.rows))
    return {
        "parameters": sum(p.numel() for p in network.parameters() if p.requires_grad),
        "exact": dataclasses.asdict(exact),
        "slow": slow_nodes(network, model.losses(network, x, y)),
    }


def main() -> None:
    """Measure the task on the command line."""
    task = Task(**json.loads(sys.argv[1]))
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # libraries' advice on their faster kernels
    torch.set_num_threads(task.threads)
    if task.kind == "time":
        print(json.dumps(times(task)))
    elif task.kind == "memory":
        print(json.dumps(worker.resident_memory(step(task.model, task.engines[0]))))
    else:
        print(json.dumps(check(task)))


if __name__ == "__main__":
    main()
