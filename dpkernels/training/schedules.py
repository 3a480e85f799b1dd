"""Learning rate schedules, as factors over the steps of a plan."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def factor(schedule: str, step: int, steps: int, warmup: float = 0.0) -> float:
    """What the learning rate is multiplied with at step `step` of `steps`, counted from 0.

    warmup: the fraction of all steps over which the factor rises linearly to 1. After it, "constant" stays there and
    "cosine" falls to 0 along half a cosine. Raises ValueError for another schedule.
    """
    rising = round(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))
    raise ValueError(f"schedule must be 'constant' or 'cosine', got {schedule!r}")


def scheduler(optimizer: Optimizer, schedule: str, *, steps: int, warmup: float = 0.0, start_step: int = 0) -> LambdaLR:
    """torch's scheduler for the steps from `start_step` on; call its step() once a logical step.

    Every parameter group goes along its own multiple of the schedule: of the learning rate that it was made with, also
    where a state was loaded that was saved on the way. It follows the position in the plan, so that a run whose steps
    were lost to a kill still ends where the schedule does.
    """
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"])
    # Beyond the last step torch asks once more.
    return LambdaLR(optimizer, lambda done: factor(schedule, min(start_step + done, steps), steps, warmup))
