"""The scattering transform of order two: wavelet, modulus, wavelet, modulus, low pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dpkernels import _native  # noqa: F401  (loads the operators)
from dpkernels.ops._checks import require_tensor


@dataclass(frozen=True, eq=False)
class Filters:
    """The filters of one transform, as real Fourier transforms on the padded image, H x W.

    Resolution r has H >> r by W >> r pixels; J, the number of scales, is the number of resolutions. Wavelets are in the
    order of their scale j and then of their angle.

    shape: (height, width) of the images. They are padded by reflection to H x W, with (H - height) // 2 rows and
        (W - width) // 2 columns before the image.
    angles: wavelets a scale.
    wavelets: for each resolution float64 [count, H >> r, W >> r]. Resolution 0 has all J * angles of the first order,
        resolution r > 0 those with j > r, which a second order that follows scale r needs.
    lowpass: for each resolution float64 [H >> r, W >> r], the product of a function of the row's frequency and one of
        the column's up to rounding.

    Raises ValueError for sizes that do not fit together or a low pass that is no such product.
    """

    shape: tuple[int, int]
    angles: int
    wavelets: tuple[Tensor, ...]
    lowpass: tuple[Tensor, ...]
    _operands: dict[
        tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor]
    ] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if len(self.wavelets) != len(self.lowpass) or not self.lowpass:
            raise ValueError(
                "wavelets and lowpass must have one entry for each resolution, "
                f"got {len(self.wavelets)} and {len(self.lowpass)}"
            )
        for resolution, (waves, low) in enumerate(zip(self.wavelets, self.lowpass, strict=True)):
            first = resolution + 1 if resolution else 0
            size = tuple(n >> resolution for n in self.padded_shape)
            count = max(0, self.scales - first) * self.angles
            for name, value, wanted in (("wavelets", waves, (count, *size)), ("lowpass", low, size)):
                if value.dtype != torch.float64 or tuple(value.shape) != wanted:
                    raise ValueError(
                        f"{name}[{resolution}] must be float64 {wanted}, got {value.dtype} {tuple(value.shape)}"
                    )
        for pixels, padded in zip(self.shape, self.padded_shape, strict=True):
            if not 0 < pixels <= padded or padded % 2**self.scales or padded >> self.scales < 3:
                raise ValueError(
                    f"shape must be at most the padded shape {self.padded_shape}, which must be a multiple of "
                    f"2^{self.scales}, and 3 of them at least, got {self.shape}"
                )
        for low in self.lowpass:
            rows, columns = factors(low)
            if (torch.outer(rows, columns) - low).abs().max() > 1e-6 * low.abs().max():
                raise ValueError("lowpass must be a product of a function of rows and one of columns")

    def __getstate__(self) -> dict[str, Any]:
        """Copies and files hold no operands, which may lie on a device."""
        return self.__dict__ | {"_operands": {}}

    @property
    def scales(self) -> int:
        """J"""
        return len(self.lowpass)

    @property
    def padded_shape(self) -> tuple[int, int]:
        """(H, W)"""
        height, width = self.lowpass[0].shape
        return height, width

    @property
    def feature_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of the features of one plane: order 0, the wavelets, and pairs of rising scale."""
        waves = self.scales * self.angles
        pairs = self.scales * (self.scales - 1) // 2 * self.angles**2
        height, width = (size // 2**self.scales - 2 for size in self.padded_shape)
        return 1 + waves + pairs, height, width

    @property
    def sources(self) -> tuple[Tensor, Tensor]:
        """The row of the image that each padded row repeats, int64 [H], and the column, int64 [W]: reflection that
        leaves out the border, as often as it takes."""
        height, width = (_reflected(size, padded) for size, padded in zip(self.shape, self.padded_shape, strict=True))
        return height, width

    def operands(
        self, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor]:
        """What the operator takes after the images, in its form: wavelets; for each resolution the low pass as two
        matrices; `sources`. Computed once for each dtype and device."""
        key = dtype, torch.device(device)
        if key not in self._operands:
            _, height, width = self.feature_shape
            pairs = [factors(low) for low in self.lowpass]
            rows = [smoothing(pair[0], height, self.scales - r) for r, pair in enumerate(pairs)]
            columns = [smoothing(pair[1], width, self.scales - r) for r, pair in enumerate(pairs)]
            waves, rows, columns = (
                [t.to(device, dtype).contiguous() for t in ts] for ts in (self.wavelets, rows, columns)
            )
            row_source, column_source = (t.to(device) for t in self.sources)
            self._operands[key] = waves, rows, columns, row_source, column_source
        return self._operands[key]


def factors(lowpass: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors u [H] and v [W] whose outer product is nearest to ``lowpass`` [H, W]."""
    u, s, v = torch.linalg.svd(lowpass, full_matrices=False)
    root = s[0].sqrt()
    return u[:, 0] * root, v[0] * root


def smoothing(spectrum: Tensor, count: int, halvings: int) -> Tensor:
    """The matrix [count, n] of a convolution with a filter of the real Fourier transform ``spectrum`` [n], subsampled
    by 2^halvings, without the first of its values and those after ``count`` more."""
    n = len(spectrum)
    kernel = torch.fft.ifft(spectrum).real
    at = torch.arange(1, count + 1) * 2**halvings
    return kernel[(at[:, None] - torch.arange(n)) % n]


def _reflected(size: int, padded: int) -> Tensor:
    period = max(1, 2 * (size - 1))
    at = (torch.arange(padded) - (padded - size) // 2) % period
    return torch.minimum(at, period - at) if size > 1 else torch.zeros(padded, dtype=torch.int64)


def scatter(images: Tensor, filters: Filters) -> Tensor:
    """Scattering coefficients of every image plane: [planes, *filters.feature_shape].

    Args:
        images: [planes, *filters.shape]; half precision is widened to float32.
        filters: what the transform consists of.

    Returns:
        float32 or float64. Order 0, then a channel for each wavelet, then one for each pair of wavelets of rising
        scale, the first one's index first. A plane's values depend on no other plane, and neither on the number of
        threads.

    Raises:
        ValueError, TypeError: shapes or types do not fit, or ``images`` needs a gradient, which this operator has not.
        RuntimeError: on CUDA, where a plane's work does not fit into a block's shared memory (images of more than about
            64 x 64 pixels).
    """
    require_tensor(images, "images", "[planes, height, width]")
    if tuple(images.shape[1:]) != filters.shape:
        raise ValueError(f"images must be [planes, {filters.shape[0]}, {filters.shape[1]}], got {tuple(images.shape)}")
    if images.requires_grad and torch.is_grad_enabled():
        raise ValueError("images must not require a gradient: the scattering transform has none here")
    if images.dtype not in (torch.float32, torch.float64):
        images = images.float()
    operands = filters.operands(images.dtype, images.device)
    return torch.ops.dpkernels.scatter(images.contiguous(), *operands, filters.angles)


@torch.library.register_fake("dpkernels::scatter")
def _(
    images: Tensor,
    wavelets: Sequence[Tensor],
    rows: Sequence[Tensor],
    columns: Sequence[Tensor],
    row_source: Tensor,
    column_source: Tensor,
    angles: int,
) -> Tensor:
    scales = len(rows)
    channels = 1 + scales * angles + scales * (scales - 1) // 2 * angles**2
    return images.new_empty(images.size(0), channels, rows[0].size(0), columns[0].size(0))
