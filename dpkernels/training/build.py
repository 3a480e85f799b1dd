"""What a configuration is made into: features, model, optimizer."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from dpkernels import models
from dpkernels.accounting import Ledger, Plan
from dpkernels.data import ArraySplit, ImageDataset, with_features
from dpkernels.features import GroupNorm, Mirrored, PrivateDataNorm, PublicWhitening, ScatterNet, public_statistics
from dpkernels.optim import DPSGD, DPAdam, DPAdamW
from dpkernels.optim.private import PrivateOptimizer
from dpkernels.training.config import TrainConfig
from dpkernels.training.objective import decayed_groups
from dpkernels.training.transfer import parameter_groups

UNIT = (0.0, 1.0)
PHOTOGRAPH = (-2.5, 2.5)  # units of synthetic images' spread, around their mean
PUBLIC_SHAPE = (32, 32)  # of synthetic images for statistics of pixels, which hardly depend on it


@dataclass(frozen=True)
class Features:
    """What images are replaced by before training: of each image alone, and free of privacy.

    pixel_range: what pixels are scaled to before. Those of photographs lie around 0, as in the paper's code: else their
    mean outweighs all else in the groups of a group normalization that have a low-pass channel. What is drawn on black
    keeps its 0.
    """

    transform: nn.Module
    shape: tuple[int, ...]
    fingerprint: str
    pixel_range: tuple[float, float]

    def of(self, dataset: ImageDataset) -> ImageDataset:
        """Those of `dataset`, from the cache or computed now."""
        images = dataset.scaled(*self.pixel_range)
        return with_features(images, self.transform, shape=self.shape, fingerprint=self.fingerprint)


def features_of(name: str, image_shape: tuple[int, ...]) -> Features | None:
    """Those of a name in `FEATURES`, for images of `image_shape`; None where the model sees the images.

    Three channels are taken for a photograph's.
    """
    if name == "none":
        return None
    _, *more = name.split("-")
    pixel_range = PHOTOGRAPH if image_shape[0] == 3 else UNIT
    scatter = ScatterNet(image_shape)
    net = Mirrored(scatter) if "mirrored" in more else scatter
    if "whitened" not in more:
        return Features(net, net.feature_shape, net.fingerprint, pixel_range)
    whitening = PublicWhitening(public_statistics(net, image_shape, value_range=pixel_range))
    fingerprint = f"{net.fingerprint} {whitening.fingerprint}"
    return Features(nn.Sequential(net, whitening), net.feature_shape, fingerprint, pixel_range)


def build_model(
    config: TrainConfig, dataset: ImageDataset, features: Features | None, image_shape: tuple[int, ...]
) -> nn.Module:
    """The untrained model; the same initial weights for the same seed. torch's own generator is left as it was.

    Where the configuration has a normalization it comes first, by public statistics at most: the private ones are
    released later. features: what `dataset` has instead of images of `image_shape`.

    Raises ValueError where the data set is of features that the user brings: nothing public is known of their scale.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(secrets.randbits(63) if config.seed is None else config.seed)
        network = models.create(config.model, dataset.input_shape, dataset.num_classes)
    if config.normalization == "none":
        return network
    if config.normalization == "group":
        assert config.groups is not None
        return nn.Sequential(GroupNorm(config.groups, dataset.input_shape[0]), network)
    if features is None and isinstance(dataset.train, ArraySplit):
        raise ValueError(
            f"normalization must be none or group for {dataset.name}, which holds no images, got {config.normalization}"
        )
    transform: nn.Module = nn.Identity() if features is None else features.transform
    shape = PUBLIC_SHAPE if features is None else image_shape[1:]
    public = public_statistics(transform, (image_shape[0], *shape), value_range=dataset.test.value_range)
    return nn.Sequential(PrivateDataNorm(public.mean, public.std), network)


def build_optimizer(config: TrainConfig, plan: Plan, model: nn.Module, ledger: Ledger) -> PrivateOptimizer:
    """The private optimizer that `config` names."""
    shared: dict[str, Any] = {
        "lr": config.lr,
        "max_grad_norm": config.max_grad_norm,
        "weight_decay": config.weight_decay,
        "params": parameter_groups(config, model) or decayed_groups(config, model),
        "ledger": ledger,
        "seed": config.seed,
    }
    if config.optimizer == "sgd":
        return DPSGD(model, plan, momentum=config.momentum, nesterov=config.nesterov, **shared)
    kind: Callable[..., PrivateOptimizer] = {"adam": DPAdam, "adamw": DPAdamW}[config.optimizer]
    return kind(model, plan, **shared)


def moving_average(model: nn.Module, decay: float) -> AveragedModel:
    """The exponential moving average of `model`'s weights: after n updates the decay is at most (1 + n) / (10 + n), so
    that the first weights are soon forgotten."""

    def average(averaged: Tensor, current: Tensor, updates: Tensor | int) -> Tensor:
        count = int(updates)
        return averaged.lerp(current, 1 - min(decay, (1 + count) / (10 + count)))

    return AveragedModel(model, avg_fn=average)
