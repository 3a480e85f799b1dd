"""Runs side by side, each in a process of its own that goes on to the next one.

A worker is told what to do and tells how it gets on over a pipe. It sits in a session of its own, so that Ctrl-C
reaches the process that drives them alone, which then asks every worker once to stop: its run ends as `train` ends, and
can be gone on with. A worker that dies takes one run with it, and is replaced. Where the driver dies, workers stop.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

from dpkernels.accounting import Plan
from dpkernels.data import ImageDataset, load_dataset
from dpkernels.training.config import TrainConfig
from dpkernels.training.interrupt import StopSignal
from dpkernels.training.loop import Execution, train
from dpkernels.training.progress import Silent
from dpkernels.training.run_folder import RunFolder

POLL_SECONDS = 0.2
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Job:
    """A run whose configuration lies in its folder already: it is begun or gone on with."""

    folder: Path
    config: TrainConfig
    plan: Plan
    data_root: Path | None = None
    execution: Execution = field(default_factory=Execution)


@dataclass(frozen=True)
class Outcome:
    """How a job ended: metrics as in `metrics.json`, complete or not; or what made it fail; or it was never begun."""

    metrics: dict[str, Any] | None = None
    failure: str | None = None

    @property
    def complete(self) -> bool:
        return self.metrics is not None and self.metrics["complete"]


class Watcher:
    """Hears how jobs get on, by their index. This one shows nothing."""

    def step(self, index: int, step: int) -> None:
        """`step` steps of the job's plan are spent."""

    def ended(self, index: int, outcome: Outcome) -> None:
        """The job is over, for now at least."""

    def tick(self) -> None:
        """Some time went by."""


def run_jobs(
    jobs: Sequence[Job], *, processes: int, threads: int = 1, watcher: Watcher | None = None
) -> tuple[list[Outcome], int | None]:
    """Run `jobs`, `processes` at a time, each with `threads` threads: their outcomes, and the signal that ended it.

    The first SIGINT or SIGTERM lets every run end at its next batch, the second one kills. Raises ValueError unless
    both numbers are positive integers.
    """
    for name, value in (("processes", processes), ("threads", threads)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    watcher = watcher or Watcher()
    outcomes = [Outcome() for _ in jobs]
    waiting = deque(range(len(jobs)))
    workers: list[_Worker] = []

    def end(index: int, outcome: Outcome) -> None:
        outcomes[index] = outcome
        watcher.ended(index, outcome)

    with StopSignal() as stop:
        try:
            asked = False
            while True:
                if stop and not asked:
                    asked = True
                    waiting.clear()
                    for worker in workers:
                        worker.ask_to_stop()
                while waiting and len(workers) < processes:
                    workers.append(_Worker(threads))
                for worker in workers:
                    if worker.job is None and not worker.dismissed:
                        if waiting:
                            worker.give(waiting[0], jobs[waiting[0]])
                            waiting.popleft()
                        else:
                            worker.dismiss()
                workers = [worker for worker in workers if not worker.dismissed]
                if not workers:
                    break
                ready = wait([worker.connection for worker in workers], POLL_SECONDS)
                for worker in [worker for worker in workers if worker.connection in ready]:
                    message = worker.read()
                    if message is None:
                        workers.remove(worker)
                        index, reason = worker.job, worker.last_words()
                        if index is not None:
                            end(index, Outcome(failure=None if asked else reason))
                        elif not asked:
                            raise RuntimeError(f"a process that trains could not start: {reason}")
                    elif isinstance(message, Outcome):
                        assert worker.job is not None
                        index, worker.job = worker.job, None
                        end(index, message)
                    else:
                        assert worker.job is not None
                        watcher.step(worker.job, message)
                watcher.tick()
        finally:
            for worker in workers:
                worker.kill()
    return outcomes, stop.number


class _Worker:
    """The driver's end of a worker process."""

    PROGRAM = "from dpkernels.search.workers import main; main()"

    def __init__(self, threads: int) -> None:
        self.job: int | None = None
        self.dismissed = False
        self.connection, there = Pipe()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        root = str(Path(__file__).parents[2])  # so that the process imports this very package
        path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-c", self.PROGRAM, str(there.fileno())],
                env={**os.environ, "PYTHONPATH": path, **dict.fromkeys(THREAD_VARIABLES, str(threads))},
                pass_fds=[there.fileno()],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )

    def give(self, index: int, job: Job) -> None:
        self.job = index
        with contextlib.suppress(OSError):  # it died: reading finds out
            self.connection.send(job)

    def read(self) -> int | Outcome | None:
        """A step, the end of a run, or None where the process is no more."""
        try:
            message: int | Outcome = self.connection.recv()
        except (EOFError, OSError):
            self._process.wait()
            return None
        return message

    def ask_to_stop(self) -> None:
        """Once: a second signal would break off in the middle of an update."""
        self._process.terminate()

    def dismiss(self) -> None:
        """Closed, the pipe tells the process to end."""
        self.dismissed = True
        self.connection.close()
        self._process.wait()
        self._log.close()

    def kill(self) -> None:
        self._process.kill()
        self.dismiss()

    def last_words(self) -> str:
        """Why it died."""
        code = self._process.returncode
        if code < 0:
            return f"its process was ended by signal {-code} ({signal.Signals(-code).name})"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"its process ended with exit code {code}"


# ---- in the worker


class _Told(Silent):
    """Tells the driver of every step. Where nobody listens any more the run is asked to stop."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._alone = connection, False

    def begin(self, plan: Plan, step: int) -> None:
        self.step(step)

    def step(self, step: int) -> None:
        self._tell(step)

    def _tell(self, step: int) -> None:
        if self._alone:
            return
        try:
            self._connection.send(step)
        except OSError:
            self._alone = True
            os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """The life of a worker process: ``-c "from dpkernels.search.workers import main; main()" FILE_DESCRIPTOR``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver says when to stop
    connection = Connection(int(sys.argv[1]))
    data: dict[Hashable, ImageDataset] = {}
    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            return
        outcome = _outcome(job, data, connection)
        try:
            connection.send(outcome)
        except OSError:
            return


def _outcome(job: Job, data: dict[Hashable, ImageDataset], connection: Connection) -> Outcome:
    folder, config = RunFolder(job.folder), job.config
    key = (config.dataset, job.data_root, config.image_size)
    try:
        folder.reclaim()
        if key not in data:
            data[key] = load_dataset(config.dataset, job.data_root, image_size=config.image_size)
        progress = _Told(connection)
        result = train(config, job.plan, data[key], folder, resume=True, execution=job.execution, progress=progress)
    except Exception as error:
        return Outcome(failure=" ".join(str(error).split()) or type(error).__name__)
    return Outcome(result.metrics)
