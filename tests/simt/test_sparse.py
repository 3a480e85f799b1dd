"""The CUDA kernel of selected gradient entries against its reference in float64."""

import pytest
import torch
from torch.nn import functional as F

from dpkernels.reference import sparse as reference
from tests.simt.machine import Machine

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# (batch, channels, outputs, size, kernel_size, stride, padding, dilation, groups): teams of 1, 8 and 32 threads, one
# run of a thread and several, more and fewer entries than a block takes
SHAPES = [
    (0, 2, 3, (1, 3, 3), (1, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), 1),
    (3, 31, 17, (1, 1, 1), (1, 1, 1), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1),
    (3, 4, 6, (1, 5, 7), (1, 3, 2), (1, 2, 1), (0, 1, 2), (1, 1, 2), 2),
    (2, 5, 9, (1, 4, 4), (1, 3, 3), (1, 1, 1), (0, 1, 1), (1, 1, 1), 1),
    (1, 2, 3, (5, 6, 8), (3, 1, 3), (1, 1, 2), (1, 0, 1), (1, 1, 1), 1),
    (1, 1, 2, (1, 1, 4500), (1, 1, 2), (1, 1, 2), (0, 0, 0), (1, 1, 1), 1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sparse_gradients(simt: Machine, shape: tuple, dtype: torch.dtype) -> None:
    batch, channels, outputs, size, kernel, *rest, groups = shape
    settings = dict(zip(("stride", "padding", "dilation"), rest, strict=True)) | {"groups": groups}
    weight = torch.zeros(outputs, channels // groups, *kernel)
    x = torch.randn(batch, channels, *size).to(dtype)
    g = torch.randn(F.conv3d(x.float(), weight, **settings).shape).to(dtype)
    entries = (torch.rand(weight.shape) < 0.6).flatten().nonzero().squeeze(1)
    want = reference.sparse_gradients(x.double(), g.double(), entries, kernel_size=kernel, **settings)
    got = simt.sparse_gradients(x, g, entries, kernel_size=kernel, **settings)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = 1e-11 if dtype == torch.float64 else 5e-5
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    last = [t.movedim(1, -1).contiguous() for t in (x, g)]
    again = simt.sparse_gradients(*last, entries, kernel_size=kernel, **settings, channels_last=True)
    assert torch.equal(again, got)
    some = simt.sparse_gradients(x, g, entries[3:8], kernel_size=kernel, **settings)
    assert torch.equal(some, got[:, 3:8])


def test_nothing_is_selected(simt: Machine) -> None:
    x, one = torch.randn(2, 3, 1, 4, 4), (1, 1, 1)
    settings = {"kernel_size": one, "stride": one, "padding": (0, 0, 0), "dilation": one}
    assert simt.sparse_gradients(x, x, torch.empty(0, dtype=torch.int64), **settings).shape == (2, 0)
