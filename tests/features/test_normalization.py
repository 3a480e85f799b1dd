"""Private statistics: right without noise, bounded for every example, noisy as accounted, paid for first."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch import Tensor

import dpkernels as dpk
from dpkernels.accounting import Gaussian, Ledger, SampledGaussian
from dpkernels.accounting.ledger import BudgetExceededError
from dpkernels.features import GroupNorm, NormRelease, PrivateDataNorm
from dpkernels.random import Domain, Key

QUIET = 1e-12  # a noise multiplier that changes nothing that is tested


def plain(channels: int, **options: float) -> PrivateDataNorm:
    """Without public statistics and without a prior: the algorithm of the paper."""
    options = {"min_ratio": 1e-3, "prior": math.inf} | options
    return PrivateDataNorm(torch.zeros(channels), torch.ones(channels), **options)


def features(rows: int = 50, channels: int = 6) -> Tensor:
    scale = torch.logspace(-0.5, 0.5, channels)[:, None, None]
    return scale * (torch.randn(rows, channels, 3, 2) + 1)


def test_group_norm_is_torchs() -> None:
    x = torch.randn(4, 6, 5, 5)
    torch.testing.assert_close(GroupNorm(3, 6)(x), torch.nn.functional.group_norm(x, 3))
    assert not list(GroupNorm(3, 6).parameters())
    with pytest.raises(ValueError, match="groups must divide channels=6, got 4"):
        GroupNorm(4, 6)
    with pytest.raises(TypeError, match="groups must be an int, got float"):
        GroupNorm(3.0, 6)  # type: ignore[arg-type]


@pytest.mark.parametrize("public", [False, True])
def test_without_noise_it_normalizes(public: bool) -> None:
    x = features()
    norm = plain(6)
    if public:
        norm = PrivateDataNorm(torch.rand(6), 2 * torch.rand(6) + 0.1, min_ratio=1e-3, prior=math.inf)
    norm.release(x.split(7), NormRelease(50, QUIET, 1e2, 2e3), ledger=None)
    y = norm(x)
    assert y.mean((0, 2, 3)).abs().max() < 1e-4
    torch.testing.assert_close(y.var((0, 2, 3), correction=0), torch.ones(6), rtol=1e-4, atol=0)
    assert norm.weak == 0
    assert norm(x[:0]).shape == (0, 6, 3, 2)
    assert norm(x.flatten(2)).shape == (50, 6, 6)


@pytest.mark.parametrize("shape", [(5, 3, 4, 6), (5, 1, 4, 6), (0, 3, 4, 6), (5, 3, 1, 1), (5, 3, 7), (5, 3)], ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_features_keep_their_layout(shape: tuple[int, ...], last: bool) -> None:
    layout = torch.channels_last if last and len(shape) == 4 else torch.preserve_format
    x = torch.randn(shape)
    norm = PrivateDataNorm(torch.arange(float(shape[1])), torch.arange(1.0, 1 + shape[1]))
    lying = x.to(memory_format=layout)
    assert norm(lying).stride() == lying.stride()
    wide = [1, -1, *[1] * (x.dim() - 2)]
    torch.testing.assert_close(norm(lying), ((x - norm.mean.view(wide)) / norm.std.view(wide)).float())


def test_sums_are_divided_by_the_planned_number() -> None:
    x = torch.full((10, 1, 2, 2), 3.0)
    norm = plain(1)
    norm.release([x], NormRelease(20, QUIET, 100.0, 100.0), ledger=None)  # ten of the twenty are not there
    assert norm.mean.item() == pytest.approx(1.5, abs=1e-3)
    assert norm.std.item() ** 2 == pytest.approx(4.5 - 1.5**2, abs=1e-2)


def test_every_example_is_clipped() -> None:
    norm = plain(4)
    rows = torch.cat([1e20 * torch.randn(3, 4, 5), 1e-3 * torch.randn(3, 4, 5), torch.zeros(1, 4, 5)])
    rows[0, 0, 0] = math.inf
    rows[1, 1, 0] = math.nan
    parts = norm._contributions(rows, NormRelease(10, 1.0, 0.5, 2.0))
    assert parts.shape == (2, 7, 4)
    assert parts.isfinite().all()
    assert (parts[:, :2] == 0).all()
    assert (parts[0].norm(dim=1) <= 0.5 * (1 + 1e-12)).all()
    assert (parts[1].norm(dim=1) <= 2.0 * (1 + 1e-12)).all()
    torch.testing.assert_close(parts[0, 3:6], rows[3:6].double().mean(2))


def test_contributions_are_in_public_units() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = 3 + 2 * torch.randn(9, 5, 7, generator=generator, dtype=torch.float64)
    norm = PrivateDataNorm(torch.linspace(-4, 4, 5), torch.linspace(0.2, 3, 5))
    units = norm(rows)
    parts = norm._contributions(rows, NormRelease(10, 1.0, 1e9, 1e9))
    torch.testing.assert_close(parts, torch.stack([units.mean(2), units.square().mean(2)]), rtol=1e-12, atol=1e-12)


def test_noise_is_that_of_the_accounting() -> None:
    """Over many releases of nothing: mean and mean square are noise alone, of sigma bound / count."""
    means, squares = [], []
    how = NormRelease(100, 2.0, 3.0, 5.0)
    for seed in range(40):
        norm = plain(50, min_ratio=1e-6)
        noisy: list[Tensor] = []
        norm._adopt = lambda mean, variance, noise, keep=noisy: keep.extend([mean, variance + mean**2])  # type: ignore[method-assign]
        norm.release([torch.zeros(0, 50, 2)], how, ledger=None, key=Key.from_seed(seed))
        means.append(noisy[0])
        squares.append(noisy[1])
    for values, bound in ((torch.stack(means), 3.0), (torch.stack(squares), 5.0)):
        expected = 2.0 * bound / 100
        assert values.std().item() == pytest.approx(expected, rel=0.06)
        assert abs(values.mean().item()) < 4 * expected / math.sqrt(2000)
        assert len(values.unique()) > 1900


def test_event_is_claim_b5() -> None:
    """Two releases at sigma cost (alpha, alpha / sigma^2)-RDP: one at sigma / sqrt(2)."""
    how = NormRelease(100, 8.0, 1.0, 1.0)
    assert how.event == Gaussian(8.0 / math.sqrt(2))
    bound = dpk.accounting.bound([how.event], 1e-5, "rdp").upper
    assert bound == pytest.approx(dpk.accounting.bound([Gaussian(8.0, 2)], 1e-5, "rdp").upper)
    sampled = NormRelease(100, 8.0, 1.0, 1.0, sampling_rate=0.1)
    assert sampled.event == SampledGaussian(8.0 / math.sqrt(2), 0.1)
    assert sampled.count == 10


def test_a_sample_is_fresh_secret_and_of_the_planned_rate() -> None:
    x = torch.ones(2000, 1, 1, 1)
    how = NormRelease(2000, QUIET, 10.0, 10.0, sampling_rate=0.1)
    counts = []
    for seed in range(3):
        parts, whole = plain(1), plain(1)
        parts.release(x.split(300), how, ledger=None, key=Key.from_seed(seed))
        whole.release([x], how, ledger=None, key=Key.from_seed(seed))
        assert torch.equal(parts.mean, whole.mean)  # however it comes in batches
        counts.append(parts.mean.item() * how.count)
    assert len(set(counts)) == 3
    assert all(140 < count < 260 for count in counts)


def test_channels_under_the_noise_keep_their_public_variance() -> None:
    public = torch.tensor([1.0, 1e-3])
    x = public[:, None, None] * torch.randn(400, 2, 4, 4) * 3
    raw = plain(2, min_ratio=1e-4)
    raw.release([x], NormRelease(400, 4.0, 2.0, 20.0), ledger=None, key=Key.from_seed(0))
    assert raw.weak == 1  # the second channel's variance is 1e-5, the noise 0.2
    norm = PrivateDataNorm(torch.zeros(2), public)
    norm.release([x], NormRelease(400, 4.0, 2.0, 20.0), ledger=None, key=Key.from_seed(0))
    assert norm.weak == 0
    torch.testing.assert_close(norm.std, 3 * public.double(), rtol=0.1, atol=0)
    drowned = PrivateDataNorm(torch.zeros(2), public)
    drowned.release([x], NormRelease(400, 1e5, 2.0, 20.0), ledger=None, key=Key.from_seed(0))
    torch.testing.assert_close(drowned.std, public.double(), rtol=1e-3, atol=0)
    floored = PrivateDataNorm(torch.zeros(2), 100 * public, min_ratio=0.5)
    floored.release([x], NormRelease(400, QUIET, 2.0, 20.0), ledger=None)
    torch.testing.assert_close(floored.std, 50 * public.double())


def test_it_is_paid_before_it_is_made() -> None:
    how = NormRelease(50, 8.0, 1.0, 1.0)
    plan = dpk.plan(dataset_size=50, batch_size=5, steps=10, delta=1e-5, noise_multiplier=2.0, compose_with=[how.event])
    ledger = Ledger(budget=plan)
    plain(6).release([features()], how, ledger=ledger)
    (entry,) = ledger.entries()
    assert (entry.what, entry.event, entry.is_step) == ("normalization statistics", how.event, False)
    again = plain(6)
    with pytest.raises(BudgetExceededError):
        again.release([features()], NormRelease(50, 0.1, 1.0, 1.0), ledger=ledger)
    assert torch.equal(again.std, torch.ones(6, dtype=torch.float64))
    assert again.weak is None


def test_statistics_are_released_once_and_kept() -> None:
    norm = plain(6)
    x = features()
    norm.release([x], NormRelease(50, 1.0, 1.0, 1.0), ledger=None)
    with pytest.raises(RuntimeError, match="released before"):
        norm.release([x], NormRelease(50, 1.0, 1.0, 1.0), ledger=None)
    file = io.BytesIO()
    torch.save(norm.state_dict(), file)
    file.seek(0)
    other = plain(6)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other(x), norm(x))


def test_fresh_keys_give_other_noise() -> None:
    first, second = plain(6), plain(6)
    for norm in (first, second):
        norm.release([features()[:0]], NormRelease(50, 1.0, 1.0, 1.0), ledger=None)
    assert not torch.equal(first.mean, second.mean)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dataset_size": 0}, "dataset_size must be a positive integer, got 0"),
        ({"noise_multiplier": 0.0}, "noise_multiplier must be a finite number > 0, got 0.0"),
        ({"mean_bound": math.inf}, "mean_bound must be a finite number > 0, got inf"),
        ({"square_bound": -1.0}, "square_bound must be a finite number > 0, got -1.0"),
        ({"sampling_rate": 0.0}, "sampling_rate must be a probability"),
    ],
)
def test_releases_that_are_refused(change: dict[str, float], words: str) -> None:
    values = {"dataset_size": 5, "noise_multiplier": 1.0, "mean_bound": 1.0, "square_bound": 1.0}
    with pytest.raises(ValueError, match=words):
        NormRelease(**(values | change))  # type: ignore[arg-type]


def test_statistics_and_features_that_are_refused() -> None:
    ones = torch.ones(3)
    with pytest.raises(ValueError, match="std positive"):
        PrivateDataNorm(ones, 0 * ones)
    with pytest.raises(ValueError, match="of one length"):
        PrivateDataNorm(ones, torch.ones(4))
    with pytest.raises(TypeError, match="mean must be a floating-point tensor"):
        PrivateDataNorm([0.0], ones)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_ratio must be"):
        PrivateDataNorm(ones, ones, min_ratio=0)
    norm = plain(3)
    with pytest.raises(ValueError, match=r"features must be \[batch, 3, \.\.\.\], got \(2, 4, 5\)"):
        norm(torch.zeros(2, 4, 5))
    with pytest.raises(ValueError, match=r"batches must give \[rows, 3, \.\.\.\]"):
        norm.release([torch.zeros(2, 4, 5)], NormRelease(5, 1.0, 1.0, 1.0), ledger=None)


def test_two_releases_with_one_key_share_no_noise() -> None:
    """Their difference would be free of noise otherwise, and tell the data."""
    key, means = Key.fresh(), []
    for _ in range(2):
        norm = PrivateDataNorm(torch.zeros(3), torch.ones(3), prior=math.inf)
        norm.release([torch.zeros(10, 3, 4)], NormRelease(10, 8.0, 1.0, 1.0, 0.5), ledger=None, key=key)
        means.append(norm.mean)
    assert (means[0] != means[1]).all()
    assert key.free(Domain.NORMALIZATION) == 6  # the noise of two sums and the sample, twice
