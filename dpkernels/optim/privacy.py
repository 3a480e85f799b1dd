"""How a private optimizer is set up."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from dpkernels.accounting import Ledger, Plan


@dataclass(frozen=True)
class Privacy:
    """How a private optimizer is set up; the keyword arguments that all of them share.

    Attributes:
        plan: the privacy plan; gives noise, expected batch size and budget.
        noise_multiplier, batch_size: instead of a plan: noise standard deviation divided by the sensitivity, and the
            expected number of examples in a logical batch, which every sum is divided by.
        max_grad_norm: the bound C on an example's gradient norm over all parameters together.
        ledger: where spent steps are recorded; by default one in memory, bound to the plan's budget.
        seed: makes the noise reproducible, for tests. The run is then not private, and says so.
        loss_reduction: as for :class:`dpkernels.GhostClipper`.
    """

    plan: Plan | None = None
    max_grad_norm: float | None = None
    noise_multiplier: float | None = None
    batch_size: int | None = None
    ledger: Ledger | None = None
    seed: int | None = None
    loss_reduction: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        if self.max_grad_norm is None:
            raise TypeError("max_grad_norm must be given: the bound on one example's gradient norm")
        if self.plan is not None:
            if not isinstance(self.plan, Plan):
                raise TypeError(f"plan must be a plan made by dpkernels.plan(...), got {type(self.plan).__name__}")
            if self.noise_multiplier is not None or self.batch_size is not None:
                raise ValueError("give either plan, or noise_multiplier and batch_size, not both")
        else:
            if self.noise_multiplier is None or self.batch_size is None:
                raise TypeError("give plan, or both noise_multiplier and batch_size")
            if not (isinstance(self.noise_multiplier, (int, float)) and 0 <= self.noise_multiplier < math.inf):
                raise ValueError(f"noise_multiplier must be a finite number >= 0, got {self.noise_multiplier!r}")
            if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
                raise ValueError(f"batch_size must be a positive integer, got {self.batch_size!r}")
            if self.ledger is not None:
                raise ValueError("a ledger needs a plan: without one there is no sampling rate to account for")
        if self.sigma > 0 and self.max_grad_norm == math.inf:
            raise ValueError("max_grad_norm=inf needs noise_multiplier=0: without a bound no noise is enough")

    @property
    def sigma(self) -> float:
        """The noise multiplier."""
        noise_multiplier = self.plan.noise_multiplier if self.plan is not None else self.noise_multiplier
        assert noise_multiplier is not None
        return float(noise_multiplier)

    @property
    def denominator(self) -> int:
        """The expected batch size, which sums are divided by whatever the actual one."""
        batch_size = self.plan.batch_size if self.plan is not None else self.batch_size
        assert batch_size is not None
        return batch_size


#: What the guarantee rests on: fixed when the optimizer is made, and one for all parameters.
FIXED = {field.name for kind in (Privacy, Plan) for field in fields(kind)} | {"clipper", "key", "sampling_rate"}
