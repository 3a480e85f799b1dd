"""Configurations: defaults, round trip, and errors that name the field."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from dpkernels.data import ImageDataset, ImageSplit
from dpkernels.training import TrainConfig, default_delta, resolve


def like(name: str, shape: tuple[int, int, int], nominal_size: int | None) -> ImageDataset:
    split = ImageSplit(torch.zeros(2, *shape, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    return ImageDataset(name, ("a", "b"), split, split, nominal_size)


def test_mnist_has_the_values_of_the_paper() -> None:
    config = resolve(like("mnist", (1, 28, 28), 60_000), {"dataset": "mnist"})
    assert (config.model, config.batch_size, config.epochs, config.lr) == ("mnist_cnn", 512, 40, 0.5)
    assert (config.momentum, config.max_grad_norm, config.epsilon, config.delta) == (0.9, 0.1, 3.0, 1e-5)
    assert config.seed is None


def test_what_is_given_wins() -> None:
    config = resolve(like("cifar10", (3, 32, 32), 50_000), {"dataset": "cifar10", "lr": 0.25, "noise_multiplier": 1.5})
    assert (config.lr, config.noise_multiplier, config.epsilon) == (0.25, 1.5, None)


def test_an_adaptive_optimizer_gets_its_own_learning_rate_and_no_momentum() -> None:
    config = resolve(like("mnist", (1, 28, 28), 60_000), {"dataset": "mnist", "optimizer": "adam"})
    assert config.momentum == 0
    assert config.lr < 0.1


def test_a_folder_needs_its_public_size() -> None:
    folder = like("pets", (3, 64, 64), None)
    with pytest.raises(ValueError, match="dataset_size must be given"):
        resolve(folder, {"dataset": "pets"})
    config = resolve(folder, {"dataset": "pets", "dataset_size": 2000})
    assert (config.dataset_size, config.batch_size, config.model) == (2000, 40, "simple_vgg")
    assert resolve(like("x", (1, 28, 28), None), {"dataset": "x", "dataset_size": 9}).model == "mnist_cnn"
    assert resolve(like("x", (1, 8, 8), None), {"dataset": "x", "dataset_size": 9}).model == "linear"


@pytest.mark.parametrize("size", [1, 10, 99_999, 100_000, 100_001, 1_281_167, 10**9])
def test_default_delta_is_below_one_over_the_size(size: int) -> None:
    delta = default_delta(size)
    assert delta <= 1e-5
    assert delta * size < 1
    assert math.isclose(math.log10(delta), round(math.log10(delta)))


def test_round_trip_through_json() -> None:
    config = resolve(like("mnist", (1, 28, 28), 60_000), {"dataset": "mnist", "seed": 7, "schedule": "cosine"})
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ValueError, match="expected the fields"):
        TrainConfig.from_dict({"dataset": "mnist"})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("lr", 0.0, "> 0"),
        ("lr", math.nan, "> 0"),
        ("lr", "fast", "> 0"),
        ("epochs", -1, "> 0"),
        ("epochs", math.inf, "finite"),
        ("batch_size", 0, "positive integer"),
        ("batch_size", 12.5, "positive integer"),
        ("batch_size", True, "positive integer"),
        ("batch_size", 60_001, "dataset_size=60000"),
        ("dataset_size", -5, "positive integer"),
        ("delta", 0, "0 < delta < 1"),
        ("delta", 1, "0 < delta < 1"),
        ("epsilon", 0, "> 0"),
        ("epsilon", -3, "> 0"),
        ("noise_multiplier", 0.0, "> 0"),
        ("max_grad_norm", 0, "1e-10"),
        ("max_grad_norm", 1e11, "1e10"),
        ("momentum", 1.0, "< 1"),
        ("weight_decay", -0.1, ">= 0"),
        ("warmup", 1.0, "< 1"),
        ("optimizer", "lbfgs", "sgd, adam, adamw"),
        ("schedule", "step", "constant, cosine"),
        ("loss", "hinge", "cross-entropy, losing-less"),
        ("loss_threshold_epoch", math.nan, "a finite number"),
        ("loss_beta", 0.0, "> 0"),
        ("loss_gamma", -1.0, ">= 0"),
        ("model", " ", "a name"),
        ("seed", 1.5, "an integer"),
        ("nesterov", 1, "true or false"),
        ("image_size", 0, "positive integer"),
    ],
)
def test_errors_name_the_field_what_was_expected_and_what_came(field: str, value: Any, expected: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        resolve(like("mnist", (1, 28, 28), 60_000), {"dataset": "mnist", field: value})
    assert str(error.value).startswith(f"{field} must be")
    assert expected in str(error.value)
    assert repr(value) in str(error.value)


def test_contradictions() -> None:
    mnist = like("mnist", (1, 28, 28), 60_000)
    with pytest.raises(ValueError, match="exactly one of epsilon and noise_multiplier"):
        resolve(mnist, {"dataset": "mnist", "epsilon": 3.0, "noise_multiplier": 1.0})
    with pytest.raises(ValueError, match="momentum must be 0 with the optimizer adam"):
        resolve(mnist, {"dataset": "mnist", "optimizer": "adam", "momentum": 0.9})
    with pytest.raises(ValueError, match=r"loss_gamma must be given with the losses that have it .*loss='sse'"):
        resolve(mnist, {"dataset": "mnist", "loss": "sse", "loss_gamma": 2.0})
    with pytest.raises(ValueError, match="loss_beta must be given with the losses that have it"):
        resolve(mnist, {"dataset": "mnist", "loss": "losing-less", "loss_beta": None})
    for decay in ({"weight_decay": 0.1}, {"optimizer": "adamw"}, {"lr_body": 0.1}):
        with pytest.raises(
            ValueError, match="loss must not be losing-less-weights with another weight decay or other groups"
        ):
            resolve(mnist, {"dataset": "mnist", "loss": "losing-less-weights", **decay})
    with pytest.raises(ValueError, match=r"nesterov must be false without momentum, got true with momentum=0"):
        resolve(mnist, {"dataset": "mnist", "momentum": 0, "nesterov": True})
    with pytest.raises(ValueError, match="image_size must not be given with features, got 28"):
        resolve(mnist, {"dataset": "mnist", "features": "scatternet", "image_size": 28})
    with pytest.raises(ValueError, match="is not a field"):
        resolve(mnist, {"dataset": "mnist", "learning_rate": 1.0})
