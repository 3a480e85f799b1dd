"""Batches by random shuffle, as most implementations of DP-SGD make them (Tramèr & Boneh 2021, appendix D.4).

The data set is shuffled once an epoch and cut into batches. No accountant of dpkernels covers this, so that the epsilon
of such a run is that of Poisson sampling, and not a guarantee: it shows that accuracy is about the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from dpkernels.random import Key


def shuffled_batch(key: Key, step: int, size: int, rate: float) -> Tensor:
    """Indices, int64 and ascending, of the examples of step `step`, in place of `dpkernels.data.sampling`.

    The examples of all epochs follow one another, and step t takes those from t * batch on: a batch may begin in one
    epoch and end in the next.
    """
    batch = round(rate * size)
    first = step * batch
    epochs = range(first // size, (first + batch - 1) // size + 1)
    order = torch.cat([_permutation(key, epoch, size) for epoch in epochs])
    start = first - epochs.start * size
    return order[start : start + batch].sort().values


def _permutation(key: Key, epoch: int, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash((tuple(key.value.tolist()), epoch)) % 2**63)
    return torch.randperm(size, generator=generator)


@contextmanager
def random_shuffle() -> Iterator[None]:
    """While this holds, loaders draw batches by random shuffle."""
    with mock.patch("dpkernels.data.loader.poisson_sample", shuffled_batch):
        yield
