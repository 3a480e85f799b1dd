"""Whole training steps against an ordinary one: time and memory of every engine on every model.

Each engine is timed in a process of its own, its steps interleaved with ordinary ones; what counts is the median of the
ratios of neighbours, because machines are noisy. Memory is measured in separate processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dpkernels.bench import worker
from dpkernels.bench.engines import ENGINES
from dpkernels.bench.models import MODELS
from dpkernels.bench.worker import Task, WorkerError

OURS = "dpkernels"


@dataclass(frozen=True)
class StepResult:
    """One engine on one model: figures, or why there are none."""

    model: str
    engine: str
    batch: int
    failure: str | None = None
    ordinary_ms: float | None = None  #: median of the ordinary step
    ms: float | None = None  #: median of the engine's
    ratio: float | None = None  #: median of the engine's over its ordinary neighbour's
    ratio_low: float | None = None  #: its quartiles
    ratio_high: float | None = None
    pairs: int | None = None  #: how many of both were timed
    extra_mib: float | None = None  #: peak memory of the engine's steps above the model and the data
    ordinary_extra_mib: float | None = None  #: of ordinary steps
    speed_up: float | None = None  #: how many times faster dpkernels is, through both ratios to the ordinary step

    @property
    def memory_ratio(self) -> float | None:
        """Peak memory over the ordinary step's; below one MiB nothing is resolved."""
        if self.extra_mib is None or self.ordinary_extra_mib is None:
            return None
        return max(self.extra_mib, 1.0) / max(self.ordinary_extra_mib, 1.0)


def measure(
    models: Sequence[str],
    engines: Sequence[str],
    *,
    batch: int | None = None,
    seconds: float = 10.0,
    threads: int = 1,
    device: str = "cpu",
    channels_last: bool = False,
) -> Iterator[StepResult]:
    """Results as soon as they are there, model by model, dpkernels first. A failure is a result and stops nothing.

    Args:
        models: names in :data:`MODELS`.
        engines: names in :data:`ENGINES`, without "ordinary".
        batch: examples of a step; None: each model's own.
        seconds: of timing for each engine and model; a few steps are always timed.
        threads: of torch and the kernels.
        device: of models and examples.
        channels_last: examples lie in memory with their channels last, for every engine.

    Raises:
        ValueError: a name is not known, or a number is out of range.
    """
    peers = [name for name in ENGINES if name != "ordinary"]
    for argument, given, known in (("models", models, list(MODELS)), ("engines", engines, peers)):
        if not given or set(given) - set(known):
            raise ValueError(f"{argument} must be of {', '.join(known)}, got {', '.join(given) or 'none'}")
    for argument, number, least in (("batch", batch, 1), ("seconds", seconds, 0), ("threads", threads, 1)):
        if number is not None and not number >= least:
            raise ValueError(f"{argument} must be at least {least}, got {number}")
    ordered = sorted(dict.fromkeys(engines), key=lambda name: name != OURS)
    common = (batch, seconds, threads, device, channels_last)
    return _measure(ordered, [Task("memory", "ordinary", model, *common) for model in models])


def _measure(engines: Sequence[str], tasks: Sequence[Task]) -> Iterator[StepResult]:
    for task in tasks:
        model, rows, ours = task.model, task.batch or MODELS[task.model].batch, None
        ordinary_mib = _ordinary_memory(task)
        for engine in engines:
            try:
                figures = worker.run(replace(task, kind="time", engine=engine))
                figures |= worker.run(replace(task, engine=engine))
            except WorkerError as error:
                yield StepResult(model, engine, rows, failure=str(error))
                continue
            if engine == OURS:
                ours = figures["ratio"]
            speed_up = None if ours is None or engine == OURS else figures["ratio"] / ours
            yield StepResult(
                model,
                engine,
                rows,
                ordinary_extra_mib=ordinary_mib,
                speed_up=speed_up,
                **figures,
            )


def _ordinary_memory(task: Task) -> float | None:
    try:
        return worker.run(task).get("extra_mib")
    except WorkerError:
        return None
