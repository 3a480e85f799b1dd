"""LSTM layers that torch computes in one node, in float32: the engine's sums are those of the one-example loop."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkernels.clipping import GhostClipper
from tests.clipping.oracle import deviation, one_example_loop

FEATURES, HIDDEN, CLASSES = 6, 4, 3
LAYERS: dict[str, dict[str, Any]] = {
    "one": {},
    "two, both directions": {"num_layers": 2, "bidirectional": True},
    "without biases": {"bias": False},
    "time first": {"batch_first": False},
}


class Recurrent(nn.Module):
    """A classifier of an LSTM's outputs or of its last states."""

    def __init__(self, used: str, *, batch_first: bool = True, **options: Any) -> None:
        super().__init__()
        self.used, self.batch_first = used, batch_first
        self.layer = nn.LSTM(FEATURES, HIDDEN, batch_first=batch_first, **options)
        self.head = nn.Linear(HIDDEN * (2 if self.layer.bidirectional else 1), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs, states = self.layer(x if self.batch_first else x.transpose(0, 1))
        if self.used == "states":
            return self.head(sum(s.transpose(0, 1).flatten(1)[:, -self.head.in_features :] for s in states))
        outputs = outputs if self.batch_first else outputs.transpose(0, 1)
        return self.head(outputs[:, -1] if self.used == "last output" else outputs.square().mean(1))


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


@pytest.mark.parametrize(("batch", "time"), [(5, 7), (4, 4), (1, 3), (3, 1), (2, 8)])
@pytest.mark.parametrize(("used", "name"), list(itertools.product(("outputs", "last output", "states"), LAYERS)))
def test_equals_the_one_example_loop(used: str, name: str, batch: int, time: int) -> None:
    model = Recurrent(used, **LAYERS[name])
    x, y = torch.randn(batch, time, FEATURES), torch.arange(batch) % CLASSES
    double = Recurrent(used, **LAYERS[name]).double()
    double.load_state_dict(model.state_dict())
    expected, norms = one_example_loop(double, losses_of, x.double(), y, 0.3)
    with GhostClipper(model, 0.3) as clipper:
        result = clipper.backward(losses_of(model, x, y))
        (plan,) = clipper._plans.values()
    assert all(use.rule is not None for use in plan.uses)
    assert deviation(result.grads, expected) < 1e-5
    assert torch.allclose(result.norms, norms, rtol=1e-5)


def test_some_of_the_parameters() -> None:
    for chosen in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        model = Recurrent("outputs")
        for name, p in model.named_parameters():
            p.requires_grad_(chosen in name)
        x, y = torch.randn(3, 5, FEATURES), torch.arange(3)
        expected, _ = one_example_loop(model, losses_of, x, y, 0.01)
        with GhostClipper(model, 0.01) as clipper:
            assert deviation(clipper.backward(losses_of(model, x, y)).grads, expected) < 1e-5


def test_a_layer_that_is_used_twice() -> None:
    class Twice(Recurrent):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + super().forward(x.flip(1))

    model = Twice("outputs")
    x, y = torch.randn(4, 5, FEATURES), torch.arange(4) % CLASSES
    expected, _ = one_example_loop(model, losses_of, x, y, 0.3)
    with GhostClipper(model, 0.3) as clipper:
        assert deviation(clipper.backward(losses_of(model, x, y)).grads, expected) < 1e-5
