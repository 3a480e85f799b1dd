"""Few-shot tasks of real digits, learned privately."""

from __future__ import annotations

from typing import Any

import pytest

from dpkernels.data import ImageDataset
from dpkernels.training import TrainConfig, learner, resolve
from dpkernels.transfer import few_shot

SHOTS = 20


def config(digits: ImageDataset, **given: Any) -> TrainConfig:
    size = {"dataset_size": 5 * SHOTS, "batch_size": 5 * SHOTS, "epochs": 12.0, "lr": 4.0, "noise_multiplier": 1.0}
    return resolve(digits, {"dataset": "digits", "model": "linear", "seed": 3} | size | given)


def test_trials_are_learned_and_can_be_repeated(digits: ImageDataset) -> None:
    few, again, drowned = (
        few_shot(digits.train, learner(config(digits, **given), digits.input_shape, 5), shots=SHOTS, trials=2)
        for given in ({}, {}, {"noise_multiplier": 100.0})
    )
    assert few.mean > 0.85
    assert few == again
    assert drowned.mean < few.mean


def test_every_trial_starts_from_the_same_model_with_noise_of_its_own(digits: ImageDataset) -> None:
    split = digits.train
    images, labels = split.batch((split.labels < 5).nonzero().squeeze(1)[: 5 * SHOTS])
    fit, same = (learner(config(digits, epochs=1.0), digits.input_shape, 5) for _ in range(2))
    first, second, repeated = fit(images, labels), fit(images, labels), same(images, labels)
    assert not first(images).equal(second(images))
    assert first(images).equal(repeated(images))


def test_what_such_tasks_do_not_have(digits: ImageDataset) -> None:
    with pytest.raises(ValueError, match="config must have none of features, normalization, averaging, got"):
        learner(config(digits, averaging=0.9), digits.input_shape, 5)
