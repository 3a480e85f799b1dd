"""Convolutions whose weight is standardized: channels of a parameter W get mean 0 and variance 1, and a gain each.

``w = s what`` with ``what = (W - mean) / sqrt(variance + eps)`` in each output channel of N entries. A gradient c of w
gives

    s / sqrt(variance + eps) P c,   P c = c - mean(c) - what mean(c what)

of W and ``c . what`` of s. P is the same for all examples, so that a clipped sum is taken of scaled c by the
convolution and goes through P once, in float64. Its norm needs two numbers of c more, in each channel, with
r = mean(what^2):

    ||P c||^2 = ||c||^2 - sum(c)^2 / N - (2 - r) (c . what)^2 / N

Both are products of the output gradient with convolutions of the input, by ones and by what, in the input's precision.
Each sum of n products rounds by at most ``n u`` times that of magnitudes, u = 2^-24 in float32. With S the sum over
positions t of ``|g_t| ||patch_t||``, both numbers of what is added lie within ``(N + 2 T + 20) u S sqrt(N)`` of what
is computed, for patches of N entries and T positions: products with patches round N times, those with gradients T
times, the sum that is added T + 3 times, and the rest few times. By so much less in magnitude they are subtracted, so
that the norm is never below that of what is added.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpkernels.layers.base import Record
from dpkernels.layers.conv import ConvRule


class Standardization(NamedTuple):
    """How a node computed the weight: batch normalization of a parameter's channels, the rows of [1, channels, N]."""

    node: int
    parameter: int
    gain: tuple[int, int] | None  # the edge of s, if it is trained
    of_gain: tuple[int, ...]  # the parameters that s is computed from


class StandardizedConvRule(ConvRule):
    """Saves what a convolution saves, with output gradients times ``s / sqrt(variance + eps)``."""

    nodes = {}  # noqa: RUF012  # it takes records of convolutions

    def fits(self, record: Record) -> bool:
        """Whether the rounding of products with what a record holds is known."""
        plain = isinstance(record.rule, ConvRule) and not (record.settings["lifted"] or record.settings["transposed"])
        (x,) = record.saved if plain else (record.output_grad,)
        return (
            plain and x.device.type == "cpu" and x.dtype == record.output_grad.dtype in (torch.float32, torch.float64)
        )

    def of(self, record: Record, weight: Tensor, gain: Tensor | None, eps: float) -> tuple[Record, Tensor]:
        """The record of W, and the gradients [batch, channels] of the gain.

        Args:
            record: of the convolution by w.
            weight: W.
            gain: s, [channels].
            eps: what is added to the variance.
        """
        (x,), g = record.saved, record.output_grad
        rows = weight.detach().double().flatten(1)
        centred = rows - rows.mean(1, keepdim=True)
        inverse = (centred.square().mean(1) + eps).rsqrt()
        what = centred * inverse[:, None]
        scale = inverse if gain is None else inverse * gain.detach().double()
        dots, totals, error = _products(x, g, what.to(x.dtype).view_as(weight), record.settings)
        size = rows.size(1)
        parts = (dots.abs() - error).clamp_min(0).square() * (2 - what.square().mean(1))
        removed = (parts + (totals.abs() - error).clamp_min(0).square()) * scale.square() / size
        scaled = g * scale.to(g.dtype).view(-1, *[1] * (g.dim() - 2))
        settings = record.settings | {"what": what}
        own = Record(self, (x,), scaled, frozenset({"weight"}), {"removed": removed.sum(1)}, settings)
        return own, dots

    def squared_norms(
        self, record: Record, operands: frozenset[str], *, store: bool | None = None, strategy: str = "auto"
    ) -> Tensor:
        whole = super().squared_norms(record, operands, store=store, strategy=strategy)
        return (whole * (1 + 1e-14) - record.per_example["removed"]).clamp_min(0)

    def clipped_sums(self, record: Record, weights: Tensor, operands: frozenset[str]) -> dict[str, Tensor]:
        (total,) = super().clipped_sums(record, weights, operands).values()
        return {"weight": _project(total.flatten(1), record.settings["what"]).view_as(total)}

    def gradients(self, record: Record, operand: str) -> Tensor:
        each = super().gradients(record, operand).double()
        return _project(each.flatten(2), record.settings["what"]).view_as(each)


STANDARDIZED = StandardizedConvRule()


def _project(rows: Tensor, what: Tensor) -> Tensor:
    return rows - rows.mean(-1, keepdim=True) - what * (rows * what).mean(-1, keepdim=True)


def _products(x: Tensor, g: Tensor, what: Tensor, settings: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """``c . what`` and ``sum(c)`` of each example's c, and how far either may lie from that of what is added:
    float64 [batch, channels]."""
    groups = settings["groups"]

    def convolve(t: Tensor, kernel: Tensor) -> Tensor:
        places = (settings["stride"], settings["padding"], settings["dilation"])
        return torch.convolution(t, kernel, None, *places, False, [0] * len(places[0]), groups).flatten(2)

    def of_patches(t: Tensor) -> Tensor:
        """Sums over the patches of each group of channels, for each output channel."""
        ones = t.new_ones(groups, 1, *what.shape[2:])
        sums = convolve(t.unflatten(1, (groups, -1)).sum(2), ones)
        return sums.repeat_interleave(len(what) // groups, 1)

    flat = g.flatten(2)
    dots = torch.linalg.vecdot(flat, convolve(x, what)).double()
    totals = torch.linalg.vecdot(flat, of_patches(x)).double()
    magnitudes = torch.linalg.vecdot(flat.abs(), of_patches(x.square()).sqrt()).double()
    size, positions = math.prod(what.shape[1:]), flat.size(2)
    unit, least = torch.finfo(x.dtype).eps / 2, torch.finfo(x.dtype).tiny
    roundings = 1.1 * (size + 2 * positions + 20) * unit  # the tenth is for the rounding of S
    return dots, totals, (roundings * magnitudes + size * positions * least) * math.sqrt(size)
