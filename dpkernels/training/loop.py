"""A private training run from its configuration to its report, started or gone on with.

What a kill can take away. The ledger knows of a step before its noise is drawn, and the checkpoint may be older. A run
without a seed draws fresh noise after a resume, so the steps between checkpoint and ledger were other releases: they
stay spent, and as many are missing in the end. So do private statistics that were released, and lost before the first
checkpoint: they are released anew, and the steps that the plan has no longer room for are missing. A seeded run (which
is not private) draws the same sample and the same noise for the same step again, which is the same release: it goes
back to its checkpoint, repeats these steps, and ends with the parameters that it would have had.

No file that is released holds anything that depends on which examples were drawn but through noised sums: no times, no
numbers of physical batches, no sizes of batches. Times go into a file that is marked PRIVATE.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

from torch import nn

from dpkernels.accounting import AccountantUnavailableError, BudgetExceededError, Ledger, Plan
from dpkernels.data import ImageDataset, PoissonLoader
from dpkernels.features import PrivateDataNorm
from dpkernels.random import Domain, total_variation
from dpkernels.training import report
from dpkernels.training.build import build_model, build_optimizer, features_of, moving_average
from dpkernels.training.checkpoint import Checkpoint, load_checkpoint
from dpkernels.training.config import TrainConfig
from dpkernels.training.diagnostics import Diagnostics
from dpkernels.training.evaluation import accuracy
from dpkernels.training.files import write_json
from dpkernels.training.interrupt import StopSignal, ignore_interrupts
from dpkernels.training.memory import keep_freed_memory, placed
from dpkernels.training.objective import Objective
from dpkernels.training.privacy_report import write_report
from dpkernels.training.progress import Progress, Silent
from dpkernels.training.run_folder import EpochResult, RunFolder
from dpkernels.training.schedules import scheduler
from dpkernels.training.timing import Timing
from dpkernels.training.trained import write_trained
from dpkernels.training.transfer import dense, prepare

SCORE = "number of right answers on the training data"  # in the ledger
CHECKPOINT_SECONDS = 1.0
CHECKPOINT_SHARE = 0.02  # of the time, at most, goes into writing checkpoints


@dataclass(frozen=True)
class Execution:
    """How a run is computed, not what: it may differ after a resume.

    physical_batch_size: rows at once, which bounds memory. workers: processes that fetch data. diagnostics: leave
    measurements of single private examples in the folder, see `dpkernels.training.diagnostics`.
    """

    device: str = "cpu"
    physical_batch_size: int = 256
    workers: int = 0
    diagnostics: bool = False

    def __post_init__(self) -> None:
        for name, least in (("physical_batch_size", 1), ("workers", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, got {value!r} of type {type(value).__name__}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True)
class RunResult:
    """How a run ended. metrics: as in `metrics.json`. stopped_by: the signal that ended it early, else None. seconds:
    of training, which depend on what was drawn: private, as the data."""

    metrics: dict[str, Any]
    folder: RunFolder
    stopped_by: int | None
    seconds: float


def train(
    config: TrainConfig,
    plan: Plan,
    dataset: ImageDataset,
    folder: RunFolder,
    *,
    resume: bool = False,
    execution: Execution | None = None,
    progress: Progress | None = None,
) -> RunResult:
    """Run `config` by `plan` on `dataset` in `folder`, which was claimed (or reclaimed, with `resume`).

    SIGINT and SIGTERM end it after the physical batch at hand: an unfinished logical batch is discarded, and what was
    reached is evaluated and written. From here on the process keeps the memory that it frees (`keep_freed_memory`).

    Raises:
        LedgerLockedError: another process trains in the folder.
        BudgetExceededError: what was lost to a kill left no room for another step.
        FileExistsError: a run was started in the folder since it was claimed.
        UnsupportedModelError, ValueError, RuntimeError, OSError: see the optimizers, the loader and the readers.
    """
    _check_labels(dataset)
    keep_freed_memory()
    with Ledger(folder.ledger, budget=plan, seeded=config.seeded) as ledger:
        if not resume and (folder.exists or ledger.steps):
            raise FileExistsError(f"{folder.path} already holds a run: go on with it, or choose another folder")
        try:
            run = _Run(config, plan, dataset, folder, ledger, execution or Execution(), progress or Silent())
            if not resume:
                folder.write_config(config, plan, report.versions())
        except BaseException:
            folder.forget_unstarted()
            raise
        if resume:
            run.restore()
        with StopSignal() as stop:
            run.go(stop)
            metrics = run.report()
        return RunResult(metrics, folder, None if metrics["complete"] else stop.number, run.timing.seconds)


class _Run:
    """The state of a run: model, optimizer, history, and the position in the plan."""

    def __init__(
        self,
        config: TrainConfig,
        plan: Plan,
        dataset: ImageDataset,
        folder: RunFolder,
        ledger: Ledger,
        execution: Execution,
        progress: Progress,
    ) -> None:
        self.features = features_of(config.features, dataset.input_shape)
        self.dataset = self.features.of(dataset)
        self.config, self.plan, self.folder = config, plan, folder
        self.ledger, self.execution, self.progress = ledger, execution, progress
        self.model = build_model(config, self.dataset, self.features)
        self.told = prepare(config, self.model)
        self.model = self.model.to(execution.device)
        self.averaged = None if config.averaging is None else moving_average(self.model, config.averaging)
        self.objective = Objective(config, self.model)
        with warnings.catch_warnings():
            if config.epsilon is not None:
                warnings.filterwarnings("ignore", "no epsilon will be stated")  # it is refused instead
            self.optimizer = build_optimizer(config, plan, self.model, ledger)
        self.epsilon = self._claimed()
        self.diagnostics: Diagnostics | None = None
        if execution.diagnostics:
            self.diagnostics = Diagnostics(folder, config, self.dataset.train, execution.physical_batch_size)
        self.history: list[EpochResult] = []
        self.timing = Timing(folder.timing)
        self.last_step = plan.steps  # fewer, where the plan has no room for all that was lost
        self._saved_at = self._save_took = 0.0

    def _claimed(self) -> float:
        """Epsilon of the whole plan, with this model's noise. Raises ValueError where the target cannot be stated."""
        config, channels = self.config, [m.channels for m in self.model.modules() if isinstance(m, PrivateDataNorm)]
        releases = [how.noise_error(count) for count in channels if (how := config.release(count)) is not None]
        score = config.score_noise_multiplier
        error = sum(releases) + (0.0 if score is None else _score_error(score))
        claim = self.plan.claim(self.plan.steps * self.optimizer.noise_error + error)
        if claim.refusal and config.epsilon is not None:
            raise ValueError(f"epsilon must be smaller for this model, got {config.epsilon:g}: {claim.refusal}")
        return claim.upper

    def restore(self) -> None:
        """Go back to the checkpoint. Without one no step was made, for the first is written before the first step."""
        if not self.folder.checkpoint.exists():
            if self.ledger.steps:
                entries = self.ledger.entries()
                spent = ", ".join(f"{entry.what}: {entry.event}" for entry in entries)
                raise FileNotFoundError(f"{self.folder.checkpoint} is missing, though something is spent: {spent}")
            return
        checkpoint = load_checkpoint(self.folder.checkpoint)
        if checkpoint.fingerprint != self.features.fingerprint:
            raise ValueError(
                f"{self.folder.path} was begun by another version, whose {self.config.features} features were others: "
                "go on with that version, or start a run in another folder"
            )
        try:
            self.model.load_state_dict(checkpoint.model)
            self.optimizer.load_state_dict(checkpoint.optimizer)
            if self.averaged is not None and checkpoint.averaged is not None:
                self.averaged.load_state_dict(checkpoint.averaged)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            place, config = self.folder.checkpoint, self.folder.config.name
            raise ValueError(f"{place} does not fit the run that {config} describes: {error}") from error
        # What a stop measured between epochs goes: a run that was stopped ends with the history of one that was not.
        self.history = [line for line in self.folder.read_history(checkpoint.step) if self._ends_epoch(line.step)]
        if self.diagnostics is not None:
            self.diagnostics.restore(checkpoint.step)
            self.diagnostics.snapshots = [it for it in self.diagnostics.snapshots if self._ends_epoch(it.step)]
        self.timing.restore(checkpoint.step)

    def go(self, stop: StopSignal) -> None:
        """All steps that are left, and after the last one, or at the stop, evaluation and checkpoint."""
        start = self.ledger.steps
        loader = PoissonLoader(
            self.dataset.train,
            self.plan,
            optimizer=self.optimizer,
            physical_batch_size=self.execution.physical_batch_size,
            start_step=start,
            key=self.optimizer.key,
            num_workers=self.execution.workers,
            worker_init_fn=ignore_interrupts,
        )
        schedule = scheduler(
            self.optimizer,
            self.config.schedule,
            steps=self.plan.steps,
            warmup=self.config.warmup,
            start_step=start,
        )
        if not self.folder.checkpoint.exists():
            self._release_statistics()
            self._save()
        self._find_last_step()
        for text in self.told:
            self.progress.note(text)
        self.progress.begin(self.plan, start)
        self.model.train()
        if self.diagnostics is not None and not self.diagnostics.snapshots:
            self._diagnose()
        try:
            for step in range(start + 1, self.last_step + 1):
                if not self._logical_step(loader, stop):
                    break
                lr = self.optimizer.param_groups[0]["lr"]
                schedule.step()
                if self.averaged is not None:
                    self.averaged.update_parameters(self.model)
                self.progress.step(step)
                if self._ends_epoch(step):
                    self._evaluate(lr)
                self._save_if_due()
            self._save()  # before an evaluation that may take long
            if not self.history or self.history[-1].step != self.ledger.steps:
                self._evaluate(self.optimizer.param_groups[0]["lr"])
        finally:
            self.progress.end()

    def _release_statistics(self) -> None:
        """Those of the normalization, where the configuration pays for them.

        Where a kill came between their entry in the ledger and the first checkpoint, their noise may have been drawn:
        the entry stays, and this is another release. With a seed it is the same one.
        """
        lost = bool(self.ledger.entries())
        for module in self.model.modules():
            if isinstance(module, PrivateDataNorm) and (how := self.config.release(module.channels)) is not None:
                rows = (examples for examples, _ in self.dataset.train.batches(self.execution.physical_batch_size))
                ledger = None if lost and self.config.seeded else self.ledger
                module.release(rows, how, ledger=ledger, key=self.optimizer.key)

    def _find_last_step(self) -> None:
        """The last step that the plan has room for, beside what was lost to kills.

        Raises BudgetExceededError where it has room for none.
        """
        self.last_step = min(self.plan.steps, self.ledger.most_steps(self.plan.step_event))
        missing = self.plan.steps - self.last_step
        if missing and not self.last_step:
            raise BudgetExceededError(
                f"what a kill took away leaves no room for a step in the plan's epsilon {self.plan.epsilon:.4g}: start "
                "a run in another folder, and count what this one spent, which its ledger tells, with it"
            )
        if missing:
            self.progress.note(
                f"a kill took private statistics away that were released already; they were released anew, and "
                f"{missing} of {self.plan.steps} steps are left out to pay for that"
            )

    def _logical_step(self, loader: PoissonLoader, stop: StopSignal) -> bool:
        """One step of the plan; False where a stop came first, and then nothing of it is left."""
        device = self.execution.device
        for images, labels in loader.take(1):
            if stop:
                return False
            self.objective.set_weight_decay(self.optimizer, loader.epoch)
            inputs = placed(images, self.model, device)
            self.optimizer.backward(self.objective(inputs, labels.to(device), loader.epoch))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return True

    def _ends_epoch(self, step: int) -> bool:
        batch, size = self.plan.batch_size, self.plan.dataset_size
        return step == self.last_step or step * batch // size > (step - 1) * batch // size

    @property
    def released(self) -> nn.Module:
        """What the run evaluates and leaves."""
        if self.averaged is None or not self.averaged.n_averaged:  # nothing was averaged before the first step
            return self.model
        return self.averaged.module

    def _accuracy(self, model: nn.Module) -> float:
        execution = self.execution
        return accuracy(model, self.dataset.test, device=execution.device, batch_size=execution.physical_batch_size)

    def _evaluate(self, lr: float) -> None:
        step = self.ledger.steps
        result = EpochResult(
            step=step,
            epoch=self._epoch(step),
            test_accuracy=self._accuracy(self.released),
            epsilon=report.finite(epsilon_spent(self.ledger, self.plan, self.epsilon)),
            lr=lr,
            last_iterate_accuracy=None if self.averaged is None else self._accuracy(self.model),
        )
        self.history.append(result)
        self.folder.write_history(self.history)
        self.timing.mark(step)
        self.progress.epoch(result)
        if self.diagnostics is not None:
            self._diagnose()

    def _diagnose(self) -> None:
        assert self.diagnostics is not None
        step = self.ledger.steps
        self.diagnostics.measure(self.model, step=step, epoch=self._epoch(step))

    def _epoch(self, step: int) -> float:
        return round(step * self.plan.batch_size / self.plan.dataset_size, 6)

    def _save(self) -> None:
        """History is written before: a line too many is dropped on a resume, one too few could not be made up."""
        begin = time.monotonic()
        averaged = None if self.averaged is None else self.averaged.state_dict()
        model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        Checkpoint(self.ledger.steps, model, optimizer, averaged, self.features.fingerprint).save(
            self.folder.checkpoint
        )
        self._saved_at = time.monotonic()
        self._save_took = self._saved_at - begin

    def _save_if_due(self) -> None:
        pause = max(CHECKPOINT_SECONDS, self._save_took / CHECKPOINT_SHARE)
        if time.monotonic() - self._saved_at >= pause:
            self._save()

    def report(self) -> dict[str, Any]:
        """Write weights, plot, metrics and report, and return the metrics."""
        claim = self.ledger.claim(self.plan.delta)
        released = dense(self.config, self.released)
        write_trained(self.folder.model, released, self.config, claim.upper, self.dataset, self.features)
        report.write_plot(self.folder.plot, self.config, self.plan, report.finite(claim.upper), self.history)
        if self.diagnostics is not None:
            self.diagnostics.draw()
        train_accuracy = self._released_train_accuracy()  # last, so that a kill hardly comes between it and its file
        document = report.metrics(
            self.config,
            self.plan,
            self.history,
            claim=claim,
            updates=self.optimizer.steps,
            last_step=self.last_step,
            trained=sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            statement=self.optimizer.privacy_statement(),
            data=report.described(self.config, self.dataset, self.features),
            train_accuracy=train_accuracy,
        )
        write_json(self.folder.metrics, document)
        write_report(self.folder)
        self.timing.save()
        return document

    def _released_train_accuracy(self) -> float | None:
        """A noisy count of right answers on the training data over the nominal size, once a run; None where the
        configuration has none, the run is unfinished, or a kill took it away between its entry and the metrics."""
        event, sigma = self.config.score_event, self.config.score_noise_multiplier
        if event is None or sigma is None or self.ledger.steps < self.last_step:
            return None
        train, device = self.dataset.train, self.execution.device
        rows = self.execution.physical_batch_size
        if any(entry.what == SCORE for entry in self.ledger.entries()):
            if (written := self.folder.read_metrics()) is not None:
                return None if (value := written.get("train_accuracy")) is None else float(value)
            if not self.config.seeded:
                return None
        right = round(accuracy(self.released, train, device=device, batch_size=rows) * len(train))
        if not any(entry.what == SCORE for entry in self.ledger.entries()):
            self.ledger.record(event, SCORE, _score_error(sigma))
        key = self.optimizer.key
        noise = key.grid_normal(Domain.SCORE, key.claim(Domain.SCORE), 1, noise_std=sigma, grid=1.0).item()
        return min(max((right + noise) / self.plan.dataset_size, 0.0), 1.0)


def epsilon_spent(ledger: Ledger, plan: Plan, claimed: float) -> float:
    """Upper bound on what was spent, by one fast accountant, or `claimed`, the plan's, where that is smaller: it holds
    as well.

    Cross-checking three accountants at every epoch would take longer than training a small model.
    """
    try:
        spent = ledger.bound(plan.delta, "pld").upper
    except AccountantUnavailableError:
        spent = ledger.bound(plan.delta, "rdp").upper
    return min(spent, claimed)


def _score_error(noise_multiplier: float) -> float:
    """Total variation of the noise of the score from ideal."""
    return total_variation(1, noise_std=noise_multiplier, grid=1.0)


def _check_labels(dataset: ImageDataset) -> None:
    for name, split in (("train", dataset.train), ("test", dataset.test)):
        low, high = int(split.labels.min()), int(split.labels.max())
        if low < 0 or high >= dataset.num_classes:
            raise ValueError(
                f"{name} labels must lie in [0, {dataset.num_classes - 1}], got labels from {low} to {high}"
            )
