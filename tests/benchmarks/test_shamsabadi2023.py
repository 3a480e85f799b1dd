"""The paper's experiments are configurations."""

from __future__ import annotations

from benchmarks.papers.shamsabadi2023.experiments import EXPERIMENTS, PAPER
from dpkernels.data import load_dataset
from dpkernels.training import resolve
from dpkernels.training.config import check_values


def test_every_row_is_a_configuration_of_its_own() -> None:
    digits = load_dataset("digits")
    names = []
    for make in EXPERIMENTS.values():
        rows = make()
        names += [row.name for row in rows]
        assert len({row.name for row in rows}) == len(rows)
        for row in rows:
            check_values(row.fields)
            config = resolve(digits, row.fields | {"dataset_size": 50_000})
            assert config.noise_multiplier is not None
    assert set(PAPER) <= set(names)
    assert len(names) == len(set(names))
