"""Modules with parameters of their own: what else a forward takes and gives back, whatever it is called or its size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkernels.clipping import GhostClipper, UnsupportedModelError
from tests.clipping.oracle import cross_entropy, deviation, one_example_loop

ROWS, TIME, FEATURES, CLASSES = 6, 5, 4, 3


class Pooling(nn.Module):
    """Attention pooling by a query of its own; the argument is every example's own, whatever its name says."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(FEATURES))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = (x @ self.query).masked_fill(~mask, -1e9).softmax(1)
        return (weights.unsqueeze(-1) * x).sum(1)


class Pooled(nn.Module):
    """Takes [batch, time, features + 1], of which the last column is the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.head = Pooling(), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(x[..., :-1], mask=x[..., -1] > 0))


class Rotated(nn.Module):
    """A table without batch is an argument of a module with parameters of its own."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(FEATURES))

        def forward(self, x: Tensor, angles: Tensor, power: Tensor) -> Tensor:
            return x * self.scale * angles.cos() ** power

    def __init__(self, length: int) -> None:
        super().__init__()
        self.inner, self.head = self.Scale(), nn.Linear(FEATURES, CLASSES)
        self.register_buffer("angles", torch.randn(length, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x, self.angles, torch.tensor(2.0)).tanh().mean(1))


@dataclass
class Output:
    logits: Tensor


class Structured(nn.Module):
    """Parameters in a list, and an output that is a dataclass."""

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([torch.randn(FEATURES, CLASSES), torch.randn(CLASSES)])

        def forward(self, x: Tensor) -> Output:
            return Output((x @ self.weights[0] + self.weights[1]).tanh().mean(1))

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Listed()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).logits


def masked() -> Tensor:
    x = torch.randn(ROWS, TIME, FEATURES + 1)
    x[:, 0, -1] = 1  # every example has a token
    return x


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "a mask of every example's own": (Pooled, masked),
    "a table as long as the batch": (lambda: Rotated(ROWS), lambda: torch.randn(ROWS, ROWS, FEATURES)),
    "a table of another length": (lambda: Rotated(TIME), lambda: torch.randn(ROWS, TIME, FEATURES)),
    "a list of parameters and a dataclass": (Structured, lambda: torch.randn(ROWS, TIME, FEATURES)),
}


@pytest.mark.parametrize("way", ["losses", "mean"])
@pytest.mark.parametrize("name", MODELS)
def test_the_forward_and_the_clipped_sum_are_those_of_single_examples(name: str, way: str) -> None:
    make, draw = MODELS[name]
    model, x, y = make().double(), draw().double(), torch.randint(0, CLASSES, (ROWS,))
    plain = model(x).detach()
    expected, norms = one_example_loop(model, cross_entropy, x, y, 0.3)
    with GhostClipper(model, 0.3) as clipper:
        assert torch.equal(model(x), plain)
        for rows in (ROWS, ROWS, ROWS - 1):
            if rows < ROWS:
                expected, norms = one_example_loop(model, cross_entropy, x[:rows], y[:rows], 0.3)
            if way == "losses":
                result = clipper.backward(cross_entropy(model, x[:rows], y[:rows]))
            else:
                F.cross_entropy(model(x[:rows]), y[:rows]).backward()
                result = clipper.take()
            assert deviation(result.grads, expected) < 1e-9
            torch.testing.assert_close(result.norms, norms, rtol=1e-9, atol=0)


def test_one_examples_mask_changes_no_other_norm() -> None:
    model, x, y = Pooled(), masked(), torch.randint(0, CLASSES, (ROWS,))
    with GhostClipper(model, 0.3) as clipper:
        before = clipper.backward(cross_entropy(model, x, y)).norms
        x[-1, 1:, -1] *= -1
        after = clipper.backward(cross_entropy(model, x, y)).norms
    assert torch.equal(before[:-1], after[:-1])
    assert before[-1] != after[-1]


def test_complex_parameters_are_refused_with_the_way_to_hold_them() -> None:
    model = nn.ModuleDict({"inner": nn.ParameterDict({"filter": torch.randn(3, dtype=torch.complex64)})})
    with pytest.raises(UnsupportedModelError, match=r"inner.*'filter' is complex.*torch\.view_as_real"):
        GhostClipper(model, 1.0)
