"""What a measurement was taken on."""

import platform
from pathlib import Path

import torch

from dpkernels import _native


def machine() -> dict[str, object]:
    return {
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "instruction_set": _native.active_isa(),
        "torch": torch.__version__,
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
