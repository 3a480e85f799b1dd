"""What a measurement was taken on and with."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

import torch

from dpkernels import _native
from dpkernels.training.report import versions as own_versions


def machine() -> dict[str, object]:
    """The processor, the number of threads, the instruction set of the kernels, torch, and the GPU if there is one."""
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "instruction_set": _native.active_isa(),
        "torch": torch.__version__,
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
    }


def versions() -> dict[str, str]:
    """Of everything that is measured; peers only where they are installed."""
    try:
        return {**own_versions(), "opacus": importlib.metadata.version("opacus")}
    except importlib.metadata.PackageNotFoundError:
        return own_versions()


def processor() -> str:
    """The name of the processor, as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
