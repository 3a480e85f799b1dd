"""The folder of a training run: what lies in it, and when one may be started or gone on with."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpkernels.accounting import Plan
from dpkernels.training.config import TrainConfig
from dpkernels.training.files import write_json, write_text

FORMAT = 1


@dataclass(frozen=True)
class EpochResult:
    """One line of the history. It holds nothing that depends on single private examples, and so no time."""

    step: int
    """Steps of the plan that are spent."""
    epoch: float
    """step * batch_size / dataset_size"""
    test_accuracy: float
    """In [0, 1]."""
    epsilon: float | None
    """Upper bound on what was spent so far, at the plan's delta; None where none can be stated. What a run costs that
    ends here is the plan's: it may end on something it saw."""
    lr: float
    last_iterate_accuracy: float | None = None
    """Of the weights themselves, where test_accuracy is that of their moving average."""


class RunFolder:
    """Paths in a run's folder, and its configuration and history. Nothing is written until `claim`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.ledger = self.path / "ledger.json"
        self.checkpoint = self.path / "checkpoint.pt"
        self.history = self.path / "history.jsonl"
        self.metrics = self.path / "metrics.json"
        self.plot = self.path / "privacy.png"
        self.report = self.path / "report.md"
        self.audit = self.path / "audit.json"
        self.model = self.path / "model.safetensors"
        self.timing = self.path / "timing-PRIVATE.json"
        self.diagnostics = self.path / "diagnostics-PRIVATE.json"
        self.diagnostics_plot = self.path / "diagnostics-PRIVATE.png"

    @property
    def exists(self) -> bool:
        """Whether a run lies here."""
        return self.config.exists()

    def claim(self) -> None:
        """Make the folder and see that it can be written, for a new run.

        Raises FileExistsError where a run lies already, OSError where the folder cannot be made or written.
        """
        if self.exists:
            raise FileExistsError(f"{self.path} already holds a run: go on with --resume, or choose another folder")
        self._make()

    def reclaim(self) -> None:
        """See that a run lies here that can be gone on with.

        Raises FileNotFoundError where none does, OSError where the folder cannot be written.
        """
        if not self.exists:
            raise FileNotFoundError(f"{self.path} holds no run to resume: {self.config.name} is missing")
        self._make()

    def forget_unstarted(self) -> None:
        """Where no run began after all, leave no trace of the attempt. Only for who holds the ledger."""
        if self.exists:
            return
        self.ledger.unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """Remove the folder where nothing lies in it."""
        with contextlib.suppress(OSError):  # something does
            self.path.rmdir()

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise OSError(f"the folder {self.path} must be writable, but: {error.strerror or error}") from error

    def write_config(self, config: TrainConfig, plan: Plan, versions: dict[str, str]) -> None:
        fields = asdict(plan)
        planned = {name: fields[name] for name in ("steps", "noise_multiplier", "accountant")}
        document = {"format": FORMAT, "config": config.to_dict(), "plan": planned, "versions": versions}
        write_json(self.config, document)

    def read_config(self) -> tuple[TrainConfig, Plan]:
        """The configuration and the plan that the run began with. The noise is not calibrated again.

        Raises ValueError for a damaged file.
        """
        try:
            document = json.loads(self.config.read_text(encoding="utf-8"))
            if document["format"] != FORMAT:
                raise ValueError(f"its format is {document['format']!r}")
            config = TrainConfig.from_dict(document["config"])
            planned: dict[str, Any] = document["plan"]
            plan = Plan(
                dataset_size=config.dataset_size,
                batch_size=config.batch_size,
                epochs=config.epochs,
                steps=planned["steps"],
                noise_multiplier=planned["noise_multiplier"],
                delta=config.delta,
                target_epsilon=config.epsilon,
                compose_with=config.compose_with,
                accountant=planned["accountant"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.config} must be a configuration of format {FORMAT}, but: {error}") from error
        return config, plan

    def read_history(self, last_step: int) -> list[EpochResult]:
        """The lines up to `last_step`: later ones belong to steps that a kill took away."""
        results: list[EpochResult] = []
        if not self.history.exists():
            return results
        for number, line in enumerate(self.history.read_text(encoding="utf-8").splitlines(), start=1):
            try:
                results.append(EpochResult(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{self.history}, line {number} is damaged: {error}") from error
        return [result for result in results if result.step <= last_step]

    def write_history(self, results: list[EpochResult]) -> None:
        write_text(self.history, "".join(json.dumps(asdict(result)) + "\n" for result in results))
