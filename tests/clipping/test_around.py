"""Around the step: input gradients, in-place operations, parameters and clippers that come and go."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from dpkernels.clipping import GhostClipper, check
from tests.clipping.oracle import cross_entropy, deviation, one_example_loop

BATCH, FEATURES, CLASSES = 6, 5, 3
FLAT, SEQUENCE = (FEATURES,), (4, FEATURES)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.ReLU(inplace=True), nn.Linear(7, CLASSES))


@pytest.mark.parametrize("shape", [FLAT, SEQUENCE, (2, 3, FEATURES)])
@pytest.mark.parametrize("activation", [nn.ReLU(inplace=True), nn.Hardtanh(inplace=True), nn.GELU()])
def test_in_place_operations_on_what_a_layer_puts_out(shape: tuple[int, ...], activation: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 7), activation, nn.Linear(7, CLASSES), nn.Softplus())
    x = torch.randn(BATCH, *shape)

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return m(x).flatten(1).sum(1)

    expected, _ = one_example_loop(model, loss, x, x, 0.5)
    with GhostClipper(model, 0.5) as clipper:
        assert deviation(clipper.backward(loss(model, x, x)).grads, expected) < 1e-6


@pytest.mark.parametrize("way", ["losses", "mean"])
@pytest.mark.parametrize("autocast", [False, True])
def test_input_gradients_on_the_way(way: str, autocast: bool) -> None:
    """An attack on the model before its step: gradients of the input alone, which no parameter hears of."""
    model, x, y = mlp(), torch.randn(BATCH, FEATURES), torch.randint(0, CLASSES, (BATCH,))
    with GhostClipper(model, 0.5) as clipper, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        moved = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(model(moved), y), moved)
        assert gradient.abs().sum() > 0
        attacked = x + 0.1 * gradient.sign()
        if way == "losses":
            result = clipper.backward(cross_entropy(model, attacked, y))
        else:
            nn.functional.cross_entropy(model(attacked), y).backward()
            result = clipper.take()
    expected, _ = one_example_loop(model, cross_entropy, attacked, y, 0.5)
    assert deviation(result.grads, expected) < (0.1 if autocast else 1e-6)
    assert all(p.grad is None for p in model.parameters())


def test_input_gradients_that_also_reach_the_parameters_name_the_way_out() -> None:
    model, x = mlp(), torch.randn(BATCH, FEATURES, requires_grad=True)
    with GhostClipper(model, 0.5) as clipper:
        with pytest.raises(RuntimeError, match=r"input alone, call torch\.autograd\.grad"):
            model(x).sum().backward()
        assert all(p.grad is None for p in model.parameters())
        model(x).sum(1).mean().backward()
        assert clipper.take().batch_size == BATCH


def test_parameters_that_came_after_the_optimizer() -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.low, self.high = base, nn.Linear(FEATURES, 2), nn.Linear(2, 7)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.high(self.low(x))

    for freeze in (True, False):
        model, x, y = mlp(), torch.randn(BATCH, FEATURES), torch.randint(0, CLASSES, (BATCH,))
        with GhostClipper(model, 0.5) as clipper:
            model.requires_grad_(not freeze)
            model[0] = Adapted(model[0])
            with pytest.raises(RuntimeError, match="make the optimizer afterwards"):
                clipper.backward(cross_entropy(model, x, y))


def test_a_clipper_that_is_gone_leaves_its_model() -> None:
    model, x, y = mlp(), torch.randn(BATCH, FEATURES), torch.randint(0, CLASSES, (BATCH,))
    expected, _ = one_example_loop(model, cross_entropy, x, y, 0.5)
    first = GhostClipper(model, 0.5)
    first.backward(cross_entropy(model, x, y))
    with pytest.raises(ValueError, match=r"detach\(\).*or delete it"):
        GhostClipper(model, 0.5)
    del first
    gc.collect()
    assert all("forward" not in vars(module) for module in model.modules())
    with GhostClipper(model, 0.5) as clipper:
        assert deviation(clipper.backward(cross_entropy(model, x, y)).grads, expected) < 1e-6


def test_two_clippers_under_one_loss_are_refused() -> None:
    model, x, y = mlp(), torch.randn(BATCH, FEATURES), torch.randint(0, CLASSES, (BATCH,))
    with GhostClipper(model[0], 0.5), GhostClipper(model[2], 0.5) as upper:
        for backward in (upper.backward, lambda losses: losses.mean().backward()):
            with pytest.raises(RuntimeError, match="private optimizer"):
                backward(cross_entropy(model, x, y))


def test_check_takes_dictionaries() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(FEATURES, CLASSES)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.inner(batch["x"])

    x, y = torch.randn(BATCH, FEATURES), torch.randint(0, CLASSES, (BATCH,))
    assert check(Named(), nn.CrossEntropyLoss(reduction="none"), {"x": x}, y).ok
