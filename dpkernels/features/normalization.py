"""Normalization of feature channels: within an example, which is free, or by statistics of the data, which cost.

`PrivateDataNorm` is Algorithm 2 of Tramèr & Boneh 2021 with what makes it cheap: statistics are estimated of features
that were normalized by public ones before. The channels of a ScatterNet differ by a factor of 300 in their standard
deviation; noise that fits the bound on all of them together exceeds the variance of most. In units of public statistics
all channels are alike, and a fraction of the noise is left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpkernels.accounting import Event, Gaussian, Ledger, SampledGaussian
from dpkernels.random import Domain, Key, total_variation

ROUNDING = 1e-6  # of the bounds: what the grid of the sums may add to them
UPWARD = 1 + 1e-9  # covers every rounding of the clipped sums in float64, with room


class GroupNorm(nn.GroupNorm):
    """Group normalization without parameters: [batch, channels, height, width], every example on its own.

    It costs no privacy. groups: must divide channels; the paper tries 9, 27 and 81.
    """

    def __init__(self, groups: int, channels: int) -> None:
        for name, value in (("groups", groups), ("channels", channels)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if groups < 1 or channels < 1 or channels % groups:
            raise ValueError(f"groups must divide channels={channels}, got {groups}")
        super().__init__(groups, channels, affine=False)


@dataclass(frozen=True)
class NormRelease:
    """How the statistics are released: what decides privacy, and nothing that comes from the data.

    Each example contributes its channels' means over pixels and its channels' mean squares, each vector clipped to its
    bound; both sums get Gaussian noise of ``noise_multiplier`` times the bound and are divided by the planned number of
    examples.
    """

    dataset_size: int
    """Public nominal number of examples N."""
    noise_multiplier: float
    """sigma_norm, of each of the two sums."""
    mean_bound: float
    """C_1, on the norm of an example's channel means. A constant, or paid for elsewhere."""
    square_bound: float
    """C_2, on the norm of an example's channel mean squares."""
    sampling_rate: float = 1.0
    """Below 1: the statistics of a fresh secret Poisson sample. A fixed or published subset would not amplify."""

    def __post_init__(self) -> None:
        if isinstance(self.dataset_size, bool) or not isinstance(self.dataset_size, int) or self.dataset_size < 1:
            raise ValueError(f"dataset_size must be a positive integer, got {self.dataset_size!r}")
        for name in ("noise_multiplier", "mean_bound", "square_bound"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 < value < math.inf):
                raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
        if not 0 < self.sampling_rate <= 1:
            raise ValueError(f"sampling_rate must be a probability with 0 < p <= 1, got {self.sampling_rate!r}")

    @classmethod
    def in_public_units(
        cls, channels: int, dataset_size: int, noise_multiplier: float, sampling_rate: float = 1.0
    ) -> NormRelease:
        """For features that are normalized by public statistics first, by constants that come from no data.

        An example with public mean squares has a vector of those of norm sqrt(channels). Bounds are 2.5 sqrt(channels)
        on means and 16 sqrt(channels) on mean squares: room for images of four times the contrast.
        """
        root = math.sqrt(channels)
        return cls(dataset_size, noise_multiplier, 2.5 * root, 16 * root, sampling_rate)

    @property
    def event(self) -> Event:
        """What the release costs, for a plan's ``compose_with``.

        Both sums are one release of a vector that an example moves by sqrt(2) in units of the noise: the Gaussian
        mechanism with noise_multiplier / sqrt(2), (alpha, alpha / noise_multiplier^2)-RDP as in Claim B.5. Where they
        are of a sample they share it: one sampled release, not two.
        """
        sigma = self.noise_multiplier / math.sqrt(2)
        return Gaussian(sigma) if self.sampling_rate == 1 else SampledGaussian(sigma, self.sampling_rate)

    def noise_error(self, channels: int) -> float:
        """Total variation from ideal of the noise of both sums, of so many channels."""
        scales = [
            _noise_scale(channels, bound, self.noise_multiplier) for bound in (self.mean_bound, self.square_bound)
        ]
        return sum(total_variation(channels, noise_std=std, grid=grid) for std, grid in scales)

    @property
    def count(self) -> float:
        """The planned number of examples, which sums are divided by whatever the actual one."""
        return self.dataset_size * self.sampling_rate


