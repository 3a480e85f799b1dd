"""Embeddings in the engine, against the one-example loop in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpkernels.clipping import GhostClipper, UnsupportedModelError
from tests.clipping.oracle import assert_equals_the_loop, cross_entropy, deviation, one_example_loop

BATCH, ROWS, DIM, CLASSES = 5, 7, 4, 3


class Words(nn.Module):
    """Tokens of any rank, looked up and averaged."""

    def __init__(self, padding_idx: int | None = None, calls: int = 1) -> None:
        super().__init__()
        self.table, self.calls = nn.Embedding(ROWS, DIM, padding_idx=padding_idx), calls
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rows = sum(torch.tanh(self.table((x + i) % ROWS)) * (i + 1) for i in range(self.calls))
        return self.head(rows.reshape(len(x), math.prod(x.shape[1:]), DIM).square().sum(1))


class Bag(nn.Module):
    """A bag per example, with weights that a layer computes where there are any."""

    def __init__(self, mode: str, padding_idx: int | None, weighted: bool) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=padding_idx)
        self.weigh = nn.Linear(1, 1) if weighted else None
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.weigh is None:
            return self.head(torch.tanh(self.bag(x)))
        scales = self.weigh(x.unsqueeze(-1).to(self.head.weight.dtype)).squeeze(-1)
        return self.head(torch.tanh(self.bag(x, per_sample_weights=scales)))


def assert_exact(model: nn.Module, x: Tensor, dtype: torch.dtype = torch.float64) -> None:
    model, y = model.to(dtype), torch.randint(0, CLASSES, (len(x),))
    tolerance = 2e-6 if dtype == torch.float32 else 2e-10  # norms are rounded up by what cancels: 8e-11 at most here
    assert_equals_the_loop(model, x, y, tolerance, norms_tolerance=1e-5)


@pytest.mark.parametrize("shape", [(), (9,), (3, 4)])
@pytest.mark.parametrize("padding_idx", [None, 0, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_embedding_equals_the_one_example_loop(
    shape: tuple[int, ...], padding_idx: int | None, dtype: torch.dtype
) -> None:
    assert_exact(Words(padding_idx), torch.randint(0, ROWS, (BATCH, *shape)), dtype)


def test_embedding_called_twice() -> None:
    assert_exact(Words(padding_idx=2, calls=2), torch.randint(0, ROWS, (BATCH, 6)))


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bag_equals_the_one_example_loop(mode: str, padding_idx: int | None, dtype: torch.dtype) -> None:
    x = torch.randint(0, ROWS, (BATCH, 9))
    x[1] = 0
    assert_exact(Bag(mode, padding_idx, weighted=False), x, dtype)


@pytest.mark.parametrize("padding_idx", [None, 0])
@pytest.mark.parametrize("table_frozen", [False, True])
def test_weighted_bag(padding_idx: int | None, table_frozen: bool) -> None:
    """The weights receive their gradient through the bag."""
    model = Bag("sum", padding_idx, weighted=True)
    model.bag.weight.requires_grad_(not table_frozen)
    assert_exact(model, torch.randint(0, ROWS, (BATCH, 9)))


def test_padding_and_repeated_tokens() -> None:
    """Tokens 2, 2, 0, 5 with padding 0: row 2 holds twice the gradient, the padding row none."""
    model = nn.Sequential(nn.Embedding(ROWS, DIM, padding_idx=0))
    with GhostClipper(model, float("inf")) as clipper:
        result = clipper.backward(model(torch.tensor([[2, 2, 0, 5]])).sum((1, 2)))
    assert result.grads["0.weight"].sum(1).tolist() == [0, 0, 2 * DIM, 0, 0, DIM, 0]
    torch.testing.assert_close(result.norms, torch.tensor([(4 * DIM + DIM) ** 0.5]).double())


@pytest.mark.parametrize("model", [Words(0), Bag("mean", 0, weighted=False), Bag("sum", None, weighted=True)])
def test_empty_batch(model: nn.Module) -> None:
    with GhostClipper(model, 1.0) as clipper:
        result = clipper.backward(cross_entropy(model, torch.zeros(0, 4).long(), torch.zeros(0).long()))
    assert result.norms.shape == (0,)
    assert not any(g.any() for g in result.grads.values())


def test_autocast_and_half_precision() -> None:
    model, x, y = Words(0), torch.randint(0, ROWS, (BATCH, 6)), torch.randint(0, CLASSES, (BATCH,))
    expected, _ = one_example_loop(model, cross_entropy, x, y, 0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16), GhostClipper(model, 0.3) as clipper:
        result = clipper.backward(cross_entropy(model, x, y).float())
    assert deviation(result.grads, expected) < 0.15
    model = model.to(torch.bfloat16)
    with GhostClipper(model, 0.3) as clipper:
        result = clipper.backward(cross_entropy(model, x, y).float())
    assert deviation(result.grads, expected) < 0.15


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_norm": 1.0}, "0: max_norm changes the table .* Set max_norm=None"),
        ({"scale_grad_by_freq": True}, "0: scale_grad_by_freq .* Set scale_grad_by_freq=False"),
        ({"sparse": True}, "0: sparse=True .* Set sparse=False"),
    ],
)
def test_what_mixes_examples_is_refused(kind: type[nn.Module], options: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        GhostClipper(nn.Sequential(kind(ROWS, DIM, **options)), 1.0)


def test_max_bag_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"mode 'max' is not supported\. Use mode 'sum' or 'mean'"):
        GhostClipper(nn.Sequential(nn.EmbeddingBag(ROWS, DIM, mode="max")), 1.0)
