"""Hyper-parameters chosen on the private data at a known price: the best of a random number of random runs.

The mechanism (Papernot & Steinke 2022): K is drawn from a stated distribution, then K runs are made, each with
hyper-parameters that are drawn independently from stated distributions, each scored on public data or by a release that
is among its own events. The best run is released. K and everything about the other runs stays secret, so:

- nothing about a run is shown, and on disk runs lie in OUT/.tuning, readable by their owner alone, until the end;
- hyper-parameters and K are drawn before the first step, all of them from the operating system's entropy, and laid down
  there: who breaks off can only go on with what was drawn. Starting over with another K, because the first one took
  long or for whatever was seen, would be another distribution of K, and is refused while OUT/.tuning exists;
- progress shows time. Time tells K to whoever measures it, which `constant_time` prevents: as many runs are made as K
  can be, and those beyond K are thrown away. K is cut where less than a thousandth of delta lies beyond.

What may be gone on with. The theorem wants runs that are alike. A run that was stopped between two steps goes on from
its checkpoint and is then like any other. One that lost steps to a kill (its ledger is ahead of its checkpoint) would
be worse than the others: it is thrown away whole and made anew with the same hyper-parameters. Nothing of it was
released, so that it costs nothing, other than in a folder of `train`, where it stays spent. A run that fails ends the
tuning without a result, since leaving it out would be another mechanism.

There is no seed here: a run with a seed is not private, and a sweep compares such runs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from dpkernels import models
from dpkernels._files import read_json, reason
from dpkernels.accounting import Bound, Ledger, Plan
from dpkernels.accounting.locked_file import file_locks
from dpkernels.accounting.tuning import TrainingRun, draw_number_of_runs
from dpkernels.data import ImageDataset
from dpkernels.search.mechanism import Calibrated, Outlook, Search, tuning_statement
from dpkernels.search.sweep import prepare_features
from dpkernels.search.workers import Job, Watcher, run_jobs
from dpkernels.training import report
from dpkernels.training.build import features_of
from dpkernels.training.checkpoint import load_checkpoint
from dpkernels.training.config import TrainConfig
from dpkernels.training.files import write_atomically, write_json
from dpkernels.training.loop import SCORE, Execution
from dpkernels.training.privacy_report import write_report
from dpkernels.training.run_folder import RunFolder
from dpkernels.transfer.saved import open_safetensors

FORMAT = "dpkernels-tuned"


@dataclass(frozen=True)
class Tuned:
    """How a search ended. metrics: of the released run; None where it was stopped (`stopped_by`) or K was 0."""

    metrics: dict[str, Any] | None
    config: TrainConfig | None
    stopped_by: int | None


class TuneFolder:
    """The folder of a search: what is released at the end, and until then what is not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.released = RunFolder(path)
        self.secret = path / ".tuning"
        self.state = self.secret / "state.json"

    @property
    def is_done(self) -> bool:
        return self.released.exists

    def run(self, index: int) -> RunFolder:
        return RunFolder(self.secret / f"{index:04d}")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While no other process searches here. The lock ends with its process."""
        fcntl = file_locks("tuning")
        self.secret.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(self.secret / "lock", "w", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RuntimeError(f"another process tunes in {self.path}") from None
            yield

    def forget(self) -> None:
        """Remove all that is secret, and the folder where nothing else lies in it. Raises OSError where that fails."""
        if self.secret.exists():
            shutil.rmtree(self.secret)
        self.released.leave()


def start(calibrated: Calibrated, dataset: ImageDataset, folder: TuneFolder, *, data_root: Path | None = None) -> None:
    """Draw K and all hyper-parameters, and lay the runs down. Nothing was computed from the data before.

    Raises FileExistsError where a search or a run lies in the folder, ValueError where a configuration that was drawn
    is impossible.
    """
    if folder.is_done:
        raise FileExistsError(f"{folder.path} already holds a result: choose another folder")
    if folder.state.exists():
        raise FileExistsError(f"{folder.path} holds a tuning that was broken off: go on with --resume")
    search = calibrated.search
    count = draw_number_of_runs(mean_runs=search.mean_runs, shape=search.shape)
    runs = count if calibrated.slots is None else calibrated.slots
    with folder.alone():
        try:
            _lay_down(calibrated, dataset, folder, runs)
        except BaseException:
            folder.forget()
            raise
        document = {
            "search": search.to_dict(),
            "delta": calibrated.delta,
            "bound": asdict(calibrated.bound),
            "outlook": asdict(Outlook.of(calibrated)),
            "runs": runs,
            "counted": min(count, runs),
            "data_root": None if data_root is None else str(data_root.resolve()),
        }
        write_json(folder.state, document)


def _lay_down(calibrated: Calibrated, dataset: ImageDataset, folder: TuneFolder, runs: int) -> None:
    plans: dict[TrainingRun, Plan] = {}
    for index in range(runs):
        config, kind = calibrated.draw(dataset)
        _check_model(calibrated, config, dataset)
        if kind not in plans:
            plans[kind] = config.plan()
        run = folder.run(index)
        shutil.rmtree(run.path, ignore_errors=True)  # of a start that was killed: it had not begun
        run.path.mkdir(mode=0o700)
        run.write_config(config, plans[kind], report.versions())


def _check_model(calibrated: Calibrated, config: TrainConfig, dataset: ImageDataset) -> None:
    """Raises ValueError where the model does not take the images, or its noise too much of delta, before anything is
    spent."""
    features = features_of(config.features, dataset.input_shape)
    model = models.create(config.model, features.shape, dataset.num_classes)
    calibrated.check_noise(config, sum(p.numel() for p in model.parameters()), features.shape[0])


def go_on(
    folder: TuneFolder,
    *,
    processes: int,
    threads: int = 1,
    execution: Execution | None = None,
    watcher: Callable[[Sequence[Job], Outlook], Watcher] | None = None,
) -> Tuned:
    """Make the runs that are left; when none is, release the best one and remove the others.

    watcher: makes what hears how they get on. It must show nothing but time.

    Raises:
        FileNotFoundError: no search was started in the folder.
        RuntimeError: a run failed, or another process searches there. Nothing is released, and it can be gone on with.
    """
    if folder.is_done:  # killed while the others were removed
        folder.forget()
        write_report(folder.released)
        return Tuned(folder.released.read_metrics(), _released_config(folder.released.config), None)
    if not folder.state.exists():
        raise FileNotFoundError(f"{folder.path} holds no tuning to resume: {folder.state.name} is missing")
    with folder.alone():
        state = _read_state(folder)
        runs = [folder.run(index) for index in range(state.runs)]
        jobs = []
        for run in runs:
            if not _settled(run):
                config, plan = run.read_config()
                jobs.append(Job(run.path, config, plan, state.data_root, execution or Execution()))
        prepare_features(jobs)
        shown = watcher(jobs, state.outlook) if watcher else None
        outcomes, stopped_by = run_jobs(jobs, processes=processes, threads=threads, watcher=shown)
        failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]
        if failures:
            raise RuntimeError(
                f"a run failed, so that nothing is released: {failures[0]}. What was drawn is kept: go on with --resume"
            )
        if not all(outcome.complete for outcome in outcomes):
            return Tuned(None, None, stopped_by)
        best = _best(runs[: state.counted], state.search.score)
        released = Tuned(None, None, None) if best is None else _release(best, folder, state)
        folder.forget()
        return released


@dataclass(frozen=True)
class _State:
    """What `start` laid down."""

    search: Search
    delta: float
    bound: Bound
    outlook: Outlook
    runs: int
    counted: int
    data_root: Path | None


def _read_state(folder: TuneFolder) -> _State:
    """Raises ValueError that names the file, where it is damaged."""
    document = read_json(folder.state)
    try:
        search, bound = Search.from_dict(document["search"]), Bound(**document["bound"])
        root = None if document["data_root"] is None else Path(document["data_root"])
        runs, counted, delta = document["runs"], document["counted"], document["delta"]
        there = sum(1 for _ in folder.secret.glob("*/config.json"))
        if type(runs) is not int or runs != there or type(counted) is not int or not 0 <= counted <= runs:
            raise ValueError(f"{there} runs were laid down, and it tells of {runs!r}, {counted!r} of them counted")
        if not 0 < delta < 1 or not 0 <= bound.upper <= search.epsilon:
            raise ValueError(f"epsilon {bound.upper} at delta {delta} is not what the search may cost")
        return _State(search, delta, bound, Outlook(**document["outlook"]), runs, counted, root)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{folder.state} must be the state of a tuning, but: {reason(error)}") from error


def _released_config(path: Path) -> TrainConfig:
    document = read_json(path)
    try:
        return TrainConfig.from_dict(document["config"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must be the configuration of a tuned run, but: {reason(error)}") from error


def _settled(run: RunFolder) -> bool:
    """Whether the run is complete. What it cannot go on from as if nothing had happened is removed: see the module."""
    if (metrics := run.read_metrics()) is not None and metrics["complete"]:
        return True
    if run.ledger.exists():
        with Ledger(run.ledger) as ledger:
            entries, steps = ledger.entries(), ledger.steps
        saved = load_checkpoint(run.checkpoint).step if run.checkpoint.exists() else None
        if (entries and saved != steps) or any(entry.what == SCORE for entry in entries):
            for path in run.path.iterdir():
                if path != run.config:
                    path.unlink()
    return False


def _best(runs: Sequence[RunFolder], score: str) -> RunFolder | None:
    """The run of the highest score, of equal ones the first; None of no runs."""

    def scored(run: RunFolder) -> float:
        metrics, name = _metrics(run), f"{score}_accuracy"
        if name not in metrics:
            raise ValueError(f"{run.metrics}: expected {name}, got none")
        return float(metrics[name])

    return max(runs, key=scored, default=None)


def _metrics(run: RunFolder) -> dict[str, Any]:
    """Of a run that is complete."""
    if (metrics := run.read_metrics()) is None:
        raise FileNotFoundError(f"{run.metrics} is missing, though the run is complete")
    return metrics


def _release(best: RunFolder, folder: TuneFolder, state: _State) -> Tuned:
    """Write what is released of the best run: metrics, weights, and at last configuration and search."""
    config, plan = best.read_config()
    search, bound, delta = state.search, state.bound, state.delta
    left = {"epsilon", "delta", "private", "statement", "last_iterate_accuracy", "noise_error"}
    metrics = {
        **{name: value for name, value in _metrics(best).items() if name not in left},
        "epsilon": bound.upper,
        "delta": delta,
        "private": True,
        "chosen": {draw.field: getattr(config, draw.field) for draw in search.draws},
        "statement": tuning_statement(search, plan, bound, delta),
    }
    with open_safetensors(best.model) as file:
        guarantee = {"epsilon": repr(bound.upper), "delta": repr(delta)}
        metadata = file.metadata() | guarantee
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    write_atomically(folder.released.model, lambda temporary: save_file(tensors, temporary, metadata=metadata))
    write_json(folder.released.metrics, metrics)
    document = {"format": FORMAT, "config": config.to_dict(), "search": search.to_dict(), "bound": asdict(bound)}
    write_json(folder.released.config, document)
    write_report(folder.released)
    return Tuned(metrics, config, None)
