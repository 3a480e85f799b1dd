"""Which public points have private examples near them, told with noise."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dpkernels.accounting import Event, Ledger, PureEpsilon
from dpkernels.random import Domain, Key, discrete_laplace
from dpkernels.selection.pca import check_rows, fixed_point

_DIRECTION_BITS = 18
_AT_ONCE = 2**22  # distances held at once


@dataclass(frozen=True)
class SupportRelease:
    """How support counts are released (Algorithm 2 of the paper, with its sensitivity mended).

    Every private example that is uncertain enough counts for the one public point that it is nearest to.

    **Sensitivity.** The paper takes the k most uncertain private examples. One more example then pushes another out,
    so that two counts change by one, and Laplace noise of scale 1 / epsilon costs 2 epsilon. Here an example counts
    where its uncertainty reaches a threshold that no private data had a part in: whether and where it counts depends
    on itself and on public values alone, one count changes, by one, and the L1 sensitivity is 1.

    **Noise.** Counts are integers and get discrete Laplace noise, P(z) proportional to exp(-epsilon |z|), sampled
    exactly (`dpkernels.random.discrete_laplace`). It is epsilon-differentially private in floating point too, because
    none is left: distances are computed in integers, so that an example's nearest point depends on no other row.
    """

    epsilon: float

    def __post_init__(self) -> None:
        value = self.epsilon
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 2**-40 <= value <= 1000:
            raise ValueError(f"epsilon must be a number between 2^-40 and 1000, got {value!r}")

    @property
    def event(self) -> Event:
        """What the release costs, for a plan's ``compose_with``: no Laplace event, whose losses would be smaller."""
        return PureEpsilon(self.epsilon)

    def counts(
        self,
        private: Tensor,
        scores: Tensor,
        public: Tensor,
        directions: Tensor,
        *,
        threshold: float,
        bound: float,
        ledger: Ledger | None,
        key: Key | None = None,
    ) -> Tensor:
        """Noisy counts, int64 [public rows]; some are negative.

        Args:
            private: rows [private rows, features], each a function of its example.
            scores: their uncertainty [private rows].
            public: rows [public rows, features], one at least.
            directions: what both are projected on, [components, features] with rows of norm 1: private ones have been
                paid for (`PCARelease`).
            threshold: the least uncertainty that counts; a constant, or of public data.
            bound: rows are clipped to this norm, private and public ones alike.
            ledger: the release is recorded before its noise is drawn; None only where it is accounted for elsewhere.
            key: of the noise, from a stream that nothing else was drawn from; a fresh one where None.
        """
        if scores.shape != private.shape[:1]:
            raise ValueError(f"scores must be [{len(private)}], one per private row, got {tuple(scores.shape)}")
        counts = torch.zeros(len(public), dtype=torch.int64)
        wanted = (scores >= threshold) & private.isfinite().all(1)
        found = nearest(private[wanted], public, directions, bound)
        counts += found.bincount(minlength=len(public))
        if ledger is not None:
            ledger.record(self.event, "support counts")
        key = Key.fresh() if key is None else key
        stream = key.claim(Domain.SELECTION)
        return counts + discrete_laplace(key, Domain.SELECTION, stream, len(public), epsilon=self.epsilon)


def nearest(rows: Tensor, points: Tensor, directions: Tensor, bound: float) -> Tensor:
    """Index of the nearest point for every row, int64 [rows], the first one of several, after projection.

    rows [rows, features] and points [points, features] are clipped to ``bound``, projected on directions [components,
    features] and rounded to multiples of bound / 2^15; distances between these are exact.
    """
    check_rows("rows", rows)
    check_rows("points", points)
    check_rows("directions", directions)
    if not (rows.size(1) == points.size(1) == directions.size(1)):
        sizes = rows.size(1), points.size(1), directions.size(1)
        raise ValueError(f"rows, points and directions must have as many features as one another, got {sizes}")
    if not len(points):
        raise ValueError("points must hold at least one row, got none")
    if not (directions.norm(dim=1) - 1).abs().max() < 1e-3:
        raise ValueError("directions must have rows of norm 1")
    axes = (directions.double() * 2.0**_DIRECTION_BITS).round().T

    def projected(values: Tensor) -> Tensor:  # both products stay below 2^53 in every partial sum
        return ((fixed_point(values, bound) @ axes) / 2.0**_DIRECTION_BITS).round()

    places, targets = projected(rows), projected(points)
    squares = targets.square().sum(1)
    parts = places.split(max(1, _AT_ONCE // len(points)))
    return torch.cat([(squares - 2 * (part @ targets.T)).argmin(1) for part in parts])
