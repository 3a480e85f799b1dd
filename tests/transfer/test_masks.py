"""Which convolution weights are trained, and that a private step changes these and no others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dpkernels as dpk
from dpkernels import models
from dpkernels.transfer import (
    densify,
    freeze,
    magnitude_masks,
    parameter_groups,
    train_largest,
    trained,
)


def small() -> models.ResNet:
    torch.manual_seed(0)
    return models.cifar_resnet(8, in_channels=1, width=4, groups=2)


@pytest.mark.parametrize("fraction", [0.01, 0.1, 1.0, 1e-9])
def test_the_largest_weights_of_all_convolutions(fraction: float) -> None:
    model = small()
    masks = magnitude_masks(model, fraction)
    weights = dict(model.named_parameters())
    assert set(masks) == {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    total = sum(weights[name].numel() for name in masks)
    chosen = torch.cat([weights[name][mask].abs() for name, mask in masks.items()])
    others = torch.cat([weights[name][~mask].abs() for name, mask in masks.items()])
    assert len(chosen) == max(1, round(fraction * total))
    assert len(others) == 0 or chosen.min() >= others.max()


def test_the_same_fraction_of_each_layer() -> None:
    model = small()
    nn.init.constant_(model[0].weight, 100.0)
    assert magnitude_masks(model, 0.05)["0.weight"].all()
    assert magnitude_masks(model, 0.25, scope="layer")["0.weight"].sum() == 9
    for name, mask in magnitude_masks(model, 0.25, scope="layer").items():
        weight = model.get_parameter(name)
        assert mask.sum() == weight.numel() // 4
        assert weight[mask].abs().min() >= weight[~mask].abs().max()


def test_equal_weights_and_frozen_ones() -> None:
    model = small()
    for p in model.parameters():
        nn.init.ones_(p)
    freeze(model, block_groups=1)
    masks = magnitude_masks(model, 0.05)
    assert not any(name.startswith(("0.", "1.")) for name in masks)
    flat = torch.cat([mask.flatten() for mask in masks.values()])
    assert flat[: int(flat.sum())].all()


def test_a_private_step_changes_the_selected_weights_alone() -> None:
    """Through the optimizer, with noise and weight decay; afterwards the dense model is back under its own names."""
    model = small()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    freeze(model, "1")
    masks = train_largest(model, 0.05)
    counts = trained(model)
    assert counts["sparse"][0] == sum(int(mask.sum()) for mask in masks.values())
    assert counts["body"][0] == 0
    groups = parameter_groups(model, {"classifier": 0.8, "norm": 0.1, "sparse": 0.1})
    optimizer = dpk.DPSGD(
        model, params=groups, lr=1.0, weight_decay=0.1, max_grad_norm=1.0, noise_multiplier=1.0, batch_size=4
    )
    x, y = torch.randn(4, 1, 8, 8), torch.arange(4)
    optimizer.backward(F.cross_entropy(model(x), y, reduction="none"))
    optimizer.step()
    optimizer.clipper.detach()
    densify(model)

    def expected(name: str) -> Tensor:
        if name in masks:
            return masks[name]
        return torch.full_like(before[name], not name.startswith("1."), dtype=torch.bool)

    after = dict(model.named_parameters())
    assert set(after) == set(before)
    for name, parameter in after.items():
        assert torch.equal(parameter.detach() != before[name], expected(name)), name


def test_bad_arguments_are_named() -> None:
    model = small()
    for fraction in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="fraction must be above 0 and at most 1"):
            magnitude_masks(model, fraction)
    with pytest.raises(TypeError, match="fraction must be a number, got True"):
        magnitude_masks(model, True)
    with pytest.raises(ValueError, match="scope must be 'global' or 'layer', got 'block'"):
        magnitude_masks(model, 0.1, scope="block")
    freeze(model, "body")
    with pytest.raises(ValueError, match="must have a 2-D convolution that is not frozen"):
        train_largest(model, 0.1)
