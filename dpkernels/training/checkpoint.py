"""Checkpoints: model, optimizer and position. Never a key, never the sum of an unfinished logical batch."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpkernels.training.files import write_atomically

FORMAT = 1


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

    def save(self, path: Path) -> None:
        """Written whole or not at all."""
        document = {"format": FORMAT, **vars(self)}
        write_atomically(path, lambda temporary: torch.save(document, temporary))


def load_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in `path`, on the CPU. Only tensors and plain values are read: no code of the file runs.

    Raises ValueError for a file that is not a checkpoint of this format.
    """
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
        if document.pop("format") != FORMAT:
            raise ValueError("another format")
        return Checkpoint(**document)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} must be a checkpoint of format {FORMAT}, but it cannot be read: {reason}") from error
