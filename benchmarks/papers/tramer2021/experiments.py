"""What each experiment runs: rows of fields of `dpkernels.training.TrainConfig`, and what the paper reports for them.

accuracy       Tables 1 and 13, figures 1 and 2: the best configuration of each model at epsilon 3
same-noise     the linear models, on features as they are, decorrelated and mirrored, with the noise that the paper's
               accounting asks for (Rényi, with its conversion and the price of its normalization)
decorrelated   the linear models at epsilon 3 on features that were decorrelated by synthetic images
mirrored       the linear models at epsilon 3 on what features of an image and its mirror image have in common, as it is
               and decorrelated; the network on CIFAR-10 on the latter
normalization  the linear model on CIFAR-10 under each normalization, at epsilon 3
non-private    Table 2, and Table 11 for what is affordable: 20 epochs of batches of 512 with next to no noise
sampling       Table 19: batches by shuffling instead of Poisson sampling; no accountant covers these
batch-size     Figure 7: linear scaling of the learning rate
noise          Figures 3 and 11: convergence with and without noise at a low and a high learning rate
smaller        Table 20: a smaller end-to-end CNN
symmetric      the end-to-end CNNs on CIFAR-10 on pixels in [-1, 1] instead of units of their spread
transfer       Figure 5 and Table 17: linear models on features of a network that public images trained, at epsilon 2

Runs that are private keep a moving average of the weights beside the weights themselves, which changes nothing in them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from benchmarks.papers.runner import Row
from dpkernels.accounting import Gaussian, noise_multiplier
from dpkernels.training import recipe

QUIET = 0.01  # a noise multiplier below all other randomness; 0 is refused, since no plan could state its privacy
SIZES = {"mnist": 60_000, "fashion-mnist": 60_000, "cifar10": 50_000}
AVERAGED_EPOCHS = 6.0
DECORRELATED = {"features": "scatternet-whitened"}
MIRRORED = {"features": "scatternet-mirrored"}
BOTH = {"features": "scatternet-mirrored-whitened"}


def averaged(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` with a moving average of the weights over about the last AVERAGED_EPOCHS."""
    size = SIZES[fields["dataset"].removesuffix("-efficientnet")]
    return fields | {"averaging": round(1 - fields["batch_size"] / (AVERAGED_EPOCHS * size), 5)}


