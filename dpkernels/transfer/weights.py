"""Weights of a public model, read from a file into a model by their names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dpkernels.transfer.roles import classifier_of, covers, within
from dpkernels.transfer.saved import load_saved, open_safetensors

_WRAPPERS = ("state_dict", "model", "model_state_dict")
_PARALLEL = "module."  # before every name, where a model was wrapped: data-parallel, or its moving average
_SHOWN = 8


@dataclass(frozen=True)
class LoadReport:
    """What became of each tensor of a model and of a file. str() is for people.

    matched: taken from the file. fresh: left as they were on purpose. missing: the model's, which the file does not
    have. other_shape: name, the model's shape, the file's. unused: the file's, which the model does not have.
    """

    path: Path
    matched: tuple[str, ...]
    fresh: tuple[str, ...]
    missing: tuple[str, ...]
    other_shape: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    unused: tuple[str, ...]

    @property
    def complete(self) -> bool:
        """Whether everything of the model that should come from the file did."""
        return not self.missing and not self.other_shape

    def __str__(self) -> str:
        return "\n  ".join(self.lines())

    def lines(self) -> list[str]:
        """What happened, a line a kind; names beyond the first eight are counted."""
        shapes = [f"{name} {_shape(mine)}, in the file {_shape(its)}" for name, mine, its in self.other_shape]
        lines = [f"{self.path}: {len(self.matched)} tensors loaded"]
        for what, names in (
            ("left as they were (the new classifier)", self.fresh),
            ("missing in the file", self.missing),
            ("of another shape", shapes),
            ("in the file and not used", self.unused),
        ):
            if names:
                more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                lines.append(f"{len(names)} {what}: {', '.join(names[:_SHOWN])}{more}")
        return lines


def load_weights(
    model: nn.Module, path: str | os.PathLike[str], *, fresh: Sequence[str] | None = None, strict: bool = True
) -> LoadReport:
    """Copy the weights in the file `path` into the tensors of `model` that have the same names.

    path: a .safetensors file, or one of torch.save with a state dict, alone or under "state_dict", "model" or
        "model_state_dict". Only tensors and plain values are read: no code of the file runs. The prefix "module." of
        data-parallel models is dropped. The model must be public: what it was computed from is no part of any epsilon.
    fresh: modules or parameters that keep what they have; by default the classifier (`classifier_of`), whose classes
        are other ones.
    strict: raise where a tensor of the model, the fresh ones aside, is missing in the file or has another shape there;
        else the report tells.

    Raises FileNotFoundError, and ValueError that names the file: for one that cannot be read, holds no such weights, or
    holds weights that are not finite. The model is then as it was.
    """
    path = Path(path)
    kept = (classifier_of(model),) if fresh is None else tuple(fresh)
    for name in kept:
        covers(model, name)
    found = read_weights(path)
    wanted: dict[str, Tensor] = model.state_dict(keep_vars=True)
    asked = {name: tensor for name, tensor in wanted.items() if not any(within(name, part) for part in kept)}
    matched = {name: tensor for name, tensor in asked.items() if name in found and found[name].shape == tensor.shape}
    loaded = {id(tensor) for tensor in matched.values()}  # a tied tensor may be stored under one of its names
    report = LoadReport(
        path,
        matched=tuple(matched),
        fresh=tuple(name for name in wanted if name not in asked),
        missing=tuple(name for name, tensor in asked.items() if name not in found and id(tensor) not in loaded),
        other_shape=tuple(
            (name, tuple(tensor.shape), tuple(found[name].shape))
            for name, tensor in asked.items()
            if name in found and name not in matched
        ),
        unused=tuple(name for name in found if name not in wanted),
    )
    if not matched or (strict and not report.complete):
        raise ValueError(f"the weights do not fit the model: {'; '.join(report.lines())}")
    if strange := [name for name in matched if not _is_plain(found[name])]:
        raise ValueError(f"{path} must hold plain real tensors, got others in {', '.join(strange[:_SHOWN])}")
    broken = [name for name in matched if not found[name].isfinite().all()]
    if broken:
        raise ValueError(f"{path} must hold finite weights, got others in {', '.join(broken[:_SHOWN])}")
    with torch.no_grad():
        for name, tensor in matched.items():
            tensor.copy_(found[name])
    return report


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors in a file by name, on the CPU. Raises as `load_weights` does."""
    if not os.path.lexists(path):
        raise FileNotFoundError(f"{path}: expected a file of weights, got none")
    if path.suffix == ".safetensors":
        with open_safetensors(path) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return _state_dict(path, load_saved(path))


def _state_dict(path: Path, document: Any) -> dict[str, Tensor]:
    """The first of `document` and what it holds under the usual names that is a dictionary of tensors."""
    candidates = [document, *(document[key] for key in _WRAPPERS if isinstance(document, Mapping) and key in document)]
    for found in candidates:
        if isinstance(found, Mapping) and found and all(isinstance(value, Tensor) for value in found.values()):
            tensors = {str(name): value for name, value in found.items() if name != "n_averaged"}
            parallel = all(name.startswith(_PARALLEL) for name in tensors)
            return {name.removeprefix(_PARALLEL) if parallel else name: value for name, value in tensors.items()}
    got = ", ".join(map(str, document)) if isinstance(document, Mapping) else type(document).__name__
    raise ValueError(f"{path} must hold a state dict, alone or under one of {', '.join(_WRAPPERS)}, got {got}")


def _is_plain(tensor: Tensor) -> bool:
    dense = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_nested
    return dense and not tensor.is_quantized and not tensor.is_complex()


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
