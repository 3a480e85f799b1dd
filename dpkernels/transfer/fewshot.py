"""Few-shot evaluation: many small classification tasks, each with classes and examples drawn anew.

Guo et al. 2020, "A Broader Study of Cross-Domain Few-Shot Learning": a trial draws N classes at random (N-way), k
examples of each to learn from (k-shot) and 15 others of each to be asked about; what is reported is the mean accuracy
over many trials with its 95% confidence interval. Luo et al. 2021, section 5.2, do 60 trials of 5 ways with 5, 20 and
50 shots.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_NORMAL_95 = 1.959963984540054


class Examples(Protocol):
    """Labelled examples that can be fetched by their indices, as every split of `dpkernels.data` is."""

    @property
    def labels(self) -> Tensor:
        """int64 [examples]"""

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Examples [rows, ...] and labels [rows] of `indices`."""


Predict = Callable[[Tensor], Tensor]
"""Examples [rows, ...] to scores [rows, ways]: a trained model."""
Fit = Callable[[Tensor, Tensor], Predict]
"""Learns from the examples [ways * shots, ...] and labels, int64 [ways * shots] from 0 to ways - 1, of one trial."""


@dataclass(frozen=True, eq=False)
class Episode:
    """One trial. classes: the labels that were drawn; a trial numbers them from 0. support, query: int64 indices of the
    examples to learn from, [ways * shots], and to be asked about, [ways * queries], both sorted by class."""

    classes: tuple[int, ...]
    support: Tensor
    query: Tensor


@dataclass(frozen=True)
class FewShot:
    """The accuracy of each trial, in [0, 1], and what they say together."""

    accuracies: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def interval(self) -> float:
        """Half the width of the 95% confidence interval of the mean, 1.96 s / sqrt(trials); nan for a single trial."""
        if len(self.accuracies) < 2:
            return math.nan
        return _NORMAL_95 * statistics.stdev(self.accuracies) / math.sqrt(len(self.accuracies))

    def __str__(self) -> str:
        return f"{self.mean:.2%} ± {self.interval:.2%} ({len(self.accuracies)} trials)"


def episodes(
    labels: Tensor, *, ways: int = 5, shots: int = 5, queries: int = 15, trials: int = 600, seed: int = 0
) -> Iterator[Episode]:
    """Trials over examples with `labels`, int64 [examples]; the same ones for the same seed.

    Classes with fewer than shots + queries examples are not drawn. Raises ValueError where fewer than `ways` are left,
    or for a count below 1.
    """
    for name, value in {"ways": ways, "shots": shots, "queries": queries, "trials": trials}.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    members = {int(label): (labels == label).nonzero().squeeze(1) for label in labels.unique()}
    members = {label: indices for label, indices in members.items() if len(indices) >= shots + queries}
    if len(members) < ways:
        raise ValueError(
            f"ways must be at most the number of classes with shots + queries = {shots + queries} examples or more, "
            f"{len(members)}, got {ways}"
        )
    return _draw(members, ways, shots, queries, trials, torch.Generator().manual_seed(seed))


def _draw(
    members: dict[int, Tensor], ways: int, shots: int, queries: int, trials: int, generator: torch.Generator
) -> Iterator[Episode]:
    known = list(members)
    for _ in range(trials):
        classes = tuple(known[at] for at in torch.randperm(len(known), generator=generator)[:ways].tolist())
        drawn = [
            members[label][torch.randperm(len(members[label]), generator=generator)[: shots + queries]]
            for label in classes
        ]
        yield Episode(classes, torch.cat([part[:shots] for part in drawn]), torch.cat([part[shots:] for part in drawn]))


def few_shot(
    split: Examples,
    fit: Fit,
    *,
    ways: int = 5,
    shots: int = 5,
    queries: int = 15,
    trials: int = 600,
    seed: int = 0,
) -> FewShot:
    """Accuracy of `fit` over many trials on `split`.

    fit: learns one trial from a fresh copy of whatever it starts from, privately or not. Where it is private, its
        guarantee is about the ways * shots examples of the trial; each trial draws others, and an example that comes
        in several of them is in several releases.

    Raises as `episodes` does, and ValueError where `fit` predicts another shape than [rows, ways].
    """
    accuracies = []
    for episode in episodes(split.labels, ways=ways, shots=shots, queries=queries, trials=trials, seed=seed):
        predict = fit(split.batch(episode.support)[0], torch.arange(ways).repeat_interleave(shots))
        with torch.no_grad():
            scores = predict(split.batch(episode.query)[0])
        if scores.shape != (ways * queries, ways):
            raise ValueError(f"fit must predict [{ways * queries}, {ways}], got {tuple(scores.shape)}")
        right = scores.argmax(1).cpu() == torch.arange(ways).repeat_interleave(queries)
        accuracies.append(right.double().mean().item())
    return FewShot(tuple(accuracies))
