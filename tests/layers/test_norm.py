"""Normalization layers in the engine, against the one-example loop in float64."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpkernels.clipping import GhostClipper, UnsupportedModelError
from tests.clipping.oracle import assert_equals_the_loop, cross_entropy, deviation, one_example_loop
from tests.configurations import CLASSES, NORM, Framed

BATCH = 5


def batch(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, *shape).to(dtype), torch.randint(0, CLASSES, (BATCH,))


@pytest.mark.parametrize("name", NORM)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_one_example_loop(name: str, dtype: torch.dtype) -> None:
    model = Framed(NORM[name]).to(dtype)
    x, y = batch(model.shape, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10  # norms are rounded up by what cancels: 4e-11 at most here
    assert_equals_the_loop(model, x, y, tolerance)


@pytest.mark.parametrize("name", ["group", "instance 2-D", "layer", "batch 2-D"])
@pytest.mark.parametrize("frozen", ["weight", "bias", "before"])
def test_part_of_it_frozen(name: str, frozen: str) -> None:
    """Weight only, bias only, and a norm whose input needs no gradient."""
    model = Framed(NORM[name])
    (model.before if frozen == "before" else getattr(model.layer, frozen)).requires_grad_(False)
    x, y = batch(model.shape)
    expected, norms = one_example_loop(model, cross_entropy, x, y, 0.3)
    with GhostClipper(model, 0.3) as clipper:
        result = clipper.backward(cross_entropy(model, x, y))
    assert deviation(result.grads, expected) < 1e-5
    torch.testing.assert_close(result.norms, norms, rtol=1e-5, atol=0)


class Twice(Framed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.layer(x))


@pytest.mark.parametrize("name", ["group", "layer", "rms", "batch 2-D"])
def test_called_twice(name: str) -> None:
    model = Twice(NORM[name])
    x, y = batch(model.shape)
    expected, norms = one_example_loop(model, cross_entropy, x, y, 0.3)
    with GhostClipper(model, 0.3) as clipper:
        result = clipper.backward(cross_entropy(model, x, y))
    assert deviation(result.grads, expected) < 1e-5
    torch.testing.assert_close(result.norms, norms, rtol=1e-5, atol=0)


def test_under_checkpointing_and_channels_last() -> None:
    model = Framed(NORM["group"])
    x, y = batch(model.shape)
    expected, _ = one_example_loop(model, cross_entropy, x, y, 0.3)
    x = x.to(memory_format=torch.channels_last)
    with GhostClipper(model, 0.3) as clipper:
        losses = nn.functional.cross_entropy(checkpoint(model, x, use_reentrant=False), y, reduction="none")
        assert deviation(clipper.backward(losses).grads, expected) < 1e-5


@pytest.mark.parametrize("name", NORM)
def test_empty_batch(name: str) -> None:
    model = Framed(NORM[name])
    x, y = batch(model.shape)
    with GhostClipper(model, 0.3) as clipper:
        result = clipper.backward(cross_entropy(model, x[:0], y[:0]))
    assert result.norms.shape == (0,)
    assert not any(g.any() for g in result.grads.values())


@pytest.mark.parametrize("name", NORM)
def test_autocast_keeps_the_dtype(name: str) -> None:
    model = Framed(NORM[name])
    x, y = batch(model.shape)
    expected, _ = one_example_loop(model, cross_entropy, x, y, 0.3)
    with warnings.catch_warnings(), torch.autocast("cpu", dtype=torch.bfloat16):
        warnings.simplefilter("ignore")  # torch's RMS norm has no fused form for a weight of another dtype
        plain = model.layer(model.before(x))
        with GhostClipper(model, 0.3) as clipper:
            assert model.layer(model.before(x)).dtype == plain.dtype
            result = clipper.backward(cross_entropy(model, x, y).float())
    assert deviation(result.grads, expected) < 0.15


@pytest.mark.parametrize("needs_grad", [False, True])
def test_the_record_keeps_the_small_gradients_alone(needs_grad: bool) -> None:
    layer, records = GroupNormLayer(nn.GroupNorm(2, 4), "norm"), []
    y = layer.call(lambda ctx, record: records.append(record), None, torch.randn(5, 4, 6, requires_grad=needs_grad))
    y.sum().backward()
    (record,) = records
    layer.squared_norms(record, frozenset(record.slots))
    assert not record.saved
    assert record.output_grad.numel() == 0
    assert {slot: tuple(g.shape) for slot, g in record.per_example.items()} == {"weight": (5, 4), "bias": (5, 4)}


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.BatchNorm2d(4), r"0: batch norm in training mode .* dpkernels\.models\.replace_batch_norm"),
        (nn.BatchNorm2d(4, affine=False), "0: batch norm in training mode"),
        (nn.SyncBatchNorm(4), "0: batch norm in training mode"),
        (nn.BatchNorm2d(4, track_running_stats=False).eval(), "0: batch norm without running statistics"),
        (nn.InstanceNorm2d(4, affine=True, track_running_stats=True), "0: instance norm with running statistics"),
        (nn.InstanceNorm2d(4, affine=True, track_running_stats=True).eval(), "track_running_stats=False"),
    ],
)
def test_what_mixes_examples_is_refused(layer: nn.Module, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        GhostClipper(nn.Sequential(layer, nn.Linear(5, 2)), 1.0)


def test_frozen_instance_norm_in_eval_mode_is_fine() -> None:
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True).eval().requires_grad_(False)
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(12, CLASSES))
    x, y = batch((4, 3))
    expected, _ = one_example_loop(model, cross_entropy, x, y, 0.3)
    with GhostClipper(model, 0.3) as clipper:
        assert deviation(clipper.backward(cross_entropy(model, x, y)).grads, expected) < 1e-5


def test_back_in_training_mode_is_refused_too() -> None:
    model = Framed(NORM["batch 2-D"])
    with GhostClipper(model, 1.0):
        model.train()
        with pytest.raises(RuntimeError, match="layer: batch norm in training mode"):
            model(batch(model.shape)[0])


@pytest.mark.parametrize(
    ("layer", "shape", "words"),
    [
        (nn.LayerNorm((2, 5)), (2, 5), r"must have the batch before its normalized shape \(2, 5\)"),
        (nn.InstanceNorm1d(4, affine=True), (4, 6), "must be 3-D, batch first, got 2-D"),
        (nn.InstanceNorm1d(4, affine=True), (2, 4, 1), "must have several values to normalize"),
    ],
)
def test_input_without_a_batch_is_refused(layer: nn.Module, shape: tuple[int, ...], words: str) -> None:
    with GhostClipper(nn.Sequential(layer), 1.0) as clipper, pytest.raises(ValueError, match=words):
        clipper.model(torch.randn(shape))
