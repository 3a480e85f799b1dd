"""Synthetic images are reproducible and natural-like, and their statistics come from no data."""

from __future__ import annotations

import pytest
import torch

from dpkernels.features import PublicWhitening, ScatterNet, public_statistics, synthetic_images
from dpkernels.features.public import VERSION


def test_images_are_reproducible_and_in_range() -> None:
    images = synthetic_images(20, (3, 12, 10))
    assert images.shape == (20, 3, 12, 10)
    assert images.dtype == torch.float32
    assert images.min() >= 0
    assert images.max() <= 1
    assert torch.equal(images, synthetic_images(20, (3, 12, 10)))
    assert not torch.equal(images, synthetic_images(20, (3, 12, 10), seed=1))
    assert synthetic_images(0, (1, 8, 8)).shape == (0, 1, 8, 8)


def test_the_amplitude_falls_with_frequency() -> None:
    images = synthetic_images(300, (1, 64, 64))
    power = torch.fft.fft(images[:, 0], dim=2).abs().square().mean((0, 1))
    octaves = [power[2:4].mean(), power[4:8].mean(), power[8:16].mean()]
    assert octaves[0] > 1.5 * octaves[1] > 2.25 * octaves[2]


def test_colours_vary_along_grey_most() -> None:
    images = synthetic_images(300, (3, 16, 16)).transpose(0, 1).flatten(1)
    correlation = torch.corrcoef(images)
    assert correlation.min() > 0.6
    assert synthetic_images(300, (2, 16, 16)).transpose(0, 1).flatten(1).corrcoef()[0, 1].abs() < 0.2


def test_statistics_are_those_of_the_features() -> None:
    net = ScatterNet((1, 8, 8), J=1, L=2)
    public = public_statistics(net, (1, 8, 8), count=100, value_range=(-1.0, 1.0))
    features = net(synthetic_images(100, (1, 8, 8)) * 2 - 1).transpose(0, 1).flatten(1).double()
    torch.testing.assert_close(public.mean, features.mean(1))
    torch.testing.assert_close(public.std, features.std(1, correction=0))
    with pytest.raises(ValueError, match="channels that vary, got 1 that do not"):
        public_statistics(torch.zeros_like, (1, 8, 8), count=10)


def test_whitening_removes_public_correlation() -> None:
    net = ScatterNet((1, 8, 8), J=1, L=2)
    public = public_statistics(net, (1, 8, 8), count=200)
    features = net(synthetic_images(200, (1, 8, 8))).double()

    def correlation(x: torch.Tensor) -> torch.Tensor:
        rows = x.transpose(0, 1).flatten(1)
        return rows @ rows.T / rows.shape[1]

    for power in (0.0, 0.25, 0.5):
        whitening = PublicWhitening(public, power)
        values, vectors = torch.linalg.eigh(public.correlation)
        raised = values + 0.01 * values.mean()
        expected = (vectors * values * raised ** (-2 * power)) @ vectors.T
        torch.testing.assert_close(correlation(whitening(features)), expected, rtol=1e-5, atol=1e-8)
    assert PublicWhitening(public, 0.5)(features[:0]).shape == features[:0].shape
    flat = whitening(features[..., 0, 0])
    torch.testing.assert_close(flat, whitening(features)[..., 0, 0])
    assert whitening(features.float()).dtype == torch.float32
    with pytest.raises(ValueError, match=r"power must be a number with 0 <= power <= 0\.5, got 0\.6"):
        PublicWhitening(public, 0.6)
    with pytest.raises(ValueError, match=r"features must be \[batch, 3, \.\.\.\], got \(2, 4\)"):
        whitening(torch.zeros(2, 4))


def test_other_statistics_are_another_version() -> None:
    """Runs and trained models know their whitening by `VERSION` alone: where these numbers change, raise it."""
    public = public_statistics(ScatterNet((3, 16, 16), J=1, L=2), (3, 16, 16))
    measured = [*public.mean[:3].tolist(), *public.std[:3].tolist(), PublicWhitening(public).matrix.norm().item()]
    version_1 = [0.49787124, 0.05747207, 0.05827495, 0.16159731, 0.01727701, 0.01755282, 189.11666]
    assert VERSION == 1
    assert measured == pytest.approx(version_1, rel=1e-5)
