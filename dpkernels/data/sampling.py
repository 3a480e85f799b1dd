"""Poisson sampling: each example is in a logical batch with the planned probability, on its own."""

from __future__ import annotations

from torch import Tensor

from dpkernels.random import Domain, Key


def poisson_sample(key: Key, step: int, size: int, rate: float) -> Tensor:
    """Indices, int64 and ascending, of the examples out of `size` that step `step` draws; see `Key.sample`.

    A draw depends neither on the size of the data set nor on the other examples.
    """
    return key.sample(Domain.SAMPLING, step, size, rate)
