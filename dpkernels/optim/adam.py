"""DPAdam and DPAdamW: Adam on noised, clipped sums, weight decay in the gradient or decoupled, in one pass."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dpkernels.accounting import Plan
from dpkernels.ops.update import adam_update
from dpkernels.optim.groups import Parameters, as_groups, require_range
from dpkernels.optim.privacy import Privacy
from dpkernels.optim.private import PrivateOptimizer


class DPAdam(PrivateOptimizer):
    """torch.optim.Adam on the privatized gradient.

    Args:
        model: the module to train; every trainable parameter must be in a group.
        plan: the privacy plan; or noise_multiplier and batch_size as keywords.
        lr, betas, eps, weight_decay, amsgrad: as for torch.optim.Adam.
        params: parameter groups of ``model``; by default one group of all its parameters, which
            trains frozen ones once they are unfrozen.
        privacy: the keywords of :class:`dpkernels.optim.Privacy`: max_grad_norm, noise_multiplier, batch_size, ledger,
            seed, loss_reduction.

    Raises:
        UnsupportedModelError, ValueError, TypeError: see :class:`dpkernels.GhostClipper` and
            :class:`dpkernels.optim.Privacy`.
    """

    _decoupled: ClassVar[bool] = False

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | None = None,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        params: Parameters | None = None,
        **privacy: Any,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            require_range(name, value, 0.0)
        for k, beta in enumerate(betas):
            require_range(f"betas[{k}]", beta, 0.0, 1.0)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(model, as_groups(model, params), defaults, Privacy(plan, **privacy))

    def _update(self, sums: dict[nn.Parameter, Tensor], step: int) -> None:
        params, groups = self._in_order(sums)
        for p, group in zip(params, groups, strict=True):
            state = self.state[p]
            if not state:
                state["step"] = 0
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                if group["amsgrad"]:
                    state["max_exp_avg_sq"] = torch.zeros_like(p)
            state["step"] += 1
        states = [self.state[p] for p in params]
        adam_update(
            params,
            [sums[p] for p in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [state.get("max_exp_avg_sq", p.new_empty(0)) for p, state in zip(params, states, strict=True)],
            steps=[state["step"] for state in states],
            lr=[group["lr"] for group in groups],
            beta1=[group["betas"][0] for group in groups],
            beta2=[group["betas"][1] for group in groups],
            eps=[group["eps"] for group in groups],
            weight_decay=[group["weight_decay"] for group in groups],
            decoupled=self._decoupled,
            **self._noise(step),
        )


class DPAdamW(DPAdam):
    """torch.optim.AdamW on the privatized gradient: decoupled weight decay. Arguments as for :class:`DPAdam`."""

    _decoupled = True

    def __init__(
        self, model: nn.Module, plan: Plan | None = None, *, weight_decay: float = 1e-2, **options: Any
    ) -> None:
        super().__init__(model, plan, weight_decay=weight_decay, **options)
