"""The tagged backward: rows of captured gradients are their examples', or the model is refused, by both doors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dpkernels.clipping import GhostClipper, fingerprint
from tests.clipping.oracle import cross_entropy, deviation, one_example_loop

ROWS, FEATURES, CLASSES = 8, 6, 3
WORDS = "no sums over"


class Layers(nn.Module):
    """Two captured layers, and what happens between them and after them."""

    def __init__(self, between: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor] = lambda z: z) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)
        self.between, self.after = between, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.last(self.between(self.first(x).tanh())))


class Positions(nn.Module):
    """A language model that looks positions up without a batch."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, FEATURES), nn.Embedding(length, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tokens(x) + self.places(torch.arange(x.size(1))))).mean(1)


class TimeFirst(nn.Module):
    """[time, batch, features] inside, with as many steps as examples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x.transpose(0, 1)).tanh().mean(0))


def by_length(z: Tensor) -> Tensor:
    """Sorted, as for packing, and left so."""
    return z[z.detach().sum(1).argsort()]


#: Model, and one example's input.
COUPLED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "minus the batch's mean": (lambda: Layers(lambda h: h - h.mean(0)), (FEATURES,)),
    "normalized over the batch": (lambda: Layers(lambda h: F.batch_norm(h, None, None, training=True)), (FEATURES,)),
    "attention over the batch": (lambda: Layers(lambda h: (h @ h.T).softmax(1) @ h), (FEATURES,)),
    "rolled": (lambda: Layers(lambda h: h.roll(1, 0)), (FEATURES,)),
    "rows by their size": (lambda: Layers(by_length), (FEATURES,)),
    "a weak coupling": (lambda: Layers(lambda h: h + 1e-4 * h.flip(0)), (FEATURES,)),
}


def batch(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, *shape), torch.randint(0, CLASSES, (ROWS,))


def attempt(clipper: GhostClipper, model: nn.Module, x: Tensor, y: Tensor, way: str) -> None:
    if way == "losses":
        clipper.backward(cross_entropy(model, x, y))
    else:
        F.cross_entropy(model(x), y).backward()
        clipper.take()


@pytest.mark.parametrize("way", ["losses", "mean"])
@pytest.mark.parametrize("name", COUPLED)
def test_coupled_examples_are_refused_and_nothing_is_left(name: str, way: str) -> None:
    make, shape = COUPLED[name]
    model, (x, y) = make(), batch(*shape)
    with GhostClipper(model, 0.3) as clipper:
        for _ in range(2):  # a refused sequence stays refused
            with pytest.raises(RuntimeError, match=WORDS):
                attempt(clipper, model, x, y, way)
            assert not clipper.has_result
            assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("make", [lambda: Positions(ROWS), TimeFirst])
def test_as_many_positions_as_examples_are_told_apart(make: Callable[[], nn.Module]) -> None:
    model = make()
    x = torch.randn(ROWS, ROWS, FEATURES) if isinstance(model, TimeFirst) else torch.randint(0, 20, (ROWS, ROWS))
    y = torch.randint(0, CLASSES, (ROWS,))
    expected, _ = one_example_loop(model, cross_entropy, x, y, 0.3)
    with GhostClipper(model, 0.3) as clipper:
        assert deviation(clipper.backward(cross_entropy(model, x, y)).grads, expected) < 1e-5


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "minus the mean loss": lambda z: z.square().sum(1) - z.square().sum(1).mean(),
    "contrastive": lambda z: F.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="none"),
    "in another order": lambda z: z.square().sum(1).flip(0),
    "normalized": lambda z: z.square().sum(1) / z.norm(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_couple_examples(name: str) -> None:
    model, (x, _) = nn.Linear(FEATURES, CLASSES), batch(FEATURES)
    with GhostClipper(model, 0.3) as clipper, pytest.raises(RuntimeError, match=WORDS):
        clipper.backward(LOSSES[name](model(x)))


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(2, 64), seed=st.integers(0, 10**6), share=st.floats(1e-3, 1))
def test_any_permutation_is_found(rows: int, seed: int, share: float) -> None:
    """Up to 64 examples have all different tags, so that not even two in each other's place pass."""
    torch.manual_seed(seed)
    order = torch.randperm(rows)
    x, y = torch.randn(rows, FEATURES), torch.randint(0, CLASSES, (rows,))

    def refused(between: Callable[[Tensor], Tensor]) -> bool:
        model = Layers(between)
        with GhostClipper(model, 0.3) as clipper:
            try:
                clipper.backward(cross_entropy(model, x, y))
            except RuntimeError as error:
                return WORDS in str(error)
        return False

    assert refused(lambda h: h[order]) == (not torch.equal(order, torch.arange(rows)))
    assert refused(lambda h: h + share * h.mean(0))


# ---- what must pass --------------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.inner(x), 0.5, self.training))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, CLASSES))


@pytest.mark.parametrize("way", ["losses", "mean"])
@pytest.mark.parametrize("make", [mlp, Dropping])
def test_examples_apart_pass_at_every_step(make: Callable[[], nn.Module], way: str) -> None:
    model = make()
    with GhostClipper(model, 0.3) as clipper:
        for rows in (8, 1, 5, 0, 7, 8, 2, 3):
            attempt(clipper, model, torch.randn(rows, FEATURES), torch.randint(0, CLASSES, (rows,)), way)


