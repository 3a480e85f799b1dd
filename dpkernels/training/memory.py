"""What the allocator of the process does with memory that was freed."""

from __future__ import annotations

import ctypes
import sys

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
