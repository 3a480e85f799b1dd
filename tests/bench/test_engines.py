"""The engines make the same private step, and only those that can run are offered."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from dpkernels.bench import engines


def small() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 10))
    return model, torch.randn(5, 1, 6, 6), torch.randint(0, 10, (5,))


def moved(engine: str) -> torch.Tensor:
    """How far one step moves the parameters."""
    model, x, y = small()
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    engines.ENGINES[engine](model, x, y)()
    return nn.utils.parameters_to_vector(model.parameters()).detach() - before


def test_private_engines_agree_but_for_their_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "SIGMA", 1e-8)
    monkeypatch.setattr(engines, "LR", 100.0)  # moves that the parameters' rounding does not blur
    ours = moved("dpkernels")
    assert 0 < ours.norm() <= engines.LR * engines.BOUND * 1.001
    for engine in ("vmap",):
        torch.testing.assert_close(moved(engine), ours, rtol=0, atol=1e-5 * float(ours.abs().max()))
    assert moved("ordinary").norm() > 2 * ours.norm()  # nothing is clipped there


@pytest.mark.parametrize("engine", ["dpkernels", "vmap"])
def test_private_engines_add_noise(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "SIGMA", 1000.0)
    expected = engines.LR * 1000.0 * engines.BOUND / 5
    assert 0.85 < float(moved(engine).std()) / expected < 1.15


def test_missing_peers_are_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ["dpkernels", "vmap"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert engines.installed() == ours
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert set(engines.installed()) == {*ours, "opacus-hooks", "opacus-ghost"}
