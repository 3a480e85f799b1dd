"""The noise of a GPU is the CPU's, bit for bit, and so is the update."""

import copy

import pytest
import torch
from torch import nn

from dpkernels import optim
from dpkernels.ops.update import noised_mean

KEY = torch.arange(32, dtype=torch.uint8)
COUNT, OFFSET = 100_003, 77


@pytest.mark.parametrize("name", ["random_bits", "gaussian", "grid_gaussian"])
def test_streams(name: str) -> None:
    operator = getattr(torch.ops.dpkernels, name)
    grid = (0.3, 2.0**-24) if name == "grid_gaussian" else ()
    on_cpu = operator(KEY, 2, 7, OFFSET, COUNT, *grid)
    on_device = operator(KEY.cuda(), 2, 7, OFFSET, COUNT, *grid).cpu()
    if name == "gaussian":  # not rounded to a grid: the last bit is the compiler's
        torch.testing.assert_close(on_device, on_cpu, rtol=1e-14, atol=1e-300)
    else:
        assert torch.equal(on_device, on_cpu)


@pytest.mark.parametrize("optimizer", ["DPSGD", "DPAdamW"])
def test_steps(optimizer: str) -> None:
    """Three steps on an empty batch: noise and update alone."""
    on_cpu = nn.Sequential(nn.Linear(300, 40), nn.Linear(40, 7))
    on_device = copy.deepcopy(on_cpu).cuda()
    options = {"lr": 0.1, "noise_multiplier": 1.0, "batch_size": 10, "max_grad_norm": 1.0, "seed": 3}
    for model in (on_cpu, on_device):
        step = getattr(optim, optimizer)(model, **options)
        for _ in range(3):
            x = torch.zeros(0, 300, device=next(model.parameters()).device)
            step.backward(model(x).sum(1))
            step.step()
            step.zero_grad()
    for ours, theirs in zip(on_device.parameters(), on_cpu.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_noise_is_not_captured() -> None:
    """A graph would repeat it."""
    out, total = torch.zeros(5).cuda(), torch.zeros(5, dtype=torch.float64).cuda()
    with pytest.raises(RuntimeError, match="graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        noised_mean([out], [total], denominator=1.0, key=KEY, domain=0, step=0, noise_std=1.0, grid=2.0**-20)
