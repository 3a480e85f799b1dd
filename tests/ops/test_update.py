"""Noise and update in one pass: against the reference, torch's optimizers, and the grid's exactness."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dpkernels.ops.noise import STREAM_LENGTH, grid_gaussian
from dpkernels.ops.update import adam_update, noised_mean, sgd_update
from dpkernels.reference import update as reference

KEY = torch.arange(32, dtype=torch.uint8)
SHAPES = [(3,), (0,), (5, 7), (), (129,), (2, 3, 4, 5), (1000,), (1,)]
NOISE = {"key": KEY, "domain": 2, "step": 7, "noise_std": 0.3, "grid": 2.0**-24}
NO_NOISE: dict[str, Any] = {}


def tensors(dtype: torch.dtype, scale: float = 1.0) -> list[Tensor]:
    return [(torch.randn(shape) * scale).to(dtype) for shape in SHAPES]


def clones(tensors: list[Tensor]) -> list[Tensor]:
    return [t.clone() for t in tensors]


def empties(like: list[Tensor]) -> list[Tensor]:
    return [t.new_empty(0) for t in like]


def assert_all_close(got: list[Tensor], want: list[Tensor]) -> None:
    for g, w in zip(got, want, strict=True):
        tolerance = {torch.float64: 1e-13, torch.float32: 3e-7, torch.bfloat16: 1e-2, torch.float16: 2e-3}[g.dtype]
        torch.testing.assert_close(g, w, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("noise", [NO_NOISE, NOISE], ids=["plain", "noise"])
def test_noised_mean_matches_reference(isa: str, dtype: torch.dtype, noise: dict[str, Any]) -> None:
    sums, got = tensors(torch.float64), tensors(dtype)
    want = clones(got)
    noised_mean(got, sums, denominator=12.5, **noise)
    reference.noised_mean(want, sums, denominator=12.5, **noise)
    assert_all_close(got, want)


SGD: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.1},
    "decay": {"lr": 0.1, "weight_decay": 0.01},
    "momentum": {"lr": 0.1, "momentum": 0.9},
    "dampening": {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    "nesterov": {"lr": 0.1, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
}
ADAM: dict[str, dict[str, Any]] = {
    "adam": {"lr": 0.01},
    "decay": {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-4},
    "amsgrad": {"lr": 0.01, "amsgrad": True, "betas": (0.5, 0.6)},
    "adamw": {"lr": 0.01, "weight_decay": 0.1, "decoupled": True},
    "adamw amsgrad": {"lr": 0.01, "weight_decay": 0.1, "decoupled": True, "amsgrad": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("noise", [NO_NOISE, NOISE], ids=["plain", "noise"])
@pytest.mark.parametrize("options", SGD.values(), ids=SGD)
def test_sgd_matches_reference(isa: str, dtype: torch.dtype, noise: dict[str, Any], options: dict[str, Any]) -> None:
    states = []
    params, buffers = tensors(dtype), tensors(dtype)
    sums = [tensors(torch.float64) for _ in range(2)]
    for update in (sgd_update, reference.sgd_update):
        p, b = clones(params), clones(buffers)
        if not options.get("momentum"):
            b = empties(p)
        for k, s in enumerate(sums):
            update(p, s, b, **options, first=k == 0, denominator=3.0, **noise)
        states.append(p + b)
    assert_all_close(*states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("noise", [NO_NOISE, NOISE], ids=["plain", "noise"])
@pytest.mark.parametrize("options", ADAM.values(), ids=ADAM)
def test_adam_matches_reference(isa: str, dtype: torch.dtype, noise: dict[str, Any], options: dict[str, Any]) -> None:
    states = []
    options = {"betas": (0.9, 0.999)} | options
    (beta1, beta2), amsgrad = options.pop("betas"), options.pop("amsgrad", False)
    params, firsts, seconds = tensors(dtype), tensors(dtype), [t.abs() for t in tensors(dtype)]
    sums = tensors(torch.float64)
    for update in (adam_update, reference.adam_update):
        p, m, v = clones(params), clones(firsts), clones(seconds)
        largest = clones(seconds) if amsgrad else empties(p)
        options |= {"steps": 3, "beta1": beta1, "beta2": beta2, "denominator": 3.0}
        update(p, sums, m, v, largest, **options, **noise)
        states.append(p + m + v + largest)
    assert_all_close(*states)


def run_torch(make: Callable[[list[Tensor]], torch.optim.Optimizer], params: list[Tensor], grads: list[list[Tensor]]):
    optimizer = make(params)
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = g.to(p.dtype)
        optimizer.step()
    return params


@pytest.mark.parametrize("options", SGD.values(), ids=SGD)
def test_sgd_without_noise_equals_torch(options: dict[str, Any]) -> None:
    params, grads = tensors(torch.float64), [tensors(torch.float64) for _ in range(5)]
    want = run_torch(lambda p: torch.optim.SGD(p, **options), clones(params), grads)
    buffers = clones(params) if options.get("momentum") else empties(params)
    for k, step in enumerate(grads):
        sgd_update(params, [8 * g for g in step], buffers, **options, first=k == 0, denominator=8)
    assert_all_close(params, want)


@pytest.mark.parametrize("options", ADAM.values(), ids=ADAM)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adam_without_noise_equals_torch(options: dict[str, Any], dtype: torch.dtype) -> None:
    options = {"betas": (0.9, 0.999)} | options
    kind = torch.optim.AdamW if options.get("decoupled") else torch.optim.Adam
    plain = {k: v for k, v in options.items() if k != "decoupled"}
    plain.setdefault("weight_decay", 0.0)
    params, grads = tensors(dtype), [tensors(torch.float64) for _ in range(5)]
    want = run_torch(lambda p: kind(p, **plain), clones(params), grads)
    (beta1, beta2), amsgrad = options.pop("betas"), options.pop("amsgrad", False)
    moments = [[torch.zeros_like(p) for p in params] for _ in range(3)]
    if not amsgrad:
        moments[2] = empties(params)
    for k, step in enumerate(grads):
        sums = [8 * g for g in step]
        adam_update(params, sums, *moments, steps=k + 1, beta1=beta1, beta2=beta2, **options, denominator=8)
    for got, expected in zip(params, want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_scalars_per_parameter() -> None:
    count = len(SHAPES)
    params, sums = tensors(torch.float32), tensors(torch.float64)
    rates = [0.1 * k for k in range(count)]
    momenta = [0.0 if k % 2 else 0.9 for k in range(count)]
    buffers = [torch.zeros_like(p) if m else p.new_empty(0) for p, m in zip(params, momenta, strict=True)]
    options: dict[str, Any] = {"lr": rates, "momentum": momenta, "nesterov": [m > 0 for m in momenta]}
    want, want_buffers = clones(params), clones(buffers)
    sgd_update(params, sums, buffers, **options, denominator=2, **NOISE)
    reference.sgd_update(want, sums, want_buffers, **options, denominator=2, **NOISE)
    assert_all_close(params + buffers, want + want_buffers)
    moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    want_moments = [clones(m) for m in moments]
    options = {"steps": list(range(1, count + 1)), "lr": rates, "eps": [1e-8 + r for r in rates]}
    adam_update(params, sums, *moments, empties(params), **options, denominator=2)
    reference.adam_update(want, sums, *want_moments, empties(want), **options, denominator=2)
    assert_all_close(params + moments[1], want + want_moments[1])


def test_noise_indices_run_through_all_parameters() -> None:
    """The same noise however the values are cut into parameters."""
    sums = [torch.zeros(n, dtype=torch.float64) for n in (100, 0, 300, 1, 599)]
    outs = [torch.zeros_like(s) for s in sums]
    noised_mean(outs, sums, denominator=1, **NOISE)
    whole = grid_gaussian(KEY, 2, 7, 0, 1000, noise_std=NOISE["noise_std"], grid=NOISE["grid"])
    assert torch.equal(torch.cat(outs), whole)


def test_noised_sums_lie_on_the_grid_and_nothing_is_lost(isa: str) -> None:
    grid = NOISE["grid"]
    sums = [torch.randn(5000, dtype=torch.float64) * scale for scale in (1.0, 1e3, 1e6)]
    outs = [torch.empty_like(s) for s in sums]
    noised_mean(outs, sums, denominator=1, **NOISE)
    noise = grid_gaussian(KEY, 2, 7, 0, 15_000, noise_std=NOISE["noise_std"], grid=grid).split(5000)
    for out, s, z in zip(outs, sums, noise, strict=True):
        assert torch.equal(out / grid, (out / grid).round())
        assert torch.equal(out - z, (s / grid).round() * grid)


def test_huge_sums_are_bounded_and_nan_shows() -> None:
    sums = [torch.tensor([1e300, -1e300, math.inf, math.nan, 2.0**30], dtype=torch.float64)]
    outs = [torch.empty(5, dtype=torch.float64)]
    noised_mean(outs, sums, denominator=1, **NOISE)
    z = grid_gaussian(KEY, 2, 7, 0, 5, noise_std=NOISE["noise_std"], grid=NOISE["grid"])
    limit = 2.0**51 * NOISE["grid"]
    expected = torch.tensor([limit, -limit, limit, math.nan, limit], dtype=torch.float64)
    torch.testing.assert_close(outs[0], expected + z, rtol=0, atol=0, equal_nan=True)


def test_same_bits_for_any_number_of_threads() -> None:
    sums = [torch.randn(n, dtype=torch.float64) for n in (30_000, 17, 50_000)]
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        params = [torch.ones(s.shape) for s in sums]
        moments = [[torch.ones_like(p) for p in params] for _ in range(2)]
        adam_update(params, sums, *moments, empties(params), steps=1, lr=0.1, denominator=4, **NOISE)
        results.append(params + moments[0] + moments[1])
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_non_contiguous_parameters_keep_their_noise() -> None:
    sums = [torch.randn(2, 3, 4, 5, dtype=torch.float64)]
    plain = [torch.ones(2, 3, 4, 5)]
    channels_last = [torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)]
    buffers = [torch.zeros_like(plain[0])]
    strided = [torch.zeros(2, 3, 5, 4).transpose(2, 3)]
    sgd_update(plain, sums, buffers, lr=0.1, momentum=0.9, denominator=4, **NOISE)
    sgd_update(
        channels_last,
        [sums[0].transpose(0, 3).contiguous().transpose(0, 3)],
        strided,
        lr=0.1,
        momentum=0.9,
        denominator=4,
        **NOISE,
    )
    assert torch.equal(plain[0], channels_last[0])
    assert torch.equal(buffers[0], strided[0])
    assert channels_last[0].is_contiguous(memory_format=torch.channels_last)


def test_autograd_notices_the_change() -> None:
    p = torch.ones(3, requires_grad=True)
    loss = (p * p).sum()
    version = p._version
    sgd_update([p], [torch.ones(3, dtype=torch.float64)], [p.new_empty(0)], lr=0.1, denominator=1)
    assert p._version > version
    assert p.is_leaf
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_parameters() -> None:
    noised_mean([], [], denominator=1, **NOISE)
    sgd_update([], [], [], lr=0.1, denominator=1)


def test_opcheck() -> None:
    p, s, b = (
        [torch.ones(3), torch.ones(2)],
        [torch.ones(3).double(), torch.ones(2).double()],
        [torch.ones(3), torch.ones(2)],
    )
    tail = (2.0, KEY, 0, 1, 0.5, 0.25)
    ones = [0.5, 0.5]
    torch.library.opcheck(torch.ops.dpkernels.noised_mean.default, (p, s, *tail))
    torch.library.opcheck(
        torch.ops.dpkernels.sgd_update.default, (p, s, b, ones, ones, ones, ones, [0, 1], [0, 0], *tail)
    )
    torch.library.opcheck(
        torch.ops.dpkernels.adam_update.default,
        (p, s, b, clones(b), clones(b), [1, 2], ones, ones, ones, ones, ones, [0, 1], *tail),
    )


def test_errors_name_the_argument() -> None:
    p, s = [torch.ones(3)], [torch.ones(3, dtype=torch.float64)]
    for arguments, options, words in [
        ((p, s * 2), {}, "sums must hold one tensor for each of 1 parameters, got 2"),
        ((p, [s[0][:2]]), {}, r"sums\[0\] must have the shape \(3,\)"),
        ((p, [p[0]]), {}, r"sums\[0\] must be float64 on cpu"),
        (([p[0].long()], s), {}, r"params\[0\] must be floating-point"),
        ((p, s), {"denominator": 0.0}, "denominator must be a positive number"),
        ((p, s), {"denominator": math.nan}, "denominator must be a positive number"),
        ((p, s), {"noise_std": 1.0, "grid": 0.5}, "key must be given"),
        ((p, s), {"noise_std": 1.0, "grid": 0.3, "key": KEY}, "grid must be a power of two"),
        ((p, s), {"noise_std": -1.0, "grid": 0.5, "key": KEY}, "noise_std must be in"),
        ((p, s), {"noise_std": 1.0, "grid": 0.5, "key": KEY[:3]}, "key must be a uint8 CPU tensor"),
        ((p, s), {"noise_std": 1.0, "grid": 0.5, "key": KEY, "step": -1}, "step must be in"),
    ]:
        with pytest.raises((ValueError, TypeError), match=words):
            noised_mean(*arguments, **({"denominator": 1.0} | options))  # type: ignore[arg-type]
    long = torch.empty(1, dtype=torch.float64).expand(STREAM_LENGTH + 1)
    with pytest.raises(ValueError, match="offset and count must stay within"):
        noised_mean([long], [long], denominator=1.0, **NOISE)
    with pytest.raises(ValueError, match=r"momentum_buffers\[0\] must have the shape"):
        sgd_update(p, s, empties(p), lr=0.1, momentum=0.9, denominator=1)
    with pytest.raises(TypeError, match=r"momentum_buffers\[0\] must be torch.float32"):
        sgd_update(p, s, [p[0].double()], lr=0.1, momentum=0.9, denominator=1)
    with pytest.raises(ValueError, match="lr must be one number, or one for each of 1 parameters, got 2"):
        sgd_update(p, s, empties(p), lr=[0.1, 0.2], denominator=1)
    with pytest.raises(ValueError, match="exp_avgs must hold one tensor"):
        adam_update(p, s, [], p, empties(p), steps=1, lr=0.1, denominator=1)
    with pytest.raises(ValueError, match="steps must be one count >= 1"):
        adam_update(p, s, p, p, empties(p), steps=0, lr=0.1, denominator=1)
