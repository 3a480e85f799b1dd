"""Losing Less: a squared error that gives way to the focal loss, and a penalty on pre-activations."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dpkernels.losses.logits import focal, require, sum_squared_error, wide
from dpkernels.losses.outputs import recorded_outputs, weighted_layers

Penalty = Literal["pre-activations", "weights"]


class LosingLess:
    """Shamsabadi & Papernot 2023, equation 10, one value per example:

        alpha L_Focal + (1 - alpha) L_SSE + (1 - alpha) / beta L_Reg,    alpha = sigmoid(epoch - threshold_epoch)

    It stands in for model and loss in a training loop, since the penalty reads what happens inside the model::

        criterion = dpk.losses.LosingLess(model, threshold_epoch=0, beta=1, gamma=5)
        for x, y in loader:
            losses = criterion(x, y, epoch=loader.epoch)  # was: F.cross_entropy(model(x), y, reduction="none")
            optimizer.backward(losses)

    L_Reg (equation 9) is sum_m ||h_m||^2 / d_m over the outputs h_m of all linear and convolutional layers but the one
    that is called last, whose output are the logits; d_m is the number of values of h_m for one example. (The paper
    writes ||h_m||_2, and in equation 7 spells that out as the sum of squares.) Nothing is left in the model.

    Args:
        model: maps inputs to logits [batch, classes].
        threshold_epoch: the epoch, counted from 0, at which squared error and focal loss weigh the same.
        beta: > 0, divides the penalty; ``inf`` leaves it out.
        gamma: >= 0, the focal loss's power; 0 makes it cross entropy.
        penalty: "pre-activations", or "weights" for equation 15, sum_m ||W_m||^2 / d'_m over the layers' weights. That
            does not depend on the example, and so is no part of the losses but of the update: set the optimizer's
            weight decay to :meth:`weight_decays` at each epoch.
        layers: names of modules of ``model`` whose outputs count as pre-activations, instead of those above.

    Raises:
        ValueError, TypeError: an argument is out of range, or there is nothing to penalize.
    """

    def __init__(
        self,
        model: nn.Module,
        threshold_epoch: float,
        beta: float,
        gamma: float,
        *,
        penalty: Penalty = "pre-activations",
        layers: Iterable[str] | None = None,
    ) -> None:
        require("threshold_epoch", threshold_epoch, "a finite number", math.isfinite)
        require("beta", beta, "a number > 0", lambda value: value > 0)
        require("gamma", gamma, "a finite number >= 0", lambda value: 0 <= value < math.inf)
        if penalty not in ("pre-activations", "weights"):
            raise ValueError(f"penalty must be 'pre-activations' or 'weights', got {penalty!r}")
        self.model = model
        self.threshold_epoch, self.beta, self.gamma, self.penalty = threshold_epoch, beta, gamma, penalty
        self._names = None if layers is None else tuple(layers)
        if not self._layers() and beta < math.inf:
            raise ValueError(
                "model must have a linear or convolutional layer to penalize, got none: name others in layers, or set "
                "beta to inf"
            )

    def _layers(self) -> dict[str, nn.Module]:
        """Looked up anew each time: layers of a model may be replaced."""
        return weighted_layers(self.model) if self._names is None else _by_name(self.model, self._names)

    def alpha(self, epoch: float) -> float:
        """The weight of the focal loss at ``epoch``."""
        return _sigmoid(epoch - self.threshold_epoch)

    def __call__(self, inputs: Any, labels: Tensor, epoch: float) -> Tensor:
        """Run the model on ``inputs`` and compare with ``labels``.

        Args:
            inputs: what the model takes, examples first.
            labels: int64 [batch].
            epoch: counted from 0: the number of whole passes made before this batch, such as ``loader.epoch``.

        Returns:
            [batch], where entry i depends on example i alone.

        Raises:
            ValueError: logits, labels or an output of a layer have another shape.
            RuntimeError: the forward called none of the layers.
        """
        alpha, rest = self.alpha(epoch), _sigmoid(self.threshold_epoch - epoch)  # 1 - alpha, without rounding to 0
        share = rest / self.beta if self.penalty == "pre-activations" else 0.0
        layers = self._layers() if share else {}
        with recorded_outputs(self.model, layers) as outputs:
            logits = self.model(inputs)
        losses = alpha * focal(logits, labels, self.gamma) + rest * sum_squared_error(logits, labels)
        if not share:
            return losses
        if not outputs:
            raise RuntimeError(f"the forward called none of the layers {', '.join(layers)} (a compiled model?)")
        for name, h in outputs[:-1] if self._names is None else outputs:
            if h.dim() < 2 or h.size(0) != len(labels):
                raise ValueError(f"layer {name!r} must give [{len(labels)}, ...], examples first, got {tuple(h.shape)}")
            losses = losses + share * _MeanSquare.apply(wide(h))
        return losses

    def weight_decays(self, epoch: float) -> dict[str, float]:
        """Equation 15 as the weight decay of each layer's weight, by parameter name: 2 (1 - alpha) / (beta d').

        Raises ValueError unless the penalty is on weights.
        """
        if self.penalty != "weights":
            raise ValueError(f"penalty must be 'weights' to be a weight decay, got {self.penalty!r}")
        share = 2 * _sigmoid(self.threshold_epoch - epoch) / self.beta
        weights = {id(layer._parameters.get("weight")) for layer in self._layers().values()}
        return {name: share / p.numel() for name, p in self.model.named_parameters() if id(p) in weights}


class _MeanSquare(torch.autograd.Function):
    """The mean of squares of each row, without the squares of a whole activation in memory."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return torch.linalg.vector_norm(h, dim=tuple(range(1, h.dim()))).square_().div_(math.prod(h.shape[1:]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_grads: Tensor) -> Tensor:
        (h,), (grad,) = ctx.saved_tensors, output_grads
        return h * (grad * (2 / math.prod(h.shape[1:]))).view(-1, *(1,) * (h.dim() - 1))


def _sigmoid(x: float) -> float:
    return float(torch.sigmoid(torch.tensor(x, dtype=torch.float64)))


def _by_name(model: nn.Module, layers: Iterable[str]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    found = {}
    for name in layers:
        if name not in modules:
            raise ValueError(f"layers must be names of modules of model, got {name!r}")
        parts = name.split(".") if name else []
        above = [modules[".".join(parts[:count])] for count in range(len(parts))]
        if any(True for module in above for _ in module.parameters(recurse=False)):
            raise ValueError(f"layers must not lie within a module with parameters of its own, got {name!r}")
        found[name] = modules[name]
    return found
