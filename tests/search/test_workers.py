"""Runs in processes of their own: a death, Ctrl-C and what is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dpkernels.accounting import Ledger
from dpkernels.search import workers
from dpkernels.search.workers import Job, Outcome, Watcher, run_jobs
from dpkernels.training import RunFolder, TrainConfig, load_checkpoint, report

STEPS = 12


def test_a_death_takes_one_run_and_ctrl_c_lets_all_be_gone_on_with(
    tmp_path: Path, small: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(seed=5)
    plan = config.plan()
    jobs = []
    for name in ("killed", "failing", "stopped", "waiting"):
        own = small(seed=5, model="mnist_cnn") if name == "failing" else config
        folder = RunFolder(tmp_path / name)
        folder.claim()
        folder.write_config(own, plan, {})
        jobs.append(Job(folder.path, own, plan))
    started: list[int] = []

    class Remembered(workers._Worker):
        def __init__(self, threads: int) -> None:
            if not started:
                self.PROGRAM = "import os; os.kill(os.getpid(), 9)"  # as when memory runs out
            super().__init__(threads)
            started.append(self._process.pid)

    class Meddler(Watcher):
        def __init__(self) -> None:
            self.over: list[int] = []
            self.interrupted = False

        def step(self, index: int, step: int) -> None:
            if index == 2 and not self.interrupted:
                self.interrupted = True
                os.kill(os.getpid(), signal.SIGINT)

        def ended(self, index: int, outcome: Outcome) -> None:
            self.over.append(index)

    monkeypatch.setattr(workers, "_Worker", Remembered)
    meddler = Meddler()
    outcomes, stopped_by = run_jobs(jobs, processes=1, watcher=meddler)
    assert stopped_by == signal.SIGINT
    assert outcomes[0].failure == "its process was ended by signal 9 (SIGKILL)"
    assert "(1, 28, 28)" in str(outcomes[1].failure)
    stopped = outcomes[2].metrics
    assert stopped is not None
    assert not outcomes[2].complete
    assert stopped["steps"] < STEPS
    assert outcomes[3] == Outcome()
    assert meddler.over == [0, 1, 2]
    assert len(started) == 2
    with Ledger(jobs[2].folder / "ledger.json", seeded=True) as ledger:
        assert ledger.steps == load_checkpoint(jobs[2].folder / "checkpoint.pt").step == stopped["steps"]
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("name", ["processes", "threads"])
def test_numbers_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive integer, got 0"):
        run_jobs([], **{"processes": 1, name: 0})


def test_a_run_without_a_driver_stops(
    tmp_path: Path, small: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipe breaks in the middle of a run: it ends as after Ctrl-C."""

    class Broken:
        def send(self, step: int) -> None:
            if step == 5:
                raise BrokenPipeError

    monkeypatch.setattr(report, "write_plot", lambda path, *_: path.touch())
    config = small(seed=5)
    plan = config.plan()
    folder = RunFolder(tmp_path)
    folder.write_config(config, plan, {})
    pipe: workers.Connection = Broken()  # type: ignore[assignment]
    outcome = workers._outcome(Job(tmp_path, config, plan), {}, pipe)
    assert outcome.metrics is not None
    assert outcome.metrics["steps"] == load_checkpoint(folder.checkpoint).step == 5
