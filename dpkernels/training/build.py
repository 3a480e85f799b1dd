"""What a configuration is made into: features, model, optimizer."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from dpkernels import models
from dpkernels._files import require_memory
from dpkernels.accounting import Ledger, Plan
from dpkernels.data import ArraySplit, ImageDataset, with_features
from dpkernels.features import GroupNorm, Mirrored, PrivateDataNorm, PublicWhitening, ScatterNet, public_statistics
from dpkernels.features.public import IMAGES, VERSION
from dpkernels.optim import DPSGD, DPAdam, DPAdamW
from dpkernels.optim.private import PrivateOptimizer
from dpkernels.training.config import TrainConfig, stands_on_features
from dpkernels.training.objective import decayed_groups
from dpkernels.training.transfer import parameter_groups

UNIT = (0.0, 1.0)
PHOTOGRAPH = (-2.5, 2.5)  # units of synthetic images' spread, around their mean
MOST_PIXELS = 2**18
"""Of an image whose features are taken: filters are as large, and there are dozens."""
_SYNTHETIC = 150  # bytes for each pixel of synthetic images: spectra, features, and their products in float64
PUBLIC_SIZE = (32, 32)  # of synthetic images for statistics of pixels, which hardly depend on it


@dataclass(frozen=True)
class Features:
    """What images are replaced by before training: of each image alone, and free of privacy.

    transform: images [batch, *image_shape] to features [batch, *shape]; the identity where the model sees the images.
    fingerprint: another one for other features, the same on every CPU, though their last bits are not; empty for the
    images. pixel_range: what pixels are scaled to before, None for what the data set has. Those of photographs lie
    around 0, as in the paper's code: else their mean outweighs all else in the groups of a group normalization that
    have a low-pass channel. What is drawn on black keeps its 0.
    """

    transform: nn.Module
    image_shape: tuple[int, ...]
    shape: tuple[int, ...]
    fingerprint: str
    pixel_range: tuple[float, float] | None

    def of(self, dataset: ImageDataset) -> ImageDataset:
        """Those of `dataset`, from the cache or computed now."""
        if self.pixel_range is None:
            return dataset
        images = dataset.scaled(*self.pixel_range)
        return with_features(images, self.transform, shape=self.shape, fingerprint=self.fingerprint)


def features_of(name: str, image_shape: tuple[int, ...]) -> Features:
    """Those of a name in `FEATURES`, for images of `image_shape`. Three channels are taken for a photograph's."""
    if name == "none":
        return Features(nn.Identity(), image_shape, image_shape, "", None)
    _, *more = name.split("-")
    low, high = PHOTOGRAPH if image_shape[0] == 3 else UNIT
    if math.prod(image_shape[1:]) > MOST_PIXELS:
        raise ValueError(f"features must be none for images of more than {MOST_PIXELS} pixels, got {name!r}")
    if "whitened" in more:  # before anything is made
        require_memory(f"{name} of {image_shape}", _SYNTHETIC * IMAGES * math.prod(image_shape))
    scatter = ScatterNet(image_shape)
    net = Mirrored(scatter) if "mirrored" in more else scatter
    transform: nn.Module = net
    fingerprint = f"{net.fingerprint} of pixels in [{low:g}, {high:g}]"
    if "whitened" in more:
        whitening = PublicWhitening(public_statistics(net, image_shape, value_range=(low, high)))
        transform = nn.Sequential(net, whitening)
        fingerprint += f" whitened {VERSION} {whitening.power}"
    return Features(transform, image_shape, net.feature_shape, fingerprint, (low, high))


def build_model(config: TrainConfig, dataset: ImageDataset, features: Features) -> nn.Module:
    """The untrained model; the same initial weights for the same seed. torch's own generator is left as it was.

    Where the configuration has a normalization it comes first, by public statistics at most: the private ones are
    released later. features: what `dataset` has.

    Raises ValueError where a model for features would get pixels, and where features that the user brings are to be
    normalized by statistics: nothing public is known of their scale.
    """
    on_images = features.pixel_range is None
    if on_images and stands_on_features(config.model) and not isinstance(dataset.train, ArraySplit):
        raise ValueError(
            f"features must be given with {config.model} on images, got {config.features}: this model is made for "
            "features such as scatternet, and learns little of pixels"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(secrets.randbits(63) if config.seed is None else config.seed)
        network = models.create(config.model, dataset.input_shape, dataset.num_classes)
    if config.normalization == "none":
        return network
    if config.normalization == "group":
        assert config.groups is not None
        return nn.Sequential(GroupNorm(config.groups, dataset.input_shape[0]), network)
    if on_images and isinstance(dataset.train, ArraySplit):
        raise ValueError(
            f"normalization must be none or group for {dataset.name}, which holds no images, got {config.normalization}"
        )
    channels, *size = features.image_shape
    shape = (channels, *(PUBLIC_SIZE if on_images else size))
    public = public_statistics(features.transform, shape, value_range=dataset.test.value_range)
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
