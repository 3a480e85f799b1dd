"""Features of images: what they are taken of, and by what they are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dpkernels._native import active_isa, isas, set_isa
from dpkernels.features import GroupNorm, PrivateDataNorm, public_statistics
from dpkernels.training import build
from dpkernels.training.config import FEATURES

SHAPE = (3, 16, 16)


def features(images: Tensor, norm: str) -> Tensor:
    found = build.features_of("scatternet", SHAPE)
    assert found.pixel_range is not None
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
    assert build.features_of("scatternet", (1, 28, 28)).pixel_range == (0.0, 1.0)


def test_other_features_have_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprints() -> list[str]:
        return [build.features_of(name, SHAPE).fingerprint for name in FEATURES]

    here = fingerprints()
    assert (here[0], len(set(here))) == ("", len(FEATURES))
    for name in ("PHOTOGRAPH", "VERSION"):
        with monkeypatch.context() as changed:
            changed.setattr(build, name, (0.0, 2.0) if name == "PHOTOGRAPH" else 0)
            there = fingerprints()
        assert there[0] == ""
        for feature, old, new in zip(FEATURES[1:], here[1:], there[1:], strict=True):
            assert (old != new) == (name == "PHOTOGRAPH" or "whitened" in feature)


def test_processors_that_round_otherwise_know_each_others_features() -> None:
    before, known = active_isa(), set()
    try:
        for isa in isas():
            set_isa(isa)
            known.add(build.features_of("scatternet-mirrored-whitened", SHAPE).fingerprint)
    finally:
        set_isa(before)
    assert len(known) == 1
