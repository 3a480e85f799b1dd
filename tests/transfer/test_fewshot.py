"""Few-shot trials are drawn as the protocol says, and their accuracies summed up."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from dpkernels.data import load_dataset
from dpkernels.transfer import FewShot, episodes, few_shot
from dpkernels.transfer.fewshot import Predict


def test_trials_are_disjoint_balanced_and_repeatable() -> None:
    labels = torch.arange(70) % 7
    trials = list(episodes(labels, ways=3, shots=2, queries=4, trials=50, seed=5))
    assert len(trials) == 50
    for trial in trials:
        assert len(set(trial.classes)) == 3
        assert labels[trial.support].tolist() == [label for label in trial.classes for _ in range(2)]
        assert labels[trial.query].tolist() == [label for label in trial.classes for _ in range(4)]
        assert len({*trial.support.tolist(), *trial.query.tolist()}) == 18
    assert {label for trial in trials for label in trial.classes} == set(range(7))
    again = list(episodes(labels, ways=3, shots=2, queries=4, trials=50, seed=5))
    assert all(torch.equal(a.query, b.query) for a, b in zip(trials, again, strict=True))
    other = list(episodes(labels, ways=3, shots=2, queries=4, trials=50, seed=6))
    assert not all(torch.equal(a.query, b.query) for a, b in zip(trials, other, strict=True))


def nearest_mean(images: Tensor, labels: Tensor) -> Predict:
    means = torch.stack([images[labels == label].flatten(1).mean(0) for label in labels.unique()])
    return lambda queries: -torch.cdist(queries.flatten(1), means)


def test_real_digits_from_a_few_examples() -> None:
    split = load_dataset("digits").train
    few, more = (few_shot(split, nearest_mean, shots=shots, trials=60) for shots in (1, 20))
    assert 0.6 < few.mean < 0.9 < more.mean
    assert 0 < more.interval < few.interval < 0.05
    assert str(few).endswith("(60 trials)")


def test_the_interval_is_that_of_the_mean() -> None:
    values = (0.2, 0.4, 0.9)
    result = FewShot(values)
    assert result.mean == pytest.approx(0.5)
    assert result.interval == pytest.approx(1.96 * statistics.stdev(values) / math.sqrt(3), rel=1e-4)
    assert math.isnan(FewShot((0.5,)).interval)


def test_bad_arguments_are_named() -> None:
    labels = torch.tensor([0] * 20 + [1] * 20 + [2] * 19)
    with pytest.raises(ValueError, match=r"shots \+ queries = 20 examples or more, 2, got 5"):
        episodes(labels)
    with pytest.raises(ValueError, match="shots must be at least 1, got 0"):
        episodes(labels, shots=0)
    with pytest.raises(TypeError, match="trials must be an int"):
        episodes(labels, trials=1.5)
    split = load_dataset("digits").train
    with pytest.raises(ValueError, match=r"fit must predict \[75, 5\], got \(75, 10\)"):
        few_shot(split, lambda images, labels: lambda queries: torch.zeros(len(queries), 10), trials=1)
