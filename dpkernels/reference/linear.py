"""Linear layers: the per-example gradient is ``sum_t g_t a_t^T`` for the weight and ``sum_t g_t`` for the bias."""

import torch
from torch import Tensor


def _per_example(activations: Tensor, output_grads: Tensor) -> tuple[Tensor, Tensor]:
    return torch.einsum("btd,btp->bdp", output_grads, activations), output_grads.sum(1)


def linear_squared_norms(
    activations: Tensor, output_grads: Tensor, *, weight: bool = True, bias: bool = True
) -> Tensor:
    weight_grads, bias_grads = _per_example(activations, output_grads)
    return weight * weight_grads.double().square().sum((1, 2)) + bias * bias_grads.double().square().sum(1)


def linear_forward(activations: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    outputs = activations @ weight.T
    return outputs if bias is None else outputs + bias, activations.double().square().sum(1)


def linear_clipped_sums(
    activations: Tensor, output_grads: Tensor, weights: Tensor, *, weight: bool = True, bias: bool = True
) -> tuple[Tensor, Tensor]:
    kept = weights != 0
    weight_grads, bias_grads = _per_example(activations[kept], output_grads[kept])
    empty = weights.new_empty
    return (
        torch.einsum("b,bdp->dp", weights[kept], weight_grads.double()) if weight else empty(0, 0),
        torch.einsum("b,bd->d", weights[kept], bias_grads.double()) if bias else empty(0),
    )
