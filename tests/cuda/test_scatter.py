"""Scattering features of a GPU against the CPU's."""

import pytest
import torch

from dpkernels.features import ScatterNet


@pytest.mark.parametrize(
    ("shape", "J", "L"), [((3, 32, 32), 2, 8), ((1, 28, 28), 2, 8), ((2, 17, 21), 2, 6), ((1, 40, 33), 3, 4)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_features(shape: tuple[int, int, int], J: int, L: int, dtype: torch.dtype) -> None:
    net, images = ScatterNet(shape, J, L), torch.rand(5, *shape, dtype=dtype)
    features = net(images.cuda())
    assert features.is_cuda
    want = net(images)
    assert features.dtype == want.dtype
    torch.testing.assert_close(features.cpu(), want, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-6)
    assert torch.equal(net(images[2:3].cuda())[0], features[2])
    assert net(images[:0].cuda()).shape == (0, *net.feature_shape)


def test_images_that_are_too_large() -> None:
    with pytest.raises(RuntimeError, match="images must be small enough"):
        ScatterNet((1, 128, 128))(torch.rand(1, 1, 128, 128).cuda())
