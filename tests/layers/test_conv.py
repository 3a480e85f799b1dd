"""Convolutions in the engine, against the one-example loop in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpkernels.clipping import GhostClipper, UnsupportedModelError
from dpkernels.layers.conv import ConvLayer
from tests.clipping.oracle import cross_entropy, deviation, one_example_loop

BATCH, CLASSES = 5, 3

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1-D": (lambda: nn.Conv1d(4, 6, 3, padding=1), (4, 11)),
    "1-D wide": (lambda: nn.Conv1d(24, 40, 3), (24, 6)),
    "2-D": (lambda: nn.Conv2d(4, 6, 3), (4, 7, 6)),
    "2-D wide": (lambda: nn.Conv2d(24, 40, 3, padding=1), (24, 3, 4)),
    "2-D strided": (lambda: nn.Conv2d(4, 6, 4, 2, 1), (4, 9, 8)),
    "2-D without bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), (4, 5, 5)),
    "2-D rectangular": (lambda: nn.Conv2d(4, 6, (3, 1), (2, 1), (1, 0), (1, 2)), (4, 7, 6)),
    "3-D": (lambda: nn.Conv3d(4, 3, (2, 3, 1), (1, 2, 1), (1, 0, 1)), (4, 3, 5, 4)),
    "two groups": (lambda: nn.Conv2d(4, 8, 3, groups=2), (4, 5, 6)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), (4, 5, 6)),
    "same": (lambda: nn.Conv2d(4, 6, (3, 5), padding="same", dilation=(2, 1)), (4, 6, 7)),
    "same, even kernel": (lambda: nn.Conv2d(4, 6, (4, 3), padding="same"), (4, 6, 7)),
    "same, even kernel, circular": (lambda: nn.Conv1d(4, 6, 4, padding="same", padding_mode="circular"), (4, 9)),
    "valid": (lambda: nn.Conv2d(4, 6, 2, padding="valid"), (4, 4, 4)),
    "reflect": (lambda: nn.Conv2d(4, 6, 3, padding=(2, 1), padding_mode="reflect"), (4, 5, 6)),
    "replicate": (lambda: nn.Conv3d(4, 2, 3, padding=1, padding_mode="replicate"), (4, 3, 2, 3)),
    "circular": (lambda: nn.Conv1d(4, 6, 3, 2, padding=2, padding_mode="circular"), (4, 9)),
    "transposed 1-D": (lambda: nn.ConvTranspose1d(4, 6, 3, 2, output_padding=1), (4, 5)),
    "transposed 2-D": (lambda: nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 0), (1, 2), groups=2), (4, 4, 3)),
    "transposed 2-D, dilated": (lambda: nn.ConvTranspose2d(4, 3, 2, 1, 0, 1, dilation=2), (4, 4, 3)),
    "transposed 2-D, wide": (lambda: nn.ConvTranspose2d(40, 24, 3, padding=1), (40, 3, 4)),
    "transposed 3-D": (lambda: nn.ConvTranspose3d(4, 2, 2, 2, bias=False), (4, 2, 3, 2)),
}


class Net(nn.Module):
    """The layer behind a trainable linear of the input, so that its input's gradient matters too."""

    def __init__(self, name: str) -> None:
        super().__init__()
        make, self.shape = LAYERS[name]
        self.before = nn.Linear(self.shape[-1], self.shape[-1])
        self.conv = make()
        with torch.no_grad():
            size = self.conv(torch.zeros(1, *self.shape)).numel()
        self.head = nn.Linear(size, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.conv(self.before(x))).flatten(1))


def batch(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, *shape).to(dtype), torch.randint(0, CLASSES, (BATCH,))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_one_example_loop(name: str, dtype: torch.dtype) -> None:
    model = Net(name).to(dtype)
    x, y = batch(model.shape, dtype)
    _, norms = one_example_loop(model, cross_entropy, x, y, 1.0)
    bound = float(norms.median())
    expected, norms = one_example_loop(model, cross_entropy, x, y, bound)
    output = model(x)
    tolerance = 5e-5 if dtype == torch.float32 else 1e-11
    for memory in ("keep", "lean"):
        with GhostClipper(model, bound, memory=memory) as clipper:
            assert torch.equal(model(x), output)
            result = clipper.backward(cross_entropy(model, x, y))
        assert deviation(result.grads, expected) < tolerance
        torch.testing.assert_close(result.norms, norms, rtol=tolerance, atol=0)


