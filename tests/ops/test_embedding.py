"""The embedding family against its reference, and against autograd of torch's layers."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from dpkernels.ops.embedding import (
    embedding_bag_clipped_sums,
    embedding_bag_squared_norms,
    embedding_clipped_sums,
    embedding_squared_norms,
)
from dpkernels.reference import embedding as reference

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# batch, positions, rows of the table, dim
SHAPES = [(0, 3, 5, 2), (2, 0, 5, 2), (1, 1, 1, 1), (5, 1, 33, 31), (3, 40, 7, 33), (4, 9, 129, 129), (2, 6, 9000, 3)]


def example(
    batch: int, positions: int, rows: int, dim: int, dtype: torch.dtype, *, bag: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (batch, dim) if bag else (batch, positions, dim)
    indices = torch.randint(rows, (batch, positions))
    return indices, torch.randn(shape).to(dtype), torch.rand(batch).double()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding_idx", [None, 0])
def test_embedding_matches_reference(
    isa: str, shape: tuple[int, ...], dtype: torch.dtype, padding_idx: int | None
) -> None:
    indices, g, w = example(*shape, dtype)
    norms = embedding_squared_norms(indices, g, padding_idx=padding_idx)
    expected = reference.embedding_squared_norms(indices, g, padding_idx=padding_idx)
    torch.testing.assert_close(norms, expected, rtol=1e-12, atol=0)
    options = {"num_embeddings": shape[2], "padding_idx": padding_idx}
    got = embedding_clipped_sums(indices.int(), g, w, **options)
    torch.testing.assert_close(got, reference.embedding_clipped_sums(indices, g, w, **options), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize("kind", ["sum", "mean", "weighted"])
def test_bag_matches_reference(
    isa: str, shape: tuple[int, ...], dtype: torch.dtype, padding_idx: int | None, kind: str
) -> None:
    indices, g, w = example(*shape, dtype, bag=True)
    options: dict[str, Any] = {
        "mode": "mean" if kind == "mean" else "sum",
        "per_sample_weights": torch.randn(indices.shape).to(dtype) if kind == "weighted" else None,
        "padding_idx": padding_idx,
    }
    norms = embedding_bag_squared_norms(indices, g, **options)
    torch.testing.assert_close(norms, reference.embedding_bag_squared_norms(indices, g, **options), rtol=1e-11, atol=0)
    options["num_embeddings"] = shape[2]
    got = embedding_bag_clipped_sums(indices, g, w, **options)
    want = reference.embedding_bag_clipped_sums(indices, g, w, **options)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_reference_is_autograd(padding_idx: int | None) -> None:
    """The formulas themselves, one example at a time, against torch's layers."""
    indices, g, w = example(4, 9, 5, 3, torch.float64)
    table = torch.randn(5, 3).double().requires_grad_()
    for b in range(4):
        (grad,) = torch.autograd.grad(F.embedding(indices[b], table, padding_idx), table, g[b])
        one = slice(b, b + 1)
        norm = reference.embedding_squared_norms(indices[one], g[one], padding_idx=padding_idx)
        torch.testing.assert_close(norm, grad.square().sum()[None])
        got = reference.embedding_clipped_sums(indices, g, F.one_hot(torch.tensor(b), 4).double(), num_embeddings=5,
                                               padding_idx=padding_idx)  # fmt: skip
        torch.testing.assert_close(got, grad)
        for mode, scales in (("sum", None), ("mean", None), ("sum", torch.randn(4, 9).double())):
            bag = F.embedding_bag(
                indices[one],
                table,
                mode=mode,
                per_sample_weights=None if scales is None else scales[one],
                padding_idx=padding_idx,
            )
            (grad,) = torch.autograd.grad(bag, table, g[one, 0])
            options: dict[str, Any] = {"mode": mode, "padding_idx": padding_idx}
            got = reference.embedding_bag_clipped_sums(
                indices[one],
                g[one, 0],
                w[one],
                num_embeddings=5,
                per_sample_weights=None if scales is None else scales[one],
                **options,
            )
            torch.testing.assert_close(got, grad * w[b])


