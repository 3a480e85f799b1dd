"""replace_batch_norm: every kind, on a copy, with what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpkernels.models import replace_batch_norm


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(12), (4, 12)),
        (nn.BatchNorm1d(12), (4, 12, 5)),
        (nn.BatchNorm2d(48), (2, 48, 3, 3)),
        (nn.BatchNorm3d(7), (2, 7, 2, 2, 2)),
        (nn.SyncBatchNorm(64), (2, 64, 3, 3)),
        (nn.BatchNorm2d(1, affine=False), (2, 1, 3, 3)),
    ],
)
def test_each_kind_becomes_a_group_norm(norm: nn.Module, shape: tuple[int, ...]) -> None:
    replaced = replace_batch_norm(nn.Sequential(norm))
    group = replaced[0]
    assert type(group) is nn.GroupNorm
    assert group.num_channels % group.num_groups == 0
    assert group.affine == norm.affine
    x = torch.randn(*shape)
    assert replaced(x).shape == shape
    assert replaced(x).abs().sum() > 0  # no group consists of one number
    assert replaced(x[:0]).shape == (0, *shape[1:])


@pytest.mark.parametrize(
    ("channels", "groups"), [(1, 1), (2, 1), (7, 1), (12, 6), (16, 8), (48, 24), (64, 32), (66, 22), (256, 32)]
)
def test_the_number_of_groups(channels: int, groups: int) -> None:
    assert replace_batch_norm(nn.BatchNorm2d(channels)).num_groups == groups


def test_max_groups() -> None:
    assert replace_batch_norm(nn.BatchNorm2d(64), max_groups=5).num_groups == 4


def test_works_on_a_copy_and_keeps_what_can_be_kept() -> None:
    norm = nn.BatchNorm2d(8, eps=1e-3).double()
    nn.init.normal_(norm.weight)
    norm.bias.requires_grad_(False)
    inner = nn.Sequential(nn.Conv2d(3, 8, 3), norm).eval()
    model = nn.ModuleDict({"a": inner, "b": nn.ReLU()})
    replaced = replace_batch_norm(model)
    assert model["a"][1] is norm
    group = replaced["a"][1]
    assert isinstance(group, nn.GroupNorm)
    assert torch.equal(group.weight, norm.weight)
    assert group.weight is not norm.weight
    assert (group.eps, group.weight.dtype) == (1e-3, torch.float64)
    assert (group.weight.requires_grad, group.bias.requires_grad, group.training) == (True, False, False)
    assert replaced.state_dict().keys() == {k for k in model.state_dict() if "running" not in k and "num_b" not in k}


def test_a_module_used_twice_stays_one() -> None:
    norm = nn.BatchNorm1d(4)
    replaced = replace_batch_norm(nn.Sequential(norm, nn.Linear(4, 4), norm))
    assert replaced[0] is replaced[2]


def test_examples_no_longer_mix() -> None:
    model = replace_batch_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())).train()
    x = torch.randn(2, 3, 6, 6)
    torch.testing.assert_close(model(x)[0], model(torch.cat([x[:1], 50 * x[1:]]))[0])


def test_a_model_without_batch_norm_is_copied() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    replaced = replace_batch_norm(model)
    assert replaced is not model
    assert torch.equal(replaced[0].weight, model[0].weight)


class NormAndRelu(nn.BatchNorm2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).relu()


def test_what_cannot_be_replaced_is_named() -> None:
    with pytest.raises(TypeError, match=r"model: 1\.0 is a NormAndRelu"):
        replace_batch_norm(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(NormAndRelu(4))))
    with pytest.raises(ValueError, match=r"model: 0 is a lazy batch normalization"):
        replace_batch_norm(nn.Sequential(nn.LazyBatchNorm2d()))
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str"):
        replace_batch_norm("resnet")
    with pytest.raises(ValueError, match="max_groups must be at least 1, got 0"):
        replace_batch_norm(nn.BatchNorm1d(3), max_groups=0)