@pytest.mark.parametrize("name", ["2-D", "2-D wide", "transposed 2-D", "transposed 2-D, wide"])
@pytest.mark.parametrize("frozen", ["weight", "bias", "before"])
def test_part_of_it_frozen(name: str, frozen: str) -> None:
    """Weight only, bias only, and a convolution whose input needs no gradient."""
    model = Net(name)
    (model.before if frozen == "before" else getattr(model.conv, frozen)).requires_grad_(False)
    x, y = batch(model.shape)
    expected, norms = one_example_loop(model, cross_entropy, x, y, 0.3)
    with GhostClipper(model, 0.3) as clipper:
        result = clipper.backward(cross_entropy(model, x, y))
    assert deviation(result.grads, expected) < 5e-5
    torch.testing.assert_close(result.norms, norms, rtol=5e-5, atol=0)


class Twice(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv, self.head = make(), nn.LazyLinear(CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.conv(torch.tanh(self.conv(x)))).flatten(1))


@pytest.mark.parametrize("make", [lambda: nn.Conv2d(3, 3, 3, padding=1), lambda: nn.ConvTranspose2d(3, 3, 2)])
def test_called_twice(make: Callable[[], nn.Module]) -> None:
    model = Twice(make)
    x, y = batch((3, 5, 4))
    model(x)
    expected, norms = one_example_loop(model, cross_entropy, x, y, 0.3)
    with GhostClipper(model, 0.3) as clipper:
        result = clipper.backward(cross_entropy(model, x, y))
    assert deviation(result.grads, expected) < 5e-5
    torch.testing.assert_close(result.norms, norms, rtol=5e-5, atol=0)


@pytest.mark.parametrize("name", ["2-D", "2-D wide", "reflect"])
def test_under_checkpointing_and_channels_last(name: str) -> None:
    model = Net(name).to(memory_format=torch.channels_last)
    x, y = batch(model.shape)
    expected, _ = one_example_loop(model, cross_entropy, x, y, 0.3)
    x = x.to(memory_format=torch.channels_last)
    with GhostClipper(model, 0.3) as clipper:
        losses = nn.functional.cross_entropy(checkpoint(model, x, use_reentrant=False), y, reduction="none")
        assert deviation(clipper.backward(losses).grads, expected) < 5e-5


@pytest.mark.parametrize("name", LAYERS)
def test_empty_batch(name: str) -> None:
    model = Net(name)
    x, y = batch(model.shape)
    with GhostClipper(model, 0.3) as clipper:
        result = clipper.backward(cross_entropy(model, x[:0], y[:0]))
    assert result.norms.shape == (0,)
    assert not any(g.any() for g in result.grads.values())


@pytest.mark.parametrize("name", ["2-D", "2-D wide", "reflect", "transposed 2-D"])
def test_autocast(name: str) -> None:
    model = Net(name)
    x, y = batch(model.shape)
    expected, _ = one_example_loop(model, cross_entropy, x, y, 0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model.conv(x)
        with GhostClipper(model, 0.3) as clipper:
            assert model.conv(x).dtype == plain.dtype
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
    layer, records = ConvLayer(nn.Conv2d(16, 16, 3, padding=1), "conv"), []
    y = layer.call(lambda ctx, record: records.append(record), None, torch.randn(5, 16, *size))
    y.sum().backward()
    (record,) = records
    layer.squared_norms(record, frozenset(record.slots))
    assert record.per_example["bias"].shape == (5, 16)
    assert bool(record.saved) == keeps == (record.output_grad.numel() > 0) == ("weight" not in record.per_example)


@pytest.mark.parametrize(
    ("layer", "shape", "dims"), [(nn.Conv2d(4, 6, 3), (4, 5, 5), 4), (nn.ConvTranspose1d(4, 6, 3), (4, 5), 3)]
)
def test_input_without_a_batch_is_refused(layer: nn.Module, shape: tuple[int, ...], dims: int) -> None:
    with GhostClipper(nn.Sequential(layer), 1.0) as clipper, pytest.raises(ValueError, match=f"0' must be {dims}-D"):
        clipper.model(torch.randn(shape))


def test_a_conv_forward_of_its_own_is_refused() -> None:
    class Scaled(nn.Conv2d):
        def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return 2 * super()._conv_forward(input, weight, bias)

    with pytest.raises(UnsupportedModelError, match="0: it has a _conv_forward of its own"):
        GhostClipper(nn.Sequential(Scaled(4, 6, 3)), 1.0)