def test_padding_and_repeated_tokens(isa: str) -> None:
    """Row 2 occurs three times: its gradients add up before they are squared; the padding row counts for nothing."""
    indices = torch.tensor([[0, 2, 2, 1, 2, 0]])
    g = torch.tensor([[[100.0], [1.0], [2.0], [4.0], [-6.0], [torch.nan]]])
    norms = embedding_squared_norms(indices, g, padding_idx=0)
    torch.testing.assert_close(norms, torch.tensor([9.0 + 16.0]).double(), rtol=1e-14, atol=0)
    sums = embedding_clipped_sums(indices, g, torch.tensor([0.5]).double(), num_embeddings=4, padding_idx=0)
    assert sums.flatten().tolist() == [0.0, 2.0, -1.5, 0.0]


def test_all_padding_is_zero_whatever_the_gradient(isa: str) -> None:
    indices, g, w = torch.zeros(2, 3, dtype=torch.int64), torch.full((2, 4), torch.nan), torch.ones(2).double()
    for mode in ("sum", "mean"):
        assert embedding_bag_squared_norms(indices, g, mode=mode, padding_idx=0).tolist() == [0, 0]
        options: dict[str, Any] = {"num_embeddings": 3, "mode": mode, "padding_idx": 0}
        assert not embedding_bag_clipped_sums(indices, g, w, **options).any()


def test_norm_is_that_of_what_is_added(isa: str) -> None:
    """Also where repeated rows cancel but for rounding."""
    for seed in range(20):
        g = torch.randn(1, 7, 9, generator=torch.Generator().manual_seed(seed)).double()
        g[:, 6] = -g[:, :6].sum(1) * (1 + 1e-15)
        indices = torch.full((1, 7), 3)
        norm = embedding_squared_norms(indices, g).sqrt()
        held = embedding_clipped_sums(indices, g, torch.ones(1).double(), num_embeddings=4).norm()
        torch.testing.assert_close(norm[0], held, rtol=1e-14, atol=0)
        scales, ones = g[:, :, 0].contiguous(), torch.ones(1, 5).double()
        options: dict[str, Any] = {"mode": "sum", "per_sample_weights": scales}
        norm = embedding_bag_squared_norms(indices, ones, **options).sqrt()
        held = embedding_bag_clipped_sums(indices, ones, torch.ones(1).double(), num_embeddings=4, **options).norm()
        torch.testing.assert_close(norm[0], held, rtol=1e-14, atol=0)


def test_cancelling_repeats_leave_the_others_alone(isa: str) -> None:
    """Repeats of 1e20 that cancel are added up before they meet the other examples' sums."""
    indices, g = torch.tensor([[1, 0], [1, 1]]), torch.tensor([[[1.0], [0.0]], [[1e20], [-1e20]]])
    sums = embedding_clipped_sums(indices, g, torch.tensor([1.0, 1.0]).double(), num_embeddings=2)
    assert sums.flatten().tolist() == [0.0, 1.0]


def test_scales_neither_overflow_nor_vanish(isa: str) -> None:
    indices = torch.tensor([[1, 1, 0]])
    for scale in (1e-25, 1e25):
        g = torch.tensor([[[3.0], [0.0], [4.0]]]) * scale
        norms = embedding_squared_norms(indices, g)
        torch.testing.assert_close(norms, torch.tensor([25.0 * scale**2], dtype=torch.float64), rtol=1e-6, atol=0)
        options: dict[str, Any] = {"mode": "sum", "per_sample_weights": torch.tensor([[1.0, 2.0, 4.0]]) / scale}
        norms = embedding_bag_squared_norms(indices, g[:, 0], **options)
        torch.testing.assert_close(norms, torch.tensor([9.0 * 25.0]).double(), rtol=1e-6, atol=0)


def test_weight_zero_skips_whatever_the_values() -> None:
    indices, g, w = example(3, 4, 6, 5, torch.float32)
    g[1], w[1] = torch.nan, 0
    kept = [0, 2]
    got = embedding_clipped_sums(indices, g, w, num_embeddings=6)
    assert torch.equal(got, embedding_clipped_sums(indices[kept], g[kept], w[kept], num_embeddings=6))
    assert embedding_squared_norms(indices, g).isfinite().tolist() == [True, False, True]
    bags: dict[str, Any] = {"num_embeddings": 6, "mode": "mean"}
    got = embedding_bag_clipped_sums(indices, g[:, 0], w, **bags)
    assert torch.equal(got, embedding_bag_clipped_sums(indices[kept], g[kept, 0], w[kept], **bags))


