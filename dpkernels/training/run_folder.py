"""The folder of a training run: what lies in it, and when one may be started or gone on with."""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dpkernels._files import bad_file, parse_json, read_json, read_text, reason
from dpkernels.accounting import Plan
from dpkernels.accounting.planning import planned_steps
from dpkernels.training.config import TrainConfig
from dpkernels.training.files import write_json, write_text

FORMAT = 1
_ROUNDING = 1.01
"""How far another version's epsilon of one plan may lie above that of the version that calibrated it."""


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

    def __post_init__(self) -> None:
        for name, (wanted, fits) in _LINE.items():
            if not fits(getattr(self, name)):
                raise ValueError(f"{name} must be {wanted}, got {getattr(self, name)!r}")


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
        document = read_json(self.config)
        try:
            if document["format"] != FORMAT:
                raise ValueError(f"its format is {document['format']!r}")
            config = TrainConfig.from_dict(document["config"])
            plan = _planned(config, **document["plan"])
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else reason(error)
            raise ValueError(f"{self.config} must be a configuration of format {FORMAT}, but: {why}") from error
        return config, plan

    def read_history(self, last_step: int) -> list[EpochResult]:
        """The lines up to `last_step`: later ones belong to steps that a kill took away.

        Raises ValueError for a damaged file.
        """
        if not os.path.lexists(self.history):
            return []
        results: list[EpochResult] = []
        for number, line in enumerate(read_text(self.history).splitlines(), start=1):
            where = f"{self.history}, line {number}"
            values = parse_json(where, line)
            try:
                result = EpochResult(**values)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{where} is damaged: {reason(error)}") from error
            if results and result.step <= results[-1].step:
                raise ValueError(f"{where} is damaged: step {result.step} follows step {results[-1].step}")
            results.append(result)
        return [result for result in results if result.step <= last_step]

    def read_metrics(self) -> dict[str, Any] | None:
        """What `metrics.json` holds; None where there is none. Raises ValueError for a damaged file."""
        if not os.path.lexists(self.metrics):
            return None
        document = read_json(self.metrics)
        if not isinstance(document, dict):
            raise bad_file(self.metrics, "the metrics of a run", type(document).__name__)
        may_lack = {"train_accuracy", *(["noise_error"] if "chosen" in document else [])}  # of a tuning
        for name, (wanted, fits) in _METRICS.items():
            if name not in document and name not in may_lack:
                raise bad_file(self.metrics, f"{name}, {wanted}", "none")
            if name in document and not fits(document[name]):
                raise bad_file(self.metrics, f"{wanted} as {name}", repr(document[name])[:100])
        return document

    def write_history(self, results: list[EpochResult]) -> None:
        write_text(self.history, "".join(json.dumps(asdict(result)) + "\n" for result in results))


def _planned(config: TrainConfig, *, steps: int, noise_multiplier: float, accountant: Any) -> Plan:
    """The plan of `config` with what was calibrated for it. Raises ValueError where both do not fit together."""
    wanted = planned_steps(config.epochs, config.dataset_size, config.batch_size)
    if type(steps) is not int or steps != wanted:
        raise ValueError(f"steps must be {wanted} for its epochs and sizes, got {steps!r}")
    if not is_number(noise_multiplier) or config.noise_multiplier not in (None, noise_multiplier):
        raise ValueError(f"noise_multiplier must be that of the configuration, got {noise_multiplier!r}")
    plan = Plan(
        dataset_size=config.dataset_size,
        batch_size=config.batch_size,
        epochs=config.epochs,
        steps=steps,
        noise_multiplier=noise_multiplier,
        delta=config.delta,
        target_epsilon=config.epsilon,
        compose_with=config.compose_with,
        accountant=accountant,
    )
    if config.epsilon is not None and not plan.epsilon <= _ROUNDING * config.epsilon:
        raise ValueError(
            f"noise_multiplier must meet the target epsilon {config.epsilon:g}, got {noise_multiplier:g}, which gives "
            f"{plan.epsilon:g}"
        )
    return plan


def is_number(value: object) -> bool:
    """Whether it is a finite one."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_fraction(value: object) -> bool:
    return is_number(value) and 0 <= value <= 1  # type: ignore[operator]


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_epsilon(value: object) -> bool:
    return value is None or (is_number(value) and value >= 0)  # type: ignore[operator]


_Check = tuple[str, Callable[[object], bool]]
_FRACTION: _Check = ("a fraction in [0, 1]", _is_fraction)
_COUNT: _Check = ("a count", _is_count)
_EPSILON: _Check = ("a number >= 0 or null", _is_epsilon)
_TRUTH: _Check = ("true or false", lambda value: isinstance(value, bool))
_TEXT: _Check = ("text", lambda value: isinstance(value, str))
_LINE: dict[str, _Check] = {
    "step": _COUNT,
    "epoch": ("a number >= 0", lambda value: value is not None and _is_epsilon(value)),
    "test_accuracy": _FRACTION,
    "epsilon": _EPSILON,
    "lr": ("a number", is_number),
    "last_iterate_accuracy": ("a fraction in [0, 1] or null", lambda value: value is None or _is_fraction(value)),
}
_METRICS: dict[str, _Check] = {
    "test_accuracy": _FRACTION,
    "epsilon": _EPSILON,
    "delta": _FRACTION,
    "private": _TRUTH,
    "statement": _TEXT,
    "model": _TEXT,
    "features": _TEXT,
    "normalization": _TEXT,
    "train_accuracy": _FRACTION,
    "noise_error": _FRACTION,
    "steps": _COUNT,
    "planned_steps": _COUNT,
    "lost_steps": _COUNT,
    "complete": _TRUTH,
}
