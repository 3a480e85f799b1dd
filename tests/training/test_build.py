"""What features are taken of: photographs' pixels around 0, which only normalization within an example can tell."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpkernels.features import GroupNorm, PrivateDataNorm, public_statistics
from dpkernels.training import build

SHAPE = (3, 16, 16)


def features(images: Tensor, norm: str) -> Tensor:
    found = build.features_of("scatternet", SHAPE)
    assert found is not None
    low, high = found.pixel_range
    layer: nn.Module = GroupNorm(27, found.shape[0])
    if norm == "public":
        public = public_statistics(found.transform, SHAPE, value_range=found.pixel_range)
        layer = PrivateDataNorm(public.mean, public.std)
    return layer(found.transform(images * (high - low) + low))


@pytest.mark.parametrize(("norm", "alike"), [("public", True), ("group", False)])
def test_what_pixels_are_scaled_to_is_nothing_to_normalization_by_channel(
    norm: str, alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = torch.rand(5, *SHAPE, generator=torch.Generator().manual_seed(1))
    around_zero = features(images, norm)
    monkeypatch.setattr(build, "PHOTOGRAPH", build.UNIT)
    assert torch.allclose(features(images, norm), around_zero, atol=2e-3) == alike


def test_drawings_keep_their_black() -> None:
    found = build.features_of("scatternet", (1, 28, 28))
    assert found is not None
    assert found.pixel_range == (0.0, 1.0)
    assert build.features_of("none", (1, 28, 28)) is None