@pytest.mark.parametrize("coupled", [False, True])
def test_under_checkpointing(coupled: bool) -> None:
    model = Layers((lambda h: h - h.mean(0)) if coupled else torch.relu)
    x, y = batch(FEATURES)
    x.requires_grad_()
    expected, _ = one_example_loop(model, cross_entropy, x.detach(), y, 0.3)
    with GhostClipper(model, 0.3) as clipper:
        losses = F.cross_entropy(checkpoint(model, x, use_reentrant=False), y, reduction="none")
        if coupled:
            with pytest.raises(RuntimeError, match=WORDS):
                clipper.backward(losses)
        else:
            assert deviation(clipper.backward(losses).grads, expected) < 1e-5
    assert x.grad is None  # no backward of the engine's leaves anything in it


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [-150, -60, -30, -20, -12, -6, 0, 6, 12, 30, 60])
def test_numbers_at_the_edge_of_their_range(dtype: torch.dtype, exponent: int) -> None:
    """Gradients that are subnormal, zero, huge or infinite raise no false alarm."""
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)).to(dtype)
    x, y = torch.randn(ROWS, FEATURES).to(dtype), torch.randint(0, CLASSES, (ROWS,))
    with GhostClipper(model, 1e-3) as clipper:
        clipper.backward(cross_entropy(model, x, y) * 2.0**exponent)


def test_confident_examples_raise_no_false_alarm() -> None:
    """Probabilities that vanish: whole rows of subnormal gradients beside ordinary ones."""
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    with torch.no_grad():
        model[2].weight.mul_(300)
    x, y = torch.randn(64, FEATURES), torch.zeros(64, dtype=torch.long)
    with torch.no_grad():
        y[:] = model(x).argmax(1)
    with GhostClipper(model, 1e-3) as clipper:
        result = clipper.backward(cross_entropy(model, x, y))
    assert float(result.norms.min()) < 1e-20


def test_a_layer_without_gradient_is_looked_at_again() -> None:
    """A head that starts at zero passes no gradient on: the coupling before it is seen once it does."""
    model, (x, y) = Layers(lambda h: h - h.mean(0)), batch(FEATURES)
    nn.init.zeros_(model.last.weight)
    with GhostClipper(model, 0.3) as clipper:
        for _ in range(3):  # the third is no step at which a check is due otherwise
            clipper.backward(cross_entropy(model, x, y))
        for _ in range(2):
            clipper.backward(cross_entropy(model, x, y))
        with torch.no_grad():
            model.last.weight.normal_()
        with pytest.raises(RuntimeError, match=WORDS):
            clipper.backward(cross_entropy(model, x, y))


def test_routing_by_data_is_looked_at_at_every_step() -> None:
    """Rows that are in order at the first steps and are not later."""
    model, (x, y) = Layers(by_length), batch(FEATURES)
    with GhostClipper(model, 0.3) as clipper:
        model.between = lambda h: h[torch.zeros(len(h)).argsort(stable=True)]
        for _ in range(6):
            clipper.backward(cross_entropy(model, x, y))
        model.between = by_length
        for _ in range(2):
            with pytest.raises(RuntimeError, match=WORDS):
                clipper.backward(cross_entropy(model, x, y))


class Counted(nn.Module):
    """Counts the backwards that pass it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.inner = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        z = self.inner(x)
        z.register_hook(lambda _: setattr(self, "count", self.count + 1))
        return z


@pytest.mark.parametrize("way", ["losses", "mean"])
def test_checks_cost_one_backward_at_ever_fewer_steps(way: str) -> None:
    model, (x, y) = Counted(), batch(FEATURES)
    extra = []
    with GhostClipper(model, 0.3) as clipper:
        for step in range(1, 33):
            before = model.count
            attempt(clipper, model, x, y, way)
            if model.count - before > 1:
                assert model.count - before == 3
                extra.append(step)
        assert extra == [1, 2, 4, 8, 16, 32]
        before = model.count
        attempt(clipper, model, x.unsqueeze(1).expand(-1, 4, -1).mean(1), y, way)
        assert model.count - before == 1
        longer = x.unsqueeze(1).expand(-1, 4, -1)  # another shape of an example: new to the engine
        clipper.backward(model(longer).square().mean((1, 2)))
        assert model.count - before == 4


def test_the_engine_draws_no_random_numbers_from_torch() -> None:
    model, (x, y) = mlp(), batch(FEATURES)
    with GhostClipper(model, 0.3) as clipper:
        before = torch.get_rng_state()
        clipper.backward(cross_entropy(model, x, y))
        assert torch.equal(torch.get_rng_state(), before)


# ---- fingerprints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool]
)
def test_fingerprints_tell_rows_apart(dtype: torch.dtype) -> None:
    x = (torch.randn(50, 7) * 100).to(dtype) if dtype != torch.bool else torch.randint(2, (50, 7)).bool()
    prints = fingerprint.of_rows(x)
    assert prints.shape == (50,)
    assert torch.equal(fingerprint.of_rows(x[3:9]), prints[3:9])
    assert len(prints.unique()) == len(x.unique(dim=0))
    swapped = x.flip(1)
    assert int((fingerprint.of_rows(swapped) == prints).sum()) == int((swapped == x).all(1).sum())


def test_fingerprints_of_signed_zeros_are_equal_and_one_bit_is_seen() -> None:
    x = torch.tensor([[0.0, 1.0], [-0.0, 1.0]])
    assert len(fingerprint.of_rows(x).unique()) == 1
    whole = torch.randn(2_000_003)
    before = fingerprint.of_whole(whole)
    for i in (0, 1_048_576, 2_000_002):
        other = whole.clone()
        other[i] = torch.nextafter(other[i], torch.tensor(9e9))
        assert not torch.equal(fingerprint.of_whole(other), before)
    assert torch.equal(fingerprint.of_whole(whole.clone()), before)
