"""`dpkernels doctor`: it passes on a sound build, and a wrong computation fails it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dpkernels import _native
from dpkernels.cli import main, selfcheck
from dpkernels.layers import Record
from dpkernels.layers.conv import ConvRule
from dpkernels.layers.linear import LinearRule


def test_a_sound_build_passes(capsys: pytest.CaptureFixture[str]) -> None:
    before = _native.active_isa()
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "FAILED" not in printed
    for fact in (torch.__version__, _native.host.build_info()["compiler"], *_native.isas(), f"active: {before}"):
        assert fact in printed
    for module_type in selfcheck.SAMPLES:
        assert f"clipping, {module_type.__name__}: at most" in printed
    for name in ("ChaCha20", "noise", "private step", "accountants"):
        assert f"ok      {name}: " in printed
    assert _native.active_isa() == before


class _Shrunk:
    """A generator whose normals are 3% too small."""

    @classmethod
    def fresh(cls) -> _Shrunk:
        return cls()

    def normal(self, domain: int, step: int, count: int) -> Tensor:
        return 0.97 * torch.randn(count, dtype=torch.float64)


def test_wrong_noise_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(selfcheck, "Key", _Shrunk)
    monkeypatch.setattr(selfcheck, "SAMPLES", {torch.nn.Linear: selfcheck.SAMPLES[torch.nn.Linear]})
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("FAILED") == 2  # its line, and the verdict
    assert "FAILED  noise: " in printed
    assert "1 of 5 checks FAILED" in printed


@pytest.mark.parametrize(("kind", "rule"), [(torch.nn.Linear, LinearRule), (torch.nn.Conv2d, ConvRule)])
def test_a_wrong_layer_fails(
    kind: type[torch.nn.Module], rule: type[LinearRule] | type[ConvRule], monkeypatch: pytest.MonkeyPatch
) -> None:
    own: Callable[..., dict[str, Tensor]] = rule.clipped_sums

    def scaled(self: object, record: Record, weights: Tensor, operands: frozenset[str]) -> dict[str, Tensor]:
        return {operand: 1.01 * value for operand, value in own(self, record, weights, operands).items()}

    monkeypatch.setattr(rule, "clipped_sums", scaled)
    monkeypatch.setattr(selfcheck, "SAMPLES", {kind: selfcheck.SAMPLES[kind]})
    monkeypatch.setattr(selfcheck, "_CHECKS", {})
    (found,) = selfcheck.self_checks()
    assert found.name == f"clipping, {kind.__name__}"
    assert not found.ok
    assert "module.weight" in found.detail


def test_an_exception_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "SAMPLES", {torch.nn.Linear: lambda: {}["x"]})
    monkeypatch.setattr(selfcheck, "_CHECKS", {"broken": lambda: 1 / 0})
    assert list(selfcheck.self_checks()) == [
        selfcheck.Check("clipping, Linear", False, "KeyError: 'x'"),
        selfcheck.Check("broken", False, "ZeroDivisionError: division by zero"),
    ]
