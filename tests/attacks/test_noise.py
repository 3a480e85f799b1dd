"""The noise that optimizers release: normal, of the stated width, and independent of everything else that is drawn.

A logical batch without examples has a sum of 0, so that what a step releases is its noise. The generator itself is
tested in tests/ops/test_noise.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import dpkernels as dpk
from dpkernels import _native
from dpkernels.optim import PrivateOptimizer

SIGMA, C = 0.7, 1.3
Z = 4.5  # standard errors that an estimate may be off: 7 in a million
SIZES = [2**16, pytest.param(2**23, marks=pytest.mark.slow)]
KINDS = {
    "DPSGD": lambda model, **options: dpk.DPSGD(model, lr=1.0, **options),
    "DPOptimizer": lambda model, **options: dpk.DPOptimizer(
        model, torch.optim.SGD(model.parameters(), lr=1.0), **options
    ),
}


@contextmanager
def computed_by(threads: int, isa: str) -> Iterator[None]:
    before = torch.get_num_threads(), _native.active_isa()
    torch.set_num_threads(threads)
    _native.set_isa(isa)
    yield
    torch.set_num_threads(before[0])
    _native.set_isa(before[1])


def noise(size: int, *, kind: str = "DPSGD", seed: int | None = 1, steps: int = 2) -> Tensor:
    """What steps release in a model of two parameters of ``size`` values, in units of its noise: [steps, 2, size]."""
    model = nn.ModuleList(nn.Linear(size, 1, bias=False, dtype=torch.float64) for _ in range(2))
    optimizer: PrivateOptimizer = KINDS[kind](model, max_grad_norm=C, noise_multiplier=SIGMA, batch_size=1, seed=seed)
    released = []
    for _ in range(steps):
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        optimizer.begin_physical_batch(0, True)
        optimizer.step()
        released.append(torch.stack([-p.detach()[0] for p in model.parameters()]))
    optimizer.clipper.detach()
    return torch.stack(released) / (SIGMA * C)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_released_noise_is_normal(kind: str, size: int) -> None:
    drawn = noise(size, kind=kind, steps=1).flatten()
    n, covered = len(drawn), 1 + 2.0**-10  # the width is that of the bound, roundings included
    assert abs(float(drawn.mean())) < Z * covered / math.sqrt(n)
    assert 1 - Z / math.sqrt(2 * n) < float(drawn.std()) < covered * (1 + 1e-4) + Z / math.sqrt(2 * n)
    z = drawn / drawn.std()
    for power, expected, variance in ((3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert abs(float((z**power).mean()) - expected) < Z * math.sqrt(variance / n)
    assert stats.kstest((drawn / drawn.std()).numpy(), "norm").pvalue > 1e-3


@pytest.mark.parametrize("size", SIZES)
def test_released_noise_is_independent(size: int) -> None:
    """Of itself at any lag, of the other parameter's, of the next step's, of another optimizer's."""
    first, second = noise(size)
    other = noise(size, seed=2, steps=1)[0]
    limit = Z / math.sqrt(size)
    values = torch.cat([first, second, other])
    assert float((torch.corrcoef(values) - torch.eye(len(values))).abs().max()) < limit
    assert float((torch.corrcoef(values.abs()) - torch.eye(len(values))).abs().max()) < limit
    for lag in (1, 2, 8, 16, 31, 32, 64, 127, 128, 256, 4096):
        for values in (first[0], first[0].abs() - math.sqrt(2 / math.pi)):
            assert abs(float((values[:-lag] * values[lag:]).mean())) < 1.01 * limit
    spectrum = torch.fft.rfft(first[0] / first[0].std()).abs().square() / size  # exponential where nothing repeats
    assert float(spectrum[1:].max()) < math.log(size / 2) + 12


def test_fresh_optimizers_draw_other_noise() -> None:
    a, b = (noise(2**16, seed=None, steps=1).flatten() for _ in range(2))
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 6 / math.sqrt(len(a))


@pytest.mark.parametrize("size", [10_007, pytest.param(2**22 + 5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_released_noise_is_the_same_however_it_is_computed(kind: str, size: int) -> None:
    """With one divisor of 1 and one rate of 1 there is nothing else to round."""
    with computed_by(1, "baseline"):
        expected = noise(size, kind=kind, steps=1)
    for isa in _native.isas():
        for threads in (1, 2, 3):
            with computed_by(threads, isa):
                assert torch.equal(noise(size, kind=kind, steps=1), expected)
