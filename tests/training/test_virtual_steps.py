"""Very large logical batches come in small physical ones, and get the noise of one step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dpkernels.data import ArraySplit, ImageDataset
from dpkernels.training import Execution, RunFolder, load_checkpoint, loop, resolve, train

LOGICAL, PHYSICAL, FEATURES = 16_384, 256, 400


def test_a_batch_of_16384_by_256(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All features are zero, and so is the gradient of the weights: what these come to is the noise, lr sigma C / B
    times a normal for each of two steps."""
    seen: list[int] = []

    def model(*_: object) -> nn.Module:
        layer = nn.Linear(FEATURES, 10)
        nn.init.zeros_(layer.weight)
        layer.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])) if module.training else None)
        return nn.Sequential(layer)

    monkeypatch.setattr(loop, "build_model", model)
    rows = torch.zeros(2 * LOGICAL, FEATURES, dtype=torch.float16)
    labels = torch.arange(len(rows)) % 10
    data = ImageDataset("zeros", tuple("0123456789"), ArraySplit(rows, labels), ArraySplit(rows[:10], labels[:10]))
    fields = {"dataset": "zeros", "dataset_size": len(rows), "batch_size": LOGICAL, "epochs": 1.0, "momentum": 0.0}
    config = resolve(data, fields | {"noise_multiplier": 2.0, "max_grad_norm": 0.5, "lr": 1000.0, "seed": 3})
    folder = RunFolder(tmp_path / "run")
    folder.claim()
    train(config, config.plan(), data, folder, execution=Execution(physical_batch_size=PHYSICAL))

    assert max(seen) == PHYSICAL
    assert abs(sum(seen) - 2 * LOGICAL) < 6 * LOGICAL**0.5  # of two Poisson samples
    weights = load_checkpoint(folder.checkpoint).model["0.weight"]
    expected = 2**0.5 * 1000.0 * 2.0 * 0.5 / LOGICAL
    assert weights.std().item() == pytest.approx(expected, rel=6 / (2 * weights.numel()) ** 0.5)
    assert abs(weights.mean().item()) < 6 * expected / weights.numel() ** 0.5
