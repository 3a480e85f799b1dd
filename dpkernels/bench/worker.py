"""The processes that measure: ``python -m dpkernels.bench.worker TASK`` prints the figures of one task as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from dpkernels.bench.engines import ENGINES, Step
from dpkernels.bench.models import MODELS

WARM_UP, LEAST_PAIRS, MEMORY_STEPS = 2, 7, 3


@dataclass(frozen=True)
class Task:
    """What one process measures: an engine beside the ordinary step ("time"), or its memory alone."""

    kind: Literal["time", "memory"]
    engine: str
    model: str
    batch: int | None  #: None: the model's own
    seconds: float  #: of timing
    threads: int
    device: str = "cpu"
    channels_last: bool = False  #: how the examples lie in memory, and with them all maps

    def step(self, engine: str) -> Step:
        """A step of an engine on a fresh model; every engine gets the same weights and examples."""
        model, x, y = MODELS[self.model].make(self.batch, self.device)
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        return ENGINES[engine](model, x.to(memory_format=layout), y)

    def now(self) -> float:
        """Seconds, once the device has done all that was asked of it."""
        if self.device != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


class WorkerError(RuntimeError):
    """A process that measured nothing; says why."""


def run(task: Any, module: str = "dpkernels.bench.worker") -> Any:
    """The figures of a task, measured in a process of its own.

    Args:
        task: a dataclass that JSON can hold: a :class:`Task`, or what another module's `main` reads.
        module: whose `main` measures it, in this package's folder or in its checkout.

    Raises:
        WorkerError: the process failed or was killed.
    """
    root = Path(__file__).parents[2]  # so that the process imports this very package
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, json.dumps(dataclasses.asdict(task))],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
    )
    if process.returncode < 0:
        raise WorkerError(f"killed by signal {-process.returncode}")
    if process.returncode:
        raise WorkerError((process.stderr.strip().splitlines() or ["no message"])[-1][:200])
    return json.loads(process.stdout.splitlines()[-1])


def time_pair(task: Task) -> dict[str, float]:
    """Median milliseconds of both steps, and the quartiles of the ratios of neighbours."""
    times = interleaved([task.step("ordinary"), task.step(task.engine)], task.now, seconds=task.seconds)
    return summary(times)


def interleaved(
    steps: Sequence[Step],
    now: Callable[[], float] = time.perf_counter,
    *,
    seconds: float = 0.0,
    rounds: int = LEAST_PAIRS,
) -> list[tuple[float, ...]]:
    """Seconds of each step in rounds in which all take turns: for some time, and in a number of rounds at least."""
    for _ in range(WARM_UP):
        for step in steps:
            step()
    times: list[tuple[float, ...]] = []
    start = now()
    while len(times) < rounds or time.perf_counter() - start < seconds:
        marks = [now()]
        for step in steps:
            step()
            marks.append(now())
        times.append(tuple(after - before for before, after in pairwise(marks)))
    return times


def summary(times: Sequence[tuple[float, ...]]) -> dict[str, float]:
    """What is reported of pairs of seconds, ordinary and private, at least two."""
    low, middle, high = statistics.quantiles((private / ordinary for ordinary, private in times), n=4)
    return {
        "ordinary_ms": statistics.median(ordinary for ordinary, _ in times) * 1e3,
        "ms": statistics.median(private for _, private in times) * 1e3,
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
        "pairs": len(times),
    }


def peak_memory(task: Task) -> dict[str, float]:
    """MiB that a few steps take above model and data, of the device's memory or resident; no figure where the system
    tells none."""
    if task.device != "cpu":
        return _device_memory(task)
    return resident_memory(task.step(task.engine))


def resident_memory(step: Step) -> dict[str, float]:
    """MiB by which resident memory rises in a few steps; no figure where the system tells none."""
    status = Path("/proc/self/status")
    if not status.exists():
        return {}
    with contextlib.suppress(OSError):  # forget the peak of building the model
        Path("/proc/self/clear_refs").write_text("5")
    before = _mib(status, "VmRSS")
    for _ in range(MEMORY_STEPS):
        step()
    return {"extra_mib": _mib(status, "VmHWM") - before}


def _device_memory(task: Task) -> dict[str, float]:
    step = task.step(task.engine)
    before = torch.cuda.memory_allocated(task.device)
    torch.cuda.reset_peak_memory_stats(task.device)
    for _ in range(MEMORY_STEPS):
        step()
    return {"extra_mib": (torch.cuda.max_memory_allocated(task.device) - before) / 2**20}


def _mib(status: Path, field: str) -> float:
    line = next(text for text in status.read_text().splitlines() if text.startswith(field))
    return int(line.split()[1]) / 1024


def main() -> None:
    """Measure the task on the command line."""
    task = Task(**json.loads(sys.argv[1]))
    torch.set_num_threads(task.threads)
    print(json.dumps(time_pair(task) if task.kind == "time" else peak_memory(task)))


if __name__ == "__main__":
    main()
