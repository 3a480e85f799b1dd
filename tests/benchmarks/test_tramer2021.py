"""The paper's experiments are configurations."""

from __future__ import annotations

import pytest

from benchmarks.papers.tramer2021.experiments import EXPERIMENTS, SIZES, classic_noise
from dpkernels.data import load_dataset
from dpkernels.training import resolve
from dpkernels.training.config import check_values


def test_every_row_is_a_configuration_of_its_own() -> None:
    digits = load_dataset("digits")
    for make in EXPERIMENTS.values():
        rows = make()
        assert len({row.name for row in rows}) == len(rows)
        for row in rows:
            check_values(row.fields)
            resolve(digits, row.fields | {"dataset_size": SIZES[row.fields["dataset"]]})


def test_noise_of_the_papers_accounting() -> None:
    assert classic_noise("cifar10", 8192, 60, 8.0) == pytest.approx(5.7, abs=0.05)
    assert classic_noise("mnist", 4096, 40, None) < classic_noise("mnist", 4096, 40, 8.0)
