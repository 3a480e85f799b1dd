"""Labels for the chosen public examples, and fine-tuning on them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Oracle = Callable[[Tensor], Tensor]
"""Who labels: takes the indices of examples, int64 [rows], and gives their labels, int64 [rows], -1 where there is
none."""


def ask(oracle: Oracle, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and labels, int64 [labelled] each, of the examples that the oracle has a label for.

    Raises ValueError where it answers with anything but one integer an example.
    """
    labels = oracle(indices)
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.shape != indices.shape:
        got = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise ValueError(f"the oracle must give int64 {tuple(indices.shape)}, one label an example, got {got}")
    known = labels >= 0
    return indices[known], labels[known]


@dataclass(frozen=True)
class FineTuning:
    """Ordinary training on public examples: SGD with momentum and a learning rate that falls to 0 along a cosine."""

    epochs: int = 20
    batch_size: int = 64
    lr: float = 0.02
    momentum: float = 0.9
    weight_decay: float = 0.0
    seed: int = 0
    """Of the order of examples."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        for name in ("lr", "momentum", "weight_decay"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")


def fine_tune(model: nn.Module, examples: Tensor, labels: Tensor, how: FineTuning | None = None) -> nn.Module:
    """A copy of ``model``, in eval mode, trained further on public examples [rows, ...] and their labels, int64 [rows].

    It costs no privacy: the model was paid for and the examples are public. The copy has nothing of a private
    optimizer that the model is attached to. Raises ValueError where there are not as many labels as examples.
    """
    how = FineTuning() if how is None else how
    if labels.shape != examples.shape[:1]:
        raise ValueError(f"labels must be [{len(examples)}], one an example, got {tuple(labels.shape)}")
    tuned = copy.deepcopy(model).train()
    generator = torch.Generator().manual_seed(how.seed)
    optimizer = torch.optim.SGD(tuned.parameters(), lr=how.lr, momentum=how.momentum, weight_decay=how.weight_decay)
    steps = how.epochs * -(-len(examples) // how.batch_size)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    for _ in range(how.epochs):
        for rows in torch.randperm(len(examples), generator=generator).split(how.batch_size):
            if len(rows):
                F.cross_entropy(tuned(examples[rows]), labels[rows]).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    return tuned.eval()