@lru_cache
def classic_noise(dataset: str, batch_size: int, epochs: float, norm_noise: float | None) -> float:
    """The noise multiplier at (3, 1e-5) by Rényi accounting with the paper's conversion (Lemma B.4)."""
    size = SIZES[dataset]
    sigma = noise_multiplier(
        target_epsilon=3.0,
        delta=1e-5,
        sampling_rate=batch_size / size,
        steps=-(-int(epochs) * size // batch_size),
        compose_with=[] if norm_noise is None else [Gaussian(norm_noise, 2)],
        accountant="rdp-classic",
    )
    return round(sigma, 4)


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
    return [Row(name, averaged(recipe(f"tramer2021-{name}")), value) for name, value in paper.items()]


def _same_noise() -> list[Row]:
    rows = []
    for row in _accuracy():
        if row.name.endswith("scatternet-linear"):
            fields = dict(row.fields)
            norm = 8.0 if fields["normalization"] == "private" else None
            fields["noise_multiplier"] = classic_noise(fields["dataset"], fields["batch_size"], fields["epochs"], norm)
            del fields["epsilon"]
            rows.append(Row(row.name, fields, row.paper))
            rows.append(Row(f"{row.name}-decorrelated", fields | DECORRELATED, row.paper))
            rows.append(Row(f"{row.name}-mirrored-decorrelated", fields | BOTH, row.paper))
    return rows


def _decorrelated() -> list[Row]:
    return [
        Row(row.name, row.fields | DECORRELATED, row.paper)
        for row in _accuracy()
        if row.name.endswith("scatternet-linear")
    ]


def _mirrored() -> list[Row]:
    rows = []
    for row in _accuracy():
        if row.name.endswith("scatternet-linear"):
            rows.append(Row(f"{row.name}-mirrored", row.fields | MIRRORED, row.paper))
        if row.name.endswith("scatternet-linear") or row.name == "cifar10-scatternet-cnn":
            rows.append(Row(f"{row.name}-mirrored-decorrelated", row.fields | BOTH, row.paper))
    return rows


def _normalization() -> list[Row]:
    base = averaged(recipe("tramer2021-cifar10-scatternet-linear"))
    del base["normalization"], base["norm_noise_multiplier"]
    kinds: dict[str, dict[str, Any]] = {
        "none": {"normalization": "none"},
        **{f"group-{groups}": {"normalization": "group", "groups": groups} for groups in (9, 27, 81)},
        "public": {"normalization": "public"},
        **{f"private-{s}": {"normalization": "private", "norm_noise_multiplier": float(s)} for s in (8, 32, 100)},
    }
    rows = [Row(f"cifar10-{name}", base | kind) for name, kind in kinds.items()]
    return rows + [_unit_pixels(row) for row in rows if row.fields["normalization"] in {"none", "group"}]


def _non_private() -> list[Row]:
    # learning rate; groups (Table 10); accuracy without, with group and with data normalization (Table 2); networks on
    # features and end to end (Table 11)
    paper = {
        "mnist": (2.0, 27, (95.9, 0.0), (99.1, 0.0), (99.1, 0.0), (99.2, 0.0), (99.2, 0.0)),
        "fashion-mnist": (4.0, 81, (82.6, 0.1), (90.9, 0.1), (91.0, 0.2), (91.5, 0.2), (90.1, 0.2)),
        "cifar10": (2.0, 27, (58.0, 0.1), (67.8, 0.2), (70.7, 0.2), (73.8, 0.3), (80.0, 0.1)),
    }
    exact = {"normalization": "private", "norm_noise_multiplier": 1.0}
    rows = []
    for dataset, (lr, groups, none, group, data, on_features, end_to_end) in paper.items():
        linear = _quiet(recipe(f"tramer2021-{dataset}-scatternet-linear")) | {"batch_size": 512, "lr": lr, "epochs": 20}
        for name in ("groups", "normalization", "norm_noise_multiplier"):
            linear.pop(name, None)
        by_scale = [
            Row(f"{dataset}-none", linear | {"normalization": "none"}, none),
            Row(f"{dataset}-group", linear | {"normalization": "group", "groups": groups}, group),
        ]
        rows += by_scale
        if dataset == "cifar10":
            rows += map(_unit_pixels, by_scale)
        rows += [
            Row(f"{dataset}-data", linear | exact, data),
            Row(f"{dataset}-data-decorrelated", linear | exact | DECORRELATED),
            Row(f"{dataset}-data-mirrored-decorrelated", linear | exact | BOTH),
            Row(f"{dataset}-scatternet-cnn", linear | exact | {"model": "scatternet_cnn"}, on_features),
        ]
        network = _quiet(recipe(f"tramer2021-{dataset}-cnn")) | {"batch_size": 512, "lr": lr, "epochs": 20}
        rows.append(Row(f"{dataset}-cnn", network, end_to_end))
    return rows


def _unit_pixels(row: Row) -> Row:
    return Row(f"{row.name}-unit-pixels", row.fields, row.paper, "unit-pixels")


def _quiet(fields: dict[str, Any]) -> dict[str, Any]:
    """Without noise, in effect."""
    return {name: value for name, value in fields.items() if name != "epsilon"} | {"noise_multiplier": QUIET}


def _sampling() -> list[Row]:
    paper = {
        "mnist-scatternet-linear": ((98.6, 0.1), (98.7, 0.0)),
        "mnist-cnn": ((98.0, 0.1), (98.1, 0.0)),
        "fashion-mnist-scatternet-linear": ((89.6, 0.1), (89.7, 0.0)),
        "fashion-mnist-cnn": ((86.1, 0.2), (86.0, 0.1)),
        "cifar10-scatternet-linear": ((66.8, 0.2), (67.0, 0.0)),
        "cifar10-cnn": ((59.0, 0.4), (59.2, 0.1)),
    }
    rows = []
    for name, (poisson, shuffled) in paper.items():
        fields = averaged(recipe(f"tramer2021-{name}"))
        rows += [Row(f"{name}-poisson", fields, poisson), Row(f"{name}-shuffle", fields, shuffled, "shuffle")]
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
    # low and high learning rate (Table 14)
    for dataset, rates, epochs in (
        ("mnist", (0.5, 8.0), 40),
        ("fashion-mnist", (1.0, 16.0), 40),
        ("cifar10", (0.25, 4.0), 60),
    ):
        for kind in ("scatternet-linear", "scatternet-cnn", "cnn"):
            fields = recipe(f"tramer2021-{dataset}-{kind}") | {"batch_size": 512, "epochs": epochs}
            if "groups" in fields:
                fields["groups"] = 81
            for word, rate in zip(("low", "high"), rates, strict=True):
                noisy = fields | {"lr": rate}
                rows.append(Row(f"{dataset}-{kind}-{word}", noisy))
                rows.append(Row(f"{dataset}-{kind}-{word}-quiet", _quiet(noisy)))
    return rows


def _smaller() -> list[Row]:
    large = averaged(recipe("tramer2021-cifar10-cnn"))
    return [
        Row("cifar10-cnn", large, (59.2, 0.1)),
        Row("cifar10-cnn-small", large | {"model": "cifar10_cnn_small"}, (60.7, 0.3)),
    ]


def _symmetric() -> list[Row]:
    quiet = [row for row in _non_private() if row.name == "cifar10-cnn"]
    return [
        Row(f"{row.name}-symmetric{ending}", row.fields | {"normalization": "none"}, row.paper)
        for rows, ending in ((_smaller(), ""), (quiet, "-non-private"))
        for row in rows
    ]


def _transfer() -> list[Row]:
    """The paper's networks (ResNeXt on CIFAR-100, SimCLR) are not at hand; the values are theirs all the same."""
    paper = {"resnext": (80.0, 0.0), "simclr": (92.7, 0.0)}
    return [
        Row(
            f"{name}-values",
            averaged(recipe(f"tramer2021-transfer-{name}") | {"dataset": "cifar10-efficientnet"}),
            value,
        )
        for name, value in paper.items()
    ]


EXPERIMENTS = {
    "accuracy": _accuracy,
    "same-noise": _same_noise,
    "decorrelated": _decorrelated,
    "mirrored": _mirrored,
    "normalization": _normalization,
    "non-private": _non_private,
    "sampling": _sampling,
    "batch-size": _batch_size,
    "noise": _noise,
    "smaller": _smaller,
    "symmetric": _symmetric,
    "transfer": _transfer,
}
