"""The oracle: a loop over single examples with plain autograd, in float64 unless told otherwise."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpkernels.clipping import GhostClipper

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]  # (model, x, y) -> one loss per example


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y, reduction="none")


def one_example_loop(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor, bound: float, dtype: torch.dtype = torch.float64
) -> tuple[dict[str, Tensor], Tensor]:
    """Clipped sum and norms by one backward per example, on a copy of the model in ``dtype``."""
    model = copy.deepcopy(model).to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in trainable.items()}
    norms = torch.zeros(len(x), dtype=torch.float64)
    for i in range(len(x)):
        grads = torch.autograd.grad(loss(model, x[i : i + 1], y[i : i + 1]).sum(), list(trainable.values()))
        norms[i] = torch.stack([g.double().norm() for g in grads]).norm()
        for name, g in zip(trainable, grads, strict=True):
            total[name] += g * (bound / float(norms[i]) if norms[i] > bound else 1.0)
    return total, norms


def deviation(got: dict[str, Tensor], want: dict[str, Tensor], *, floor: float = 0.0) -> float:
    """Largest difference of a parameter's sums, relative to that parameter's largest entry.

    floor: that entry counts as no less than this part of the largest of all; where some gradients are zero but for
    rounding, such as that of a bias before a softmax.
    """
    assert got.keys() == want.keys()
    some = [k for k in want if want[k].numel()]
    least = max(1e-12, floor * max(float(want[k].abs().max()) for k in some))
    return max(float((got[k] - want[k]).abs().max() / want[k].abs().max().clamp_min(least)) for k in some)


def assert_equals_the_loop(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    tolerance: float,
    *,
    norms_tolerance: float | None = None,
    empty: bool = True,
) -> None:
    """The engine gives the loop's clipped sums and norms, at a bound that clips half the examples.

    norms_tolerance: relative, else ``tolerance``. empty: whether torch runs the model on a batch of no rows; else there
    are no losses to come by.
    """
    _, norms = one_example_loop(model, cross_entropy, x, y, 1.0)
    bound = float(norms.median())
    expected, norms = one_example_loop(model, cross_entropy, x, y, bound)
    with GhostClipper(model, bound) as clipper:
        result = clipper.backward(cross_entropy(model, x, y))
        nothing = clipper.backward(cross_entropy(model, x[:0], y[:0]) if empty else torch.zeros(0))
    assert deviation(result.grads, expected) < tolerance
    torch.testing.assert_close(
        result.norms, norms, rtol=tolerance if norms_tolerance is None else norms_tolerance, atol=0
    )
    assert not any(g.any() for g in nothing.grads.values())
