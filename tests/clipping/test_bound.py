"""No example contributes more than the bound, whatever it is: the privacy law, in floating point."""

from __future__ import annotations

import collections
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkernels.clipping import GhostClipper
from dpkernels.clipping import engine as clipping_engine
from dpkernels.clipping.passes import Pass
from tests.audit.variants import VARIANTS, Fault
from tests.clipping.law import MODELS, Case, Outcome, verify

FEW, MANY = 5, 130  # cases of each model, MODELS x MANY in all: more than 10,000
pytestmark = pytest.mark.filterwarnings(
    "ignore:There is a performance drop", "ignore:Using padding='same'", "ignore:Mismatch dtype"
)


def verified(name: str, cases: range) -> list[Outcome]:
    found = []
    for seed in cases:
        case = Case.draw(name, seed)
        try:
            found.append(verify(case))
        except AssertionError as error:
            raise AssertionError(f"{error.args[0] if error.args else error}: {case}") from None
    return [outcome for outcome in found if outcome is not None]


@pytest.mark.parametrize("name", MODELS)
def test_no_example_contributes_more_than_the_bound(name: str) -> None:
    assert verified(name, range(FEW))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_no_example_contributes_more_than_the_bound_in_many_cases(name: str) -> None:
    outcomes = verified(name, range(FEW, FEW + MANY))
    # Cases where nothing could go wrong are the fewer. Recurrent layers multiply all examples of a time step by their
    # weights at once, and torch rounds such products otherwise in another batch.
    assert sum(o.contribution > 0 for o in outcomes) > 0.4 * MANY
    assert sum(o.alike == 1 for o in outcomes) > (0.35 if "LSTM" in name or "GRU" in name else 0.6) * MANY


# ---- that it would be seen -------------------------------------------------------------------------------------------


def with_larger_weights(patch: pytest.MonkeyPatch) -> None:
    """Twice as much above the bound as rounding may be."""
    right = clipping_engine.clip_factors

    def factors(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        weights, norms = right(*args, **options)
        return weights * (1 + 2**-9), norms

    patch.setattr(clipping_engine, "clip_factors", factors)


def with_sums_in_float32(patch: pytest.MonkeyPatch) -> None:
    right = Pass.clipped_sums
    patch.setattr(
        Pass, "clipped_sums", lambda self, f: {p: value.float().double() for p, value in right(self, f).items()}
    )


PLANTED: dict[str, Fault] = {
    "0.2% above the bound": with_larger_weights,
    "sums in float32": with_sums_in_float32,
    **{variant.name: variant.fault for variant in VARIANTS if variant.of_clipping},
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a few of the cases."""
    PLANTED[fault](monkeypatch)
    cases = itertools.product(range(8), ("linear: on 3-D", "linear: flat", "network: convolutions"))
    with pytest.raises(AssertionError):
        collections.deque((verify(Case.draw(name, seed)) for seed, name in cases), maxlen=0)


# ---- what the law leaves to torch ------------------------------------------------------------------------------------


def gradients_rounding(model: nn.Sequential, x: Tensor, probe: Tensor) -> tuple[Tensor, Tensor]:
    """Norm of the exact gradient of each example's loss, sum(probe * model(x)), and how far torch's may lie from it.

    For linear, tanh, linear in float32, whatever the order in which products of n terms are added: gamma_n = n u /
    (1 - n u) of the sum of their magnitudes (Higham 2002, section 3.1). Elementary operations err by a few units.
    """
    unit = torch.finfo(torch.float32).eps / 2
    (w, b), (v, _) = [(layer.weight.detach().double(), layer.bias.detach().double()) for layer in (model[0], model[2])]

    def gamma(n: int) -> float:
        return n * unit / (1 - n * unit)

    x, probe = x.double(), probe.double()
    hidden, backward = torch.tanh(x @ w.T + b), probe @ v
    off_hidden = gamma(w.size(1) + 1) * (x.abs() @ w.abs().T + b.abs()) + 4 * unit
    off_backward = gamma(v.size(0)) * (probe.abs() @ v.abs())
    slope, off_slope = 1 - hidden**2, 2 * off_hidden + off_hidden**2 + 4 * unit
    off_delta = off_backward * slope + (backward.abs() + off_backward) * off_slope + 4 * unit * backward.abs()
    ones = torch.ones(len(x), dtype=torch.float64)
    inputs = torch.hypot(x.norm(dim=1), ones)  # the bias is an input of 1
    outputs = torch.hypot(hidden.norm(dim=1), ones) * probe.norm(dim=1)
    off = torch.hypot(off_delta.norm(dim=1) * inputs, off_hidden.norm(dim=1) * probe.norm(dim=1))
    return torch.hypot((backward * slope).norm(dim=1) * inputs, outputs), off


def moves_by_rounding(cases: range) -> int:
    """Assert that x moves the sum of others by no more than torch's rounding of them explains.

    Returns how often there was such a move. Clipping is a projection onto a ball of radius C: it moves two gradients no
    further apart, and those of norms above m > C closer, by C / m.
    """
    moved = 0
    for seed in cases:
        torch.manual_seed(seed)
        sizes = [int(n) for n in torch.randint(1, 100, (3,))]
        rows, bound = int(torch.randint(2, 40, ())), 10.0 ** float(torch.randint(-9, 2, ()))
        model = nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.Tanh(), nn.Linear(sizes[1], sizes[2]))
        x, probe = torch.randn(rows, sizes[0]), torch.randn(rows, sizes[2])
        with GhostClipper(model, bound) as clipper:
            losses = (model(x) * probe).sum(1)
            losses = torch.cat([losses[:1] * math.nan, losses[1:]])  # x is dropped
            with_x = clipper.backward(losses).grads
            without = clipper.backward((model(x[1:]) * probe[1:]).sum(1)).grads
        norms, off = gradients_rounding(model, x[1:], probe[1:])
        move = math.hypot(*(float((with_x[name] - without[name]).norm()) for name in without))
        assert move <= 2 * float((off * (bound / (norms - off).clamp_min(0)).clamp_max(1)).sum()) + 1e-15 * bound
        moved += move > 1e-12 * bound
    return moved


def test_others_move_by_torchs_rounding_alone() -> None:
    assert moves_by_rounding(range(60)) > 2
