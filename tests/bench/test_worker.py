"""What a measuring process measures, and what becomes of one that fails."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dpkernels.bench import worker
from dpkernels.bench.engines import ENGINES, Step
from dpkernels.bench.worker import Task, WorkerError

TINY = Task("time", "dpkernels", "mnist_cnn", 2, 0.0, 1)


def test_summary() -> None:
    pairs = [(1.0, 2.0), (2.0, 6.0), (1.0, 5.0)]  # ratios 2, 3, 5
    assert worker.summary(pairs) == {
        "ordinary_ms": 1000.0,
        "ms": 5000.0,
        "ratio": 3.0,
        "ratio_low": 2.0,
        "ratio_high": 5.0,
        "pairs": 3,
    }


def test_steps_are_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def engine(name: str) -> object:
        return lambda model, x, y: lambda: made.append(name)

    for name in ("ordinary", "dpkernels"):
        monkeypatch.setitem(ENGINES, name, engine(name))
    figures = worker.time_pair(TINY)
    assert figures["pairs"] == worker.LEAST_PAIRS
    assert made == ["ordinary", "dpkernels"] * (worker.WARM_UP + worker.LEAST_PAIRS)


def test_every_engine_gets_the_same_model_and_data() -> None:
    seen: list[tuple[nn.Module, Tensor, Tensor]] = []

    def engine(model: nn.Module, x: Tensor, y: Tensor) -> Step:
        seen.append((model, x, y))
        return lambda: None

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENGINES, "vmap", engine)
        TINY.step("vmap")
        replace(TINY, channels_last=True).step("vmap")
    (first, x, y), (second, other_x, other_y) = seen
    assert x.stride() == (784, 784, 28, 1)
    assert other_x.stride() == (784, 1, 28, 1)
    assert x.shape == (2, 1, 28, 28)
    assert torch.equal(x, other_x)
    assert torch.equal(y, other_y)
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert p is not q
        assert torch.equal(p, q)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the peak of resident memory")
def test_peak_memory() -> None:
    """In a process of its own, as ever: in this one, memory that earlier tests gave back would be taken again."""
    script = """
import torch
from dpkernels.bench.engines import ENGINES
from dpkernels.bench.worker import Task, peak_memory

for step in (lambda: None, lambda: torch.ones(64, 1 << 18)):  # 64 MiB, freed again
    ENGINES["vmap"] = lambda model, x, y: step
    print(peak_memory(Task("memory", "vmap", "mnist_cnn", 2, 0.0, 1))["extra_mib"])
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modest, hungry = map(float, run.stdout.split())
    assert modest < 20
    assert 60 < hungry < 100


def test_a_failing_process_says_why() -> None:
    with pytest.raises(WorkerError, match="KeyError: 'nowhere'"):
        worker.run(Task("time", "dpkernels", "nowhere", 2, 0.0, 1))


def test_a_killed_process_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = subprocess.CompletedProcess([], -9, "", "")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: killed)
    with pytest.raises(WorkerError, match="killed by signal 9"):
        worker.run(TINY)
