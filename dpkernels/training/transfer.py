"""The part of a configuration that starts from a public model: its weights, what stays frozen, what is trained."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from dpkernels import transfer
from dpkernels.training.config import TrainConfig


def prepare(config: TrainConfig, model: nn.Module) -> list[str]:
    """Load, freeze and select in `model`, in place, as `config` says; what was done, in words.

    Raises ValueError or FileNotFoundError where the weights or the names do not fit the model.
    """
    told = []
    total = sum(parameter.numel() for parameter in model.parameters())
    if config.init is not None:
        told.append(str(transfer.load_weights(model, config.init)))
    if config.freeze is not None:
        if config.freeze.strip().isdecimal():
            transfer.freeze(model, block_groups=int(config.freeze))
        else:
            transfer.freeze(model, *(name for part in config.freeze.split(",") if (name := part.strip())))
    if config.sparse is not None:
        transfer.train_largest(model, config.sparse)
    if config.freeze is not None or config.sparse is not None:
        counts = [f"{role} {some:,}" for role, (some, _) in transfer.trained(model).items() if some]
        told.append(f"trained: {', '.join(counts)} of {total:,} parameters")
    return told


def parameter_groups(config: TrainConfig, model: nn.Module) -> list[dict[str, Any]] | None:
    """One for each role where the body has a learning rate of its own; None where one group does."""
    if config.lr_body is None:
        return None
    rates = {"classifier": config.lr, "norm": config.lr_body, "sparse": config.lr_body, "body": config.lr_body}
    return transfer.parameter_groups(model, rates)


def dense(config: TrainConfig, model: nn.Module) -> nn.Module:
    """`model` with the names and the dense weights of its architecture: a copy where something was selected."""
    if config.sparse is None:
        return model
    copied = copy.deepcopy(model)
    transfer.densify(copied)
    return copied
