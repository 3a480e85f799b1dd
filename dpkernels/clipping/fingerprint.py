"""Fingerprints of tensors: equal where all bits are equal, and different otherwise but for one chance in 2^64."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 1 << 20  # elements that are widened to int64 at a time


def of_rows(x: Tensor) -> Tensor:
    """int64 [rows]: a fingerprint of every row of ``x`` [rows, ...]. Zeros count as equal whatever their sign."""
    rows = x.detach().reshape(x.size(0), math.prod(x.shape[1:]))
    if rows.is_complex():
        rows = torch.view_as_real(rows.resolve_conj()).flatten(1)
    if rows.is_floating_point():
        rows = rows + 0.0  # -0 becomes 0
    integers = rows.contiguous().view(_INTEGERS[rows.element_size()])
    multipliers = _multipliers(rows.size(1)).to(x.device)
    each = max(1, _AT_ONCE // max(1, rows.size(1)))
    parts = [(part.long() * multipliers).sum(1) for part in integers.split(each)] if len(rows) else []
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=x.device)


def of_whole(x: Tensor) -> Tensor:
    """int64 []: a fingerprint of all elements of ``x``, in their order."""
    flat = x.detach().reshape(1, -1)
    return sum(
        (of_rows(part) * (2 * i + 1) for i, part in enumerate(flat.split(_AT_ONCE, dim=1))),
        start=torch.zeros(1, dtype=torch.int64, device=x.device),
    )[0]


def _multipliers(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
