"""The CUDA kernels of embeddings and bags against their reference in float64."""

import pytest
import torch
from torch import Tensor

from dpkernels.reference import embedding as reference
from tests.simt.machine import Machine

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (batch, positions, dim, rows of the table): nothing, one, more and fewer than a warp and a block, several blocks
SHAPES = [(0, 3, 4, 5), (2, 0, 3, 4), (2, 3, 0, 4), (1, 1, 1, 1), (3, 31, 33, 9), (5, 130, 5, 40), (2, 65, 129, 13)]


def tokens(batch: int, positions: int, rows: int) -> Tensor:
    """Indices of which many occur more than once."""
    return torch.minimum(torch.randint(0, rows, (batch, positions)), torch.randint(0, rows, (batch, positions)))


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.float64
    assert got.shape == want.shape
    assert ((got - want).abs() <= 1e-13 * want.abs().max()).all() if want.numel() else True


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(simt: Machine, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, positions, dim, rows = shape
    indices, g = tokens(batch, positions, rows), torch.randn(batch, positions, dim).to(dtype)
    weights = torch.rand(batch, dtype=torch.float64)
    for padding in (None, rows // 2):
        keyword = {} if padding is None else {"padding_idx": padding}
        got = simt.embedding_squared_norms(indices, g, None, **keyword)
        assert_close(got, reference.embedding_squared_norms(indices, g, padding_idx=padding))
        got = simt.embedding_clipped_sums(indices, g, None, weights, num_embeddings=rows, **keyword)
        want = reference.embedding_clipped_sums(indices, g, weights, num_embeddings=rows, padding_idx=padding)
        assert_close(got, want)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bags(simt: Machine, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, positions, dim, rows = shape
    indices, g = tokens(batch, positions, rows), torch.randn(batch, dim).to(dtype)
    weights = torch.rand(batch, dtype=torch.float64)
    scales = torch.randn(batch, positions).double() * (torch.rand(batch, positions) > 0.2)
    keywords = {"mode": "sum", "per_sample_weights": scales}
    got = simt.embedding_squared_norms(indices, g, scales)
    assert_close(got, reference.embedding_bag_squared_norms(indices, g, **keywords))
    got = simt.embedding_clipped_sums(indices, g, scales, weights, num_embeddings=rows)
    want = reference.embedding_bag_clipped_sums(indices, g, weights, num_embeddings=rows, **keywords)
    assert_close(got, want)


def test_more_positions_than_shared_memory_holds(simt: Machine) -> None:
    indices, g = tokens(1, 4099, 700), torch.randn(1, 4099, 1)
    assert_close(simt.embedding_squared_norms(indices, g, None), reference.embedding_squared_norms(indices, g))
    weights = torch.ones(1, dtype=torch.float64)
    got = simt.embedding_clipped_sums(indices, g, None, weights, num_embeddings=700)
    assert_close(got, reference.embedding_clipped_sums(indices, g, weights, num_embeddings=700))


def test_more_examples_than_threads(simt: Machine) -> None:
    indices, g = tokens(300, 2, 5), torch.randn(300, 2, 3)
    weights = torch.rand(300, dtype=torch.float64)
    got = simt.embedding_clipped_sums(indices, g, None, weights, num_embeddings=5)
    assert_close(got, reference.embedding_clipped_sums(indices, g, weights, num_embeddings=5))


def test_repeats_that_cancel(simt: Machine) -> None:
    """The sum over a run is what is squared: here exactly nothing is left."""
    g = torch.randn(1, 3, 40)
    indices, g = torch.tensor([[2, 7, 2, 7, 2, 7]]), torch.cat([g, -g], 1)[:, [0, 1, 3, 4, 2, 5]]
    g[0, 4:] = 0
    assert simt.embedding_squared_norms(indices, g, None).item() == 0
    weights = torch.ones(1, dtype=torch.float64)
    assert not simt.embedding_clipped_sums(indices, g, None, weights, num_embeddings=8).any()


def test_what_is_skipped_may_hold_anything(simt: Machine) -> None:
    """Examples of weight 0, padding, and bags of nothing but padding."""
    indices, g = tokens(3, 20, 6), torch.randn(3, 20, 9)
    weights = torch.tensor([1.0, 0.0, 2.0], dtype=torch.float64)
    want = simt.embedding_clipped_sums(indices, g, None, weights, num_embeddings=6, padding_idx=1)
    norms = simt.embedding_squared_norms(indices, g, None, padding_idx=1)
    g[1] = torch.nan
    g[indices == 1] = torch.inf
    got = simt.embedding_clipped_sums(indices, g, None, weights, num_embeddings=6, padding_idx=1)
    assert torch.equal(got, want)
    got = simt.embedding_squared_norms(indices, g, None, padding_idx=1)
    assert torch.equal(got[[0, 2]], norms[[0, 2]])
    assert got[1].isnan()
    scales = torch.zeros(3, 20, dtype=torch.float64)
    scales[0] = 1
    bags = torch.full((3, 4), torch.inf)
    bags[0] = 1
    got = simt.embedding_squared_norms(indices, bags, scales)
    assert torch.equal(got[1:], torch.zeros(2, dtype=torch.float64))
    sums = simt.embedding_clipped_sums(indices, bags, scales, torch.ones(3).double(), num_embeddings=6)
    assert sums.isfinite().all()
