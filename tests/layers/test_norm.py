"""Normalization layers in the engine, against the one-example loop in float64."""

import warnings

import pytest
import torch
from torch import Tensor, nn
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
    assert_equals_the_loop(model, x, y, tolerance, empty="instance" not in name)


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


@pytest.mark.parametrize("name", [name for name in NORM if "instance" not in name])
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


class NormAndRelu(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.BatchNorm2d(4), r"0: batch norm in training mode .* dpkernels\.models\.replace_batch_norm"),
        (nn.BatchNorm2d(4, affine=False), "0: batch norm in training mode"),
        (nn.SyncBatchNorm(4), "0: batch norm in training mode"),
        (NormAndRelu(4), "0: batch norm in training mode"),
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
    model, y = Framed(NORM["batch 2-D"]), torch.randint(0, CLASSES, (BATCH,))
    with GhostClipper(model, 1.0) as clipper:
        clipper.backward(cross_entropy(model, batch(model.shape)[0], y))
        model.train()
        with pytest.raises(RuntimeError, match=r"Batch normalization|running_mean"):
            clipper.backward(cross_entropy(model, batch(model.shape)[0], y))
