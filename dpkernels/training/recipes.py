"""Hyper-parameters of the papers by name, as `dpkernels train --recipe NAME` takes them.

tramer2021: Tramèr & Boneh 2021, Table 13 (best at epsilon 3) and Table 17 (private linear models on public features, at
epsilon 2). Their learning rates are for batches of 512 and grow with the batch. Data normalization is ours: private
statistics in units of public ones (`dpkernels.features.PrivateDataNorm`).

shamsabadi2023: Shamsabadi & Papernot 2023, Table 5: the CNNs of tramer2021 with the loss Losing Less. The noise is the
paper's, not an epsilon.

kurakin2022: Kurakin et al. 2022. "imagenet-places365" is section 3.6, for a ResNet-18 that was trained on Places365
(given with --init), three of whose block groups are frozen; "imagenet-full-batch" is the last column of Table 9, from
scratch. "cifar10-simplevgg" is appendix H, where the paper tunes the learning rate and does not print it: 0.1 with the
clipping norm 1 is what 1.0 is with 0.1, the default for CIFAR-10 (along good values lr * C is constant, appendix D).
"""

from __future__ import annotations

import math
from typing import Any

from dpkernels.training.config import NORM_NOISE

_SHARED = {"optimizer": "sgd", "momentum": 0.9, "max_grad_norm": 0.1, "delta": 1e-5}
_PRIVATE = {"normalization": "private", "norm_noise_multiplier": NORM_NOISE}
_GROUP = {"normalization": "group", "groups": 27}


def _recipe(batch_size: int, base_lr: float, epochs: float, epsilon: float = 3.0, **more: Any) -> dict[str, Any]:
    """Linear scaling of the learning rate: base_lr * batch_size / 512."""
    lr = base_lr * batch_size / 512
    return {**_SHARED, "batch_size": batch_size, "lr": lr, "epochs": epochs, "epsilon": epsilon, **more}


def _table13(
    dataset: str, cnn: dict[str, Any], rows: dict[str, tuple[int, float, float]], norm: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    kinds = {
        "scatternet-linear": {"features": "scatternet", "model": "scatternet_linear", **norm},
        "scatternet-cnn": {"features": "scatternet", "model": "scatternet_cnn", **norm},
        "cnn": cnn,
    }
    return {
        f"tramer2021-{dataset}-{kind}": {"dataset": dataset, **_recipe(*rows[kind]), **more}
        for kind, more in kinds.items()
    }


def _table5(rows: dict[str, tuple[float, float, float, float]]) -> dict[str, dict[str, Any]]:
    """Everything but noise and loss is as in Table 13."""
    recipes = {}
    for name, (noise, threshold_epoch, beta, gamma) in rows.items():
        values = {**_TABLE_13[f"tramer2021-{name}"], "noise_multiplier": noise, "loss": "losing-less"}
        del values["epsilon"]
        own = {"loss_threshold_epoch": threshold_epoch, "loss_beta": beta, "loss_gamma": gamma}
        recipes[f"shamsabadi2023-{name}"] = {**values, **own}
    return recipes


_TABLE_13: dict[str, dict[str, Any]] = {
    # (batch size, learning rate for batches of 512, epochs)
    **_table13(
        "mnist",
        {"model": "mnist_cnn"},
        {"scatternet-linear": (4096, 1, 40), "scatternet-cnn": (1024, 1 / 2, 25), "cnn": (512, 1 / 2, 40)},
        _PRIVATE,
    ),
    **_table13(
        "fashion-mnist",
        {"model": "mnist_cnn"},
        {"scatternet-linear": (8192, 1, 40), "scatternet-cnn": (2048, 1, 40), "cnn": (2048, 1, 40)},
        _GROUP,
    ),
    **_table13(
        "cifar10",
        {"model": "cifar10_cnn", "normalization": "public"},
        {"scatternet-linear": (8192, 1 / 4, 60), "scatternet-cnn": (8192, 1 / 4, 60), "cnn": (1024, 1 / 2, 30)},
        _PRIVATE,
    ),
}

_IMAGENET: dict[str, Any] = {
    "dataset_size": 1_281_167,
    "image_size": 224,
    "model": "resnet18",
    "delta": 1e-6,
    "optimizer": "sgd",
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 1e-4,
    "max_grad_norm": 1.0,
    "schedule": "cosine",
}

RECIPES: dict[str, dict[str, Any]] = {
    **_TABLE_13,
    # (noise multiplier, threshold epoch, beta, gamma)
    **_table5(
        {
            "mnist-cnn": (1.23, 0, 1, 5),
            "mnist-scatternet-cnn": (1.35, 2, 11, 2),
            "fashion-mnist-cnn": (2.15, 0, 1, 5),
            "fashion-mnist-scatternet-cnn": (2.15, 2, 51, 2),
            "cifar10-cnn": (1.54, 7, 11, 5),
            "cifar10-scatternet-cnn": (5.67, 2, 11, 2),
        }
    ),
    # The data set is a folder of features that the user brings.
    "tramer2021-transfer-resnext": _recipe(2048, 2, 40, epsilon=2.0, model="linear"),
    "tramer2021-transfer-simclr": _recipe(1024, 2, 40, epsilon=2.0, model="linear"),
    # The data set is a folder of ImageNet's images.
    "kurakin2022-imagenet-places365": {
        **_IMAGENET,
        **{"batch_size": 64 * 1024, "epochs": 70.0, "lr": 7.68, "warmup": 1 / 70, "epsilon": 10.0, "freeze": "3"},
    },
    "kurakin2022-imagenet-full-batch": {
        **_IMAGENET,
        **{"batch_size": 1024 * 1024, "epochs": 640.0, "lr": 16.0, "warmup": 0.1},
        "noise_multiplier": round(0.001 * math.sqrt(8) * 1024, 4),
    },
    "kurakin2022-cifar10-simplevgg": {
        "dataset": "cifar10",
        "model": "simple_vgg",
        **{"batch_size": 500, "epochs": 100.0, "lr": 0.1, "momentum": 0.9, "max_grad_norm": 1.0},
        **{"noise_multiplier": 1.5, "delta": 1e-5},
    },
}


def recipe(name: str) -> dict[str, Any]:
    """The fields of `TrainConfig` that the recipe fixes. Raises ValueError for an unknown name."""
    if name not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, got {name!r}")
    return dict(RECIPES[name])
