"""The streams' CUDA kernels against the CPU's, word for word and integer for integer."""

import pytest
import torch

from dpkernels.ops import noise
from tests.simt.machine import Machine

KEY = torch.arange(7, 39, dtype=torch.uint8)
# (offset, count): nothing, parts of a group, across groups, warps and blocks of the grid, and the stream's end
RANGES = [(0, 0), (5, 1), (100, 29), (127, 130), (1000, 1500), (2**35 - 131, 131)]


@pytest.mark.parametrize(("offset", "count"), RANGES)
@pytest.mark.parametrize("on_device", [False, True])
def test_random_bits(simt: Machine, offset: int, count: int, on_device: bool) -> None:
    got = simt.random_bits(KEY, 3, 2**40 + 1, offset, count, on_device=on_device)
    assert torch.equal(got, noise.random_bits(KEY, 3, 2**40 + 1, offset, count))


@pytest.mark.parametrize(("offset", "count"), RANGES)
def test_gaussian(simt: Machine, offset: int, count: int) -> None:
    got = simt.gaussian(KEY, 3, 9, offset, count)
    assert ((got - noise.gaussian(KEY, 3, 9, offset, count)).abs() <= 2.0**-45).all()  # each errs by half of that


@pytest.mark.parametrize(("offset", "count"), RANGES)
@pytest.mark.parametrize("scale", [0.01, 3.7, 1e9])
def test_grid_gaussian(simt: Machine, offset: int, count: int, scale: float) -> None:
    arguments = {"noise_std": scale * 2.0**-20, "grid": 2.0**-20}
    got = simt.grid_gaussian(KEY, 3, 9, offset, count, on_device=count == 1, **arguments)
    assert torch.equal(got, noise.grid_gaussian(KEY, 3, 9, offset, count, **arguments))


def test_what_double_cannot_decide(simt: Machine) -> None:
    """At the largest scale one pair in 16 is computed in double-double: many in each warp."""
    count = 4000
    arguments = {"noise_std": 2.0**40, "grid": 1.0}
    got = simt.grid_gaussian(KEY, 1, 2, 0, count, **arguments)
    assert torch.equal(got, noise.grid_gaussian(KEY, 1, 2, 0, count, **arguments))
    fractions = noise.gaussian(KEY, 1, 2, 0, count) * 2.0**40
    undecided = (fractions - fractions.round()).abs() > 0.5 - 2.0**-6
    assert undecided.sum() > count / 64


def test_the_ends_of_the_radius(simt: Machine) -> None:
    """Radii near 0 lie outside of what double is used for, here of a pair that a search found."""
    step = next(s for s in range(10**4) if (noise.random_bits(KEY, 0, s, 0, 16) >> 49 == -1).any())
    first = noise.random_bits(KEY, 0, step, 0, 16)
    assert (first >> 49 == -1).any()  # u > 1 - 2^-15
    arguments = {"noise_std": 2.0**30, "grid": 1.0}
    got = simt.grid_gaussian(KEY, 0, step, 0, 32, **arguments)
    assert torch.equal(got, noise.grid_gaussian(KEY, 0, step, 0, 32, **arguments))
    exact = noise.gaussian(KEY, 0, step, 0, 32)
    assert ((simt.gaussian(KEY, 0, step, 0, 32) - exact).abs() <= 2.0**-45).all()
