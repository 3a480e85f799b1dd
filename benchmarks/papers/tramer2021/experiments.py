"""What each experiment runs: rows of fields of `dpkernels.training.TrainConfig`, and what the paper reports for them.

accuracy       Tables 1 and 13: the best configuration of each model at epsilon 3
same-noise     the linear models with the noise that the paper's accounting asks for (Rényi, with its conversion and the
               price of its normalization)
decorrelated   the linear models at epsilon 3 on features that were decorrelated by synthetic images
normalization  the linear model on CIFAR-10 under each normalization, at epsilon 3
non-private    Tables 2 and 11: the linear models with next to no noise, 20 epochs of batches of 512
batch-size     Figure 7: linear scaling of the learning rate
noise          Figure 3: convergence with and without noise at a low and a high learning rate
smaller        Table 20: a smaller end-to-end CNN
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from benchmarks.papers.runner import Row
from dpkernels.accounting import Gaussian, noise_multiplier
from dpkernels.training import recipe

QUIET = 0.01  # a noise multiplier below all other randomness; 0 is refused, since no plan could state its privacy
SIZES = {"mnist": 60_000, "fashion-mnist": 60_000, "cifar10": 50_000}


@lru_cache
def classic_noise(dataset: str, batch_size: int, epochs: float, norm_noise: float | None) -> float:
    """The noise multiplier at (3, 1e-5) by Rényi accounting with the paper's conversion (Lemma B.4)."""
    size = SIZES[dataset]
    return noise_multiplier(
        target_epsilon=3.0,
        delta=1e-5,
        sampling_rate=batch_size / size,
        steps=-(-int(epochs) * size // batch_size),
        compose_with=[] if norm_noise is None else [Gaussian(norm_noise, 2)],
        accountant="rdp-classic",
    )


def _accuracy() -> list[Row]:
    paper = {
        "mnist-scatternet-linear": (98.7, 0.0),
        "mnist-scatternet-cnn": (98.7, 0.1),
        "mnist-cnn": (98.1, 0.0),
        "fashion-mnist-scatternet-linear": (89.7, 0.0),
        "fashion-mnist-scatternet-cnn": (89.0, 0.1),
        "fashion-mnist-cnn": (86.0, 0.1),
        "cifar10-scatternet-linear": (67.0, 0.1),
        "cifar10-scatternet-cnn": (69.3, 0.2),
        "cifar10-cnn": (59.2, 0.1),
    }
    return [Row(name, recipe(f"tramer2021-{name}"), value) for name, value in paper.items()]


def _same_noise() -> list[Row]:
    rows = []
    for row in _accuracy():
        if row.name.endswith("scatternet-linear"):
            fields = dict(row.fields)
            norm = 8.0 if fields["normalization"] == "private" else None
            fields["noise_multiplier"] = classic_noise(fields["dataset"], fields["batch_size"], fields["epochs"], norm)
            del fields["epsilon"]
            rows.append(Row(row.name, fields, row.paper))
    return rows


def _decorrelated() -> list[Row]:
    rows = [
        Row(row.name, row.fields | {"features": "scatternet-whitened"}, row.paper)
        for row in _accuracy()
        if row.name.endswith("scatternet-linear")
    ]
    shorter = {"epochs": 30, "lr": 8.0, "schedule": "cosine", "warmup": 0.0}
    return [*rows, Row("cifar10-scatternet-linear-cosine", rows[-1].fields | shorter, rows[-1].paper)]


def _normalization() -> list[Row]:
    base = recipe("tramer2021-cifar10-scatternet-linear")
    del base["normalization"], base["norm_noise_multiplier"]
    kinds: dict[str, dict[str, Any]] = {
        "none": {"normalization": "none"},
        **{f"group-{groups}": {"normalization": "group", "groups": groups} for groups in (9, 27, 81)},
        "public": {"normalization": "public"},
        **{f"private-{s}": {"normalization": "private", "norm_noise_multiplier": float(s)} for s in (8, 32, 100)},
    }
    return [Row(f"cifar10-{name}", base | kind) for name, kind in kinds.items()]


def _non_private() -> list[Row]:
    paper = {"mnist": (99.1, 0.0), "fashion-mnist": (91.0, 0.2), "cifar10": (70.7, 0.2)}
    rows = []
    for dataset, lr in (("mnist", 2.0), ("fashion-mnist", 4.0), ("cifar10", 2.0)):
        fields = recipe(f"tramer2021-{dataset}-scatternet-linear")
        for name in ("epsilon", "groups"):
            fields.pop(name, None)
        fields |= {"normalization": "private", "norm_noise_multiplier": 1.0, "noise_multiplier": QUIET}
        rows.append(Row(dataset, fields | {"batch_size": 512, "lr": lr, "epochs": 20}, paper[dataset]))
    return rows


def _batch_size() -> list[Row]:
    rows = []
    for dataset, lr, epochs in (("mnist", 0.5, 40), ("fashion-mnist", 1.0, 40), ("cifar10", 0.25, 60)):
        for size in (512, 1024, 2048, 4096):
            fields = recipe(f"tramer2021-{dataset}-scatternet-linear")
            rows.append(
                Row(f"{dataset}-{size}", fields | {"batch_size": size, "lr": lr * size / 512, "epochs": epochs})
            )
    return rows


def _noise() -> list[Row]:
    rows = []
    for kind in ("scatternet-linear", "scatternet-cnn", "cnn"):
        for rate in (0.25, 4.0):
            for quiet in (False, True):
                fields = recipe(f"tramer2021-cifar10-{kind}") | {"batch_size": 512, "lr": rate, "epochs": 60}
                if quiet:
                    del fields["epsilon"]
                    fields["noise_multiplier"] = QUIET
                rows.append(Row(f"cifar10-{kind}-lr-{rate:g}{'-quiet' if quiet else ''}", fields))
    return rows


def _smaller() -> list[Row]:
    large = recipe("tramer2021-cifar10-cnn")
    return [
        Row("cifar10-cnn", large, (59.2, 0.1)),
        Row("cifar10-cnn-small", large | {"model": "cifar10_cnn_small"}, (60.7, 0.3)),
    ]


EXPERIMENTS = {
    "accuracy": _accuracy,
    "same-noise": _same_noise,
    "decorrelated": _decorrelated,
    "normalization": _normalization,
    "non-private": _non_private,
    "batch-size": _batch_size,
    "noise": _noise,
    "smaller": _smaller,
}
