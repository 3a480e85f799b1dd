"""Both of torch's interfaces to TF32 are heeded: ``allow_tf32`` and ``fp32_precision``, which bars the former."""

from __future__ import annotations

import subprocess
import sys

import pytest

SWITCHES = {  # what a user sets -> whether linear layers and convolutions may round to TF32
    "pass": (False, True),
    "backends.cuda.matmul.allow_tf32 = True": (True, True),
    "backends.cudnn.allow_tf32 = False": (False, False),
    "set_float32_matmul_precision('high')": (True, True),
    "set_float32_matmul_precision('highest')": (False, True),
    "backends.fp32_precision = 'tf32'": (True, True),
    "backends.fp32_precision = 'ieee'": (False, False),
    "backends.cuda.matmul.fp32_precision = 'tf32'": (True, True),
    "backends.cudnn.conv.fp32_precision = 'ieee'": (False, False),
    "backends.cudnn.fp32_precision = 'ieee'": (False, False),
}
# Each switch in a process of its own, as some cannot be taken back.
ASK = """
import os, sys
from types import SimpleNamespace
import torch
from dpkernels.ops import conv, linear
for switch in sys.argv[1:]:
    if os.fork() == 0:
        exec(switch if switch == "pass" else "torch." + switch)
        on_device = SimpleNamespace(is_cuda=True)
        print(switch, linear._tf32(on_device), conv._tf32(on_device), sep="|", flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_every_switch_is_honoured() -> None:
    result = subprocess.run([sys.executable, "-c", ASK, *SWITCHES], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    found = {
        switch: (left == "True", right == "True") for switch, left, right in map(_parts, result.stdout.splitlines())
    }
    assert found == SWITCHES


def _parts(line: str) -> list[str]:
    return line.split("|")
