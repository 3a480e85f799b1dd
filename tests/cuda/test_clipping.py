"""The engine on a GPU against the loop over single examples on the CPU in float64."""

import copy

import pytest
import torch
from torch import nn

from dpkernels import models
from dpkernels.clipping import GhostClipper
from tests.clipping.oracle import cross_entropy, deviation, one_example_loop
from tests.configurations import CLASSES, LAYERS, Configuration, Framed

BATCH = 6


def assert_clips(model: nn.Module, x: torch.Tensor, tolerance: float = 1e-4, *, empty: bool = True) -> None:
    y = torch.randint(0, CLASSES, (len(x),))
    bound = float(one_example_loop(model, cross_entropy, x, y, 1.0)[1].median())
    want, norms = one_example_loop(model, cross_entropy, x, y, bound)
    with GhostClipper(copy.deepcopy(model).cuda(), bound) as clipper:
        result = clipper.backward(cross_entropy(clipper.model, x.cuda(), y.cuda()))
        assert all(g.is_cuda and g.dtype == torch.float64 for g in result.grads.values())
        assert deviation({name: g.cpu() for name, g in result.grads.items()}, want) <= tolerance
        torch.testing.assert_close(result.norms.cpu(), norms, rtol=0.01, atol=0)
        # A gradient in lower precision may be shorter than the loop's; else norms never fall below the true ones.
        assert tolerance > 1e-3 or (result.norms.cpu() >= norms * (1 - 1e-5)).all()
        if empty:
            nothing = clipper.backward(cross_entropy(clipper.model, x[:0].cuda(), y[:0].cuda()))
            assert all(not g.any() for g in nothing.grads.values())


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    configuration: Configuration = LAYERS[name]
    assert_clips(Framed(configuration), configuration.sample(BATCH))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (models.mnist_cnn, (1, 28, 28)),
        (models.cifar10_cnn, (3, 32, 32)),
        (lambda: models.scatternet_cnn((81, 7, 7)), (81, 7, 7)),
        (lambda: models.resnet18(10, stem="cifar"), (3, 32, 32)),
    ],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_models(make: type[nn.Module], shape: tuple[int, ...], layout: torch.memory_format) -> None:
    x = torch.randn(BATCH, *shape).contiguous(memory_format=layout)
    assert_clips(make().to(memory_format=layout), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    model, x, y = models.cifar10_cnn(), torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))
    want, norms = one_example_loop(model, cross_entropy, x, y, 1.0)
    with GhostClipper(model.cuda(), 1.0) as clipper:
        with torch.autocast("cuda", dtype):
            losses = cross_entropy(model, x.cuda(), y.cuda())
        result = clipper.backward(losses)
    torch.testing.assert_close(result.norms.cpu(), norms, rtol=0.1, atol=0)
    assert deviation({name: g.cpu() for name, g in result.grads.items()}, want) <= 0.1


def test_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    assert_clips(models.cifar10_cnn(), torch.randn(BATCH, 3, 32, 32), 0.02)


def test_examples_that_are_not_finite_are_left_out() -> None:
    model, x, y = models.cifar10_cnn().cuda(), torch.randn(BATCH, 3, 32, 32).cuda(), torch.zeros(BATCH).long().cuda()
    x[2] = torch.nan
    with GhostClipper(model, 1.0) as clipper:
        result = clipper.backward(cross_entropy(model, x, y))
        keep = [i for i in range(BATCH) if i != 2]
        others = clipper.backward(cross_entropy(model, x[keep], y[keep]))
    assert not result.norms[2].isfinite()
    assert deviation(result.grads, others.grads) <= 1e-4


def test_the_same_bits_twice_and_on_any_stream() -> None:
    model, x, y = models.mnist_cnn().cuda(), torch.randn(64, 1, 28, 28).cuda(), torch.randint(0, 10, (64,)).cuda()
    with GhostClipper(model, 0.1) as clipper:
        losses = cross_entropy(model, x, y)
        first = clipper.backward(losses)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            second = clipper.backward(cross_entropy(model, x, y))
        side.synchronize()
    assert torch.equal(first.norms, second.norms)
    assert all(torch.equal(first.grads[name], second.grads[name]) for name in first.grads)


def test_both_passes_under_graph_capture() -> None:
    model, x, y = models.mnist_cnn().cuda(), torch.randn(32, 1, 28, 28).cuda(), torch.randint(0, 10, (32,)).cuda()
    with GhostClipper(model, 0.1) as clipper:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # cuDNN and the allocator choose before the capture
            for _ in range(3):
                clipper.backward(cross_entropy(model, x, y))
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = clipper.backward(cross_entropy(model, x, y))
        x.normal_()
        graph.replay()
        again = clipper.backward(cross_entropy(model, x, y))
    torch.testing.assert_close(captured.norms, again.norms, rtol=1e-5, atol=0)
    assert deviation(captured.grads, again.grads) <= 1e-4
