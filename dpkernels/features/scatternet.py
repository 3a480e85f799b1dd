"""ScatterNet: the handcrafted features of Tramèr & Boneh 2021, section 2.1 and appendix C.1."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

from dpkernels.ops.scatter import Filters, scatter

VERSION = 1
"""Changes whenever the same image gets other features."""


class ScatterNet(nn.Module):
    """Scattering features of images: [batch, channels, height, width] -> [batch, *feature_shape].

    Morlet wavelets of ``J`` scales and ``L`` angles, two orders, as kymatio defines them; each channel of the image is
    transformed on its own, and its channels follow those of the one before. For J = 2 and L = 8 an image (1, 28, 28)
    has features (81, 7, 7) and an image (3, 32, 32) features (243, 8, 8).

    It has no parameters and no state, depends on each example alone, so that it costs no privacy, and gives the same
    bits for any number of threads and any batch. In a model it takes augmented images; it has no backward, and refuses
    images that require a gradient where one is recorded.

    shape: (channels, height, width) of one image; height and width at least 2^J. J: scales, 1 or more. L: angles.
    Raises TypeError or ValueError that names the argument.
    """

    def __init__(self, shape: Sequence[int], J: int = 2, L: int = 8) -> None:
        super().__init__()
        sizes = tuple(_positive(f"shape[{i}]", size) for i, size in enumerate(shape))
        if len(sizes) != 3:
            raise ValueError(f"shape must be (channels, height, width), got {tuple(shape)}")
        self.J, self.L = _positive("J", J), _positive("L", L)
        if min(sizes[1:]) < 2**self.J:
            raise ValueError(f"shape must have height and width of at least 2^J = {2**self.J}, got {sizes}")
        self.shape = sizes
        self.filters = kymatio_filters(sizes[1], sizes[2], self.J, self.L)

    @property
    def feature_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of one example's features."""
        channels, height, width = self.filters.feature_shape
        return self.shape[0] * channels, height, width

    def forward(self, images: Tensor) -> Tensor:
        """Features [batch, *feature_shape] of images [batch, *shape], float32 or float64.

        Raises TypeError or ValueError for another kind or shape of images, and ValueError for images that require a
        gradient: detach() them, or call it under torch.no_grad().
        """
        if not isinstance(images, Tensor) or not images.is_floating_point():
            got = images.dtype if isinstance(images, Tensor) else type(images).__name__
            raise TypeError(f"images must be a floating-point tensor, got {got}")
        if images.dim() != 4 or tuple(images.shape[1:]) != self.shape:
            raise ValueError(f"images must be [batch, {', '.join(map(str, self.shape))}], got {tuple(images.shape)}")
        if images.requires_grad and torch.is_grad_enabled():
            raise ValueError("images must not require a gradient: ScatterNet has no backward; detach() them first")
        planes = images.reshape(-1, *self.shape[1:])
        return scatter(planes, self.filters).view(len(images), *self.feature_shape)

    @property
    def fingerprint(self) -> str:
        """Names the features: another one for other filters, another shape or another version of the transform."""
        seen = hashlib.sha256(f"ScatterNet {VERSION} {self.extra_repr()}".encode())
        for tensor in (*self.filters.wavelets, *self.filters.lowpass):
            seen.update(tensor.numpy().data)
        return seen.hexdigest()

    def orders(self) -> Tensor:
        """The order (0, 1 or 2) of every feature channel, int64 [channels]."""
        return torch.tensor([len(path) for path in self._paths()] * self.shape[0])

    def scales(self) -> list[tuple[int, ...]]:
        """The scales of the wavelets that every feature channel went through, j for each: () is the low pass alone."""
        return [tuple(n // self.L for n in path) for path in self._paths()] * self.shape[0]

    def _paths(self) -> list[tuple[int, ...]]:
        waves = range(self.J * self.L)
        pairs = [(n, m) for n in waves for m in waves if m // self.L > n // self.L]
        return [(), *((n,) for n in waves), *pairs]

    def extra_repr(self) -> str:
        """What repr() shows."""
        return f"{self.shape}, J={self.J}, L={self.L}"


@lru_cache(maxsize=16)
def kymatio_filters(height: int, width: int, J: int, L: int) -> Filters:
    """kymatio's filters for images of height x width, padded as kymatio pads them."""
    from kymatio.scattering2d.filter_bank import filter_bank
    from kymatio.scattering2d.utils import compute_padding

    bank = filter_bank(*compute_padding(height, width, J), J, L)
    waves = [[w for w in bank["psi"] if w["j"] >= (r + 1 if r else 0)] for r in range(J)]
    size = bank["phi"]["levels"][0].shape
    return Filters(
        shape=(height, width),
        angles=L,
        wavelets=tuple(
            torch.from_numpy(
                np.array([w["levels"][r] for w in chosen], np.float64).reshape(-1, size[0] >> r, size[1] >> r)
            )
            for r, chosen in enumerate(waves)
        ),
        lowpass=tuple(torch.from_numpy(np.array(low, np.float64)) for low in bank["phi"]["levels"]),
    )


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


__all__ = ["VERSION", "ScatterNet", "kymatio_filters"]
