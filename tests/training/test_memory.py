"""Memory that was freed comes back without the kernel, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT = """
import resource, sys, torch
from dpkernels.training.memory import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()

def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

sizes = (5, 40, 17, 64, 33)  # MiB
def step(): [torch.zeros(size << 18).add_(1) for size in sizes]

step()
before = faults()
for _ in range(4): step()
print((faults() - before) * resource.getpagesize() / 4 / sum(size << 20 for size in sizes))
"""


def fresh_share(what: str) -> float:
    """The share of a step's bytes that lay on pages which the kernel had to provide anew."""
    done = subprocess.run([sys.executable, "-c", COUNT, what], capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
def test_freed_memory_is_given_out_again() -> None:
    assert fresh_share("keep") < 0.1
