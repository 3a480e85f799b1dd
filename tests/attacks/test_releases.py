"""Releases besides the clipped sums: whatever one example is, it moves none by more than its noise covers.

A search over awkward data sets: each release is made with one example and without it, with the same noise (none).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor

from dpkernels.features import NormRelease, PrivateDataNorm, normalization
from dpkernels.random import Domain
from dpkernels.selection import PCARelease, SupportRelease, support

FEW, MANY = 50, 2000


class Silent:
    """A key whose noise is 0, to see what is released beside the noise."""

    def claim(self, domain: Domain, *, count: int = 1) -> int:
        return 0

    def grid_normal(self, domain: Domain, step: int, count: int, **rest: float) -> Tensor:
        return torch.zeros(count, dtype=torch.float64)


def example(rng: Random, *shape: int) -> Tensor:
    """One example's features: of usual numbers, huge, tiny, not finite, constant, cancelling or rare ones."""
    x = torch.randn(shape, dtype=torch.float64)
    kind = rng.choice(("usual", "huge", "tiny", "infinite", "nan", "constant", "cancelling", "rare", "largest"))
    if kind == "huge":
        x *= 10 ** rng.uniform(0, 30)
    elif kind == "tiny":
        x *= 10 ** -rng.uniform(0, 44)
    elif kind == "infinite":
        x.view(-1)[0] = math.inf
    elif kind == "nan":
        x.view(-1)[-1] = math.nan
    elif kind == "constant":
        x.fill_(10 ** rng.uniform(-5, 30))
    elif kind == "cancelling":
        x = x.sign() * 10 ** rng.uniform(-5, 18)
    elif kind == "rare":
        x *= 1e6 * (torch.rand(shape) < 0.1)
    elif kind == "largest":
        x.fill_(3.4e38)
    return x


def neighbours(rng: Random, *shape: int) -> tuple[Tensor, Tensor]:
    """Rows with one example, and without it."""
    rows = torch.cat([example(rng, 1, *shape) for _ in range(rng.randint(1, 9))])
    rows = rows.to(rng.choice((torch.float32, torch.float64, torch.float16)))
    at = rng.randrange(len(rows))
    return rows, torch.cat([rows[:at], rows[at + 1 :]])


def normalization_moves(rng: Random) -> None:
    """Means and mean squares by no more than the bound that the noise is scaled by."""
    channels, pixels = rng.choice((1, 3, 27, 243)), rng.choice((1, 4, 64))
    how = NormRelease(1000, 1.0, 10 ** rng.uniform(-3, 3), 10 ** rng.uniform(-3, 3))
    mean = torch.randn(channels, dtype=torch.float64) * 10 ** rng.uniform(-3, 6)
    std = torch.rand(channels, dtype=torch.float64) * 10 ** rng.uniform(-8, 6) + 1e-9

    def sums(rows: Tensor) -> tuple[Tensor, Tensor]:
        norm, found = PrivateDataNorm(mean, std), []
        norm._adopt = lambda m, variance, noise: found.extend([m, variance + m**2])  # type: ignore[method-assign]
        norm.release(rows.split(rng.randint(1, 9)), how, ledger=None, key=Silent())  # type: ignore[arg-type]
        return found[0] * how.count, found[1] * how.count

    for a, b, bound in zip(
        *map(sums, neighbours(rng, channels, pixels)), (how.mean_bound, how.square_bound), strict=True
    ):
        covered, grid = normalization._noise_scale(channels, bound, 1.0)
        assert float((a - b).norm()) <= covered * (1 + 1e-9) + 1e-9 * grid  # read off a quotient and a square


def component_moves(rng: Random) -> None:
    """The sum of outer products by no more than R^2, in the norm that its noise has: exactly, in integers."""
    features, bound = rng.choice((1, 2, 16, 100)), 10 ** rng.uniform(-6, 6)
    rows, fewer = neighbours(rng, features)
    unit = (bound / 2**15) ** 2
    a, b = (
        PCARelease(bound, 1.0).second_moments(r, ledger=None, key=Silent()) / unit  # type: ignore[arg-type]
        for r in (rows, fewer)
    )
    assert int((a - b).round().long().square().sum()) <= 4**30


def count_moves(rng: Random) -> None:
    """Support counts by one in all."""
    features, points = rng.choice((2, 16)), torch.randn(9, 16)
    directions = torch.linalg.qr(torch.randn(features, features, dtype=torch.float64)).Q[:2]
    rows, _ = neighbours(rng, features)
    scores, at = torch.rand(len(rows)), rng.randrange(len(rows))
    scores[rng.randrange(len(rows))] = math.nan
    keep = torch.arange(len(rows)) != at
    options = {"threshold": 0.3, "bound": 10 ** rng.uniform(-3, 3), "ledger": None, "key": Silent()}
    a, b = (
        SupportRelease(1.0).counts(rows[k], scores[k], points[:, :features], directions, **options)  # type: ignore[arg-type]
        for k in (keep | True, keep)
    )
    assert int((a - b).abs().sum()) <= 1


@pytest.fixture(autouse=True)
def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "discrete_laplace", lambda *_, **__: 0)


SEARCHES = [normalization_moves, component_moves, count_moves]


def search(move: Callable[[Random], None], seeds: range) -> None:
    for seed in seeds:
        torch.manual_seed(seed)
        move(Random(f"{move.__name__} {seed}"))


@pytest.mark.parametrize("move", SEARCHES)
def test_one_example_moves_no_release_by_more_than_its_noise_covers(move: Callable[[Random], None]) -> None:
    search(move, range(FEW))


@pytest.mark.slow
@pytest.mark.parametrize("move", SEARCHES)
def test_one_example_moves_no_release_in_many_cases(move: Callable[[Random], None]) -> None:
    search(move, range(FEW, FEW + MANY))
