"""Canaries: examples that an audit plants, each in the data or not, and that it then guesses about."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class WithCanaries(nn.Module):
    """A model with one further parameter for each canary, whose gradient is that parameter's direction alone.

    These are the Dirac canaries of Steinke, Nasr & Jagielski (2023), section 6: no other example's gradient has a share
    in theirs, which makes them the worst case for an optimizer that is right.

    Input (inputs [batch, ...], canary numbers int64 [batch]), with the number ``count`` for what is no canary. Output
    (the model's output, float [batch]), the latter 0 for what is no canary.
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.model = model
        self.count = count
        like = next((p for p in model.parameters() if p.requires_grad), torch.empty(0))
        self.table = nn.Embedding(count + 1, 1, padding_idx=count, device=like.device, dtype=like.dtype)
        nn.init.zeros_(self.table.weight)

    def forward(self, inputs: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(inputs), self.table(numbers).squeeze(1)

    def values(self) -> NDArray[np.float64]:
        """The canaries' parameters, float64 [count]."""
        return self.table.weight.detach()[: self.count, 0].double().cpu().numpy().copy()


def log_likelihood_ratio(
    released: NDArray[np.float64], noise_multiplier: float, sampling_rate: float
) -> NDArray[np.float64]:
    """How much likelier one step's release is with a canary in the data than without it, as a logarithm.

    Without, it is N(0, sigma^2); with it, N(1, sigma^2) with probability q, else N(0, sigma^2). By the lemma of Neyman
    and Pearson no score of independent steps guesses better than the sum of these.

    Args:
        released: [count], the noised sum in the canaries' directions, divided by the clipping bound.
        noise_multiplier, sampling_rate: sigma > 0 and q in (0, 1].
    """
    in_batch = (2 * released - 1) / (2 * noise_multiplier**2)
    if sampling_rate == 1:
        return in_batch
    return np.logaddexp(math.log1p(-sampling_rate), math.log(sampling_rate) + in_batch)
