"""Figures instead of measurements."""

from __future__ import annotations

import pytest

from dpkernels.bench import worker
from dpkernels.bench.worker import Task, WorkerError

RATIOS = {"dpkernels": 1.25, "vmap": 5.0}
MEMORY = {"ordinary": 40.0, "dpkernels": 60.0, "vmap": 200.0}


def figures(task: Task) -> dict[str, float]:
    """What a process would report; the engines of Opacus fail."""
    if task.engine not in MEMORY:
        raise WorkerError("ModuleNotFoundError: No module named 'opacus'")
    if task.kind == "memory":
        return {"extra_mib": MEMORY[task.engine]}
    ratio = RATIOS[task.engine]
    return {
        "ordinary_ms": 10.0,
        "ms": 10 * ratio,
        "ratio": ratio,
        "ratio_low": 0.9 * ratio,
        "ratio_high": 1.1 * ratio,
        "pairs": 7,
    }


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """Processes that measure nothing; the list of their tasks."""
    tasks: list[Task] = []

    def run(task: Task) -> dict[str, float]:
        tasks.append(task)
        return figures(task)

    monkeypatch.setattr(worker, "run", run)
    return tasks
