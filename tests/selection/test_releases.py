"""Private releases of a selection: bounded for every example, noisy as accounted, exact whatever is beside a row."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from dpkernels.accounting import Gaussian, Ledger, PureEpsilon
from dpkernels.random import Domain, Key, discrete_laplace
from dpkernels.selection import PCARelease, SupportRelease
from dpkernels.selection.pca import BITS, fixed_point
from dpkernels.selection.support import nearest

UNIT = 4.0**-BITS  # of a second moment, where the bound is 1


class Silent:
    """A key whose noise is 0, to see what is released beside the noise."""

    def claim(self, domain: Domain) -> int:
        return 0

    def grid_normal(self, domain: Domain, step: int, count: int, **rest: float) -> Tensor:
        return torch.zeros(count, dtype=torch.float64)

    def bits(self, domain: Domain, step: int, count: int, *, offset: int = 0) -> Tensor:
        raise AssertionError("counts need noise")


def moments(rows: Tensor, bound: float = 1.0) -> Tensor:
    """The sum of outer products before noise."""
    return PCARelease(bound, 1.0).second_moments(rows, ledger=None, key=Silent())  # type: ignore[arg-type]


def in_triangle(matrix: Tensor) -> Tensor:
    """v(A) of `PCARelease`: the diagonal, and sqrt(2) times what is above it."""
    upper = torch.triu_indices(*matrix.shape, 1)
    return torch.cat([matrix.diagonal(), math.sqrt(2) * matrix[upper[0], upper[1]]])


def extreme_rows(features: int) -> Tensor:
    """Rows that try to move the sum by more than they may."""
    rows = torch.randn(30, features, dtype=torch.float64) * torch.logspace(-3, 3, 30)[:, None]
    rows[0], rows[1], rows[2] = 0, 0, 1e200
    rows[0, 0], rows[1, 1], rows[3, 0], rows[4, 0] = 1e30, -1.0, math.nan, math.inf
    rows[5] = 1 / math.sqrt(features)
    return rows


def test_no_example_moves_the_sum_by_more_than_the_bound() -> None:
    rows = extreme_rows(7)
    whole = moments(rows)
    assert whole.isfinite().all()
    moved = [in_triangle(whole - moments(torch.cat([rows[:i], rows[i + 1 :]]))).norm().item() for i in range(len(rows))]
    assert max(moved) <= 1.0
    assert max(moved[:2]) == 1.0  # rows along an axis reach it: the noise could not be less
    assert moved[2:5] == [0.0, 0.0, 0.0]  # a norm beyond float64, or none


def test_the_sum_is_that_of_the_rows_in_any_order() -> None:
    rows = torch.randn(500, 9)
    rows /= rows.norm(dim=1, keepdim=True) * torch.rand(500, 1).add(1)
    torch.testing.assert_close(moments(rows, 3.0), rows.double().T @ rows.double(), rtol=0, atol=500 * 3e-4)
    assert torch.equal(moments(rows), moments(rows[torch.randperm(500)]))
    assert torch.equal(moments(rows[:0]), torch.zeros(9, 9, dtype=torch.float64))
    clipped = fixed_point(5 * rows, 1.0) / 2**BITS
    torch.testing.assert_close(clipped.float(), torch.nn.functional.normalize(rows), rtol=0, atol=2.0**-BITS)


def test_noise_of_components_is_that_of_the_accounting() -> None:
    """Releases of nothing: sigma R^2 on the diagonal, sigma R^2 / sqrt(2) beside it, symmetric, normal."""
    how = PCARelease(bound=3.0, noise_multiplier=2.0)
    nothing = torch.zeros(0, 40)
    drawn = torch.stack([how.second_moments(nothing, ledger=None, key=Key.from_seed(seed)) for seed in range(20)])
    assert torch.equal(drawn, drawn.transpose(1, 2))
    values = torch.stack([in_triangle(matrix) for matrix in drawn]) / (2.0 * 9.0)
    for part in (values[:, :40], values[:, 40:]):
        assert part.std().item() == pytest.approx(1.0, abs=4 / math.sqrt(2 * part.numel()))
        assert stats.kstest(part.flatten().numpy(), "norm").pvalue > 1e-3
    assert torch.corrcoef(values.T)[0, 1:].abs().max() < 0.9
    assert (drawn / (9.0 * UNIT) == (drawn / (9.0 * UNIT)).round()).all()  # nothing hides below the grid
    fresh = [how.second_moments(nothing, ledger=None) for _ in range(2)]
    assert not torch.equal(*fresh)


def test_components_are_found_and_paid_for() -> None:
    axes = torch.linalg.qr(torch.randn(8, 8)).Q[:2]
    rows = torch.randn(4000, 2) @ (torch.tensor([[0.3], [0.1]]) * axes)
    how, ledger = PCARelease(1.0, 5.0), Ledger()
    found = how.components(rows, 2, ledger=ledger, key=Key.from_seed(0))
    assert found.shape == (2, 8)
    assert ((found.float() @ axes.T).abs() - torch.eye(2)).abs().max() < 0.2
    (entry,) = ledger.entries()
    assert (entry.what, entry.event) == ("principal components", Gaussian(5.0))


def brute_force(rows: Tensor, points: Tensor, axes: Tensor) -> Tensor:
    places = [[float(row @ axis) for axis in axes] for row in rows]
    targets = [[float(point @ axis) for axis in axes] for point in points]
    best = [min(range(len(targets)), key=lambda j, place=place: math.dist(place, targets[j])) for place in places]
    return torch.tensor(best, dtype=torch.int64)


def test_nearest_is_the_brute_forces_and_a_rows_own() -> None:
    rows, points = torch.rand(150, 6), torch.rand(20, 6)
    axes = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q[:3]
    found = nearest(rows, points, axes, bound=3.0)
    assert torch.equal(found, brute_force(rows.double(), points.double(), axes))
    alone = torch.cat([nearest(row[None], points, axes, bound=3.0) for row in rows])
    assert torch.equal(found, alone)
    twice = torch.cat([points[:3], points])  # of equal points the first one
    assert torch.equal(nearest(points, twice, torch.eye(6), bound=3.0), torch.tensor([0, 1, 2, *range(6, 23)]))
    assert nearest(rows[:0], points, axes, bound=3.0).shape == (0,)


def support(rows: Tensor, scores: Tensor, points: Tensor, **change: object) -> Tensor:
    options = {"threshold": 0.5, "bound": 3.0, "ledger": None, "key": Key.from_seed(7)} | change
    return SupportRelease(0.7).counts(rows, scores, points, torch.eye(4), **options)  # type: ignore[arg-type]


def test_one_example_changes_one_count_by_one() -> None:
    """Every neighbour of a data set, with the same noise: the released counts differ as the true ones do."""
    rows, scores, points = torch.randn(60, 4), torch.rand(60), torch.randn(9, 4)
    rows[0, 2] = math.nan
    whole = support(rows, scores, points)
    changes = []
    for i in range(60):
        keep = torch.arange(60) != i
        changes.append(int((whole - support(rows[keep], scores[keep], points)).abs().sum()))
    assert changes == [0, *(scores[1:] >= 0.5).long().tolist()]
    noise = discrete_laplace(Key.from_seed(7), Domain.SELECTION, 0, 9, epsilon=0.7)
    assert (whole - noise).sum() == sum(changes)
    assert (whole - noise).min() >= 0


def test_the_papers_own_rule_changes_two_counts() -> None:
    """The k most uncertain: one more example evicts another, so that noise for a sensitivity of 1 is half of enough."""
    points = torch.eye(4)
    rows, scores = torch.eye(4)[:2], torch.tensor([0.2, 0.9])

    def of_top(rows: Tensor, scores: Tensor) -> Tensor:
        chosen = scores.argsort(descending=True)[:1]
        return nearest(rows[chosen], points, torch.eye(4), bound=2.0).bincount(minlength=4)

    assert (of_top(rows, scores) - of_top(rows[:1], scores[:1])).abs().sum() == 2


@pytest.mark.parametrize("epsilon", [0.1, 0.7, 1.0, 3.0])
def test_counts_have_discrete_laplace_noise(epsilon: float) -> None:
    drawn = discrete_laplace(Key.from_seed(round(10 * epsilon)), Domain.SELECTION, 1, 8000, epsilon=epsilon).double()
    r = math.exp(-epsilon)
    assert drawn.var().item() == pytest.approx(2 * r / (1 - r) ** 2, rel=0.1)
    assert abs(drawn.mean().item()) < 4 * math.sqrt(2 * r / (1 - r) ** 2 / 8000)
    edge = int(math.log(8000 / 20) / epsilon)
    inside = torch.arange(-edge, edge + 1)
    expected = 8000 * (1 - r) / (1 + r) * r ** inside.abs().double()
    observed = torch.tensor([(drawn == value).sum() for value in inside])
    tails = [(drawn < -edge).sum(), (drawn > edge).sum()]
    outside = 8000 * r ** (edge + 1) / (1 + r)
    counts = [*observed.tolist(), *map(int, tails)]
    assert stats.chisquare(counts, [*expected.tolist(), outside, outside]).pvalue > 1e-3


def test_the_mechanism_has_the_losses_of_its_event() -> None:
    """The probability of every released value changes by exp(epsilon) at most, and by that everywhere: the privacy
    curve is that of a `PureEpsilon`, above that of continuous Laplace noise."""
    epsilon, delta = 0.7, 0.05
    z = torch.arange(-200, 201).double()
    r = math.exp(-epsilon)
    p, q = (1 - r) / (1 + r) * r ** z.abs(), (1 - r) / (1 + r) * r ** (z - 1).abs()
    assert (p / q).log().abs().sub(epsilon).abs().max() < 1e-9
    event = SupportRelease(epsilon).event
    assert event == PureEpsilon(epsilon)
    ledger = Ledger()
    ledger.record(event, "counts")
    bound = ledger.bound(delta)
    assert (p - math.exp(bound.upper) * q).clamp(min=0).sum() <= delta
    assert (p - math.exp(bound.lower - 1e-3) * q).clamp(min=0).sum() >= delta


def test_counts_are_paid_for_and_fresh() -> None:
    rows, scores, points = torch.randn(60, 4), torch.ones(60), torch.randn(9, 4)
    ledger = Ledger()
    support(rows, scores, points, ledger=ledger)
    (entry,) = ledger.entries()
    assert (entry.what, entry.event) == ("support counts", PureEpsilon(0.7))
    drawn = [support(rows, scores, torch.randn(300, 4), key=None) for _ in range(2)]
    assert not torch.equal(*drawn)


def test_what_is_refused() -> None:
    for arguments, words in (
        ((0.0, 1.0), "bound must be a finite number > 0, got 0.0"),
        ((1.0, 0.0), "noise_multiplier must be a finite number > 0, got 0.0"),
        ((1.0, 2000.0), "noise_multiplier must be at most 1024, got 2000.0"),
    ):
        with pytest.raises(ValueError, match=words):
            PCARelease(*arguments)
    with pytest.raises(ValueError, match="epsilon must be a number between"):
        SupportRelease(0.0)
    with pytest.raises(ValueError, match="epsilon must be a finite number"):
        discrete_laplace(Key.from_seed(0), Domain.SELECTION, 0, 1, epsilon=math.inf)
    with pytest.raises(TypeError, match="epsilon must be a number, got str"):
        discrete_laplace(Key.from_seed(0), Domain.SELECTION, 0, 1, epsilon="1")  # type: ignore[arg-type]
    rows, axes = torch.randn(3, 4), torch.eye(4)
    with pytest.raises(ValueError, match="count must be between 1 and 4, got 5"):
        PCARelease(1.0, 1.0).components(rows, 5, ledger=None)
    with pytest.raises(ValueError, match="points must hold at least one row"):
        nearest(rows, rows[:0], axes, bound=1.0)
    with pytest.raises(ValueError, match="directions must have rows of norm 1"):
        nearest(rows, rows, 2 * axes, bound=1.0)
    with pytest.raises(ValueError, match="as many features"):
        nearest(rows, rows, torch.eye(3), bound=1.0)
    with pytest.raises(ValueError, match=r"scores must be \[3\], one per private row"):
        support(rows, torch.zeros(2), rows)


def test_releases_with_one_key_share_no_noise() -> None:
    """Of the same data, so that equal noise would give equal releases: in any order, also of two kinds."""
    key, rows = Key.fresh(), torch.zeros(5, 4)
    pca, counts = PCARelease(1.0, 1.0), SupportRelease(0.1)
    how = {"threshold": 0.5, "bound": 1.0, "ledger": None, "key": key}
    first, second = (counts.counts(rows, torch.ones(5), torch.eye(4), torch.eye(4), **how) for _ in range(2))
    moments = [pca.second_moments(rows, ledger=None, key=key) for _ in range(2)]
    assert not torch.equal(first, second)
    assert not torch.equal(*moments)
    fresh = Key.from_seed(3)
    assert torch.equal(
        pca.second_moments(rows, ledger=None, key=fresh), pca.second_moments(rows, ledger=None, key=Key.from_seed(3))
    )
    assert fresh.free(Domain.SELECTION) == 1
