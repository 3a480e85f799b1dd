"""The model that a run leaves: written with all that its use needs, and read as a module from images to logits."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpkernels import models
from dpkernels._files import bad_file, parse_json, reason
from dpkernels.data import ImageDataset
from dpkernels.features import GroupNorm, PrivateDataNorm
from dpkernels.training.build import Features, features_of
from dpkernels.training.config import FEATURES, NORMALIZATIONS, TrainConfig
from dpkernels.training.files import write_atomically
from dpkernels.training.memory import placed
from dpkernels.training.run_folder import RunFolder
from dpkernels.transfer.saved import open_safetensors


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

    Raises FileNotFoundError, and ValueError that names the file, and the field where one is meant: where no run left
    it, another version's did whose features were others, or its weights do not fit. Nothing is made of a size that the
    file only tells of: what its weights are is compared first.
    """
    from safetensors.torch import load_model

    file = RunFolder(Path(path)).model if Path(path).is_dir() else Path(path)
    if not os.path.lexists(file):
        raise FileNotFoundError(f"{file}: expected the model of a run, got none")
    with open_safetensors(file) as opened:
        metadata = opened.metadata() or {}
        found = {name: _kind(opened.get_slice(name)) for name in opened.keys()}  # noqa: SIM118
    told = _told(file, metadata)
    try:
        features = features_of(told["features"], told["input_shape"])
    except (ValueError, TypeError) as error:
        raise bad_file(file, "features of images of its input_shape", reason(error)) from error
    if features.fingerprint != metadata["fingerprint"]:
        raise ValueError(f"{file} was left by another version, whose {told['features']} features were others")
    try:
        with torch.device("meta"):  # of any size, without memory
            _check_weights(_network(told, features).state_dict(keep_vars=True), found)
        network = _network(told, features)
        load_model(network, str(file))
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"{file} must hold the weights of {told['model']} for input_shape {told['input_shape']} and "
            f"{len(told['classes'])} classes: {reason(error)}"
        ) from error
    return TrainedModel(network, features.transform, metadata).eval()


def _told(file: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """What the metadata says of the model, field by field. Raises ValueError that names the field."""
    if missing := {*_FIELDS, "fingerprint"} - metadata.keys():
        raise ValueError(f"{file} must be the model of a run of this version: it does not say its {sorted(missing)}")
    told: dict[str, Any] = {}
    for name, (wanted, is_json, fits) in _FIELDS.items():
        where = f"{file}, {name}"
        value = parse_json(where, metadata[name]) if is_json else metadata[name]
        if not fits(value):
            raise bad_file(where, wanted, repr(value)[:100])
        told[name] = tuple(value) if isinstance(value, list) else value
    if (told["groups"] is not None) != (told["normalization"] == "group"):
        raise bad_file(f"{file}, groups", "a number with group normalization and only then", repr(told["groups"]))
    return told


def _is_range(value: Any) -> bool:
    numbers = isinstance(value, list) and len(value) == 2 and all(type(end) in (int, float) for end in value)
    return numbers and all(math.isfinite(end) for end in value) and value[0] < value[1]


def _is_shape(value: Any) -> bool:
    sizes = isinstance(value, list) and 1 <= len(value) <= 8
    return sizes and all(type(size) is int and 0 < size <= _MOST_WIDE for size in value)


_MOST_WIDE = 2**24  # in each dimension of an example
_Field = tuple[str, bool, Callable[[Any], bool]]
_FIELDS: dict[str, _Field] = {  # what is expected, whether it is JSON, the check
    "classes": (
        "a list of names",
        True,
        lambda value: isinstance(value, list) and len(value) > 0 and all(isinstance(name, str) for name in value),
    ),
    "input_shape": ("a list of sizes", True, _is_shape),
    "pixel_range": ("two numbers, the smaller one first", True, _is_range),
    "features": (f"one of {', '.join(FEATURES)}", False, FEATURES.__contains__),
    "normalization": (f"one of {', '.join(NORMALIZATIONS)}", False, NORMALIZATIONS.__contains__),
    "groups": ("a count or null", True, lambda value: value is None or (type(value) is int and value >= 1)),
    "model": ("the name of a model", False, lambda value: 0 < len(value) <= 1000),
}


def _network(told: Mapping[str, Any], features: Features) -> nn.Module:
    """As it was trained, but for weights and statistics, which are in the file."""
    network = models.create(told["model"], features.shape, len(told["classes"]))
    if told["normalization"] == "none":
        return network
    channels = features.shape[0]
    if told["normalization"] == "group":
        return nn.Sequential(GroupNorm(told["groups"], channels), network)
    # It looks at these, which the device "meta" has not.
    mean, std = torch.zeros(channels, device="cpu"), torch.ones(channels, device="cpu")
    return nn.Sequential(PrivateDataNorm(mean, std), network)


_Kind = tuple[tuple[int, ...], str]  # shape and dtype of a tensor


def _kind(part: Any) -> _Kind:
    return tuple(part.get_shape()), _DTYPES.get(part.get_dtype(), part.get_dtype())


_DTYPES = {"F32": "float32", "F64": "float64", "I64": "int64"}  # that these models have


def _check_weights(state: Mapping[str, Tensor], found: Mapping[str, _Kind]) -> None:
    """Raise ValueError unless the tensors in a file are those of `state`. Of tied ones one is enough."""
    there = {id(tensor) for name, tensor in state.items() if name in found}
    for name, tensor in state.items():
        wanted = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if name in found and found[name] != wanted:
            raise ValueError(f"{name} is {_words(found[name])} in the file, where {_words(wanted)} is expected")
        if name not in found and id(tensor) not in there:
            raise ValueError(f"{name}, {_words(wanted)}, is not in the file")
    if more := found.keys() - state.keys():
        raise ValueError(f"{min(more)} is in the file and not in the model")


def _words(kind: _Kind) -> str:
    return f"{kind[1]} {'x'.join(map(str, kind[0])) or 'scalar'}"
