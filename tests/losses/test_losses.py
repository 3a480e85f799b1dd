"""The losses against the paper's formulas, and through the engine against a loop over single examples."""

from __future__ import annotations

import copy
import gc
import io
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import dpkernels as dpk
from dpkernels.clipping import check
from dpkernels.losses import (
    LosingLess,
    focal,
    huber,
    recorded_outputs,
    sum_absolute_error,
    sum_squared_error,
    weighted_layers,
)
from dpkernels.models import mnist_cnn
from tests.clipping.oracle import deviation, one_example_loop

BATCH, CLASSES = 5, 4


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


def labels(batch: int = BATCH) -> Tensor:
    return torch.randint(0, CLASSES, (batch,))


# ---- single terms ---------------------------------------------------------------------------------------------------


def test_terms_are_the_papers_formulas() -> None:
    h, y = 3 * torch.randn(BATCH, CLASSES, dtype=torch.float64), labels()
    beta, gamma = 0.7, 2.5
    for i in range(BATCH):
        sse = sae = hub = 0.0
        p = [math.exp(float(v)) for v in h[i]]
        for d in range(CLASSES):
            r = float(h[i, d]) - (1.0 if d == y[i] else 0.0)
            sse, sae = sse + 0.5 * r * r, sae + abs(r)
            hub += 0.5 * r * r / beta if abs(r) < beta else abs(r) - 0.5 * beta
        p_t = p[int(y[i])] / sum(p)
        assert float(sum_squared_error(h, y)[i]) == pytest.approx(sse, rel=1e-12)
        assert float(sum_absolute_error(h, y)[i]) == pytest.approx(sae, rel=1e-12)
        assert float(huber(h, y, beta)[i]) == pytest.approx(hub, rel=1e-12)
        assert float(focal(h, y, gamma)[i]) == pytest.approx(-((1 - p_t) ** gamma) * math.log(p_t), rel=1e-12)
    torch.testing.assert_close(focal(h, y, 0), F.cross_entropy(h, y, reduction="none"))


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_focal_loss_keeps_its_gradient_where_the_label_is_certain(gamma: float) -> None:
    h = torch.tensor([[60.0, 0.0, 0.0], [-60.0, 0.0, 0.0]], requires_grad=True)
    losses = focal(h, torch.tensor([0, 0]), gamma)
    assert 0 <= losses[0].item() < 1e-12
    assert losses[1].item() == pytest.approx(60 + math.log(2), rel=1e-6)
    (gradient,) = torch.autograd.grad(losses.sum(), h)
    assert gradient.isfinite().all()


def test_half_precision_is_widened() -> None:
    h, y = torch.full((2, CLASSES), 300.0, dtype=torch.float16), labels(2)
    assert sum_squared_error(h, y).dtype == torch.float32
    assert sum_squared_error(h, y).isfinite().all()


# ---- the whole loss -------------------------------------------------------------------------------------------------


class Functional(nn.Module):
    """Activations that are no modules, a normalization in between, a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.deep = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4 * 36, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.conv(x)))
        return self.head((h + F.relu(self.deep(h))).flatten(1))


class Reused(nn.Module):
    """One layer applied twice: both outputs are penalized."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x[:, 0]))
        return self.head(torch.tanh(self.layer(h)).flatten(1))


