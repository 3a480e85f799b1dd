"""Distributions that hyper-parameters are drawn from: fixed, stated, and the same for every run."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Any

from dpkernels.training.config import check_values, parse_value

FREE = (
    *("lr", "lr_body", "max_grad_norm", "momentum", "weight_decay", "warmup", "averaging"),
    *("loss_threshold_epoch", "loss_beta", "loss_gamma"),
)
"""What does not decide how much noise a run needs: only these may come from an interval."""
FIXED = ("dataset", "dataset_size", "delta", "epsilon", "noise_multiplier", "score_noise_multiplier", "seed")
"""What no run may choose."""


@dataclass(frozen=True)
class Draw:
    """How one field is drawn, from the operating system's entropy: from `values`, each as likely as the others; or from
    the interval `low` to `high`, evenly ("uniform") or so that its logarithm is even ("log")."""

    field: str
    kind: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0

    def __post_init__(self) -> None:
        name = self.field
        if name in FIXED:
            raise ValueError(f"draw must not be of {', '.join(FIXED)}, got {name}")
        if self.kind == "choice":
            if len(set(self.values)) < max(len(self.values), 2):
                raise ValueError(f"draw of {name} must have two different values at least, got {list(self.values)}")
            for value in self.values:
                check_values({name: value})
            return
        if self.kind not in {"log", "uniform"}:
            raise ValueError(f"draw must be log:LOW:HIGH, uniform:LOW:HIGH or values, got {self.kind!r} for {name}")
        if name not in FREE:
            raise ValueError(
                f"draw of {name} must be from values, since it decides how much noise a run needs; from an interval "
                f"may be drawn {', '.join(FREE)}"
            )
        for end in (self.low, self.high):
            check_values({name: end})
        if not (math.isfinite(self.high) and self.low < self.high) or (self.kind == "log" and self.low <= 0):
            least = "0 < LOW < HIGH" if self.kind == "log" else "LOW < HIGH"
            raise ValueError(f"draw of {name} must have {least}, got {self.low:g} and {self.high:g}")

    def one(self) -> Any:
        """A value."""
        source = secrets.SystemRandom()
        if self.kind == "choice":
            return source.choice(self.values)
        if self.kind == "uniform":
            return source.uniform(self.low, self.high)
        return min(max(math.exp(source.uniform(math.log(self.low), math.log(self.high))), self.low), self.high)

    def __str__(self) -> str:
        if self.kind == "choice":
            return f"{self.field} from {{{', '.join(map(_word, self.values))}}}"
        how = "uniform" if self.kind == "uniform" else "log-uniform"
        return f"{self.field} {how} from {self.low:g} to {self.high:g}"


def parse_draw(text: str) -> Draw:
    """FIELD=log:LOW:HIGH, FIELD=uniform:LOW:HIGH or FIELD=A,B,... Raises ValueError or TypeError that says what is
    wrong."""
    name, _, how = text.partition("=")
    name = name.strip().replace("-", "_")
    kind, _, ends = how.partition(":")
    if kind.strip() in {"log", "uniform"}:
        low, _, high = ends.partition(":")
        limits = [float(parse_value(name, end)) for end in (low, high)]
        return Draw(name, kind.strip(), low=limits[0], high=limits[1])
    return Draw(name, "choice", tuple(parse_value(name, value) for value in how.split(",")))


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
