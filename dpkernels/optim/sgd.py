"""DPSGD: stochastic gradient descent on noised, clipped sums (Abadi et al. 2016), in one pass over the parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from dpkernels.accounting import Plan
from dpkernels.ops.update import sgd_update
from dpkernels.optim.groups import Parameters, as_groups, require_range
from dpkernels.optim.privacy import Privacy
from dpkernels.optim.private import PrivateOptimizer


class DPSGD(PrivateOptimizer):
    """torch.optim.SGD on the privatized gradient.

    Args:
        model: the module to train; every trainable parameter must be in a group.
        plan: the privacy plan; or noise_multiplier and batch_size as keywords.
        lr: learning rate, >= 0.
        momentum, dampening, weight_decay, nesterov: as for torch.optim.SGD.
        params: parameter groups of ``model``; by default one group of all its parameters, which
            trains frozen ones once they are unfrozen.
        privacy: the keywords of :class:`dpkernels.optim.Privacy`: max_grad_norm, noise_multiplier, batch_size, ledger,
            seed, loss_reduction.

    Raises:
        UnsupportedModelError, ValueError, TypeError: see :class:`dpkernels.GhostClipper` and
            :class:`dpkernels.optim.Privacy`.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None = None,
        *,
        lr: float,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        params: Parameters | None = None,
        **privacy: Any,
    ) -> None:
        for name, value in {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}.items():
            require_range(name, value, 0.0)
        require_range("dampening", dampening, -math.inf)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(f"nesterov needs momentum > 0 and dampening 0, got {momentum} and {dampening}")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(model, as_groups(model, params), defaults, Privacy(plan, **privacy))

    def _update(self, sums: dict[nn.Parameter, Tensor], step: int) -> None:
        params, groups = self._in_order(sums)
        buffers = []
        first = []  # torch's momentum starts as the first gradient, without dampening
        for p, group in zip(params, groups, strict=True):
            state = self.state[p]
            first.append("momentum_buffer" not in state)
            if group["momentum"] and first[-1]:
                state["momentum_buffer"] = torch.empty_like(p)
            buffers.append(state["momentum_buffer"] if group["momentum"] else p.new_empty(0))
        names = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
        options: dict[str, Any] = {name: [group[name] for group in groups] for name in names}
        sgd_update(params, [sums[p] for p in params], buffers, first=first, **options, **self._noise(step))
