"""DPAdam and DPAdamW: Adam on noised, clipped sums, with weight decay in the gradient or decoupled from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dpkernels.accounting import Plan
from dpkernels.optim.private import Parameters, as_groups, require_range
from dpkernels.optim.wrapper import DPOptimizer


class DPAdam(DPOptimizer):
    """torch.optim.Adam on the privatized gradient.

    Args:
        model: the module to train; every trainable parameter must be in a group.
        plan: the privacy plan; or noise_multiplier and batch_size as keywords.
        lr, betas, eps, weight_decay: as for torch.optim.Adam.
        params: parameter groups of ``model``; by default one group of all its trainable parameters.
        privacy: the keywords of :class:`dpkernels.optim.Privacy`: max_grad_norm, noise_multiplier, batch_size, ledger,
            seed, memory, loss_reduction.

    Raises:
        UnsupportedModelError, ValueError, TypeError: see :class:`dpkernels.GhostClipper` and
            :class:`dpkernels.optim.Privacy`.
    """

    _ordinary: Any = torch.optim.Adam

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None = None,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        params: Parameters | None = None,
        **privacy: Any,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            require_range(name, value, 0.0)
        for k, beta in enumerate(betas):
            require_range(f"betas[{k}]", beta, 0.0, 1.0)
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(model, self._ordinary(as_groups(model, params), **options), plan, **privacy)


class DPAdamW(DPAdam):
    """torch.optim.AdamW on the privatized gradient: decoupled weight decay. Arguments as for :class:`DPAdam`."""

    _ordinary = torch.optim.AdamW

    def __init__(
        self, model: nn.Module, plan: Plan | None = None, *, weight_decay: float = 1e-2, **options: Any
    ) -> None:
        super().__init__(model, plan, weight_decay=weight_decay, **options)
