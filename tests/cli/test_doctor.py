"""`dpkernels doctor`: it passes on a sound build, and a wrong computation fails it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dpkernels import _native
from dpkernels.cli import main, selfcheck
from dpkernels.layers import REGISTRY


def test_a_sound_build_passes(capsys: pytest.CaptureFixture[str]) -> None:
    before = _native.active_isa()
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "FAILED" not in printed
    for fact in (torch.__version__, _native.host.build_info()["compiler"], *_native.isas(), f"active: {before}"):
        assert fact in printed
    for module_type in selfcheck.layer_types():
        assert f"clipping, {module_type.__name__}: at most" in printed
    for name in ("ChaCha20", "noise", "private step", "accountants"):
        assert f"ok      {name}: " in printed
    assert _native.active_isa() == before


def test_every_registered_layer_has_a_sample() -> None:
    assert set(selfcheck.layer_types()) - set(selfcheck.SAMPLES) == set()
    assert torch.nn.Linear in selfcheck.layer_types()
    for module_type, sample in selfcheck.SAMPLES.items():
        assert type(sample()[0]) is module_type


class _Shrunk:
    """A generator whose normals are 3% too small."""

    @classmethod
    def fresh(cls) -> _Shrunk:
        return cls()

    def normal(self, domain: int, step: int, count: int) -> Tensor:
        return 0.97 * torch.randn(count, dtype=torch.float64)


def test_wrong_noise_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(selfcheck, "Key", _Shrunk)
    monkeypatch.setattr(selfcheck, "layer_types", lambda: [torch.nn.Linear])
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAILED") == 2  # its line, and the verdict
    assert "FAILED  noise: " in printed
    assert "1 of 5 checks FAILED" in printed


@pytest.mark.parametrize("kind", [torch.nn.Linear, torch.nn.Conv2d])
def test_a_wrong_layer_fails(kind: type[torch.nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = REGISTRY[kind]
    own: Callable[..., dict[str, Tensor]] = layer.clipped_sums

    def scaled(self: object, record: object, weights: Tensor, slots: frozenset[str]) -> dict[str, Tensor]:
        return {slot: 1.01 * value for slot, value in own(self, record, weights, slots).items()}

    monkeypatch.setattr(layer, "clipped_sums", scaled)
    monkeypatch.setattr(selfcheck, "layer_types", lambda: [kind])
    monkeypatch.setattr(selfcheck, "_CHECKS", {})
    (found,) = selfcheck.self_checks()
    assert found.name == f"clipping, {kind.__name__}"
    assert not found.ok
    assert "module.weight" in found.detail


def test_an_exception_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(selfcheck.SAMPLES, torch.nn.Linear)
    monkeypatch.setattr(selfcheck, "_CHECKS", {"broken": lambda: 1 / 0})
    monkeypatch.setattr(selfcheck, "layer_types", lambda: [torch.nn.Linear])
    assert list(selfcheck.self_checks()) == [
        selfcheck.Check("clipping, Linear", False, "no sample of this layer to check it with"),
        selfcheck.Check("broken", False, "ZeroDivisionError: division by zero"),
    ]
