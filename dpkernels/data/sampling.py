"""Poisson sampling: each example is in a logical batch with the planned probability, on its own.

The generator gives one uniform 64-bit word for each example and step, and an example is drawn when its word lies below
rate * 2^64. The word depends on key, step and the example's index only: neither on the size of the data set nor on the
other examples, so adding an example changes no other example's draws.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from dpkernels.random import Domain, Key

_WORDS = 2**64
_HALF = 2**63


def poisson_sample(key: Key, step: int, size: int, rate: float) -> Tensor:
    """Indices, int64 and ascending, of the examples out of `size` that step `step` draws.

    Each is drawn with probability floor(rate * 2^64) / 2^64: `rate` to within 2^-64, and never above it, since a higher
    one would cost more privacy than was planned.
    """
    threshold = int(Fraction(rate) * _WORDS)
    if threshold == _WORDS:
        return torch.arange(size)
    words = key.bits(Domain.SAMPLING, step, size)
    # The words are unsigned, torch compares signed: flipping the top bit maps one order to the other.
    return ((words ^ -_HALF) < threshold - _HALF).nonzero().squeeze(1)