class PrivateDataNorm(nn.Module):
    """(x - mean) / std by channel: [batch, channels, ...] to the same shape.

    It begins with statistics that are public (`public_statistics`, or none: mean 0 and std 1, as the paper does), which
    costs nothing. `release` replaces them by an estimate from private data.

    mean, std: [channels], the public ones. min_ratio: a variance is taken to be at least min_ratio^2 of the public one.
    prior: the weight of the public variance in the estimate, as if it were known to this factor of itself; infinity
        trusts the data alone.

    The estimate of a variance v (in public units) from a noisy v' with noise of standard deviation s is
    (v' / s^2 + 1 / prior^2) / (1 / s^2 + 1 / prior^2), at least min_ratio^2: a channel whose variance lies below the
    noise keeps its public one. `weak` counts them.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Tensor, std: Tensor, *, min_ratio: float = 0.1, prior: float = 1.0) -> None:
        super().__init__()
        for name, value in (("mean", mean), ("std", std)):
            if not isinstance(value, Tensor) or value.dim() != 1 or not value.is_floating_point():
                raise TypeError(f"{name} must be a floating-point tensor [channels], got {_shape(value)}")
        if mean.shape != std.shape or not (mean.isfinite().all() and (std > 0).all() and std.isfinite().all()):
            raise ValueError("mean and std must be finite and of one length, and std positive")
        if not 0 < min_ratio < math.inf:
            raise ValueError(f"min_ratio must be a finite number > 0, got {min_ratio!r}")
        if not prior > 0:
            raise ValueError(f"prior must be a number > 0, got {prior!r}")
        self.min_ratio, self.prior = min_ratio, prior
        self.register_buffer("mean", mean.detach().double().clone())
        self.register_buffer("std", std.detach().double().clone())
        self.weak: int | None = None
        """Channels whose noisy variance was below twice its noise, once the statistics were released."""

    @property
    def channels(self) -> int:
        """The number of channels."""
        return len(self.mean)

    def forward(self, features: Tensor) -> Tensor:
        """The normalized features. Raises ValueError for another number of channels."""
        if features.dim() < 2 or features.size(1) != self.channels:
            raise ValueError(f"features must be [batch, {self.channels}, ...], got {tuple(features.shape)}")
        # whole examples, for broadcasting inside takes twice as long; the result lies as the shift does
        layout = torch.channels_last if features.dim() == 4 and features.stride(1) == 1 else torch.contiguous_format
        scale, shift = (
            values.to(features.dtype)
            .view(1, -1, *[1] * (features.dim() - 2))
            .expand(1, *features.shape[1:])
            .contiguous(memory_format=layout)
            for values in (1 / self.std, -self.mean / self.std)
        )
        return torch.addcmul(shift, features, scale)

    @torch.no_grad()
    def release(
        self, batches: Iterable[Tensor], how: NormRelease, *, ledger: Ledger | None, key: Key | None = None
    ) -> None:
        """Estimate the statistics from private features (Algorithm 2), and use them from now on.

        Args:
            batches: features [rows, channels, ...], every example of the private data once.
            how: bounds are in public units, those of ``forward`` before the release.
            ledger: the release is recorded before its noise is drawn; None only where the event is accounted for
                elsewhere.
            key: of the noise and the sample, from streams that nothing else was drawn from; a fresh one where None.

        Raises:
            ValueError: features of another shape. RuntimeError: the statistics were released before.
            BudgetExceededError: the ledger's plan does not allow the release.
        """
        if self.weak is not None:
            raise RuntimeError("the statistics were released before: make another PrivateDataNorm for another release")
        key = Key.fresh() if key is None else key
        first = key.claim(Domain.NORMALIZATION, count=3)  # the noise of two sums, and the sample
        sums = torch.zeros(2, self.channels, dtype=torch.float64)
        seen = 0
        for features in batches:
            if features.dim() < 2 or features.size(1) != self.channels:
                raise ValueError(f"batches must give [rows, {self.channels}, ...], got {tuple(features.shape)}")
            rows = features.flatten(2) if features.dim() > 2 else features.unsqueeze(2)
            chosen = _chosen(key, first + 2, seen, len(rows), how.sampling_rate)
            seen += len(rows)
            sums += self._contributions(rows[chosen], how).sum(1)
        if ledger is not None:
            ledger.record(how.event, "normalization statistics", how.noise_error(self.channels))
        noisy = torch.stack(
            [
                _noisy(total, bound, how.noise_multiplier, key, step)
                for step, (total, bound) in enumerate(zip(sums, (how.mean_bound, how.square_bound), strict=True), first)
            ]
        )
        mean, square = noisy / how.count
        self._adopt(mean, square - mean**2, self._variance_noise(mean, how))

    def _contributions(self, rows: Tensor, how: NormRelease) -> Tensor:
        """Clipped means and mean squares [2, rows, channels] of [rows, channels, pixels]; zero where not finite."""
        rows = rows.double()
        means = rows.mean(2)
        squares = torch.linalg.vector_norm(rows, dim=2).square() / rows.size(2)
        squares = (squares - 2 * self.mean * means + self.mean**2) / self.std**2  # in public units, as the means below
        parts = []
        for values, bound in (((means - self.mean) / self.std, how.mean_bound), (squares, how.square_bound)):
            norms = values.norm(dim=1)
            clipped = values * (bound / norms.clamp(min=1e-300)).clamp(max=1)[:, None]
            parts.append(torch.where(norms.isfinite()[:, None], clipped, 0))
        return torch.stack(parts)

    def _variance_noise(self, mean: Tensor, how: NormRelease) -> Tensor:
        """Standard deviation of the noise in each variance: of the mean square, and of the mean's square."""
        of_mean = how.noise_multiplier * how.mean_bound / how.count
        of_square = how.noise_multiplier * how.square_bound / how.count
        return (of_square**2 + (2 * mean * of_mean) ** 2 + 2 * of_mean**4).sqrt()

    def _adopt(self, mean: Tensor, variance: Tensor, noise: Tensor) -> None:
        self.weak = int((variance < 2 * noise).sum())
        data, public = 1 / noise**2, 1 / self.prior**2
        estimate = ((variance * data + public) / (data + public)).clamp(min=self.min_ratio**2)
        self.mean += self.std * mean
        self.std *= estimate.sqrt()

    def extra_repr(self) -> str:
        """What repr() shows."""
        return f"{self.channels}, min_ratio={self.min_ratio:g}, prior={self.prior:g}"


def _chosen(key: Key, step: int, first: int, count: int, rate: float) -> Tensor:
    """Which of the ``count`` examples from ``first`` on are in the sample of stream ``step``."""
    if rate == 1:
        return torch.arange(count)
    drawn = key.sample(Domain.NORMALIZATION, step, first + count, rate)
    return drawn[drawn >= first] - first


def _noisy(total: Tensor, bound: float, noise_multiplier: float, key: Key, step: int) -> Tensor:
    """The sum on a grid of powers of two with noise on the same grid, which hides nothing in its low bits."""
    std, grid = _noise_scale(len(total), bound, noise_multiplier)
    noise = key.grid_normal(Domain.NORMALIZATION, step, len(total), noise_std=std, grid=grid)
    return (total / grid).round() * grid + noise


def _noise_scale(channels: int, bound: float, noise_multiplier: float) -> tuple[float, float]:
    """Standard deviation and grid of the noise of a sum [channels]."""
    root = math.sqrt(channels)
    grid = 2.0 ** math.floor(math.log2(ROUNDING * bound / root))
    return noise_multiplier * (bound * UPWARD + grid * root), grid


def _shape(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
