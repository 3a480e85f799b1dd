"""Memory that was freed comes back without the kernel, in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

COUNT = """
import resource, torch
from dpkernels.training.memory import keep_freed_memory

assert keep_freed_memory()

def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

sizes = (5, 40, 17, 64, 33)  # MiB
def step(): [torch.zeros(size << 18).add_(1) for size in sizes]

step()
before = faults()
for _ in range(4): step()
print((faults() - before) * resource.getpagesize() / 4 / sum(size << 20 for size in sizes))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep it")
def test_freed_memory_is_given_out_again() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    fresh_share = float(done.stdout)  # of a step's bytes, on pages that the kernel had to provide anew: 0.9 by default
    assert fresh_share < 0.1
