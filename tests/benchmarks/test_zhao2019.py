"""The comparison of selections: what is equal, what is resumed, what is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.papers.runner import Results
from benchmarks.papers.zhao2019 import __main__ as command
from benchmarks.papers.zhao2019 import experiments
from benchmarks.papers.zhao2019.experiments import (
    DELTA,
    METHODS,
    NEAR,
    POOLS,
    SCREENED,
    Checkpoint,
    Data,
    Seen,
    measure,
    rows,
)
from dpkernels.accounting import SampledGaussian, bound
from dpkernels.data import ArraySplit, ImageDataset


def tiny(rows: int, seed: int) -> ArraySplit:
    generator = torch.Generator().manual_seed(seed)
    return ArraySplit(torch.randn(rows, 2, 5, 7, generator=generator).half(), torch.arange(rows) % 10)


def test_every_method_is_measured_at_its_own_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "PRIVATE", 300)
    digits = ImageDataset("mnist", tuple("0123456789"), tiny(600, 0), tiny(50, 1))
    data = Data.of(1, digits, ImageDataset("clothes", tuple("0123456789"), tiny(50, 2), tiny(100, 2)))
    assert len(data.private) == len(data.pools["mnist"]) == 300
    assert len(data.pools["polluted"]) == 400
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(70, 10))
    checkpoint = Checkpoint(model.eval(), SampledGaussian(2.0, 0.01, 10), 0.1)
    seen = {pool: Seen(model, data.pools[pool], data.private) for pool in POOLS}
    free = bound([checkpoint.spent], DELTA).upper
    paid = bound([checkpoint.spent, *NEAR.events], DELTA).upper
    for row in rows():
        if row.fields["labels"] == 500:
            row.fields["labels"] = 60
            record = measure(row, 1, checkpoint, lambda pool=row.fields["pool"]: seen[pool], data)
            near = row.fields["method"].startswith("Near")
            assert record["epsilon"] == round(paid if near else free, 4)
            assert 0 <= record["accuracy"] <= 100
            assert (record["pollution"] > 0) == (row.fields["pool"] == "polluted")
    assert SCREENED.events == NEAR.events


def test_what_was_made_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(tmp_path / "results.jsonl")
    for row in rows():
        for seed in (1, 2):
            record = {"fields": row.fields, "variant": "", "seed": seed, "epsilon": 3.2, "pollution": 25.0}
            results.add(record | {"accuracy": 98.0 + seed})
    monkeypatch.setattr(command, "features", lambda: pytest.fail("nothing is left to make"))
    command.run(2, tmp_path, Results(tmp_path / "results.jsonl"))
    told = command.table(results)
    assert told.count("| 99.50 ± 0.71 ") == 5 * len(METHODS) * len(POOLS)
    assert len({row.name for row in rows()}) == len(rows())
