"""Fixtures that several rooms' tests share."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.zoo.torchvision_operators import define_missing
from dpkernels import _native
from dpkernels.data import ImageDataset, load_dataset
from dpkernels.training import TrainConfig, resolve

define_missing()  # transformers imports torchvision where it finds it

# Where several workers of pytest-xdist share the CPUs, none takes more threads than its part, nor do its processes.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ and "OMP_NUM_THREADS" not in os.environ:
    threads = max(1, torch.get_num_threads() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once for every instruction set that this CPU has."""
    if request.param not in _native.isas():
        pytest.skip(f"this CPU does not run {request.param}")
    before = _native.active_isa()
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("DPKERNELS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Jobs run one after the other in this process, which is quicker than starting others; how many did, call by call.

    The processes have tests of their own.
    """
    from dpkernels.search import workers

    calls: list[int] = []

    class Told:
        def __init__(self, watcher: Any, index: int) -> None:
            self.watcher, self.index = watcher, index

        def send(self, step: int) -> None:
            self.watcher.step(self.index, step)

    def run_jobs(jobs: Any, *, watcher: Any = None, **_: Any) -> tuple[list[workers.Outcome], int | None]:
        calls.append(len(jobs))
        outcomes = [workers.Outcome() for _ in jobs]
        for index, job in enumerate(jobs):
            told: Any = Told(watcher or workers.Watcher(), index)
            outcomes[index] = workers._outcome(job, {}, told)
            if watcher is not None:
                watcher.ended(index, outcomes[index])
            if outcomes[index].failure is None and not outcomes[index].complete:
                return outcomes, signal.SIGINT
        return outcomes, None

    for module in ("sweep", "tune"):
        monkeypatch.setattr(f"dpkernels.search.{module}.run_jobs", run_jobs)
    return calls


@pytest.fixture(scope="session")
def digits() -> ImageDataset:
    """Real handwritten digits, which need no download."""
    return load_dataset("digits")


@pytest.fixture(scope="session")
def small(digits: ImageDataset) -> Callable[..., TrainConfig]:
    """The configuration of the small run, with changes."""

    def make(**changes: Any) -> TrainConfig:
        given = {"dataset": "digits", "batch_size": 479, "epochs": 4.0, "noise_multiplier": 2.0, "lr": 2.0}
        return resolve(digits, given | changes)

    return make
