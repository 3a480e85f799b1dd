"""The scattering transform: against the reference, on every instruction set, and what its wrapper refuses."""

from collections.abc import Iterator

import pytest
import torch

from dpkernels.ops.scatter import Filters, factors, scatter
from dpkernels.reference import scatter as reference


def filters(shape: tuple[int, int], padded: tuple[int, int], scales: int, angles: int) -> Filters:
    """Random real filters: the transform is the same whatever they are, as long as the low pass is a product."""
    sizes = [(padded[0] >> r, padded[1] >> r) for r in range(scales)]
    counts = [max(0, scales - (r + 1 if r else 0)) * angles for r in range(scales)]
    waves = [torch.randn(count, *size, dtype=torch.float64) for count, size in zip(counts, sizes, strict=True)]
    lowpass = [torch.outer(_even(size[0]), _even(size[1])) for size in sizes]
    return Filters(shape, angles, tuple(waves), tuple(lowpass))


def _even(n: int) -> torch.Tensor:
    """A random spectrum of a real kernel."""
    return torch.fft.fft(torch.randn(n, dtype=torch.float64)).real


# Lengths that take every radix (8, 6, 4, 5, 3, 2, 7, 11, 13), alone and one after another.
CASES = [
    ((32, 32), (40, 40), 2, 8),
    ((28, 28), (36, 36), 2, 8),
    ((3, 9), (6, 14), 1, 3),
    ((17, 20), (44, 28), 2, 2),
    ((40, 90), (48, 104), 3, 2),
    ((1, 2), (12, 12), 2, 1),
    ((60, 50), (80, 64), 4, 1),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matches_the_reference(isa: str, case: tuple, dtype: torch.dtype) -> None:
    planned = filters(*case)
    images = torch.randn(3, *case[0], dtype=torch.float64)
    want = reference.scatter(images, planned)
    got = scatter(images.to(dtype), planned)
    assert got.dtype == dtype
    assert got.shape == (3, *planned.feature_shape)
    error = ((got - want).abs().amax() / want.abs().amax()).item()
    assert error < (1e-6 if dtype == torch.float32 else 1e-14)


@pytest.mark.parametrize("planes", [0, 1, 15, 16, 17, 33])
def test_a_plane_depends_on_no_other(isa: str, planes: int) -> None:
    planned = filters((6, 7), (12, 12), 2, 2)
    images = torch.randn(planes, 6, 7)
    got = scatter(images, planned)
    assert got.shape == (planes, *planned.feature_shape)
    for k in range(planes):
        assert torch.equal(scatter(images[k : k + 1], planned)[0], got[k])
    if planes > 1:
        images[-1] = torch.nan
        assert torch.equal(scatter(images, planned)[:-1], got[:-1])
        assert scatter(images, planned)[-1].isnan().all()


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_threads_change_no_bit(isa: str, one_thread: None) -> None:
    planned = filters((9, 9), (16, 16), 2, 3)
    images = torch.randn(100, 9, 9)
    alone = scatter(images, planned)
    torch.set_num_threads(4)
    assert torch.equal(scatter(images, planned), alone)


def test_layout_and_precision_of_the_input(isa: str) -> None:
    planned = filters((9, 5), (16, 12), 2, 2)
    images = torch.randn(4, 5, 18).transpose(1, 2)[:, ::2]
    assert not images.is_contiguous()
    assert torch.equal(scatter(images, planned), scatter(images.contiguous(), planned))
    half = images.half()
    got = scatter(half, planned)
    assert got.dtype == torch.float32
    assert torch.equal(got, scatter(half.float(), planned))
    zeros = scatter(torch.zeros(1, 9, 5), planned)
    assert torch.equal(zeros, torch.zeros_like(zeros))


@pytest.mark.parametrize("scale", [1e-15, 1e15])
def test_scales_like_its_input(isa: str, scale: float) -> None:
    planned = filters((8, 8), (16, 16), 2, 2)
    images = torch.randn(2, 8, 8)
    want = scatter(images, planned) * scale
    error = (scatter(images * scale, planned) - want).abs().amax() / want.abs().amax()
    assert error < 1e-5


def test_what_is_refused() -> None:
    planned = filters((8, 8), (16, 16), 2, 2)
    images = torch.randn(2, 8, 8)
    with pytest.raises(TypeError, match="images must be a tensor"):
        scatter(images.numpy(), planned)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="images must be floating-point"):
        scatter(images.long(), planned)
    with pytest.raises(ValueError, match=r"images must be \[planes, height, width\], got 4-D"):
        scatter(images[None], planned)
    with pytest.raises(ValueError, match=r"images must be \[planes, 8, 8\], got \(2, 8, 7\)"):
        scatter(images[:, :, 1:], planned)
    with pytest.raises(ValueError, match="must not require a gradient"):
        scatter(images.requires_grad_(), planned)
    with torch.no_grad():
        assert scatter(images, planned).shape == (2, 9, 2, 2)


def test_filters_that_do_not_fit() -> None:
    planned = filters((8, 8), (16, 16), 2, 2)
    waves, low = planned.wavelets, planned.lowpass
    with pytest.raises(ValueError, match="one entry for each resolution, got 1 and 2"):
        Filters((8, 8), 2, waves[:1], low)
    with pytest.raises(ValueError, match=r"wavelets\[0\] must be float64 \(6, 16, 16\)"):
        Filters((8, 8), 3, waves, low)
    with pytest.raises(ValueError, match=r"lowpass\[1\] must be float64 \(8, 8\)"):
        Filters((8, 8), 2, waves, (low[0], low[0]))
    with pytest.raises(ValueError, match=r"shape must be at most the padded shape \(16, 16\)"):
        Filters((8, 17), 2, waves, low)
    with pytest.raises(ValueError, match="lowpass must be a product"):
        Filters((8, 8), 2, waves, (torch.randn(16, 16, dtype=torch.float64), low[1]))
    with pytest.raises(ValueError, match="3 of them at least"):
        filters((8, 8), (8, 8), 2, 2)


def test_the_operator_guards_its_memory() -> None:
    planned = filters((8, 8), (16, 16), 2, 2)
    images = torch.randn(2, 8, 8)
    waves, rows, columns, *sources = planned.operands(torch.float32)
    call = torch.ops.dpkernels.scatter
    with pytest.raises(RuntimeError):
        call(images[:, :7].contiguous(), waves, rows, columns, *sources, 2)
    with pytest.raises(RuntimeError):
        call(images, waves, rows, columns, *sources, 3)
    with pytest.raises(RuntimeError):
        call(images, waves, rows[:1], columns, *sources, 2)
    with pytest.raises(RuntimeError):
        call(images, waves, rows, columns, sources[0][:12], sources[1], 2)


def test_under_a_fake_tensor() -> None:
    planned = filters((8, 8), (16, 16), 2, 2)
    images = torch.randn(2, 8, 8)
    torch.library.opcheck(
        torch.ops.dpkernels.scatter.default,
        (images, *planned.operands(torch.float32), planned.angles),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_factors_of_a_product() -> None:
    u, v = torch.rand(5, dtype=torch.float64), torch.rand(7, dtype=torch.float64)
    rows, columns = factors(torch.outer(u, v))
    torch.testing.assert_close(torch.outer(rows, columns), torch.outer(u, v))