class OwnForward(nn.Linear):
    """No rule of the engine knows what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.mean(-1, keepdim=True)


def sequence(first: Callable[[int, int], nn.Module]) -> nn.Module:
    return nn.Sequential(first(6, 5), nn.Tanh(), nn.Flatten(), nn.Linear(30, 7), nn.ReLU(), nn.Linear(7, CLASSES))


def in_place() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 7), nn.ReLU(inplace=True), nn.Linear(7, CLASSES))


def frozen_first() -> nn.Module:
    model = sequence(nn.Linear)
    model[0].requires_grad_(False)
    return model


def tied() -> nn.Module:
    first, second = nn.Linear(36, 36), nn.Linear(36, 36, bias=False)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), second, nn.Tanh(), nn.Linear(36, CLASSES))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "positions": lambda: sequence(nn.Linear),
    "functional": Functional,
    "in place": in_place,
    "reused": Reused,
    "tied": tied,
    "frozen": frozen_first,
    "own forward": lambda: sequence(OwnForward),
    "weight_norm": lambda: sequence(lambda i, o: parametrizations.weight_norm(nn.Linear(i, o))),
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES)),  # nothing to penalize but the logits
}


def losing_less(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return LosingLess(model, threshold_epoch=1, beta=0.05, gamma=2)(x, y, epoch=1)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", MODELS)
def test_clipped_gradients_equal_the_one_example_loop(name: str) -> None:
    model = MODELS[name]().double()
    x, y = torch.randn(BATCH, 1, 6, 6, dtype=torch.float64), labels()
    x = x if name in ("functional", "in place", "tied", "linear") else x[:, 0]
    _, norms = one_example_loop(model, losing_less, x, y, 1.0)
    bound = float(norms.median())
    expected, norms = one_example_loop(model, losing_less, x, y, bound)
    with dpk.GhostClipper(model, bound) as clipper:
        whole = clipper.backward(losing_less(model, x, y))
        parts = [clipper.backward(losing_less(model, x[i : i + 2], y[i : i + 2])).grads for i in range(0, BATCH, 2)]
    assert deviation(whole.grads, expected) < 1e-9
    torch.testing.assert_close(whole.norms, norms, rtol=1e-6, atol=0)  # norms are rounded up
    assert deviation({key: sum(part[key] for part in parts) for key in expected}, expected) < 1e-9


def test_the_mnist_network_in_float64_and_its_ordinary_loop() -> None:
    model = mnist_cnn(CLASSES).double()
    x, y = torch.rand(BATCH, 1, 28, 28, dtype=torch.float64), labels()
    expected, _ = one_example_loop(model, losing_less, x, y, 0.5)
    with dpk.GhostClipper(model, 0.5) as clipper:
        losing_less(model, x, y).mean().backward()
        assert deviation(clipper.take().grads, expected) < 1e-9
    assert check(model, sum_squared_error, x, y).ok


def test_the_formula_of_the_whole() -> None:
    model = sequence(nn.Linear).double()
    x, y = torch.randn(BATCH, 6, 6, dtype=torch.float64), labels()
    h1 = model[0](x)
    h2 = model[3](h1.tanh().flatten(1))
    h3 = model[5](h2.relu())
    for epoch in (0, 3, 8):
        alpha = 1 / (1 + math.exp(3 - epoch))
        penalty = h1.square().sum((1, 2)) / 30 + h2.square().sum(1) / 7
        wanted = alpha * focal(h3, y, 5) + (1 - alpha) * sum_squared_error(h3, y) + (1 - alpha) / 11 * penalty
        torch.testing.assert_close(LosingLess(model, 3, 11, 5)(x, y, epoch), wanted, rtol=1e-12, atol=0)
    chosen = LosingLess(model, 3, 11, 5, layers=["3", "5"])(x, y, epoch=3)
    penalty = h2.square().mean(1) + h3.square().mean(1)
    torch.testing.assert_close(chosen, 0.5 * (focal(h3, y, 5) + sum_squared_error(h3, y) + penalty / 11))


def test_the_ablations_parts() -> None:
    model, x, y = sequence(nn.Linear), torch.randn(BATCH, 6, 6), labels()
    h = model(x)
    ce = F.cross_entropy(h, y, reduction="none")
    without = LosingLess(model, 0, math.inf, 0)
    torch.testing.assert_close(without(x, y, epoch=0), 0.5 * (ce + sum_squared_error(h, y)))
    torch.testing.assert_close(without(x, y, epoch=900), ce)
    torch.testing.assert_close(LosingLess(model, 900, math.inf, 0)(x, y, 0), sum_squared_error(h, y))


def test_the_penalty_on_weights_is_a_weight_decay() -> None:
    model = sequence(nn.Linear)
    criterion = LosingLess(model, 2, 11, 5, penalty="weights")
    penalty = sum(p.square().mean() for p in model.parameters() if p.dim() > 1) * (1 - criterion.alpha(1)) / 11
    model.zero_grad()
    penalty.backward()
    decays = criterion.weight_decays(1)
    assert set(decays) == {"0.weight", "3.weight", "5.weight"}
    for name, p in model.named_parameters():
        if name in decays:
            torch.testing.assert_close(decays[name] * p.detach(), p.grad)
    x, y = torch.randn(BATCH, 6, 6), labels()
    torch.testing.assert_close(criterion(x, y, 1), LosingLess(model, 2, math.inf, 5)(x, y, 1))
    with pytest.raises(ValueError, match="penalty must be 'weights'"):
        LosingLess(model, 2, 11, 5).weight_decays(1)


def test_in_a_training_loop() -> None:
    """Epochs come from the loader, whatever the physical batches, and an empty batch is no trouble."""
    data = (torch.rand(40, 1, 28, 28), labels(40))
    model = mnist_cnn(CLASSES)
    plan = dpk.plan(dataset_size=40, batch_size=4, epochs=3, delta=1e-3, noise_multiplier=4.0)
    optimizer = dpk.DPSGD(model, plan, lr=0.1, max_grad_norm=0.1, seed=1)
    loader = dpk.PoissonLoader(data, plan, optimizer=optimizer, physical_batch_size=3)
    criterion = LosingLess(model, threshold_epoch=1, beta=1, gamma=5)
    epochs = []
    for x, y in loader:
        epochs.append(loader.epoch)
        optimizer.backward(criterion(x, y, epoch=loader.epoch))
        optimizer.step()
        optimizer.zero_grad()
    assert sorted(set(epochs)) == [0, 1, 2]
    assert epochs == sorted(epochs)
    empty = criterion(torch.empty(0, 1, 28, 28), torch.empty(0, dtype=torch.int64), epoch=0)
    assert empty.shape == (0,)


def test_checkpointing() -> None:
    model, x, y = sequence(nn.Linear).double(), torch.randn(BATCH, 6, 6).double(), labels()
    expected, _ = one_example_loop(model, losing_less, x, y, 0.5)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False)

    outer = Checkpointed()
    with dpk.GhostClipper(outer, 0.5) as clipper:
        got = clipper.backward(losing_less(outer, x, y)).grads
    assert deviation({name.removeprefix("body."): g for name, g in got.items()}, expected) < 1e-6


def test_nothing_is_left_in_the_model_and_no_graph_is_held() -> None:
    model, x, y = sequence(nn.Linear), torch.randn(BATCH, 6, 6), labels()
    state = {path: {k: v for k, v in vars(m).items() if k != "training"} for path, m in model.named_modules()}
    before = {path: {k: repr(v) for k, v in values.items()} for path, values in state.items()}
    criterion = LosingLess(model, 0, 1, 5)
    with dpk.GhostClipper(model, 0.5) as clipper:
        losses = criterion(x, y, epoch=0)
        node = weakref.ref(losses)
        file = io.BytesIO()
        torch.save(model, file)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in other.modules())
        clipper.backward(losses)
        del losses
        gc.collect()
        assert node() is None
    after = {path: {k: repr(v) for k, v in vars(m).items() if k != "training"} for path, m in model.named_modules()}
    assert after == before
    with pytest.raises(RuntimeError):  # the shapes do not fit: hooks go all the same
        criterion(torch.randn(BATCH, 6, 5), y, epoch=0)
    assert not any(m._forward_hooks for m in model.modules())


# ---- what must raise ------------------------------------------------------------------------------------------------


class Token(nn.Module):
    """Parameters of its own above a layer: the engine takes it as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.scale)


class OverwritingFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.layer(x), inplace=True))


def test_layers_are_whole_modules() -> None:
    assert list(weighted_layers(nn.Sequential(Token(), nn.Linear(4, 4)))) == ["1"]
    twice = nn.Linear(4, 4)
    assert list(weighted_layers(nn.Sequential(twice, nn.Tanh(), twice))) == ["0"]
    with pytest.raises(ValueError, match="layers must not lie within a module with parameters of its own, got 'head'"):
        LosingLess(Token(), 0, 1, 5, layers=["head"])
    with pytest.raises(ValueError, match="must have a linear or convolutional layer to penalize"):
        LosingLess(Token(), 0, 1, 5)
    LosingLess(Token(), 0, math.inf, 5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"threshold_epoch": math.nan}, "threshold_epoch must be a finite number, got nan"),
        ({"beta": 0.0}, "beta must be a number > 0, got 0.0"),
        ({"gamma": -1.0}, "gamma must be a finite number >= 0, got -1.0"),
        ({"penalty": "norms"}, "penalty must be 'pre-activations' or 'weights', got 'norms'"),
        ({"layers": ["nowhere"]}, "layers must be names of modules of model, got 'nowhere'"),
    ],
)
def test_arguments(arguments: dict[str, Any], words: str) -> None:
    values = {"threshold_epoch": 0, "beta": 1, "gamma": 5} | arguments
    with pytest.raises(ValueError, match=words):
        LosingLess(sequence(nn.Linear), **values)


def test_shapes() -> None:
    with pytest.raises(ValueError, match=r"logits must be \[batch, classes\] and labels int64 \[batch\], got \(2, 3\)"):
        sum_squared_error(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(ValueError, match="beta must be a finite number > 0"):
        huber(torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), 0.0)
    with pytest.raises(TypeError, match="gamma must be a finite number >= 0, got str"):
        focal(torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), "5")
    merged = nn.Sequential(nn.Flatten(0, 1), nn.Linear(6, 3), nn.Unflatten(0, (2, 6)), nn.Flatten(), nn.Linear(18, 4))
    with pytest.raises(ValueError, match=r"layer '1' must give \[2, ...\], examples first, got \(12, 3\)"):
        losing_less(merged, torch.randn(2, 6, 6), labels(2))
    with pytest.raises(RuntimeError, match="output of layer 'layer' was overwritten"):
        losing_less(OverwritingFunction(), torch.randn(2, 6), labels(2))
    lstm = nn.LSTM(2, 2)
    with (
        recorded_outputs(lstm, {"lstm": lstm}),
        pytest.raises(TypeError, match="'lstm' must return a tensor, got tuple"),
    ):
        lstm(torch.randn(1, 1, 2))
