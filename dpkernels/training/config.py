"""What a training run computes, as a frozen configuration, and the defaults for each data set.

The hyper-parameters of MNIST, Fashion-MNIST and CIFAR-10 are those of the end-to-end networks of Tramèr & Boneh 2021,
Table 13 (learning rates scaled by batch_size / 512, as there). Those of digits were chosen by five-fold
cross-validation on its training set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from dpkernels.accounting import Event, Gaussian, Plan, plan
from dpkernels.data import ArraySplit, ImageDataset
from dpkernels.features import NormRelease

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "cosine")
FEATURES = ("none", "scatternet", "scatternet-mirrored", "scatternet-whitened", "scatternet-mirrored-whitened")
NORMALIZATIONS = ("none", "group", "public", "private")
LOSSES: dict[str, tuple[str, ...]] = {
    "cross-entropy": (),
    "losing-less": ("loss_threshold_epoch", "loss_beta", "loss_gamma"),
    "losing-less-weights": ("loss_threshold_epoch", "loss_beta", "loss_gamma"),
    "sse-focal": ("loss_threshold_epoch", "loss_gamma"),
    "sse-cross-entropy": ("loss_threshold_epoch",),
    "focal": ("loss_gamma",),
    "sse": (),
    "sae": (),
    "huber": ("loss_beta",),
}
"""The losses, and the fields that each has of its own: see `dpkernels.losses`."""
LARGEST_DELTA = 1e-5


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides what a run computes. Every field is checked; errors name it."""

    dataset: str
    """As `dpkernels.data.load_dataset` takes it."""
    model: str
    """As `dpkernels.models.create` takes it."""
    dataset_size: int
    """The public nominal number of training examples, never counted from the private data."""
    batch_size: int
    """Expected size of a logical batch."""
    epochs: float
    delta: float
    epsilon: float | None
    """The target, or None where `noise_multiplier` is given."""
    noise_multiplier: float | None
    lr: float
    max_grad_norm: float
    image_size: int | None = None
    """Photographs in a folder are cropped and resized to so many pixels a side when they are fetched; None where all
    have one size and fit into memory."""
    optimizer: str = "sgd"
    momentum: float = 0.9
    """Of SGD; 0 for the other optimizers."""
    nesterov: bool = False
    """Whether SGD's momentum is Nesterov's."""
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup: float = 0.0
    """Fraction of all steps over which the learning rate rises from 0."""
    averaging: float | None = None
    """Decay of an exponential moving average of the weights, which is what the run then evaluates and leaves: computed
    from noised updates alone, so at no privacy cost."""
    loss: str = "cross-entropy"
    """One of `LOSSES`. Those of two parts go from the first to the second around loss_threshold_epoch; "losing-less"
    also has a penalty on pre-activations, "losing-less-weights" one on weights."""
    loss_threshold_epoch: float | None = None
    """The epoch, counted from 0, at which both parts weigh the same."""
    loss_beta: float | None = None
    """What the penalty is divided by; of "huber", where squares end."""
    loss_gamma: float | None = None
    """The power of the focal loss."""
    features: str = "none"
    """What images are replaced by before training: "none" or "scatternet"; "-mirrored" takes what an image's features
    and its mirror image's have in common, "-whitened" decorrelates channels by statistics of synthetic images."""
    normalization: str = "none"
    """Of the model's input, pixels or features: "none", "group" (each example alone), "public" (by statistics of
    synthetic images) or "private" (by statistics of the training data, which are part of the plan)."""
    groups: int | None = None
    """Of group normalization."""
    norm_noise_multiplier: float | None = None
    """Of the private statistics."""
    init: str | None = None
    """A file with the weights of a public model, as `dpkernels.transfer.load_weights` takes it: all but the classifier
    start from them."""
    freeze: str | None = None
    """What is not trained: a number of block groups, or names of modules or of roles ("norm", "body") with commas
    between them, as `dpkernels.transfer.freeze` takes them."""
    sparse: float | None = None
    """The fraction of the convolution weights that is trained, the largest of the public model; beside them classifier
    and normalization."""
    lr_body: float | None = None
    """The learning rate of everything but the classifier; None for the classifier's, `lr`."""
    score_noise_multiplier: float | None = None
    """Of the number of training examples that the trained model classifies rightly, which is then released as well and
    part of the plan; None releases none."""
    seed: int | None = None
    """Makes noise, sampling and initial weights reproducible: the run is then not private."""

    def __post_init__(self) -> None:
        check_values(asdict(self))
        if (self.epsilon is None) == (self.noise_multiplier is None):
            got = f"epsilon={self.epsilon!r}, noise_multiplier={self.noise_multiplier!r}"
            raise ValueError(f"exactly one of epsilon and noise_multiplier must be given, got {got}")
        if self.batch_size > self.dataset_size:
            raise ValueError(f"batch_size must be at most dataset_size={self.dataset_size}, got {self.batch_size}")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum must be 0 with the optimizer {self.optimizer}, got {self.momentum}")
        for name in LOSSES["losing-less"]:
            if (getattr(self, name) is not None) != (name in LOSSES[self.loss]):
                raise ValueError(
                    f"{name} must be given with the losses that have it ({', '.join(_losses_with(name))}) and only "
                    f"then, got {getattr(self, name)!r} with loss={self.loss!r}"
                )
        if self.loss == "losing-less-weights":
            others: dict[str, Any] = {"weight_decay": self.weight_decay, "lr_body": self.lr_body, "sparse": self.sparse}
            others |= {"optimizer": "adamw"} if self.optimizer == "adamw" else {}
            if given := ", ".join(f"{name}={value!r}" for name, value in others.items() if value):
                raise ValueError(
                    f"loss must not be losing-less-weights with another weight decay or other groups, got {given}"
                )
        if self.nesterov and not self.momentum:
            raise ValueError(f"nesterov must be false without momentum, got true with momentum={self.momentum}")
        for name, kind in (("groups", "group"), ("norm_noise_multiplier", "private")):
            if (getattr(self, name) is not None) != (self.normalization == kind):
                raise ValueError(
                    f"{name} must be given with normalization={kind!r} and only then, got {getattr(self, name)!r} with "
                    f"normalization={self.normalization!r}"
                )
        if self.sparse is not None and self.init is None:
            raise ValueError(
                f"sparse must be given with init only, got {self.sparse!r} without: the largest weights are those of a "
                "public model"
            )
        if self.image_size is not None and self.features != "none":
            raise ValueError(f"image_size must not be given with features, got {self.image_size}")

    @property
    def seeded(self) -> bool:
        return self.seed is not None

    def plan(self) -> Plan:
        """The privacy plan, calibrated: takes seconds. Raises ValueError where no noise meets the target."""
        return plan(
            dataset_size=self.dataset_size,
            batch_size=self.batch_size,
            epochs=self.epochs,
            delta=self.delta,
            target_epsilon=self.epsilon,
            noise_multiplier=self.noise_multiplier,
            compose_with=self.compose_with,
        )

    def release(self, channels: int) -> NormRelease | None:
        """How statistics of `channels` channels of the training data are released, where they are."""
        if self.norm_noise_multiplier is None:
            return None
        return NormRelease.in_public_units(channels, self.dataset_size, self.norm_noise_multiplier)

    @property
    def compose_with(self) -> tuple[Event, ...]:
        """What the run releases besides its steps."""
        release = self.release(channels=1)
        statistics = None if release is None else release.event
        return tuple(event for event in (statistics, self.score_event) if event is not None)

    @property
    def score_event(self) -> Event | None:
        """What the number of right answers costs: one example changes it by at most 1."""
        return None if self.score_noise_multiplier is None else Gaussian(self.score_noise_multiplier)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The configuration that `to_dict` described. Raises ValueError for fields that are missing or unknown.

        A field with a default may be missing: it came with a later version.
        """
        needed = {field.name for field in fields(cls) if field.default is MISSING}
        if not needed <= values.keys() <= set(field_names()):
            raise ValueError(f"expected the fields {sorted(field_names())}, got {sorted(values)}")
        return cls(**values)


def field_names() -> tuple[str, ...]:
    """The names of what a `TrainConfig` holds."""
    return tuple(field.name for field in fields(TrainConfig))


def _losses_with(field: str) -> list[str]:
    return [loss for loss, own in LOSSES.items() if field in own]


def resolve(dataset: ImageDataset, given: Mapping[str, Any]) -> TrainConfig:
    """The configuration for `dataset` with the values of `given`, and defaults for everything else.

    given: fields of `TrainConfig`, `dataset` among them. A model that stands on features brings them. Raises ValueError
    or TypeError that names the field.
    """
    size = given.get("dataset_size", dataset.nominal_size)
    if size is None:
        raise ValueError(
            "dataset_size must be given for a folder: the number of training examples that you are ready to publish "
            "(it is part of the guarantee, and is never counted silently)"
        )
    check_values({**given, "dataset_size": size})
    values = _DEFAULTS.get(dataset.name) or _defaults_by_shape(dataset, size)
    values = {**values, "dataset_size": size, "delta": default_delta(size)}
    values |= {"noise_multiplier": None, "epsilon": None if given.get("noise_multiplier") is not None else 3.0}
    optimizer = given.get("optimizer", "sgd")
    if optimizer != "sgd":
        values |= {"lr": _ADAPTIVE_LR, "momentum": 0.0}
    if given.get("schedule") == "cosine":
        values["warmup"] = 0.05
    features = given.get("features")
    if features is None and stands_on_features(given.get("model", "")) and not isinstance(dataset.train, ArraySplit):
        features = "scatternet"
    if features not in (None, "none"):
        values |= {"features": features, "model": "scatternet_linear", "normalization": "private"}
    elif given.get("init") is not None:
        values["normalization"] = "none"  # a public model expects pixels as it was trained on
    if given.get("normalization", values.get("normalization")) == "private":
        values["norm_noise_multiplier"] = NORM_NOISE
    values |= loss_defaults(given.get("loss", "cross-entropy"), dataset.name, features or "none")
    return TrainConfig(**{**values, **given})


def stands_on_features(model: str) -> bool:
    """Whether the model of that name is one for scattering features, and learns little of pixels."""
    return model.strip().lower().replace("-", "_").startswith("scatternet_")


def loss_defaults(loss: str, dataset: str, features: str) -> dict[str, float]:
    """What Shamsabadi & Papernot 2023, Table 5, found best for a data set, for the fields that `loss` has."""
    if loss == "huber":
        return {"loss_beta": 1.0}
    kind = "pixels" if features == "none" else "features"
    found = _LOSS_DEFAULTS[kind].get(dataset, _LOSS_DEFAULTS[kind]["mnist"])
    return {name: value for name, value in zip(LOSSES["losing-less"], found, strict=True) if name in LOSSES[loss]}


_LOSS_DEFAULTS: dict[str, dict[str, tuple[float, float, float]]] = {  # threshold epoch, beta, gamma
    "pixels": {"mnist": (0.0, 1.0, 5.0), "cifar10": (7.0, 11.0, 5.0)},
    "features": {"mnist": (2.0, 11.0, 2.0), "fashion-mnist": (2.0, 51.0, 2.0)},
}


def default_delta(dataset_size: int) -> float:
    """1e-5, or for large data sets the largest power of ten below 1 / dataset_size."""
    return min(LARGEST_DELTA, 10.0 ** -(math.floor(math.log10(dataset_size)) + 1))


_ADAPTIVE_LR = 2e-3
NORM_NOISE = 32.0
"""Of private statistics in public units: they come out right to a few percent, for 1/16 of what the paper pays."""
_MNIST = {"model": "mnist_cnn", "batch_size": 512, "epochs": 40.0, "lr": 0.5, "max_grad_norm": 0.1}
_CIFAR = {"model": "cifar10_cnn", "batch_size": 1024, "epochs": 30.0, "lr": 1.0, "max_grad_norm": 0.1}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"model": "linear", "batch_size": 512, "epochs": 36.0, "lr": 4.0, "max_grad_norm": 0.1},
    "mnist": _MNIST,
    "fashion-mnist": {**_MNIST, "batch_size": 2048, "lr": 4.0},
    "cifar10": {**_CIFAR, "normalization": "public"},
}


def _defaults_by_shape(dataset: ImageDataset, size: int) -> dict[str, Any]:
    """For a folder: the network of the data set that it looks like, and a batch of a fiftieth."""
    batch = min(1024, max(1, size // 50))
    if dataset.input_shape == (1, 28, 28):
        values = _MNIST
    elif dataset.input_shape == (3, 32, 32):
        values = _CIFAR
    else:
        values = {**_CIFAR, "model": "simple_vgg" if min(dataset.input_shape[1:], default=0) >= 16 else "linear"}
    return {**values, "batch_size": batch, "lr": batch / 1024}


# ---- checks of single values


def check_values(values: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError, naming the field, for the first of `values` that is out of range."""
    for name, value in values.items():
        if value is None and name in _OPTIONAL:
            continue
        if name not in _CHECKS:
            raise ValueError(f"{name} is not a field of a training configuration; those are {', '.join(_CHECKS)}")
        wanted, kinds, fits = _CHECKS[name]
        if isinstance(value, bool) != (kinds == _TRUTH) or not isinstance(value, kinds):
            raise TypeError(f"{name} must be {wanted}, got {value!r} of type {type(value).__name__}")
        if not fits(value):
            raise ValueError(f"{name} must be {wanted}, got {value!r}")


