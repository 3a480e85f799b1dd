"""DPOptimizer: any torch optimizer, fed with noised means."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpkernels.accounting import Plan
from dpkernels.ops.update import noised_mean
from dpkernels.optim.privacy import Privacy
from dpkernels.optim.private import PrivateOptimizer


class DPOptimizer(PrivateOptimizer):
    """Runs ``optimizer`` on the privatized gradient: ``p.grad`` holds the noised mean when its ``step()`` is called.

    Args:
        model: the module whose parameters ``optimizer`` updates.
        optimizer: any torch optimizer without closure; it is used, not copied.
        plan: the privacy plan; or noise_multiplier and batch_size as keywords.
        privacy: the keywords of :class:`Privacy`: max_grad_norm, noise_multiplier, batch_size, ledger, seed,
            loss_reduction.

    Raises:
        UnsupportedModelError, ValueError, TypeError: see :class:`dpkernels.GhostClipper` and :class:`Privacy`.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, plan: Plan | None = None, **privacy: Any) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
        if isinstance(optimizer, PrivateOptimizer):
            raise TypeError("optimizer must be an ordinary torch optimizer, got a private one")
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise TypeError(
                f"optimizer must update from p.grad alone, but {type(optimizer).__name__}.step() needs a closure that "
                "evaluates the loss again, which would use the batch again: take a first-order optimizer"
            )
        if isinstance(optimizer, torch.optim.SparseAdam):
            raise TypeError("optimizer must take dense gradients, for noise is dense, got SparseAdam: take Adam")
        self._inner = optimizer
        super().__init__(model, optimizer.param_groups, optimizer.defaults, Privacy(plan, **privacy))
        self._share()

    def _share(self) -> None:
        """One set of groups and one state: schedulers act on this optimizer, updates happen in the other."""
        self.param_groups, self.state = self._inner.param_groups, self._inner.state

    def _require_groups(self) -> None:
        self._share()  # the inner optimizer makes new groups where it loads a state
        super()._require_groups()

    def _update(self, sums: dict[nn.Parameter, Tensor], step: int) -> None:
        params, _ = self._in_order(sums)
        means = [torch.empty_like(p) for p in params]
        noised_mean(means, [sums[p] for p in params], **self._noise(step))
        self._inner.zero_grad()  # a frozen parameter may have a gradient from elsewhere
        for p, mean in zip(params, means, strict=True):
            p.grad = mean
        try:
            self._inner.step()
        finally:
            self._inner.zero_grad()  # the engine takes any later p.grad for a gradient that escaped it

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._inner.load_state_dict({k: v for k, v in state_dict.items() if k != "privacy"})
        self._share()
