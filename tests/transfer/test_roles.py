"""What is frozen, what is trained, and at which rate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpkernels import models
from dpkernels.transfer import classifier_of, freeze, parameter_groups, roles, sparsify, trained


def small() -> models.ResNet:
    return models.cifar_resnet(8, in_channels=1, width=4, groups=2)


def alive(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_every_parameter_has_one_role() -> None:
    model = small()
    found = roles(model)
    assert set(found) == set(dict(model.named_parameters()))
    assert {name for name, role in found.items() if role == "classifier"} == {"7.weight", "7.bias"}
    assert all(found[name] == "norm" for name in ("2.0.activation.0.weight", "2.0.residual.1.bias", "4.weight"))
    assert all(found[name] == "body" for name in ("0.weight", "2.0.projection.weight"))
    mask = torch.zeros(4, 1, 3, 3, dtype=torch.bool)
    mask[0, 0] = True
    sparsify(model, {"0.weight": mask})
    assert roles(model)["0.values"] == "sparse"
    assert trained(model)["sparse"] == (9, 9)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("stem", ["cifar", "imagenet"])
def test_block_groups_are_frozen_as_kurakin_et_al_do(stem: str, wrapped: bool) -> None:
    """Input convolution and the first groups; with all four, everything but the last layer."""
    first = 1 if stem == "cifar" else 2  # a pooling stands before the block groups
    for count in range(5):
        model: nn.Module = models.resnet18(10, stem=stem, width=4, groups=2)
        prefix = "1." if wrapped else ""
        if wrapped:
            model = nn.Sequential(nn.Identity(), model)
        before = alive(model)
        frozen = set(freeze(model, block_groups=count))
        assert alive(model) == before - frozen
        parts = {name.removeprefix(prefix).split(".")[0] for name in frozen}
        expected = {str(at) for at in (0, *range(first, first + count))} if count else set()
        if count == 4:
            expected.add(str(first + 4))  # the last normalization
            assert {name.removeprefix(prefix) for name in alive(model)} == {
                f"{first + 7}.weight",
                f"{first + 7}.bias",
            }
        assert parts == expected


def test_names_and_roles_are_frozen() -> None:
    model = small()
    assert freeze(model, "1.0", "0.weight")[0] == "0.weight"
    assert not any(name.startswith(("1.", "0.")) for name in alive(model))
    assert freeze(model, "1") == []  # was frozen
    freeze(model, "body")
    assert {roles(model)[name] for name in alive(model)} == {"norm", "classifier"}
    freeze(model, "norm")
    assert alive(model) == {"7.weight", "7.bias"}
    own = nn.ModuleDict({"norm": nn.Linear(2, 2), "other": nn.LayerNorm(2), "last": nn.Linear(2, 2)})
    assert freeze(own, "norm") == ["norm.weight", "norm.bias"]  # a model's own name wins


def test_groups_hold_every_trained_parameter_once_at_its_rate() -> None:
    model = small()
    freeze(model, "body")
    groups = parameter_groups(model, {"classifier": 0.8, "norm": 0.01})
    assert [(group["name"], group["lr"]) for group in groups] == [("classifier", 0.8), ("norm", 0.01)]
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert {group["lr"] for group in parameter_groups(small(), 0.1)} == {0.1}


def test_a_classifier_may_be_named() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2)))
    assert classifier_of(model) == "2.0"
    assert [name for name, role in roles(model, "2").items() if role == "classifier"] == [
        "2.0.weight",
        "2.0.bias",
        "2.1.weight",
        "2.1.bias",
    ]


def test_bad_arguments_are_named() -> None:
    model = small()
    with pytest.raises(ValueError, match="no module or parameter 'conv1'; it has 0, 1, 2"):
        freeze(model, "0", "conv1")
    with pytest.raises(ValueError, match="block_groups must be from 0 to 3, got 4"):
        freeze(model, block_groups=4)
    with pytest.raises(ValueError, match="freeze modules by their names"):
        freeze(models.mnist_cnn(), block_groups=1)
    with pytest.raises(TypeError, match="block_groups must be an int, got True"):
        freeze(model, block_groups=True)
    assert alive(model) == set(dict(model.named_parameters()))
    with pytest.raises(ValueError, match="lr must be given for norm"):
        parameter_groups(model, {"classifier": 0.1})
    with pytest.raises(ValueError, match="got head"):
        parameter_groups(model, {"head": 0.1})
    with pytest.raises(ValueError, match="must have a linear layer as its classifier"):
        classifier_of(nn.Sequential(nn.Conv2d(1, 1, 1)))
