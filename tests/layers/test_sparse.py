"""Convolutions and linear layers of which selected weights are trained, in the engine, against the one-example loop."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpkernels.clipping import GhostClipper
from dpkernels.layers.sparse import SparseConv2d, SparseLinear
from tests.clipping.oracle import assert_equals_the_loop, cross_entropy, deviation, one_example_loop
from tests.configurations import CLASSES, SPARSE, Framed

BATCH = 5


def batch(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, *shape).to(dtype), torch.randint(0, CLASSES, (BATCH,))


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_one_example_loop(name: str, dtype: torch.dtype) -> None:
    model = Framed(SPARSE[name]).to(dtype)
    x, y = batch(model.shape, dtype)
    tolerance = 5e-5 if dtype == torch.float32 else 1e-9  # norms are rounded up by what cancels: 2e-10 here
    assert_equals_the_loop(model, x, y, tolerance)


@pytest.mark.parametrize("name", ["2-D", "linear on 4-D"])
@pytest.mark.parametrize("frozen", ["values", "bias", "before"])
def test_part_of_it_frozen(name: str, frozen: str) -> None:
    """Values only, bias only, and a layer whose input needs no gradient."""
    model = Framed(SPARSE[name])
    (model.before if frozen == "before" else getattr(model.layer, frozen)).requires_grad_(False)
    x, y = batch(model.shape)
    expected, norms = one_example_loop(model, cross_entropy, x, y, 0.3)
    with GhostClipper(model, 0.3) as clipper:
        result = clipper.backward(cross_entropy(model, x, y))
    assert deviation(result.grads, expected) < 5e-5
    torch.testing.assert_close(result.norms, norms, rtol=5e-5, atol=0)


@pytest.mark.parametrize("name", ["2-D", "2-D strided, two groups", "reflect"])
def test_under_checkpointing_and_channels_last(name: str) -> None:
    model = Framed(SPARSE[name])
    x, y = batch(model.shape)
    expected, _ = one_example_loop(model, cross_entropy, x, y, 0.3)
    x = x.to(memory_format=torch.channels_last)
    with GhostClipper(model, 0.3) as clipper:
        losses = nn.functional.cross_entropy(checkpoint(model, x, use_reentrant=False), y, reduction="none")
        assert deviation(clipper.backward(losses).grads, expected) < 5e-5


@pytest.mark.parametrize("name", ["2-D", "linear", "linear on 4-D"])
def test_autocast(name: str) -> None:
    model = Framed(SPARSE[name])
    x, y = batch(model.shape)
    expected, _ = one_example_loop(model, cross_entropy, x, y, 0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model.layer(x)
        with GhostClipper(model, 0.3) as clipper:
            assert model.layer(x).dtype == plain.dtype
            result = clipper.backward(cross_entropy(model, x, y).float())
    assert deviation(result.grads, expected) < 0.15


@pytest.mark.parametrize("dense", [nn.Conv2d(4, 6, 3, padding=1), nn.Linear(5, 7)])
def test_the_module_is_the_dense_one(dense: nn.Conv2d | nn.Linear) -> None:
    """Outputs, gradients without a clipper, copies, and the way back."""
    mask = torch.rand(dense.weight.shape) < 0.4
    sparse = (SparseConv2d if isinstance(dense, nn.Conv2d) else SparseLinear)(dense, mask)
    x = torch.randn(BATCH, 4, 7, 5)
    for module in (sparse, copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse)), sparse.dense()):
        assert torch.equal(module(x), dense(x))
    sparse(x).square().sum().backward()
    sums = sparse.values.grad
    sparse.bias.grad = None
    dense(x).square().sum().backward()
    torch.testing.assert_close(sums, dense.weight.grad[mask])
    with torch.no_grad():
        sparse.values += 1
    torch.testing.assert_close(sparse.dense().weight, dense.weight + mask.float())
    assert type(sparse.dense()) is type(dense)
    assert repr(sparse.dense()) == repr(dense)
    assert f"selected={int(mask.sum())} of {mask.numel()}" in repr(sparse)
    assert [name for name, _ in sparse.named_parameters()] == ["values", "bias"]


def test_what_does_not_fit_is_refused() -> None:
    dense = nn.Conv2d(4, 6, 3)
    mask = torch.ones_like(dense.weight, dtype=torch.bool)
    for module in (nn.Conv1d(4, 6, 3), nn.ConvTranspose2d(4, 6, 3), SparseConv2d(dense, mask)):
        with pytest.raises(TypeError, match=r"module must be an nn\.Conv2d, got"):
            SparseConv2d(module, mask)
    with pytest.raises(TypeError, match="mask must be bool"):
        SparseConv2d(dense, mask.float())
    with pytest.raises(ValueError, match=r"mask must have the weight's shape \(6, 4, 3, 3\), got \(4, 3, 3\)"):
        SparseConv2d(dense, mask[0])
