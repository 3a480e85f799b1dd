"""Argument checks that every operator's wrapper shares, in words for users."""

import torch
from torch import Tensor


def require_tensor(value: Tensor, name: str, shape: str) -> None:
    """Raise unless ``value`` is a floating-point tensor of the rank that ``shape`` shows: ``[batch, features]``."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor {shape}, got {type(value).__name__}")
    if value.dim() != shape.count(",") + 1:
        raise ValueError(f"{name} must be {shape}, got {value.dim()}-D of shape {tuple(value.shape)}")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be floating-point, got {value.dtype}")


def require_size(value: Tensor, name: str, dim: int, size: int, what: str) -> None:
    """Raise unless ``value.size(dim)`` is ``size``; ``what`` says where that number comes from."""
    if value.size(dim) != size:
        raise ValueError(f"{name} must have size {size} in dimension {dim} ({what}), got {value.size(dim)}")


def require_weights(weights: Tensor, batch: int) -> None:
    """Raise unless ``weights`` is a float64 tensor [batch]."""
    require_tensor(weights, "weights", "[batch]")
    require_size(weights, "weights", 0, batch, "one per example")
    if weights.dtype != torch.float64:
        raise TypeError(f"weights must be float64, got {weights.dtype}")


def widen(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, contiguous, in one dtype that the kernels take: half precision becomes float32."""
    return tuple(t.contiguous() for t in as_they_lie(*tensors))


def as_they_lie(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, as they lie, in one dtype that the kernels take."""
    dtypes = {t.dtype for t in tensors}
    if dtypes in ({torch.float32}, {torch.float64}):  # small models are bound by calls that do nothing
        return tensors
    if len(dtypes) == 1 and tensors[0].device.type != "cpu":  # only the CPU's kernels do not know half precision
        return tensors
    dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    return tuple(t.detach().to(dtype) for t in tensors)
