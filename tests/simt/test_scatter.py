"""The CUDA kernels of the scattering transform against their reference in float64, and the CPU's kernel."""

import pytest
import torch

from dpkernels.ops import scatter as ops
from dpkernels.ops.scatter import Filters
from dpkernels.reference import scatter as reference
from tests.ops.test_scatter import filters
from tests.simt.machine import Machine

# (image, padded, scales, angles). The first two have kernels of their own; then every radix (8, 6, 4, 5, 3, 2, 7, 11),
# alone and one after another, sides of one pixel, and angles that do not fill a buffer.
FIXED = [((32, 32), (40, 40), 2, 3), ((28, 28), (36, 36), 2, 1)]
CASES = [((3, 9), (6, 14), 1, 3), ((17, 20), (44, 28), 2, 1), ((1, 2), (12, 20), 2, 5), ((9, 30), (24, 48), 3, 1)]


def on_device(simt: Machine, images: torch.Tensor, planned: Filters) -> torch.Tensor:
    return simt.scatter(images, *planned.operands(images.dtype), planned.angles)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).abs().amax() / want.abs().amax()).item()


@pytest.mark.parametrize("case", [*FIXED, *CASES])
def test_matches_reference_and_cpu(simt: Machine, case: tuple) -> None:
    planned = filters(*case)
    images = torch.randn(1, *case[0], dtype=torch.float64)
    want = reference.scatter(images, planned)
    single = images.float()
    got = on_device(simt, single, planned)
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    assert error(got, want) < 1e-6
    assert error(got, ops.scatter(single, planned)) < 1e-6
    if case in CASES[:2]:
        assert error(on_device(simt, images, planned), want) < 1e-14


@pytest.mark.parametrize("angles", [1, 6])
def test_a_plane_depends_on_no_other(simt: Machine, angles: int) -> None:
    planned = filters((6, 7), (12, 12), 2, angles)
    images = torch.randn(3, 6, 7)
    got = on_device(simt, images, planned)
    assert error(got, reference.scatter(images.double(), planned)) < 1e-6
    images[1] = torch.nan
    changed = on_device(simt, images, planned)
    assert torch.equal(changed[[0, 2]], got[[0, 2]])
    assert changed[1].isnan().all()
    assert on_device(simt, images[:0], planned).shape == (0, *planned.feature_shape)


def test_indices_outside_of_the_image_are_not_followed(simt: Machine) -> None:
    """Nobody can check them before the launch: they lie on the device."""
    planned = filters((6, 7), (12, 12), 1, 1)
    images = torch.randn(1, 6, 7)
    *matrices, rows, columns = planned.operands(torch.float32)
    outside = torch.where(rows == 5, 10**12, torch.where(rows == 0, -(10**12), rows))
    assert torch.equal(simt.scatter(images, *matrices, outside, columns, 1), on_device(simt, images, planned))
