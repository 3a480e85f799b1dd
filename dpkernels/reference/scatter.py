"""The scattering transform by plain Fourier transforms, one wavelet at a time (Bruna & Mallat 2013)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def scatter(images: Tensor, filters: Any) -> Tensor:
    rows, columns = filters.sources
    padded = images[:, rows][:, :, columns]
    scales, angles = filters.scales, filters.angles
    dtype = images.dtype

    def smoothed(x: Tensor, resolution: int) -> Tensor:
        product = torch.fft.fft2(x) * filters.lowpass[resolution].to(dtype)
        step = 2 ** (scales - resolution)
        return torch.fft.ifft2(product).real[:, ::step, ::step][:, 1:-1, 1:-1]

    def modulus(x: Tensor, wavelet: Tensor, resolution: int, scale: int) -> Tensor:
        step = 2 ** (scale - resolution)
        return torch.fft.ifft2(torch.fft.fft2(x) * wavelet.to(dtype)).abs()[:, ::step, ::step]

    zeroth, first, second = [smoothed(padded, 0)], [], []
    for n, wavelet in enumerate(filters.wavelets[0]):
        scale = n // angles
        once = modulus(padded, wavelet, 0, scale)
        first.append(smoothed(once, scale))
        begin = scale + 1 if scale else 0  # the smallest scale among the wavelets of this resolution
        for m, other in enumerate(filters.wavelets[scale], start=begin * angles):
            if m // angles > scale:
                twice = modulus(once, other, scale, m // angles)
                second.append(smoothed(twice, m // angles))
    return torch.stack(zeroth + first + second, 1)
