"""Noise and update on the device against the CPU's operator: the same bits, whatever the tensors."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dpkernels import _native
from dpkernels.ops.update import adam_update, noised_mean, sgd_update
from tests.simt.machine import Machine

KEY = torch.arange(32, dtype=torch.uint8)
NOISE = {"key": KEY, "domain": 2, "step": 7, "noise_std": 0.3, "grid": 2.0**-24}
NO_NOISE: dict[str, Any] = {"key": KEY, "domain": 0, "step": 0, "noise_std": 0.0, "grid": 0.0}
# Tensors within a group, across groups and warps, empty ones first, last and between.
SIZES = [0, 3, 129, 0, 1, 128, 700, 31, 0]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DENOMINATOR = 12.5


def tensors(dtypes: list[torch.dtype]) -> list[Tensor]:
    return [torch.randn(size).to(dtype) for size, dtype in zip(SIZES, dtypes, strict=True)]


def mixed(first: int = 0) -> list[torch.dtype]:
    return [DTYPES[(first + k) % 4] for k in range(len(SIZES))]


def empty_like(tensors: list[Tensor]) -> list[Tensor]:
    return [t.new_empty(0) for t in tensors]


def run(simt: Machine, rule: str, states: list[list[Tensor]], sums: list[Tensor], noise: Any, **settings: Any) -> None:
    """Updates parameters and moments (``states``: up to four lists of tensors) in place."""
    lists = states + [empty_like(states[0])] * (4 - len(states))
    each = [{"shrink": 1.0, **{k: float(v) for k, v in settings.items()}}] * len(SIZES)
    got = simt.update(rule, lists[0], sums, *lists[1:], each, denominator=DENOMINATOR, **noise)
    changed = [t for ts in zip(*lists, strict=True) for t in ts if t.numel()]
    assert len(got) == len(changed)
    for t, new in zip(changed, got, strict=True):
        assert t.dtype == new.dtype
        t.copy_(new)


def assert_same(got: list[list[Tensor]], want: list[list[Tensor]]) -> None:
    """The same bits, where the CPU fuses products and sums as the device does."""
    for ours, theirs in zip(got, want, strict=True):
        for g, w in zip(ours, theirs, strict=True):
            assert g.isfinite().all()
            if _native.active_isa() != "baseline":
                assert torch.equal(g, w)
            torch.testing.assert_close(g, w)


def clones(states: list[list[Tensor]]) -> list[list[Tensor]]:
    return [[t.clone() for t in tensors] for tensors in states]


@pytest.mark.parametrize("noise", [NO_NOISE, NOISE], ids=["plain", "noise"])
def test_noised_mean(simt: Machine, noise: dict[str, Any]) -> None:
    for first in range(4):
        outs, sums = [tensors(mixed(first))], tensors([torch.float64] * len(SIZES))
        sums[6][:2] = torch.tensor([1e300, -1e300])  # beyond 2^51 units of the grid
        want = clones(outs)
        noised_mean(want[0], sums, denominator=DENOMINATOR, **noise)
        run(simt, "mean", outs, sums, noise)
        for g, w in zip(outs[0], want[0], strict=True):
            assert torch.equal(g, w)


SGD: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.01},
    "momentum": {"momentum": 0.9},
    "dampening": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    "nesterov": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
}


@pytest.mark.parametrize("noise", [NO_NOISE, NOISE], ids=["plain", "noise"])
@pytest.mark.parametrize("options", SGD.values(), ids=SGD)
def test_sgd(simt: Machine, noise: dict[str, Any], options: dict[str, Any]) -> None:
    dtypes = mixed(len(options))
    states = [tensors(dtypes), tensors(dtypes)] if options.get("momentum") else [tensors(dtypes)]
    want = clones(states)
    for k in range(2):
        sums = tensors([torch.float64] * len(SIZES))
        buffers = want[1] if len(want) > 1 else empty_like(want[0])
        sgd_update(want[0], sums, buffers, lr=0.1, **options, first=k == 0, denominator=DENOMINATOR, **noise)
        run(
            simt,
            "sgd",
            states,
            sums,
            noise,
            rate=0.1,
            decay=options.get("weight_decay", 0),
            keep_first=options.get("momentum", 0),
            add_first=1 - options.get("dampening", 0.0),
            nesterov=options.get("nesterov", False),
            overwrite_first=k == 0,
        )
    assert_same(states, want)


@pytest.mark.parametrize("noise", [NO_NOISE, NOISE], ids=["plain", "noise"])
@pytest.mark.parametrize("decoupled", [False, True], ids=["adam", "adamw"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
def test_adam(simt: Machine, noise: dict[str, Any], decoupled: bool, amsgrad: bool) -> None:
    lr, decay, beta1, beta2, eps = 0.01, 0.1, 0.8, 0.95, 1e-4
    dtypes = mixed(decoupled + 2 * amsgrad)
    states = [[t.abs() if k > 1 else t for t in tensors(dtypes)] for k in range(3 + amsgrad)]
    want = clones(states)
    for step in (1, 2):
        sums = tensors([torch.float64] * len(SIZES))
        largest = want[3] if amsgrad else empty_like(want[0])
        options = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": decay, "decoupled": decoupled}
        adam_update(want[0], sums, *want[1:3], largest, steps=step, **options, denominator=DENOMINATOR, **noise)
        run(
            simt,
            "adam",
            states,
            sums,
            noise,
            rate=lr / (1 - beta1**step),
            second_unbias=1 / (1 - beta2**step) ** 0.5,
            decay=0 if decoupled else decay,
            shrink=1 - lr * decay if decoupled else 1,
            keep_first=beta1,
            add_first=1 - beta1,
            keep_second=beta2,
            epsilon=eps,
        )
    assert_same(states, want)


def test_nothing_to_update(simt: Machine) -> None:
    """No tensors, or none with values: nothing is launched."""
    before = simt.module.launches()
    for count in (0, 2):
        none = [np.empty(0, np.float32)] * count
        sums = [np.empty(0)] * count
        noise = {**NOISE, "key": KEY.numpy()}
        arguments = ("sgd", none, sums, none, none, none, [{}] * count)
        assert simt.module.update(*arguments, denominator=1.0, **noise, schedule=simt.module.SCHEDULES[0]) == ()
    assert simt.module.launches() == before


@pytest.mark.parametrize("count", [28, 29, 300])
def test_many_tensors(simt: Machine, count: int) -> None:
    """Tables of both sizes, and two launches that share a group."""
    outs, sums = [torch.zeros(3) for _ in range(count)], [torch.randn(3).double() for _ in range(count)]
    want = [t.clone() for t in outs]
    noised_mean(want, sums, denominator=DENOMINATOR, **NOISE)
    none = [torch.empty(0)] * count
    got = simt.update("mean", outs, sums, none, none, none, [{}] * count, denominator=DENOMINATOR, **NOISE)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
