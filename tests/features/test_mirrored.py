"""Mirrored features are the same for an image and its mirror image, and lose nothing of a symmetric one."""

import pytest
import torch

from dpkernels.features import Mirrored, PublicWhitening, ScatterNet, public_statistics

SHAPES = [((3, 32, 32), (243, 8, 5)), ((1, 28, 28), (81, 7, 4)), ((2, 17, 6), (162, 4, 1)), ((1, 4, 4), (81, 1, 1))]


@pytest.mark.parametrize(("shape", "features"), SHAPES)
def test_an_image_and_its_mirror_image_have_the_same(shape: tuple[int, ...], features: tuple[int, ...]) -> None:
    net = Mirrored(ScatterNet(shape))
    images = torch.rand(3, *shape)
    computed = net(images)
    assert net.feature_shape == features
    assert computed.shape == (3, *features)
    assert torch.equal(computed, net(images.flip(-1)))
    assert not torch.allclose(computed, net(images.flip(-2)))
    assert net(images[:0]).shape == (0, *features)


def test_they_are_the_mean_of_both() -> None:
    scatter = ScatterNet((1, 12, 16))
    net = Mirrored(scatter)
    images = torch.rand(5, 1, 12, 16, dtype=torch.float64)
    mean = torch.stack([scatter(images), scatter(images.flip(-1))]).mean(0)
    torch.testing.assert_close(net(images), mean[..., :3], rtol=1e-14, atol=0)
    symmetric = torch.cat([images[..., :8], images[..., :8].flip(-1)], -1)
    assert torch.equal(net(symmetric), scatter(symmetric)[..., :3])


def test_they_can_be_decorrelated_and_have_a_name_of_their_own() -> None:
    scatter = ScatterNet((1, 8, 8), J=1, L=2)
    net = Mirrored(scatter)
    whitening = PublicWhitening(public_statistics(net, (1, 8, 8), count=50))
    assert whitening(net(torch.rand(2, 1, 8, 8))).shape == (2, *net.feature_shape)
    assert net.fingerprint != scatter.fingerprint
    assert net.fingerprint == Mirrored(ScatterNet((1, 8, 8), J=1, L=2)).fingerprint
    assert net.fingerprint != Mirrored(ScatterNet((1, 8, 8), J=1, L=4)).fingerprint
