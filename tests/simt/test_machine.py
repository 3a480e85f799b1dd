"""The machine itself: planted faults are found whatever the schedule, and what is right passes."""

import re

import numpy as np
import pytest
import torch

from tests.simt.machine import Machine, to_numpy


def faults_of(simt: Machine, operator: str, *args: torch.Tensor, fault: str) -> list[str]:
    """What the machine says under each schedule; an empty text where it finds nothing."""
    found = []
    for schedule in simt.module.SCHEDULES:
        try:
            getattr(simt.module, operator)(*map(to_numpy, args), fault, schedule=schedule)
            found.append("")
        except RuntimeError as error:
            found.append(str(error))
    return found


STAGED = {
    "no barrier": "kernel staged_kernel, block .*thread.*(no barrier between|before it was written).*planted.cu",
    "no trailing barrier": "(wrote|read) it before, and this one (reads|writes) it with no barrier between",
    "unwritten": "read before it was written",
    "beyond": r"element 64 of shared memory that holds elements \[0, 64\)",
    "divergent": "divergent barrier: thread .* waits at a barrier of the block at planted.cu.* has returned",
    "two barriers": "divergent barrier: thread .* waits at a barrier of the block at planted.cu",
    "exited": "divergent barrier: thread .* has returned",
    "partial": "all 32 lanes",
    "misaligned": "thread .*undefined: a misaligned access, or an overflow of an integer",
    "overflow": "thread .*undefined: a misaligned access, or an overflow of an integer",
    "input": "kernel staged_kernel, block .*access to address 0x.* outside of every buffer",
}


TILES = {
    "no barrier": "no barrier between|before it was written",
    "no trailing barrier": "no barrier between",
    "no wait": "while an asynchronous copy to it has not been waited for",
    "uncommitted": "while an asynchronous copy to it has not been waited for",
}


@pytest.mark.parametrize(("fault", "words"), STAGED.items())
def test_a_planted_fault_is_found(simt: Machine, fault: str, words: str) -> None:
    for text in faults_of(simt, "planted_staged", torch.arange(128.0), fault=fault):
        assert re.search(words, text), text


def test_a_write_behind_a_buffer_is_found(simt: Machine) -> None:
    """By the schedules that guard a buffer's end; the others guard its start."""
    found = faults_of(simt, "planted_staged", torch.arange(128.0), fault="global")
    assert all("outside of every buffer" in text for text in found[::2])


@pytest.mark.parametrize(("fault", "words"), TILES.items())
def test_a_planted_fault_around_a_matrix_product_is_found(simt: Machine, fault: str, words: str) -> None:
    a, b = torch.randn(32, 48).bfloat16(), torch.randn(8, 48).bfloat16()
    for text in faults_of(simt, "planted_tiles", a, b, fault=fault):
        assert re.search(words, text), text


def test_what_is_right_passes(simt: Machine) -> None:
    x = torch.arange(128.0)
    by_block = x.view(2, 64).roll(32, 1)
    assert torch.equal(simt.planted_staged(x, "none"), by_block.reshape(64, 2).sum(1))
    a, b = torch.randint(-9, 9, (32, 48)).bfloat16(), torch.randint(-9, 9, (8, 48)).bfloat16()
    assert torch.equal(simt.planted_tiles(a, b, "none"), a.float() @ b.float().T)


def test_a_run_after_a_fault_is_sound(simt: Machine) -> None:
    x = torch.arange(128.0)
    before = simt.planted_staged(x, "none")
    for fault in STAGED:
        faults_of(simt, "planted_staged", x, fault=fault)
        assert torch.equal(simt.planted_staged(x, "none"), before)


@pytest.mark.parametrize(
    ("operator", "dtype", "depth"),
    [
        ("product_tf32", torch.float32, 8),
        ("product_bfloat16", torch.bfloat16, 16),
        ("product_half", torch.float16, 16),
    ],
)
def test_matrix_products(simt: Machine, operator: str, dtype: torch.dtype, depth: int) -> None:
    """Exact for small integers; within the stated bound otherwise."""
    a, b = torch.randint(-99, 99, (16, depth)).float(), torch.randint(-99, 99, (depth, 8)).float()
    assert torch.equal(getattr(simt, operator)(a, b), a @ b)
    a, b = torch.randn(16, depth).to(dtype), torch.randn(depth, 8).to(dtype)
    if dtype == torch.float32:  # tf32 keeps 10 bits of the fraction
        a, b = (((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) for t in (a, b))
    a, b = a.float(), b.float()
    size = a.double().abs() @ b.double().abs()
    error = (getattr(simt, operator)(a, b).double() - a.double() @ b.double()).abs()
    assert (error <= (depth + 2) * 2.0**-23 * size).all()
    a[3], b[:, 2], b[:, 3] = torch.inf, torch.nan, 0  # what is not finite stays so
    assert torch.equal(getattr(simt, operator)(a, b).isnan(), (a @ b).isnan())


def test_intrinsics(simt: Machine) -> None:
    x = torch.randint(-100, 100, (64,), dtype=torch.int32)
    lane, warps = torch.arange(32), x.view(2, 32)
    segment = lane // 8 * 8
    ballots = ((warps > 0).long() << lane).sum(1, keepdim=True)
    rows = [
        x.sum().expand(64),
        x.max().expand(64),
        warps[:, [5] * 32],
        warps[:, segment + 1],
        warps[:, torch.where(lane % 16 >= 3, lane - 3, lane)],
        warps[:, torch.where(lane % 8 < 6, lane + 2, lane)],
        warps[:, lane ^ 4],
        (ballots - ((ballots >> 31) << 32)).expand(2, 32),
        (x > 0).sum().expand(64),
        ((warps > 90).any(1, True) + 2 * (warps > -50).all(1, True)).expand(2, 32),
    ]
    want = torch.stack([row.reshape(64).int() for row in rows])
    assert torch.equal(simt.intrinsics(x), want)


def test_halves_convert_as_torch_does(simt: Machine) -> None:
    """Every half; the ties between neighbours, and what lies beside them; random floats."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    wide = bits.view(torch.float16).float()
    got = torch.from_numpy(simt.module.widen_half(bits.numpy()))
    assert torch.equal(got.nan_to_num(-1), wide.nan_to_num(-1))
    finite = wide[wide.isfinite()]
    ties = finite + finite.abs().clamp(min=2.0**-14).log2().floor().exp2() * 2.0**-11
    random = torch.randint(-(2**31), 2**31 - 1, (50_000,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    some = torch.cat([finite, ties, *(ties.nextafter(torch.tensor(end)) for end in (-9e9, 9e9)), random])
    some = some[~some.isnan()]
    for name, dtype in (("narrow_half", torch.float16), ("narrow_bfloat16", torch.bfloat16)):
        got = torch.from_numpy(getattr(simt.module, name)(some.numpy()))
        assert torch.equal(got.view(torch.int16), some.to(dtype).view(torch.int16))


def test_wrong_calls_raise(simt: Machine) -> None:
    x = np.zeros(64, np.float32)
    with pytest.raises(ValueError, match="schedule must be one of SCHEDULES, got sideways"):
        simt.module.planted_staged(x, "none", schedule="sideways")
    with pytest.raises(TypeError, match="expected a C-contiguous array of float32, got float64"):
        simt.module.planted_staged(x.astype(np.float64), "none", schedule="forward/eager")
