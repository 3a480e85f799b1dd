"""The loss that a configuration names, ready for the loop.

All losses but cross entropy are those of Shamsabadi & Papernot 2023 and of its ablations (`dpkernels.losses`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkernels.losses import LosingLess, focal, huber, sum_absolute_error, sum_squared_error
from dpkernels.losses.losing_less import Penalty
from dpkernels.training.config import TrainConfig

OfLogits = Callable[[Tensor, Tensor], Tensor]


class Objective:
    """One loss per example of `config`, for `model`."""

    def __init__(self, config: TrainConfig, model: nn.Module) -> None:
        self._model = model
        self._combined = _combined(config, model)
        self._of_logits = None if self._combined is not None else _of_logits(config)

    def __call__(self, inputs: Tensor, labels: Tensor, epoch: int) -> Tensor:
        """[batch] losses; epoch: whole passes before this step."""
        if self._combined is not None:
            return self._combined(inputs, labels, epoch)
        assert self._of_logits is not None
        return self._of_logits(self._model(inputs), labels)

    def set_weight_decay(self, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        """Where the loss has a penalty on weights, which is a part of the update: that of `epoch`, for parameter groups
        as `decayed_groups` makes them."""
        if self._combined is not None and self._combined.penalty == "weights":
            decays = self._combined.weight_decays(epoch)
            for group in optimizer.param_groups:
                group["weight_decay"] = decays.get(group["name"], 0.0)


def decayed_groups(config: TrainConfig, model: nn.Module) -> list[dict[str, Any]] | None:
    """A group for each trainable parameter where the loss gives each its own weight decay; else None."""
    if config.loss != "losing-less-weights":
        return None
    return [{"name": name, "params": [p]} for name, p in model.named_parameters() if p.requires_grad]


def _combined(config: TrainConfig, model: nn.Module) -> LosingLess | None:
    """The losses that the curriculum runs over."""
    if config.loss_threshold_epoch is None:
        return None
    beta = math.inf if config.loss_beta is None else config.loss_beta
    gamma = 0.0 if config.loss_gamma is None else config.loss_gamma
    penalty: Penalty = "weights" if config.loss == "losing-less-weights" else "pre-activations"
    return LosingLess(model, config.loss_threshold_epoch, beta, gamma, penalty=penalty)


def _of_logits(config: TrainConfig) -> OfLogits:
    if config.loss == "focal":
        assert config.loss_gamma is not None
        gamma = config.loss_gamma
        return lambda logits, labels: focal(logits, labels, gamma)
    if config.loss == "huber":
        assert config.loss_beta is not None
        beta = config.loss_beta
        return lambda logits, labels: huber(logits, labels, beta)
    if config.loss == "sse":
        return sum_squared_error
    if config.loss == "sae":
        return sum_absolute_error
    assert config.loss == "cross-entropy"
    return lambda logits, labels: F.cross_entropy(logits, labels, reduction="none")
