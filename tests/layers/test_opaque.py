"""Modules outside the registry: which arguments are the examples' is proven, and what cannot be told is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from dpkernels.clipping import GhostClipper, UnsupportedModelError
from tests.clipping.oracle import cross_entropy, deviation, one_example_loop

ROWS, TIME, FEATURES, CLASSES = 6, 6, 5, 3  # as many time steps as examples: sizes tell nothing


class Head(nn.Module):
    """A module of its own parameter, called with a second argument, between linear layers."""

    def __init__(self, inner: nn.Module, call: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.inner, self.head = nn.Linear(FEATURES, FEATURES), inner, nn.Linear(FEATURES, CLASSES)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T, F]; its first feature makes a mask."""
        z = self.call(self.inner, torch.tanh(self.before(x)), x)
        return self.head(z.mean(1) if z.dim() == 3 else z)


class Pool(nn.Module):
    """Attention pooling over the positions that a mask leaves, [B, T, F] to [B, F]."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(FEATURES))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = (x @ self.query).masked_fill(~mask, -1e9).softmax(-1)
        return (weights.unsqueeze(-1) * x).sum(-2)


class Rotated(nn.Module):
    """Multiplies with a table of positions [T, F]."""

    def __init__(self, zero: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(FEATURES) if zero else torch.randn(FEATURES))

    def forward(self, x: Tensor, attn_mask: Tensor) -> Tensor:
        return x * (1 + self.scale * attn_mask)


class Times(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(FEATURES))

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        for other in (*rest, *named.values()):
            x = x * (other if isinstance(other, (int, float)) else other.sum() if other.dim() == 0 else 1)
        return x * self.scale


TABLE = torch.randn(TIME, FEATURES).double()
ARGUMENTS: dict[str, Callable[[], Head]] = {
    "a mask of each example": lambda: Head(Pool(), lambda m, z, x: m(z, mask=x[:, :, 0] > -0.7)),
    "a mask that leaves everything at first": lambda: Head(Pool(), lambda m, z, x: m(z, x[:, :, 0] > -99)),
    "one mask for all examples": lambda: Head(Pool(), lambda m, z, x: m(z, torch.arange(z.size(1)) > 1)),
    "a table of positions": lambda: Head(Rotated(), lambda m, z, x: m(z, TABLE[: z.size(1)])),
    "a table of zeros": lambda: Head(Rotated(), lambda m, z, x: m(z, torch.zeros(TIME, FEATURES))),
    "a table behind a gate that is closed": lambda: Head(Rotated(zero=True), lambda m, z, x: m(z, TABLE)),
    "a scale of each example": lambda: Head(Rotated(), lambda m, z, x: m(z, x[:, :1])),
    "a tensor without dimensions": lambda: Head(Times(), lambda m, z, x: m(z, torch.tensor(2.0, dtype=z.dtype))),
    "numbers and nothing": lambda: Head(Times(), lambda m, z, x: m(z, 2.0, by=3)),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_split_as_the_forward_uses_them(name: str) -> None:
    torch.manual_seed(0)
    model = ARGUMENTS[name]().double()
    x, y = torch.randn(ROWS, TIME, FEATURES).double(), torch.randint(0, CLASSES, (ROWS,))
    plain = model(x)
    expected, norms = one_example_loop(model, cross_entropy, x, y, 0.3)
    with GhostClipper(model, 0.3) as clipper:
        for rows in (ROWS, 4, ROWS, 1, 0):
            torch.testing.assert_close(model(x[:rows]), plain[:rows])
            result = clipper.backward(cross_entropy(model, x[:rows], y[:rows]))
            if rows == ROWS:
                assert deviation(result.grads, expected) < 1e-9
                torch.testing.assert_close(result.norms, norms)


@pytest.mark.parametrize("length", [4, 8])
def test_attention_masks_as_long_as_the_batch(length: int) -> None:
    """Both of torch's masks at once: [T, T] for all examples, [B, T] for each."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.head = nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            causal = torch.triu(torch.ones(x.size(1), x.size(1), dtype=torch.bool), 1)
            padding = (x[:, :, 0] < -0.5) & (torch.arange(x.size(1)) > 0)
            h = self.attention(x, x, x, attn_mask=causal, key_padding_mask=padding, need_weights=False)[0]
            return self.head(h.mean(1))

    model = Attending().double()
    x, y = torch.randn(length, length, 8).double(), torch.randint(0, CLASSES, (length,))
    expected, _ = one_example_loop(model, cross_entropy, x, y, 0.3)
    with GhostClipper(model, 0.3) as clipper:
        assert deviation(clipper.backward(cross_entropy(model, x, y)).grads, expected) < 1e-9