def parse_value(name: str, text: str) -> str | int | float:
    """The value of the field `name` that `text` says. Raises ValueError for another field, or where it fits no field of
    that kind; TypeError or ValueError where it is out of range."""
    if name not in _CHECKS:
        raise ValueError(f"{name} is not a field of a training configuration; those are {', '.join(_CHECKS)}")
    wanted, kinds, _ = _CHECKS[name]
    known: dict[tuple[type, ...], Callable[[str], Any]] = {(str,): str, (int,): int, _TRUTH: _TRUTHS.__getitem__}
    kind = known.get(kinds, float)
    try:
        value: str | int | float = kind(text.strip())
    except (ValueError, KeyError):
        raise ValueError(f"{name} must be {wanted}, got {text!r}") from None
    check_values({name: value})
    return value


_Check = tuple[str, tuple[type, ...], Callable[[Any], bool]]
_NUMBER = (int, float)
_TRUTH = (bool,)
_TRUTHS = {"true": True, "false": False}
_POSITIVE: _Check = ("a finite number > 0", _NUMBER, lambda value: 0 < value < math.inf)
_COUNT: _Check = ("a positive integer", (int,), lambda value: value >= 1)
_NAME: _Check = ("a name", (str,), lambda value: bool(value.strip()))


def _one_of(names: tuple[str, ...]) -> _Check:
    return (f"one of {', '.join(names)}", (str,), lambda value: value in names)


