"""Convolutions in the engine, against the one-example loop in float64."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpkernels.clipping import GhostClipper
from tests.clipping.oracle import assert_equals_the_loop, cross_entropy, deviation, one_example_loop
from tests.configurations import CLASSES, CONV, Framed

BATCH = 5


def batch(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, *shape).to(dtype), torch.randint(0, CLASSES, (BATCH,))


@pytest.mark.parametrize("name", CONV)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_one_example_loop(name: str, dtype: torch.dtype) -> None:
    model = Framed(CONV[name]).to(dtype)
    x, y = batch(model.shape, dtype)
    tolerance = 5e-5 if dtype == torch.float32 else 2e-10  # norms are rounded up by what cancels: 8e-11 at most here
    assert_equals_the_loop(model, x, y, tolerance)


@pytest.mark.parametrize("name", ["2-D", "2-D wide", "transposed 2-D", "transposed 2-D, wide"])
@pytest.mark.parametrize("frozen", ["weight", "bias", "before"])
def test_part_of_it_frozen(name: str, frozen: str) -> None:
    """Weight only, bias only, and a convolution whose input needs no gradient."""
    model = Framed(CONV[name])
    (model.before if frozen == "before" else getattr(model.layer, frozen)).requires_grad_(False)
    x, y = batch(model.shape)
    expected, norms = one_example_loop(model, cross_entropy, x, y, 0.3)
    with GhostClipper(model, 0.3) as clipper:
        result = clipper.backward(cross_entropy(model, x, y))
    assert deviation(result.grads, expected) < 5e-5
    torch.testing.assert_close(result.norms, norms, rtol=5e-5, atol=0)


@pytest.mark.parametrize("name", ["2-D", "2-D wide", "reflect"])
def test_under_checkpointing_and_channels_last(name: str) -> None:
    model = Framed(CONV[name]).to(memory_format=torch.channels_last)
    x, y = batch(model.shape)
    expected, _ = one_example_loop(model, cross_entropy, x, y, 0.3)
    x = x.to(memory_format=torch.channels_last)
    with GhostClipper(model, 0.3) as clipper:
        losses = nn.functional.cross_entropy(checkpoint(model, x, use_reentrant=False), y, reduction="none")
        assert deviation(clipper.backward(losses).grads, expected) < 5e-5


@pytest.mark.parametrize("name", CONV)
def test_empty_batch(name: str) -> None:
    model = Framed(CONV[name])
    x, y = batch(model.shape)
    with GhostClipper(model, 0.3) as clipper:
        result = clipper.backward(cross_entropy(model, x[:0], y[:0]))
    assert result.norms.shape == (0,)
    assert not any(g.any() for g in result.grads.values())


@pytest.mark.parametrize("name", ["2-D", "2-D wide", "reflect", "transposed 2-D"])
def test_autocast(name: str) -> None:
    model = Framed(CONV[name])
    x, y = batch(model.shape)
    expected, _ = one_example_loop(model, cross_entropy, x, y, 0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model.layer(x)
        with GhostClipper(model, 0.3) as clipper:
            assert model.layer(x).dtype == plain.dtype
            result = clipper.backward(cross_entropy(model, x, y).float())
    assert deviation(result.grads, expected) < 0.15


def test_output_size_of_a_transposed_convolution() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.ConvTranspose2d(2, 3, 3, 2), nn.Linear(3 * 10 * 9, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.conv(x, output_size=[10, 9]).flatten(1))

    model = Net()
    x, y = batch((2, 4, 4))
    expected, _ = one_example_loop(model, cross_entropy, x, y, 0.3)
    with GhostClipper(model, 0.3) as clipper:
        assert deviation(clipper.backward(cross_entropy(model, x, y)).grads, expected) < 5e-5


@pytest.mark.parametrize(("size", "keeps"), [((8, 8), False), ((3, 3), True)])
def test_the_record_keeps_the_smaller_of_gradients_and_operands(size: tuple[int, int], keeps: bool) -> None:
    model, records = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1)), []
    with GhostClipper(model, 1.0) as clipper:
        clipper.observer = lambda record, names: records.append(record)
        clipper.backward(model(torch.randn(5, 16, *size)).flatten(1).sum(1))
    (record,) = records
    record.rule.squared_norms(record, record.operands)
    assert record.per_example["bias"].shape == (5, 16)
    assert bool(record.saved) == keeps == (record.output_grad.numel() > 0) == ("weight" not in record.per_example)
