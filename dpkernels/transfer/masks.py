"""The convolution weights that are trained: the largest of them, by what public data made of them (Luo et al. 2021)."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from dpkernels.transfer.roles import roles
from dpkernels.transfer.sparse import sparsify

Scope = Literal["global", "layer"]


def magnitude_masks(model: nn.Module, fraction: float, *, scope: Scope = "global") -> dict[str, Tensor]:
    """Which convolution weights are the largest: bool in their shapes, by name (Luo et al. 2021, section 4.4).

    The weights must come from public data alone: then so does the mask, and it costs no privacy. Of equal weights the
    first ones are taken. Convolutions whose weight is frozen are left out, and of a weight that several modules share
    the first name counts.

    fraction: of the weights of all these convolutions together, 0 < fraction <= 1, to the nearest integer and one at
        least.
    scope: "global" takes the largest of all together, as in the paper, so that layers with small weights may have none;
        "layer" the same fraction of each.

    Raises ValueError or TypeError for an argument out of range, and ValueError where no convolution is trained.
    """
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
        raise TypeError(f"fraction must be a number, got {fraction!r} of type {type(fraction).__name__}")
    if not 0 < fraction <= 1:
        raise ValueError(f"fraction must be above 0 and at most 1, got {fraction}")
    if scope not in get_args(Scope):
        raise ValueError(f"scope must be 'global' or 'layer', got {scope!r}")
    convolutions = {id(module.weight) for module in model.modules() if isinstance(module, nn.Conv2d)}
    weights = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if id(parameter) in convolutions and parameter.requires_grad
    }
    if not weights:
        raise ValueError("model must have a 2-D convolution that is not frozen, got none")
    if scope == "layer":
        return {name: _largest(weight.flatten(), fraction).view_as(weight) for name, weight in weights.items()}
    flat = _largest(torch.cat([weight.flatten() for weight in weights.values()]), fraction)
    parts = flat.split([weight.numel() for weight in weights.values()])
    return {name: part.view_as(weight) for (name, weight), part in zip(weights.items(), parts, strict=True)}


def train_largest(
    model: nn.Module, fraction: float, *, scope: Scope = "global", classifier: str | None = None
) -> dict[str, Tensor]:
    """Leave of `model` to be trained: classifier, normalization, and the largest of its convolution weights.

    Everything else is frozen, and what was frozen stays so. In place, by :func:`sparsify`; :func:`densify` puts the
    dense convolutions back. Returns the masks. Raises as `magnitude_masks` and `sparsify` do, and the model is then as
    it was.
    """
    masks = magnitude_masks(model, fraction, scope=scope)
    own = roles(model, classifier)
    body = [parameter for name, parameter in model.named_parameters() if own[name] == "body"]
    sparsify(model, {name: mask for name, mask in masks.items() if mask.any()})
    for parameter in body:
        parameter.requires_grad_(False)
    return masks


def _largest(weights: Tensor, fraction: float) -> Tensor:
    """bool [weights]: true for the largest, one at least."""
    count = max(1, math.floor(fraction * len(weights) + 0.5))
    mask = torch.zeros(len(weights), dtype=torch.bool, device=weights.device)
    mask[weights.abs().sort(descending=True, stable=True).indices[:count]] = True
    return mask
