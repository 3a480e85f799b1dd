"""Checkpoints: model, optimizer and position. Never a key, never the sum of an unfinished logical batch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dpkernels._files import reason
from dpkernels.training.files import write_atomically
from dpkernels.transfer.saved import load_saved, save_sealed

FORMAT = 2


@dataclass(frozen=True)
class Checkpoint:
    """What a run goes on from.

    step: steps of the plan that were spent when it was written. averaged: the moving average of the model, where the
    run has one. fingerprint: of the features that it trains on, empty for images.
    """

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    averaged: dict[str, Any] | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        if type(self.step) is not int or self.step < 0:
            raise ValueError(f"step must be a number of steps, got {self.step!r}")
        for name, value in (("model", self.model), ("optimizer", self.optimizer), ("averaged", self.averaged)):
            if not isinstance(value, dict) and not (name == "averaged" and value is None):
                raise TypeError(f"{name} must be a state dict, got {type(value).__name__}")
        if not isinstance(self.fingerprint, str):
            raise TypeError(f"fingerprint must be a string, got {type(self.fingerprint).__name__}")

    def save(self, path: Path) -> None:
        """Written whole or not at all, with a digest of all that is in the file."""
        document = {"format": FORMAT, **vars(self)}
        write_atomically(path, lambda temporary: save_sealed(document, temporary))


def load_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in `path`, on the CPU. Only tensors and plain values are read: no code of the file runs.

    Raises FileNotFoundError, and ValueError for a file that is not a checkpoint of this format, or of which one bit was
    changed.
    """
    expected = f"a checkpoint of format {FORMAT}"
    document = load_saved(path, expected, sealed=True)
    try:
        if document.pop("format", None) != FORMAT:
            raise ValueError("it has another format")
        return Checkpoint(**document)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} must hold {expected}, but it cannot be read: {reason(error)}") from None
