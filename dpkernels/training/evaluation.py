"""Accuracy on a test split, which is treated as public."""

from __future__ import annotations

import torch
from torch import nn

from dpkernels.data import Split
from dpkernels.training.memory import placed


@torch.no_grad()
def accuracy(model: nn.Module, split: Split, *, device: str = "cpu", batch_size: int = 512) -> float:
    """Fraction of `split` that `model` classifies rightly, in [0, 1]. The model's mode is as before afterwards.

    Raises ValueError for a split without examples.
    """
    if len(split) == 0:
        raise ValueError("split must hold at least one example, got none")
    was_training = model.training
    model.eval()
    try:
        right = 0
        for images, labels in split.batches(batch_size):
            right += int((model(placed(images, model, device)).argmax(1) == labels.to(device)).sum())
    finally:
        model.train(was_training)
    return right / len(split)
