"""NaN of one example stays out of its neighbours' products, or is refused."""

import math
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpkernels.clipping import GhostClipper, products

TRAIN = """
import sys, torch
if sys.argv[1] == "late":
    torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)
from dpkernels.clipping import GhostClipper, products
with GhostClipper(torch.nn.Linear(33, 16).bfloat16(), 1.0) as clipper:
    try:
        clipper.backward(clipper.model(torch.ones(65, 33, dtype=torch.bfloat16)).float().sum(1))
        print("trained", products.examples_stay_apart())
    except RuntimeError as error:
        print("refused", products.examples_stay_apart(), error)
"""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(7, 42, 33), (65, 5), (300, 34), (3, 33, 15)])
@pytest.mark.parametrize("columns", [1, 10, 16, 33])
def test_nan_stays_in_its_own_row(dtype: torch.dtype, shape: tuple[int, ...], columns: int) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(columns, shape[-1]).to(dtype)
    expected = F.linear(x, weight)
    x[1] = math.nan
    others = torch.arange(len(x)) != 1
    assert torch.equal(F.linear(x, weight)[others], expected[others])


@pytest.mark.parametrize("autocast", [False, True])
def test_products_that_mix_examples_are_refused(monkeypatch: pytest.MonkeyPatch, autocast: bool) -> None:
    monkeypatch.setattr(products, "examples_stay_apart", lambda: False)
    model = nn.Linear(3, 2)
    with GhostClipper(model, 1.0) as clipper:
        clipper.backward(model(torch.randn(4, 3)).sum(1))  # float32
        model.to(torch.float32 if autocast else torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses = model(torch.randn(4, 3).to(model.weight.dtype)).float().sum(1)
        with pytest.raises(RuntimeError, match="ONEDNN_MAX_CPU_ISA"):
            clipper.backward(losses)


@pytest.mark.parametrize("imported", ["first", "late"])
def test_a_process_that_imports_dpkernels(imported: str) -> None:
    """First: products keep examples apart on any CPU. After torch's first product: they do, or training is refused."""
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    process = subprocess.run(
        [sys.executable, "-c", TRAIN, imported], env=environment, capture_output=True, text=True, check=True
    )
    expected = ("trained True",) if imported == "first" else ("trained True", "refused False torch's bfloat16")
    assert process.stdout.startswith(expected)
