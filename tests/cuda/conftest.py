"""Tests on a GPU; the same kernels run on the CPU in tests/simt."""

import pytest
import torch

from dpkernels import _native


@pytest.fixture(autouse=True)
def _needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is present")
    if not _native.has_cuda:
        pytest.skip("dpkernels was built without its CUDA kernels (make cuda)")
    # The CPU, which results are compared with, knows no TF32.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
