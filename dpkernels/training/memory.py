"""How a run uses memory: what becomes of what is freed, and how maps lie."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor, nn

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # mallopt(3)


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed and give it out again; whether it does. Elsewhere than on Linux nothing changes.

    A step on the CPU frees tensors of many MiB and soon asks for as much again. By default glibc hands these back to
    the kernel, which clears every page anew at its first touch. The process stays as large as it once was.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))


def placed(images: Tensor, model: nn.Module, device: str) -> Tensor:
    """`images` on `device`, channels-last where `model` pools them on the CPU, and then all its maps lie so.

    torch's max pooling takes vectors of channels there, and single values of maps that are contiguous: a tenth of the
    time, and in small networks pooling takes up to half of a step.
    """
    pools = device == "cpu" and any(isinstance(module, nn.MaxPool2d) for module in model.modules())
    layout = torch.channels_last if pools and images.dim() == 4 else torch.preserve_format
    return images.to(device, memory_format=layout)
