"""Convolutions with standardized weights: the closed form is the one-example loop, and its norms are never below."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkernels.clipping import GhostClipper
from dpkernels.layers import Record, standardized
from dpkernels.layers.conv import ConvRule
from dpkernels.layers.standardized import STANDARDIZED
from tests.clipping.oracle import deviation, one_example_loop

CLASSES = 3


class Standardized(nn.Conv2d):
    """As BiT (without a gain) and NFNets (with one) define it."""

    def __init__(self, *args: Any, gain: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1) - 0.3) if gain else None

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        gain = None if self.gain is None else (self.gain * 0.7).view(-1)
        weight = F.batch_norm(rows, None, None, weight=gain, training=True, momentum=0.0, eps=1e-6)
        return self._conv_forward(x, weight.reshape_as(self.weight), self.bias)


LAYERS: dict[str, dict[str, Any]] = {
    "3x3": {"kernel_size": 3, "padding": 1},
    "1x1 without bias": {"kernel_size": 1, "bias": False},
    "strided and grouped": {"kernel_size": 3, "stride": 2, "groups": 2},
    "dilated depthwise": {"kernel_size": 3, "dilation": 2, "padding": 2, "groups": 4},
}


def network(name: str, gain: bool) -> nn.Sequential:
    layer = Standardized(4, 8, gain=gain, **LAYERS[name])
    return nn.Sequential(
        nn.Conv2d(2, 4, 1), nn.Tanh(), layer, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("batch", [1, 4, 8])
@pytest.mark.parametrize("name", LAYERS)
def test_equals_the_one_example_loop(
    name: str, batch: int, gain: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network(name, gain)
    x, y = torch.randn(batch, 2, 7, 6), torch.arange(batch) % CLASSES
    double = network(name, gain).double()
    double.load_state_dict(model.state_dict())
    model.to(dtype)
    expected, norms = one_example_loop(double, losses_of, x.double(), y, 0.05)
    taken: list[str] = []
    right = standardized.StandardizedConvRule.of
    monkeypatch.setattr(
        standardized.StandardizedConvRule, "of", lambda self, *args: taken.append("closed form") or right(self, *args)
    )
    with GhostClipper(model, 0.05) as clipper:
        result = clipper.backward(losses_of(model, x.to(dtype), y))
    assert taken == ["closed form"]
    tolerance = 2e-4 if dtype == torch.float32 else 1e-9
    assert deviation(result.grads, expected) < tolerance
    assert torch.allclose(result.norms, norms, rtol=tolerance)


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_a_norm_is_never_below_that_of_what_is_added(seed: int, store: bool) -> None:
    """Also where most of the gradient is removed, or magnitudes differ much."""
    torch.manual_seed(seed)
    batch, groups = 3, 1 + seed % 2
    weight = torch.randn(6, 4 // groups, 3, 3) * 10 ** (torch.rand(6, 1, 1, 1) * 6 - 3)
    gain = torch.randn(6) if seed % 3 else None
    x = torch.randn(batch, 4, 6, 6) * 10 ** (torch.rand(batch, 1, 1, 1) * 4 - 2) + 100 * (seed % 4 == 0)
    if seed % 5 == 0:  # patches like the standardized weight itself: nothing but rounding is left
        x = weight[:1].repeat(batch, groups, 2, 2)
    g = torch.randn(batch, 6, 6, 6)
    settings = {"kernel_size": (3, 3), "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": groups}
    settings |= {"transposed": False, "lifted": False}

    record = Record(ConvRule(), (x,), g, frozenset({"weight"}), settings=settings)
    own, _ = STANDARDIZED.of(record, weight, gain, 1e-6)
    norms = STANDARDIZED.squared_norms(own, frozenset({"weight"}), store=store)
    for example in range(batch):
        only = torch.zeros(batch, dtype=torch.float64)
        only[example] = 1
        added = STANDARDIZED.clipped_sums(own, only, frozenset({"weight"}))["weight"]
        assert float(added.square().sum()) <= float(norms[example]) * (1 + 1e-12)
        assert float(norms[example]) >= 0