class Crossing(nn.Module):
    """Depends on the batch in a way that running examples one by one would hide."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.scale, self.how = nn.Parameter(torch.randn(FEATURES)), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "mean":
            return x * self.scale - x.mean(0)
        if self.how == "flow":
            return x * self.scale if x.sum() > 0 else x - self.scale
        if self.how == "order":
            return x.flip(0) * self.scale
        return (x * self.scale).sum(0)


@pytest.mark.parametrize("how", ["mean", "flow", "order", "sum"])
def test_a_module_that_computes_across_examples_is_refused(how: str) -> None:
    model = nn.Sequential(Crossing(how), nn.Linear(FEATURES, CLASSES))
    x = torch.randn(ROWS, FEATURES)
    x[0] -= 2 * x.sum() / FEATURES  # half of the examples alone go another way than the batch
    with GhostClipper(model, 0.3), pytest.raises(ValueError, match="module '0' has parameters of its own and must"):
        model(x)


def test_a_trial_leaves_nothing_behind() -> None:
    model = Head(Pool(), lambda m, z, x: m(z, x[:, :, 0] > 0)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    with GhostClipper(model, 0.3):
        model(torch.randn(ROWS, TIME, FEATURES, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.inner.training


# ---- what works, and what is refused in words ------------------------------------------------------------------------


class Listed(nn.Module):
    """Weights in a list, a dictionary and a bare container, which have no forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(FEATURES, CLASSES)])
        self.named = nn.ParameterDict({"bias": nn.Parameter(torch.randn(CLASSES))})
        self.bare = nn.Module()
        self.bare.scale = nn.Parameter(torch.ones(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weights[0] + self.named["bias"]) * self.bare.scale


@pytest.mark.parametrize("deep", [False, True])
def test_parameters_in_containers_belong_to_the_module_that_uses_them(deep: bool) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(FEATURES, FEATURES), Listed()) if deep else Listed()
    x, y = torch.randn(ROWS, FEATURES), torch.randint(0, CLASSES, (ROWS,))
    expected, _ = one_example_loop(model, cross_entropy, x, y, 0.3)
    with GhostClipper(model, 0.3) as clipper:
        assert deviation(clipper.backward(cross_entropy(model, x, y)).grads, expected) < 1e-5


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.LSTM(FEATURES, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.arange(len(x)).flip(0) % x.size(1) + 1
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0].sum(1))


class Prompt(nn.Module):
    """Learned vectors for as many examples as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.randn(2, FEATURES))

    def forward(self, count: int) -> Tensor:
        return self.vectors.expand(count, -1, -1)


class Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompt, self.head = Prompt(), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.prompt(len(x)), x], 1)).sum(1)


@dataclass
class Output:
    logits: Tensor


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(FEATURES)), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Output:
        return Output(self.head(x * self.scale))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Packed, "module 'recurrent' got a PackedSequence.*padded"),
        (Prompted, "module 'prompt' .* got no tensor with a batch.*hold the parameter in the module that has one"),
        (Structured, r"module '\(the model\)' .* returns a Output.*return a tensor"),
    ],
)
def test_what_cannot_be_split_is_refused_in_words(make: type[nn.Module], words: str) -> None:
    model = make()
    with GhostClipper(model, 0.3), pytest.raises((TypeError, ValueError), match=words):
        model(torch.randn(ROWS, TIME, FEATURES))


def test_complex_parameters_are_refused_when_the_engine_attaches() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES))
    model.filter = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    with pytest.raises(UnsupportedModelError, match=r"parameter 'filter' is complex .*view_as_real"):
        GhostClipper(model, 0.3)


def test_a_subclass_of_batch_norm_gets_a_fix_that_exists() -> None:
    class Activated(nn.BatchNorm2d):
        pass

    with pytest.raises(UnsupportedModelError, match="Replace this Activated by hand with a group norm"):
        GhostClipper(nn.Sequential(nn.Conv2d(3, 4, 3), Activated(4)), 0.3)
    with pytest.raises(UnsupportedModelError, match=r"dpkernels\.models\.replace_batch_norm"):
        GhostClipper(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), 0.3)