def test_same_bits_for_any_number_of_threads() -> None:
    indices, g, w = example(50, 20, 9000, 130, torch.float32)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(
            (embedding_squared_norms(indices, g), embedding_clipped_sums(indices, g, w, num_embeddings=9000))
        )
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


def test_non_contiguous_inputs() -> None:
    indices, g, w = example(4, 3, 6, 5, torch.float32)
    strided, expanded = indices.T.contiguous().T, g[:, :1].expand(-1, 3, -1)
    got = embedding_clipped_sums(strided, expanded, w, num_embeddings=6)
    assert torch.equal(got, embedding_clipped_sums(indices, expanded.contiguous(), w, num_embeddings=6))


def test_opcheck() -> None:
    indices, g, w = example(3, 4, 6, 5, torch.float32)
    operators, scales = torch.ops.dpkernels, torch.rand(3, 4).double()
    torch.library.opcheck(operators.embedding_squared_norms.default, (indices, g, 0))
    torch.library.opcheck(operators.embedding_clipped_sums.default, (indices, g, w, 6, -1))
    bag = g[:, 0].contiguous()
    torch.library.opcheck(operators.embedding_bag_squared_norms.default, (indices, bag, scales))
    torch.library.opcheck(operators.embedding_bag_clipped_sums.default, (indices, bag, scales, w, 6))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"indices": torch.tensor([[0, 6]])}, r"indices must lie in \[0, 6\), got values from 0 to 6"),
        ({"indices": torch.tensor([[-1, 2]])}, r"indices must lie in \[0, 6\), got values from -1 to 2"),
        ({"indices": torch.tensor([0, 1])}, r"indices must be \[batch, positions\], got 1-D"),
        ({"indices": torch.zeros(1, 2)}, "indices must be int64 or int32, got torch.float32"),
        ({"output_grads": torch.ones(1, 3, 4)}, "output_grads must have size 2 in dimension 1"),
        ({"weights": torch.ones(1)}, "weights must be float64"),
        ({"num_embeddings": 0}, "num_embeddings must be at least 1, got 0"),
        ({"padding_idx": 6}, "padding_idx must be below num_embeddings, 6, got 6"),
        ({"padding_idx": -1}, "padding_idx must be None or at least 0, got -1"),
    ],
)
def test_embedding_errors_name_the_argument(change: dict[str, Any], words: str) -> None:
    good = {
        "indices": torch.tensor([[0, 5]]),
        "output_grads": torch.ones(1, 2, 4),
        "weights": torch.ones(1).double(),
        "num_embeddings": 6,
    }
    with pytest.raises((ValueError, TypeError), match=words):
        embedding_clipped_sums(**(good | change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "max"}, r"mode must be one of \('sum', 'mean'\), got 'max'"),
        ({"mode": "mean", "per_sample_weights": torch.ones(1, 2)}, "per_sample_weights must be None for mode 'mean'"),
        ({"per_sample_weights": torch.ones(1, 3)}, "per_sample_weights must have size 2 in dimension 1"),
        ({"output_grads": torch.ones(1, 2, 4)}, r"output_grads must be \[batch, dim\], got 3-D"),
    ],
)
def test_bag_errors_name_the_argument(change: dict[str, Any], words: str) -> None:
    good = {"indices": torch.tensor([[0, 5]]), "output_grads": torch.ones(1, 4), "mode": "sum"}
    with pytest.raises((ValueError, TypeError), match=words):
        embedding_bag_squared_norms(**(good | change))


def test_a_direct_call_does_not_write_outside_the_table() -> None:
    with pytest.raises(RuntimeError, match="num_embeddings"):
        torch.ops.dpkernels.embedding_clipped_sums(
            torch.tensor([[7]]), torch.ones(1, 1, 2), torch.ones(1).double(), 6, -1
        )
