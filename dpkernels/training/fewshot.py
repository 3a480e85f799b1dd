"""Learns the small tasks of a few-shot evaluation as a training run would, privately, in memory."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from dpkernels import models
from dpkernels.accounting import Ledger
from dpkernels.data import PoissonLoader
from dpkernels.training.build import build_optimizer
from dpkernels.training.config import TrainConfig
from dpkernels.training.objective import Objective
from dpkernels.training.schedules import scheduler
from dpkernels.training.transfer import prepare
from dpkernels.transfer.fewshot import Fit, Predict


def learner(config: TrainConfig, input_shape: Sequence[int], ways: int) -> Fit:
    """What `dpkernels.transfer.few_shot` asks for: trains by `config` on the examples of each trial.

    config: dataset_size is ways * shots, and epsilon (or the noise) is for each trial. Every trial starts from the same
    model, prepared once from init, freeze and sparse, with noise and sample of its own; with a seed, trial i has
    seed + i. Features, normalization and averaging are not for such tasks.

    Raises ValueError where the configuration has one of these, and as `prepare` and the optimizers do.
    """
    plain = {"features": "none", "normalization": "none", "averaging": None}
    other = {name: got for name in plain if (got := getattr(config, name)) != plain[name]}
    if other:
        raise ValueError(f"config must have none of {', '.join(plain)}, got {other}")
    start = models.create(config.model, input_shape, ways)
    prepare(config, start)
    plan = config.plan()
    trial = itertools.count()

    def fit(images: Tensor, labels: Tensor) -> Predict:
        seed = None if config.seed is None else config.seed + next(trial)
        model: nn.Module = copy.deepcopy(start).train()
        ledger = Ledger(budget=plan, seeded=config.seeded)
        optimizer = build_optimizer(replace(config, seed=seed), plan, model, ledger)
        schedule = scheduler(optimizer, config.schedule, steps=plan.steps, warmup=config.warmup)
        objective = Objective(config, model)
        loader = PoissonLoader((images, labels), plan, optimizer=optimizer)
        for x, y in loader:
            objective.set_weight_decay(optimizer, loader.epoch)
            optimizer.backward(objective(x, y, loader.epoch))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        optimizer.clipper.detach()
        return model.eval()

    return fit
