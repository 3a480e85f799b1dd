"""The model that a run leaves: written with all that its use needs, and read as a module from images to logits."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from dpkernels import models
from dpkernels.data import ImageDataset
from dpkernels.features import GroupNorm, PrivateDataNorm
from dpkernels.training.build import Features, features_of
from dpkernels.training.config import TrainConfig
from dpkernels.training.files import write_atomically
from dpkernels.training.memory import placed
from dpkernels.training.run_folder import RunFolder


def write_trained(
    path: Path,
    model: nn.Module,
    config: TrainConfig,
    epsilon: float,
    dataset: ImageDataset,
    features: Features,
) -> None:
    """The weights as safetensors; tied ones are stored once.

    What the model is, what it expects, and what it guarantees go into the metadata. epsilon: as stated. dataset: what
    the model was trained on, which has `features`.
    """
    from safetensors.torch import save_model

    metadata = {
        "dataset": config.dataset,
        "classes": json.dumps(dataset.classes),
        "input_shape": json.dumps(features.image_shape),
        "pixel_range": json.dumps(dataset.test.value_range),
        "features": config.features,
        "fingerprint": features.fingerprint,
        "normalization": config.normalization,
        "groups": json.dumps(config.groups),
        "model": config.model,
        "epsilon": repr(epsilon),
        "delta": repr(config.delta),
        "private": str(not config.seeded).lower(),
    }
    write_atomically(path, lambda temporary: save_model(model, str(temporary), metadata=metadata))


class TrainedModel(nn.Module):
    """What a run left, in evaluation mode: images to logits. Made by `load_trained`.

    input_shape: of one example. classes: the names of the logits, in order. metadata: of the file, among it "epsilon",
    "delta" and "private". network: normalization and network as they were trained, on the features of the images.
    """

    def __init__(self, network: nn.Module, features: nn.Module, metadata: Mapping[str, str]) -> None:
        super().__init__()
        self.network, self.features = network, features
        self.metadata = dict(metadata)
        self.classes: tuple[str, ...] = tuple(json.loads(metadata["classes"]))
        self.input_shape: tuple[int, ...] = tuple(json.loads(metadata["input_shape"]))
        self.pixel_range: tuple[float, float] = tuple(json.loads(metadata["pixel_range"]))

    def forward(self, images: Tensor) -> Tensor:
        """Logits [batch, classes] of images, floating-point [batch, *input_shape] with pixels in [0, 1].

        A model that was trained on features which the user brought takes these. Raises ValueError for another shape or
        another kind of numbers.
        """
        if tuple(images.shape[1:]) != self.input_shape or not images.is_floating_point():
            raise ValueError(
                f"images must be floating-point [batch, {', '.join(map(str, self.input_shape))}], pixels in [0, 1], "
                f"got {images.dtype} {tuple(images.shape)}"
            )
        low, high = self.pixel_range
        features = self.features(images * (high - low) + low)
        logits: Tensor = self.network(placed(features, self.network, str(features.device)))
        return logits


def load_trained(path: str | os.PathLike[str]) -> TrainedModel:
    """The model in `path`: the folder of `dpkernels train` or `tune`, or its `model.safetensors`.

    Pixels are scaled, features taken and normalized as in training: nothing is left to the caller. In training features
    came from a cache in float16; here they are not rounded.

    Raises FileNotFoundError, and ValueError that names the file where no run left it, another
    version's did whose features were others, or its weights do not fit.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_model

    file = RunFolder(Path(path)).model if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{file}: expected the model of a run, got none")
    try:
        with safe_open(str(file), framework="pt") as opened:
            metadata = opened.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{file} must be a safetensors file, but it cannot be read: {error}") from error
    needed = {"classes", "input_shape", "pixel_range", "features", "fingerprint", "normalization", "groups", "model"}
    if missing := needed - metadata.keys():
        raise ValueError(f"{file} must be the model of a run of this version: it does not say its {sorted(missing)}")
    image_shape = tuple(json.loads(metadata["input_shape"]))
    features = features_of(metadata["features"], image_shape)
    if features.fingerprint != metadata["fingerprint"]:
        raise ValueError(f"{file} was left by another version, whose {metadata['features']} features were others")
    network = models.create(metadata["model"], features.shape, len(json.loads(metadata["classes"])))
    if metadata["normalization"] != "none":
        network = nn.Sequential(_normalization(metadata, features.shape[0]), network)
    try:
        load_model(network, str(file))
    except RuntimeError as error:
        raise ValueError(f"{file} must hold the weights of {metadata['model']}: {error}") from error
    return TrainedModel(network, features.transform, metadata).eval()


def _normalization(metadata: Mapping[str, str], channels: int) -> nn.Module:
    """As it was trained, but for the statistics, which are in the file."""
    if metadata["normalization"] == "group":
        return GroupNorm(json.loads(metadata["groups"]), channels)
    return PrivateDataNorm(torch.zeros(channels), torch.ones(channels))
