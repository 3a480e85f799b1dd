"""A small private run on real digits, and what the tests of the training room share."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpkernels.data import ImageDataset
from dpkernels.training import EpochResult, Execution, RunFolder, RunResult, TrainConfig, train
from dpkernels.training.progress import Silent

STEPS = 12  # of the small run: four epochs of three steps


Run = Callable[..., RunResult]


@pytest.fixture
def run(digits: ImageDataset) -> Run:
    """Trains a configuration in a folder."""

    def go(config: TrainConfig, path: Path, *, resume: bool = False, **options: Any) -> RunResult:
        folder = RunFolder(path)
        if resume:
            folder.reclaim()
            config, plan = folder.read_config()
        else:
            folder.claim()
            plan = config.plan()
        progress = options.pop("progress", None)
        return train(config, plan, digits, folder, resume=resume, execution=Execution(**options), progress=progress)

    return go


class Watcher(Silent):
    """Does something at one step, and remembers the epochs."""

    def __init__(self, at: int = 0, action: Callable[[], object] | None = None) -> None:
        self.at, self.action = at, action
        self.steps: list[int] = []
        self.epochs: list[EpochResult] = []

    def step(self, step: int) -> None:
        self.steps.append(step)
        if step == self.at and self.action is not None:
            self.action()

    def epoch(self, result: EpochResult) -> None:
        self.epochs.append(result)


@pytest.fixture
def watcher() -> type[Watcher]:
    return Watcher


@pytest.fixture
def interrupt_at() -> Callable[[int], Watcher]:
    """Ctrl-C at a step."""
    return lambda step: Watcher(step, lambda: os.kill(os.getpid(), signal.SIGINT))


@pytest.fixture
def copy_at() -> Callable[[int, Path, Path], Watcher]:
    """A copy of the folder at a step is what a kill at that moment would leave."""
    return lambda step, folder, copy: Watcher(step, lambda: shutil.copytree(folder, copy))
