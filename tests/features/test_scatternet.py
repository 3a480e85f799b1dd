"""ScatterNet's features are kymatio's, whatever the batch, and it works inside a private model."""

import copy
import io
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dpkernels as dpk
from dpkernels.features import ScatterNet
from dpkernels.reference.scatter import scatter as reference


def kymatio(shape: tuple[int, int], J: int, L: int) -> nn.Module:
    # kymatio.torch does not import beside a new SciPy; its front end does.
    from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ScatteringTorch2D(J, shape, L)


CASES = [
    ((3, 32, 32), 2, 8),
    ((1, 28, 28), 2, 8),
    ((2, 17, 21), 2, 8),
    ((1, 40, 33), 3, 4),
    ((1, 5, 4), 1, 3),
    ((1, 9, 12), 3, 2),
    ((1, 4, 4), 2, 2),
]


@pytest.mark.parametrize(("shape", "J", "L"), CASES)
def test_agrees_with_kymatio(shape: tuple[int, int, int], J: int, L: int) -> None:
    net, peer = ScatterNet(shape, J, L), kymatio(shape[1:], J, L)
    images = torch.rand(4, *shape)
    features = net(images)
    assert features.shape == (4, *net.feature_shape)
    assert (features - peer(images).flatten(1, 2)).abs().max() < 1e-5
    wide = images.double()
    want = peer.double()(wide).flatten(1, 2)
    plain = reference(wide.flatten(0, 1), net.filters).view_as(want)
    assert (plain - want).abs().max() < 1e-10
    # kymatio's filters are single precision, so that its low pass is a product of two only to that precision.
    assert (net(wide) - want).abs().max() < 1e-7


def test_shapes_of_the_paper() -> None:
    assert ScatterNet((1, 28, 28)).feature_shape == (81, 7, 7)
    assert ScatterNet((3, 32, 32)).feature_shape == (243, 8, 8)


def test_orders_and_scales_name_the_channels() -> None:
    net = ScatterNet((2, 8, 8), J=2, L=2)
    assert net.orders().tolist() == 2 * [0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert net.scales() == 2 * [(), (0,), (0,), (1,), (1,), (0, 1), (0, 1), (0, 1), (0, 1)]
    assert ScatterNet((3, 32, 32)).orders().bincount().tolist() == [3, 48, 192]


def test_batches_of_any_size_and_layout() -> None:
    net = ScatterNet((2, 9, 8), J=1, L=2)
    images = torch.rand(5, 9, 8, 2).permute(0, 3, 1, 2)
    features = net(images)
    assert torch.equal(features, net(images.contiguous()))
    assert torch.equal(features[2:3], net(images[2:3]))
    assert net(images[:0]).shape == (0, *net.feature_shape)


def test_copies_and_files() -> None:
    net = ScatterNet((1, 8, 8), J=1, L=2)
    images = torch.rand(2, 1, 8, 8)
    assert torch.equal(copy.deepcopy(net)(images), net(images))
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(images), net(images))
    assert net.state_dict() == {}
    assert repr(net) == "ScatterNet((1, 8, 8), J=1, L=2)"


def test_inside_a_private_model() -> None:
    net = ScatterNet((1, 8, 8), J=1, L=2)
    model = nn.Sequential(net, nn.Flatten(), nn.Linear(3 * 4 * 4, 3))
    images, labels = torch.rand(6, 1, 8, 8), torch.arange(6) % 3
    clipper = dpk.GhostClipper(model, max_grad_norm=0.1)
    result = clipper.backward(F.cross_entropy(model(images), labels, reduction="none"))
    clipper.detach()
    features = net(images).flatten(1)
    total = torch.zeros_like(model[2].weight, dtype=torch.float64)
    for x, y in zip(features, labels, strict=True):
        grads = torch.autograd.grad(F.cross_entropy(model[2](x), y), list(model[2].parameters()))
        total += grads[0] * min(1.0, 0.1 / torch.cat([g.flatten() for g in grads]).norm())
    torch.testing.assert_close(result.grads["2.weight"], total, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (((32, 32),), ValueError, r"shape must be \(channels, height, width\), got \(32, 32\)"),
        (((1, 3, 32),), ValueError, r"at least 2\^J = 4"),
        (((1, 32, 32), 0), ValueError, "J must be at least 1, got 0"),
        (((1, 32, 32), 2.0), TypeError, "J must be an int, got float"),
        (((1, 32, 32), 6), ValueError, r"at least 2\^J = 64"),
        (((1, 32, 32), 2, 0), ValueError, "L must be at least 1, got 0"),
        (((0, 32, 32),), ValueError, r"shape\[0\] must be at least 1, got 0"),
    ],
)
def test_arguments_that_are_refused(arguments: tuple, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ScatterNet(*arguments)


def test_images_that_are_refused() -> None:
    net = ScatterNet((1, 8, 8), J=1, L=2)
    with pytest.raises(ValueError, match=r"images must be \[batch, 1, 8, 8\], got \(2, 3, 8, 8\)"):
        net(torch.rand(2, 3, 8, 8))
    with pytest.raises(ValueError, match=r"got \(1, 8, 8\)"):
        net(torch.rand(1, 8, 8))
    with pytest.raises(TypeError, match=r"images must be a floating-point tensor, got torch\.uint8"):
        net(torch.zeros(1, 1, 8, 8, dtype=torch.uint8))
    with pytest.raises(TypeError, match="got list"):
        net([1.0])
    images = torch.rand(1, 1, 8, 8, requires_grad=True)
    with pytest.raises(ValueError, match=r"images must not require a gradient: ScatterNet has no backward; detach\(\)"):
        net(images)
    with pytest.raises(ValueError, match="images must not require a gradient"):
        nn.Sequential(nn.Conv2d(1, 1, 1), net)(images.detach())
    with torch.no_grad():
        assert torch.equal(net(images), net(images.detach()))
