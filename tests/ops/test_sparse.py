"""Selected entries of per-example weight gradients against their reference in float64."""

from dataclasses import asdict, dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dpkernels.ops.sparse import sparse_gradients
from dpkernels.reference import sparse as reference


@dataclass(frozen=True)
class Geometry:
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1


@dataclass(frozen=True)
class Case:
    batch: int
    channels: int
    outputs: int
    size: tuple[int, ...]
    geometry: Geometry


CASES = {
    "3x3": Case(19, 5, 7, (6, 5), Geometry((3, 3), (1, 1), (1, 1), (1, 1))),
    "one example": Case(1, 5, 7, (6, 5), Geometry((3, 3), (1, 1), (1, 1), (1, 1))),
    "no example": Case(0, 5, 7, (6, 5), Geometry((3, 3), (1, 1), (1, 1), (1, 1))),
    "several slabs": Case(9, 3, 4, (21, 33), Geometry((3, 3), (1, 1), (1, 1), (1, 1))),
    "lines longer than a slab": Case(3, 2, 3, (600,), Geometry((4,), (1,), (3,), (2,))),
    "strided, rectangular": Case(5, 6, 9, (25, 24), Geometry((3, 2), (2, 1), (1, 0), (1, 3))),
    "one tap, strided": Case(5, 6, 9, (12, 11), Geometry((1, 1), (2, 2), (0, 0), (1, 1))),
    "two groups": Case(4, 4, 6, (5, 7), Geometry((3, 3), (1, 1), (1, 1), (1, 1), 2)),
    "depthwise": Case(4, 6, 12, (5, 7), Geometry((3, 3), (1, 1), (1, 1), (1, 1), 6)),
    "padding beyond the map": Case(3, 2, 3, (3, 2), Geometry((3, 3), (2, 1), (4, 5), (1, 1))),
    "3-D": Case(3, 3, 4, (4, 5, 6), Geometry((2, 3, 2), (1, 2, 1), (1, 1, 0), (1, 1, 2))),
    "several chunks": Case(9, 70, 40, (3, 3), Geometry((3, 3), (1, 1), (1, 1), (1, 1))),
    "one position": Case(33, 31, 17, (1,), Geometry((1,), (1,), (0,), (1,))),
}


def example(case: Case, share: float = 0.3) -> tuple[Tensor, Tensor, Tensor, dict[str, object]]:
    """Input, output gradients, entries with none of the first output's, and the geometry as keywords."""
    q, x = case.geometry, torch.randn(case.batch, case.channels, *case.size)
    weight = torch.randn(case.outputs, case.channels // q.groups, *q.kernel_size)
    conv = getattr(F, f"conv{len(case.size)}d")
    y = conv(x, weight, stride=q.stride, padding=q.padding, dilation=q.dilation, groups=q.groups)
    mask = torch.rand(weight.shape) < share
    mask[0] &= share == 1
    return x, torch.randn_like(y), mask.flatten().nonzero().squeeze(1), asdict(q)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_matches_reference(isa: str, name: str, dtype: torch.dtype) -> None:
    for share in (0.3, 1.0):
        x, g, entries, q = example(CASES[name], share)
        x, g = x.to(dtype), g.to(dtype)
        want = reference.sparse_gradients(x.double(), g.double(), entries, **q)
        got = sparse_gradients(x, g, entries, **q)
        assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert got.is_contiguous()
        tolerance = {"rtol": 1e-12, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 2e-5}
        torch.testing.assert_close(got.double(), want, **tolerance)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("which", ["input", "gradients", "both"])
def test_channels_last_is_read_as_it_lies(isa: str, name: str, which: str) -> None:
    x, g, entries, q = example(CASES[name])
    last = [t.movedim(1, -1).contiguous().movedim(-1, 1) for t in (x, g)]
    got = sparse_gradients(x if which == "gradients" else last[0], g if which == "input" else last[1], entries, **q)
    assert torch.equal(got, sparse_gradients(x, g, entries, **q))


@pytest.mark.parametrize("name", ["3x3", "several slabs", "several chunks"])
def test_the_same_bits_whatever_else_is_computed(isa: str, name: str) -> None:
    """Entries a few at a time and in any order, examples alone, beside an example that is not finite, and in threads:
    the sum of a later pass adds what the norm was of."""
    x, g, entries, q = example(CASES[name])
    want = sparse_gradients(x, g, entries, **q)
    parts = [sparse_gradients(x, g, part, **q) for part in entries.split(max(5, len(entries) // 3))]
    assert torch.equal(torch.cat(parts, 1), want)
    order = torch.randperm(len(entries))
    assert torch.equal(sparse_gradients(x, g, entries[order], **q), want[:, order])
    assert torch.equal(sparse_gradients(x[3:4], g[3:4], entries, **q), want[3:4])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(sparse_gradients(x, g, entries, **q), want)
    finally:
        torch.set_num_threads(threads)
    x[2] = torch.nan
    got = sparse_gradients(x, g, entries, **q)
    assert got[2].isnan().all()
    rest = torch.arange(len(x)) != 2
    assert torch.equal(got[rest], want[rest])


def test_no_entry_is_selected() -> None:
    x, g, entries, q = example(CASES["3x3"])
    assert sparse_gradients(x, g, entries[:0], **q).shape == (19, 0)


def test_positions_that_cancel_between_slabs() -> None:
    """Slabs join in float64: what large ones leave is not lost."""
    x, g = torch.ones(1, 1, 3, 256), torch.ones(1, 1, 3, 256)
    g[0, 0, 0], g[0, 0, 2] = 1e9, -1e9
    q = asdict(Geometry((1, 1), (1, 1), (0, 0), (1, 1)))
    assert sparse_gradients(x, g, torch.tensor([0]), **q).item() == 256


def test_what_does_not_fit_is_refused() -> None:
    x, g, entries, q = example(CASES["3x3"])
    with pytest.raises(TypeError, match="entries must be int64"):
        sparse_gradients(x, g, entries.int(), **q)
    with pytest.raises(TypeError, match=r"entries must be a tensor \[selected\], got list"):
        sparse_gradients(x, g, [1, 2], **q)
    with pytest.raises(ValueError, match=r"entries must be \[selected\], got 2-D"):
        sparse_gradients(x, g, entries[None], **q)
    for entry in (-1, 7 * 5 * 9):
        with pytest.raises(ValueError, match=r"entries must lie in \[0, 315\), got values from"):
            sparse_gradients(x, g, torch.tensor([3, entry]), **q)
    with pytest.raises(ValueError, match="output_grads must have size 6 in dimension 2"):
        sparse_gradients(x, g[:, :, 1:], entries, **q)
    with pytest.raises(ValueError, match="groups must divide the 5 channels of input, got 2"):
        sparse_gradients(x, g, entries, **{**q, "groups": 2})


def test_fake() -> None:
    x, g, entries, q = example(CASES["two groups"])
    torch.library.opcheck(torch.ops.dpkernels.sparse_gradients.default, (x, g, entries, *q.values()))
