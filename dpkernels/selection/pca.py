"""Principal components: of public rows as anybody computes them, of private rows from a noisy sum of outer products."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpkernels.accounting import Event, Gaussian, Ledger
from dpkernels.random import Domain, Key, total_variation

BITS = 15
"""Private rows are integers in units of bound / 2^BITS: products of two and their sums are exact in float64."""
_EXACT_ROWS = 2**20  # 2^20 2^(2 BITS) < 2^53
_LARGEST_NOISE = 2.0**10  # 2^10 2^(2 BITS) is as wide as noise on the grid of integers can be


def public_pca(rows: Tensor, components: int) -> Tensor:
    """The first principal components [components, features] of public rows [rows, features], by scikit-learn.

    Centred, by the mean of all rows, and computed without noise: never of private rows. Raises ValueError where there
    are fewer rows or features than components.
    """
    from sklearn.decomposition import PCA

    check_rows("rows", rows)
    if not 1 <= components <= min(rows.shape):
        raise ValueError(f"components must be between 1 and {min(rows.shape)}, got {components}")
    found = PCA(components, svd_solver="covariance_eigh").fit(rows.double().numpy()).components_
    return torch.from_numpy(np.ascontiguousarray(found))


@dataclass(frozen=True)
class PCARelease:
    """How principal components of private rows are released: Analyze Gauss (Dwork, Talwar, Thakurta & Zhang 2014).

    What is released is the sum of outer products A = sum_i a_i a_i^T, not centred, plus symmetric Gaussian noise; the
    eigenvectors of that are post-processing. Centring would subtract a mean that every example moves.

    **Sensitivity.** Rows are clipped to ``||a_i|| <= R``. One example that is added or removed changes A by one a a^T.
    Write the upper triangle as the vector v(A) = (A_jj; sqrt(2) A_jk, j < k): then ||v(A)||_2 = ||A||_F, and
    ||a a^T||_F = ||a||^2 <= R^2, with equality for every a of norm R. Noise N(0, (sigma R^2)^2) on each entry of v is
    the Gaussian mechanism with noise multiplier sigma. In A that is a standard deviation of sigma R^2 on the diagonal
    and of sigma R^2 / sqrt(2) beside it. (The paper of the mechanism adds sigma R^2 to every entry of the triangle:
    the same guarantee, up to sqrt(2) more noise.)

    **Floating point.** Rows are rounded towards 0 to integers in units of R / 2^15 after clipping, and one that is not
    finite is left out. Then sums are exact in any order, sensitivity is exactly 2^30 in units of R^2 / 2^30, and the
    noise is a rounded Gaussian on the integers.
    """

    bound: float
    """R. A constant: sqrt(d) for a network whose last hidden layer is a tanh of d units, where nothing is clipped."""
    noise_multiplier: float
    """sigma, at most 1024."""

    def __post_init__(self) -> None:
        for name, most in (("bound", math.inf), ("noise_multiplier", _LARGEST_NOISE)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
            if value > most:
                raise ValueError(f"{name} must be at most {most:g}, got {value!r}")

    @property
    def event(self) -> Event:
        """What the release costs, for a plan's ``compose_with``."""
        return Gaussian(self.noise_multiplier)

    def second_moments(self, rows: Tensor, *, ledger: Ledger | None, key: Key | None = None) -> Tensor:
        """The noisy sum of outer products, float64 [features, features], of private rows [rows, features].

        ledger: the release is recorded before its noise is drawn; None only where it is accounted for elsewhere.
        key: of the noise, from a stream that nothing else was drawn from; a fresh one where None.
        """
        check_rows("rows", rows)
        features = rows.size(1)
        total = torch.zeros(features, features, dtype=torch.int64)
        for part in rows.split(_EXACT_ROWS):
            integers = fixed_point(part, self.bound)
            total += (integers.T @ integers).long()
        if ledger is not None:
            ledger.record(self.event, "principal components", self._noise_error(features))
        noise = self._noise(features, Key.fresh() if key is None else key)
        return (total + noise).double() * (self.bound / 2**BITS) ** 2

    def components(self, rows: Tensor, count: int, *, ledger: Ledger | None, key: Key | None = None) -> Tensor:
        """The ``count`` eigenvectors of the noisy sum with the largest eigenvalues, float64 [count, features], the
        largest first. The first of them is about the direction of the mean. Arguments as in ``second_moments``."""
        check_rows("rows", rows)
        if not 1 <= count <= rows.size(1):
            raise ValueError(f"count must be between 1 and {rows.size(1)}, got {count}")
        vectors = torch.linalg.eigh(self.second_moments(rows, ledger=ledger, key=key)).eigenvectors
        return vectors.T.flip(0)[:count].contiguous()

    def _noise_parts(self, features: int) -> tuple[tuple[int, float], tuple[int, float]]:
        """How many integers are drawn and their standard deviation, on the diagonal and above it."""
        std = self.noise_multiplier * 4.0**BITS
        return (features, std), (features * (features - 1) // 2, std * math.sqrt(0.5))

    def _noise_error(self, features: int) -> float:
        """Total variation of the noise from ideal."""
        return sum(total_variation(count, noise_std=std, grid=1.0) for count, std in self._noise_parts(features))

    def _noise(self, features: int, key: Key) -> Tensor:
        """Symmetric integers [features, features], in units of R^2 / 4^BITS."""
        upper, stream = torch.triu_indices(features, features, 1), key.claim(Domain.SELECTION)
        drawn = [
            key.grid_normal(Domain.SELECTION, stream, count, noise_std=std, grid=1.0, offset=offset).long()
            for (count, std), offset in zip(self._noise_parts(features), (0, features), strict=True)
        ]
        noise = torch.diag(drawn[0])
        noise[upper[0], upper[1]] = drawn[1]
        noise[upper[1], upper[0]] = drawn[1]
        return noise


def fixed_point(rows: Tensor, bound: float) -> Tensor:
    """Rows clipped to norm ``bound``, as integers of norm at most 2^BITS in float64; zero where not finite."""
    wide = rows.double()
    norms = wide.norm(dim=1, keepdim=True)
    scale = (bound / norms.clamp(min=1e-300)).clamp(max=1) * (2.0**BITS / bound)
    integers = (wide * scale).trunc()
    # Truncation leaves room for the rounding of scale, but for rows within 1e-12 of a longer row of integers.
    within = norms.isfinite() & (integers.square().sum(1, keepdim=True) <= 4.0**BITS)
    return torch.where(within, integers, 0)


def check_rows(name: str, rows: Tensor) -> None:
    """Raise unless ``rows`` is a floating-point tensor [rows, features]."""
    if not isinstance(rows, Tensor) or rows.dim() != 2 or not rows.is_floating_point():
        got = f"{rows.dtype} {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        raise ValueError(f"{name} must be floating point [rows, features], got {got}")
