"""What a step updates: every trainable parameter of the model, each once, from a noised sum and from nothing else."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import dpkernels as dpk
from dpkernels.optim import DPSGD, DPAdam, DPAdamW, DPOptimizer
from dpkernels.optim.private import PrivateOptimizer

BATCH = 8
QUIET = {"noise_multiplier": 0.0, "batch_size": BATCH, "max_grad_norm": 1e6}


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(BATCH, 5, generator=generator), torch.randint(0, 3, (BATCH,), generator=generator)


def backward(net: Callable[[Tensor], Tensor], optimizer: PrivateOptimizer) -> None:
    x, y = batch()
    optimizer.backward(nn.functional.cross_entropy(net(x), y, reduction="none"))


def planned() -> dpk.accounting.Plan:
    return dpk.plan(dataset_size=100, batch_size=BATCH, steps=5, delta=1e-5, noise_multiplier=1.0)


def make(kind: str, net: nn.Module, **options: object) -> PrivateOptimizer:
    if kind == "wrapped":
        inner = torch.optim.SGD(net.parameters(), 0.5)
        return DPOptimizer(net, inner, **(QUIET | options))  # type: ignore[arg-type]
    kinds = {"sgd": DPSGD, "adam": DPAdam, "adamw": DPAdamW}
    return kinds[kind](net, lr=0.5, **(QUIET | options))  # type: ignore[arg-type, return-value]


KINDS = ["sgd", "adam", "adamw", "wrapped"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_unfrozen_later_is_trained_as_by_torch(kind: str) -> None:
    net, twin = model(), model()
    for m in (net, twin):
        m[0].requires_grad_(False)
    optimizer = make(kind, net)
    ordinary = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "wrapped": torch.optim.SGD,
    }
    reference = ordinary[kind](twin.parameters(), lr=0.5)
    x, y = batch()
    for frozen in (True, False):
        for m in (net, twin):
            m[0].requires_grad_(not frozen)
        backward(net, optimizer)
        assert optimizer.step()
        reference.zero_grad()
        nn.functional.cross_entropy(twin(x), y).backward()
        reference.step()
        for p, q in zip(net.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)


def unchanged(optimizer: PrivateOptimizer, before: dict[str, Tensor]) -> bool:
    after = optimizer.clipper.model.state_dict()
    spent = 0 if optimizer.ledger is None else optimizer.ledger.steps
    return spent == optimizer.steps == 0 and all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("kind", ["sgd", "wrapped"])
def test_what_is_unfrozen_and_in_no_group_is_refused_before_the_step_and_can_be_added(kind: str) -> None:
    net = model()
    net[0].requires_grad_(False)
    if kind == "sgd":
        optimizer: PrivateOptimizer = DPSGD(net, planned(), params=net[2].parameters(), lr=0.5, max_grad_norm=1.0)
    else:
        inner = torch.optim.SGD(net[2].parameters(), 0.5)
        optimizer = DPOptimizer(net, inner, planned(), max_grad_norm=1.0)
    net[0].requires_grad_(True)
    before = copy.deepcopy(net.state_dict())
    backward(net, optimizer)
    with pytest.raises(ValueError, match=r"freeze or add 0\.weight, 0\.bias: .* add_param_group"):
        optimizer.step()
    assert unchanged(optimizer, before)
    optimizer.add_param_group({"params": list(net[0].parameters())})
    assert optimizer.step()
    assert not torch.equal(net[0].weight, before["0.weight"])


def _outside(net: nn.Sequential, optimizer: PrivateOptimizer) -> None:
    optimizer.add_param_group({"params": list(nn.Linear(3, 3).parameters())})


def _inside(net: nn.Sequential, optimizer: PrivateOptimizer) -> None:
    net.append(nn.Linear(3, 3))
    optimizer.add_param_group({"params": list(net[3].parameters())})


def _by_hand(net: nn.Sequential, optimizer: PrivateOptimizer) -> None:
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))


def _by_the_inner(net: nn.Sequential, optimizer: PrivateOptimizer) -> None:
    assert isinstance(optimizer, DPOptimizer)
    optimizer._inner.add_param_group({"params": list(nn.Linear(3, 3).parameters())})


def _twice(net: nn.Sequential, optimizer: PrivateOptimizer) -> None:
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [net[0].weight]})


def _swapped(net: nn.Sequential, optimizer: PrivateOptimizer) -> None:
    net[2] = nn.Linear(6, 3)


def _added(net: nn.Sequential, optimizer: PrivateOptimizer) -> None:
    net[2].extra = nn.Parameter(torch.ones(3))


def _removed(net: nn.Sequential, optimizer: PrivateOptimizer) -> None:
    net[2] = nn.Identity()


def _option(net: nn.Sequential, optimizer: PrivateOptimizer) -> None:
    optimizer.param_groups[0]["noise_multiplier"] = 0.0


def _bound(net: nn.Sequential, optimizer: PrivateOptimizer) -> None:
    optimizer.clipper.max_grad_norm = 1e3


@pytest.mark.parametrize("kind", ["sgd", "wrapped"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_outside, "must be parameters of model, got one of shape .* complete before. Construct the optimizer anew"),
        (_inside, "came into it after the optimizer was made"),
        (_by_hand, "must be parameters of model"),
        (_by_the_inner, "must be parameters of model"),
        (_twice, r"holds 0\.weight twice"),
        (_swapped, r"2\.weight, 2\.bias came into the model after .* ledger=optimizer.ledger"),
        (_added, r"2\.extra came into the model"),
        (_removed, r"2\.weight, 2\.bias left the model"),
        (_option, "noise_multiplier is one for all parameters"),
        (_bound, "max_grad_norm of the clipper was changed"),
    ],
)
def test_what_changes_after_construction_is_refused_before_the_step(kind: str, change: Callable, words: str) -> None:
    if change is _by_the_inner and kind == "sgd":
        pytest.skip("has no inner optimizer")
    net = model()
    optimizer = make(kind, net, plan=planned(), noise_multiplier=None, batch_size=None, max_grad_norm=1.0)
    backward(net, optimizer)
    before = copy.deepcopy(net.state_dict())

    def changed_step() -> None:
        change(net, optimizer)
        optimizer.step()

    with pytest.raises(ValueError, match=words):
        changed_step()
    left = {name: value for name, value in before.items() if name in net.state_dict()}
    if change is not _swapped:
        assert unchanged(optimizer, left)
    assert optimizer.steps == 0
    assert optimizer.epsilon() == 0


def test_a_refused_group_leaves_the_groups_as_they_were() -> None:
    net = model()
    optimizer = DPSGD(net, lr=0.5, **QUIET)
    with pytest.raises(ValueError, match="must be parameters of model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    backward(net, optimizer)
    assert optimizer.step()


OUTSIDE: dict[str, Callable[[nn.Module, nn.Linear, Tensor], Tensor]] = {
    "behind the model": lambda net, head, x: head(net(x)),
    "beside the model": lambda net, head, x: net(x) + head(x[:, :3]),
    "as a scale": lambda net, head, x: net(x) * head.bias,
    "as an offset of nothing": lambda net, head, x: net(x) + 0 * head.bias,
}


@pytest.mark.parametrize("ordinary", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", OUTSIDE)
def test_a_layer_outside_of_the_model_gets_no_gradient(place: str, kind: str, ordinary: bool) -> None:
    """Its own optimizer would apply it raw: the backward raises before any p.grad is there, and no step follows."""
    net, head, (x, y) = model(), nn.Linear(3, 3), batch()
    optimizer = make(kind, net, plan=planned(), noise_multiplier=None, batch_size=None, max_grad_norm=1.0)
    before = copy.deepcopy(net.state_dict())
    losses = nn.functional.cross_entropy(OUTSIDE[place](net, head, x), y, reduction="none")
    words = r"outside of the model that is clipped.*freeze it"
    with pytest.raises(RuntimeError, match=rf"{words}|backward\(losses\)" if ordinary else words):
        losses.mean().backward() if ordinary else optimizer.backward(losses)
    assert all(p.grad is None for m in (net, head) for p in m.parameters())
    with pytest.raises(RuntimeError, match="needs a backward"):
        optimizer.step()
    assert unchanged(optimizer, before)
    head.requires_grad_(False)  # as the message says
    optimizer.backward(nn.functional.cross_entropy(OUTSIDE[place](net, head, x), y, reduction="none"))
    assert optimizer.step()


@pytest.mark.parametrize("kind", ["sgd", "adam", "wrapped"])
def test_a_parameter_is_listed_once(kind: str) -> None:
    """Its sum would be released twice, with independent noise, and the mean of both has less."""
    net = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    net["b"].weight = net["a"].weight  # tied
    listed = [net["a"].weight, net["b"].weight]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own
        inner = torch.optim.SGD(listed, 0.1)
        with pytest.raises(ValueError, match=r"holds a\.weight twice"):
            DPOptimizer(net, inner, **QUIET) if kind == "wrapped" else make(kind, net, params=listed)
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        make("sgd", net, params=[{"params": listed[:1]}, {"params": listed[1:]}])
    DPSGD(net, lr=0.1, **QUIET)  # the failures left the model as it was


def test_a_frozen_parameters_gradient_from_elsewhere_updates_nothing() -> None:
    net = model()
    optimizer = DPOptimizer(net, torch.optim.SGD(net.parameters(), 0.5), **QUIET)
    net[0].requires_grad_(False)
    net[0].weight.grad = torch.ones_like(net[0].weight)
    before = net[0].weight.clone()
    backward(net, optimizer)
    optimizer.step()
    assert torch.equal(net[0].weight, before)


def test_gradients_of_an_ordinary_backward_before_are_dropped() -> None:
    net = model()
    x, y = batch()
    nn.functional.cross_entropy(net(x), y).backward()
    DPSGD(net, lr=0.5, **QUIET)
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize(
    ("name", "value"),
    [("noise_multiplier", 0), ("max_grad_norm", 9.0), ("batch_size", 1), ("plan", None), ("ledger", None), ("seed", 1)],
)
def test_what_the_guarantee_rests_on_cannot_be_set(name: str, value: object) -> None:
    optimizer = DPSGD(model(), planned(), lr=0.5, max_grad_norm=1.0)
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm, optimizer.batch_size) == (1.0, 1.0, BATCH)
    with pytest.raises(AttributeError, match=f"{name} is fixed when the optimizer is made, because .* optimizer anew"):
        setattr(optimizer, name, value)


@pytest.mark.parametrize("name", ["max_grad_norm", "noise_multiplier", "batch_size", "delta", "sampling_rate"])
def test_groups_have_no_privacy_of_their_own(name: str) -> None:
    net = model()
    with pytest.raises(ValueError, match=f"{name} is one for all parameters"):
        DPSGD(net, params=[{"params": net.parameters(), name: 1.0}], lr=0.1, **QUIET)
    optimizer = DPSGD(net, params=[{"params": net.parameters(), "note": 1}], lr=0.1, **QUIET)
    assert optimizer.param_groups[0]["note"] == 1


@pytest.mark.parametrize(
    ("sigma", "bound"), [(1e9, 1.0), (1e300, 1.0), (1.0, 1e-320), (1.0, 1e80)], ids=["wide", "infinite", "tiny", "huge"]
)
def test_noise_that_cannot_be_drawn_is_refused_at_construction(sigma: float, bound: float) -> None:
    net = nn.Linear(400, 400)
    with pytest.raises(ValueError, match=r"no noise can be drawn for noise_multiplier|max_grad_norm must"):
        DPSGD(net, noise_multiplier=sigma, batch_size=4, max_grad_norm=bound, lr=0.1)
    DPSGD(net, noise_multiplier=1.0, batch_size=4, max_grad_norm=1.0, lr=0.1)


def test_more_values_than_a_stream_has_are_refused_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpkernels.ops.noise.STREAM_LENGTH", 10)
    with pytest.raises(ValueError, match=r"no noise can be drawn for .* and 57 parameters"):
        DPSGD(model(), noise_multiplier=1.0, batch_size=4, max_grad_norm=1.0, lr=0.1)


def test_a_parameter_that_no_kernel_updates_is_refused_before_the_step() -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.phase = nn.Linear(5, 3), nn.Parameter(torch.ones(3, dtype=torch.cfloat))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.phase.abs()

    with pytest.raises(ValueError, match="complex"):
        DPSGD(Spectral(), lr=0.1, **QUIET)


def test_no_step_has_less_noise_than_the_sensitivity_at_the_largest_bound() -> None:
    """The largest and the smallest noise that are accepted are drawn as they should be."""
    for sigma, bound in ((1e5, 1e10), (1e-3, 1e-10)):
        net = nn.Linear(200, 200, bias=False, dtype=torch.float64)
        nn.init.zeros_(net.weight)
        optimizer = DPSGD(net, noise_multiplier=sigma, batch_size=1, max_grad_norm=bound, lr=1.0)
        optimizer.begin_physical_batch(0, True)
        optimizer.step()
        assert float(net.weight.detach().std()) == pytest.approx(sigma * bound, rel=4 / math.sqrt(2 * 40_000))
