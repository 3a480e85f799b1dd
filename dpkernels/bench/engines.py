"""What is measured: an ordinary step of training, dpkernels' private one, and those of peers.

An engine takes a model, examples [batch, ...], labels [batch, ...] and what computes one loss per example of them, and
returns a function that makes one step: zero_grad, forward, backward, clip, noise, update.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkernels.optim import DPSGD

BOUND, SIGMA, LR, MOMENTUM = 0.1, 1.0, 0.01, 0.9
Step = Callable[[], None]
Losses = Callable[[Callable[..., Any], Tensor, Tensor], Tensor]  # (model, x, y) -> one loss per example


def cross_entropy(model: Callable[..., Any], x: Tensor, y: Tensor) -> Tensor:
    """Of a classifier."""
    return F.cross_entropy(model(x), y, reduction="none")


def ordinary(model: nn.Module, x: Tensor, y: Tensor, losses: Losses = cross_entropy) -> Step:
    """torch's own step, without privacy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)

    def step() -> None:
        optimizer.zero_grad()
        losses(model, x, y).mean().backward()
        optimizer.step()

    return step


def private(model: nn.Module, x: Tensor, y: Tensor, losses: Losses = cross_entropy) -> Step:
    """dpkernels' step."""
    optimizer = DPSGD(
        model,
        lr=LR,
        momentum=MOMENTUM,
        noise_multiplier=SIGMA,
        batch_size=len(x),
        max_grad_norm=BOUND,
    )

    def step() -> None:
        optimizer.zero_grad()
        optimizer.backward(losses(model, x, y))
        optimizer.step()

    return step


def opacus_hooks(model: nn.Module, x: Tensor, y: Tensor, losses: Losses = cross_entropy) -> Step:
    """Opacus with per-example gradients from hooks."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(model)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM),
        noise_multiplier=SIGMA,
        max_grad_norm=BOUND,
        expected_batch_size=len(x),
    )

    def step() -> None:
        optimizer.zero_grad()
        losses(wrapped, x, y).mean().backward()
        optimizer.step()

    return step


def opacus_ghost(model: nn.Module, x: Tensor, y: Tensor, losses: Losses = cross_entropy) -> Step:
    """Opacus with ghost clipping."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=BOUND, use_ghost_clipping=True)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM),
        noise_multiplier=SIGMA,
        max_grad_norm=BOUND,
        expected_batch_size=len(x),
    )
    criterion = DPLossFastGradientClipping(wrapped, optimizer, _Criterion(losses))

    def step() -> None:
        optimizer.zero_grad()
        criterion(wrapped, x, y).backward()
        optimizer.step()

    return step


class _Criterion:
    """Losses as Opacus wants them, which reads their reduction and then asks for none."""

    def __init__(self, losses: Losses) -> None:
        self.losses, self.reduction = losses, "mean"

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self.losses(model, x, y)


def vmap(model: nn.Module, x: Tensor, y: Tensor, losses: Losses = cross_entropy) -> Step:
    """Per-example gradients from torch.func, clipped and summed in plain torch."""
    from torch.func import functional_call, grad
    from torch.func import vmap as over_examples

    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, Tensor], one_x: Tensor, one_y: Tensor) -> Tensor:
        def call(*args: Any, **kwargs: Any) -> Any:
            return functional_call(model, parameters, args, kwargs)

        return losses(call, one_x[None], one_y[None]).sum()

    per_example = over_examples(grad(loss), in_dims=(None, 0, 0), randomness="different")

    def step() -> None:
        grads = per_example({name: p.detach() for name, p in named.items()}, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        factors = (BOUND / norms).clamp(max=1)
        for name, p in named.items():
            p.grad = torch.einsum("b,b...->...", factors, grads[name])
            p.grad.add_(torch.randn_like(p), alpha=SIGMA * BOUND).div_(len(x))
        optimizer.step()

    return step


class Engine(Protocol):
    """What makes the step of an engine."""

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, losses: Losses = ..., /) -> Step: ...


ENGINES: dict[str, Engine] = {
    "ordinary": ordinary,
    "dpkernels": private,
    "opacus-hooks": opacus_hooks,
    "opacus-ghost": opacus_ghost,
    "vmap": vmap,
}

_NEEDS = {"opacus-hooks": "opacus", "opacus-ghost": "opacus"}


def installed() -> list[str]:
    """The engines that can run here, without the ordinary one."""
    names = [name for name in ENGINES if name != "ordinary"]
    return [name for name in names if name not in _NEEDS or importlib.util.find_spec(_NEEDS[name])]
