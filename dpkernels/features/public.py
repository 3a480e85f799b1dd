"""Statistics of features from synthetic images that no data was used for: they cost no privacy.

Natural images have an amplitude spectrum that falls like 1 / frequency, and colours that vary along grey most, least
along magenta to green (Ruderman et al. 1998). Gaussian noise with these two properties is enough to tell how the
channels of a ScatterNet compare: on CIFAR-10 their standard deviations come out right to a factor of 0.9 to 2.3, while
they differ by a factor of 300 among themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

IMAGES = 1000
SEED = 0
VERSION = 1  # of the synthetic images and of what is made by their statistics
_RIDGE = 0.01
_CONTRAST = 0.2  # standard deviation of grey, where 1 is white
_AXES = np.array([[1, 1, 1], [1, 0, -1], [1, -2, 1]]) / np.sqrt([[3], [2], [6]])  # grey, red to blue, magenta to green
_SPREAD = np.array([1.0, 0.3, 0.12])  # along these


def synthetic_images(count: int, shape: Sequence[int], *, seed: int = SEED) -> Tensor:
    """Images of 1 / f noise, float32 [count, channels, height, width] in [0, 1]; three channels are red, green, blue.

    Other numbers of channels are drawn on their own. The same images for the same seed.
    """
    channels, height, width = shape
    rng = np.random.default_rng(seed)
    tall, wide = 2 * height, 2 * width  # a window of a larger image, which does not wrap around
    rows, columns = np.fft.fftfreq(tall)[:, None], np.fft.rfftfreq(wide)[None]
    frequency = np.hypot(rows, columns)
    frequency[0, 0] = frequency[frequency > 0].min()
    size = (count, channels, tall, wide // 2 + 1)
    spectrum = (rng.standard_normal(size) + 1j * rng.standard_normal(size)) / frequency
    noise = np.fft.irfft2(spectrum, s=(tall, wide))[:, :, :height, :width]
    noise /= math.sqrt(np.mean(noise**2)) if noise.size else 1.0
    if channels == 3:
        noise = np.einsum("ncij,cd->ndij", noise * (math.sqrt(3) * _SPREAD)[:, None, None], _AXES)
    return torch.from_numpy(np.clip(0.5 + _CONTRAST * noise, 0, 1).astype(np.float32))


@dataclass(frozen=True, eq=False)
class PublicStatistics:
    """Of features of synthetic images, by channel.

    mean, std: float64 [channels]. correlation: float64 [channels, channels].
    """

    mean: Tensor
    std: Tensor
    correlation: Tensor


def public_statistics(
    transform: Callable[[Tensor], Tensor],
    shape: Sequence[int],
    *,
    value_range: tuple[float, float] = (0.0, 1.0),
    count: int = IMAGES,
) -> PublicStatistics:
    """Statistics by channel of ``transform`` (images [batch, *shape] to features [batch, channels, ...]) on synthetic
    images whose pixels are scaled to ``value_range``. Takes seconds."""
    low, high = value_range
    images = synthetic_images(count, shape) * (high - low) + low
    features = torch.cat([transform(part) for part in images.split(256)]).flatten(2).double()
    mean, std = features.mean((0, 2)), features.var((0, 2), correction=0).sqrt()
    if not (std > 0).all():
        raise ValueError(f"transform must give channels that vary, got {int((std == 0).sum())} that do not")
    units = ((features - mean[:, None]) / std[:, None]).transpose(0, 1).flatten(1)
    return PublicStatistics(mean, std, units @ units.T / units.shape[1])


class PublicWhitening(nn.Module):
    """Features with less correlation between channels, by statistics of synthetic images: [batch, channels, ...].

    x -> R^-power (x - mean) / std, with R the public correlation, and its eigenvalues raised by 1% of their mean. The
    channels of a ScatterNet say much the same of an image, and the gradients of a model on them have few directions,
    while the noise has all. A power of 1/2 would whiten wholly and raise what is noise in the features as well.

    It has no parameters, depends on each example alone and costs no privacy.
    """

    mean: Tensor
    matrix: Tensor

    def __init__(self, public: PublicStatistics, power: float = 0.25) -> None:
        super().__init__()
        if isinstance(power, bool) or not isinstance(power, (int, float)) or not 0 <= power <= 0.5:
            raise ValueError(f"power must be a number with 0 <= power <= 0.5, got {power!r}")
        values, vectors = torch.linalg.eigh(public.correlation)
        raised = values.clamp(min=0) + _RIDGE * values.mean()
        self.power = power
        self.register_buffer("mean", public.mean.clone())
        self.register_buffer("matrix", (vectors * raised.pow(-power)) @ vectors.T / public.std)

    @torch.no_grad()
    def forward(self, features: Tensor) -> Tensor:
        """The features, decorrelated, in their own dtype. Raises ValueError for another number of channels."""
        if features.dim() < 2 or features.size(1) != len(self.mean):
            raise ValueError(f"features must be [batch, {len(self.mean)}, ...], got {tuple(features.shape)}")
        rows = features.flatten(2) if features.dim() > 2 else features.unsqueeze(2)
        centred = rows - self.mean.to(rows.dtype)[:, None]
        return torch.matmul(self.matrix.to(rows.dtype), centred).view(features.shape)

    def extra_repr(self) -> str:
        """What repr() shows."""
        return f"{len(self.mean)}, power={self.power:g}"