_TRANSFER = {"init", "freeze", "sparse", "lr_body"}
_NOISE = {"epsilon", "noise_multiplier", "norm_noise_multiplier", "score_noise_multiplier"}
_OPTIONAL = {"averaging", "groups", "image_size", "seed", *_NOISE, *_TRANSFER, *LOSSES["losing-less"]}
_CHECKS: dict[str, _Check] = {
    "dataset": _NAME,
    "model": _NAME,
    "dataset_size": _COUNT,
    "batch_size": _COUNT,
    "epochs": _POSITIVE,
    "delta": ("a probability with 0 < delta < 1", _NUMBER, lambda value: 0 < value < 1),
    "epsilon": _POSITIVE,
    "noise_multiplier": _POSITIVE,
    "lr": _POSITIVE,
    "max_grad_norm": ("a number from 1e-10 to 1e10", _NUMBER, lambda value: 1e-10 <= value <= 1e10),
    "image_size": _COUNT,
    "optimizer": _one_of(OPTIMIZERS),
    "momentum": ("a number with 0 <= momentum < 1", _NUMBER, lambda value: 0 <= value < 1),
    "nesterov": ("true or false", _TRUTH, lambda value: True),
    "weight_decay": ("a finite number >= 0", _NUMBER, lambda value: 0 <= value < math.inf),
    "schedule": _one_of(SCHEDULES),
    "warmup": ("a fraction with 0 <= warmup < 1", _NUMBER, lambda value: 0 <= value < 1),
    "averaging": ("a decay with 0 < averaging < 1", _NUMBER, lambda value: 0 < value < 1),
    "loss": _one_of(tuple(LOSSES)),
    "loss_threshold_epoch": ("a finite number", _NUMBER, math.isfinite),
    "loss_beta": _POSITIVE,
    "loss_gamma": ("a finite number >= 0", _NUMBER, lambda value: 0 <= value < math.inf),
    "features": _one_of(FEATURES),
    "normalization": _one_of(NORMALIZATIONS),
    "groups": _COUNT,
    "norm_noise_multiplier": _POSITIVE,
    "init": _NAME,
    "freeze": _NAME,
    "sparse": ("a fraction with 0 < sparse <= 1", _NUMBER, lambda value: 0 < value <= 1),
    "lr_body": _POSITIVE,
    "score_noise_multiplier": _POSITIVE,
    "seed": ("an integer", (int,), lambda value: True),
}
