"""The paper's experiments are configurations, and runs are compared where they had spent as much."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from benchmarks.papers import pictures
from benchmarks.papers.runner import Results, Row
from benchmarks.papers.shamsabadi2023.experiments import EXPERIMENTS, PAPER
from benchmarks.papers.shamsabadi2023.plots import accuracy
from benchmarks.papers.shamsabadi2023.within import within
from dpkernels.data import load_dataset
from dpkernels.training import resolve
from dpkernels.training.config import check_values


def test_every_row_is_a_configuration_of_its_own() -> None:
    digits = load_dataset("digits")
    seen = []
    for make in EXPERIMENTS.values():
        rows = make()
        assert len({row.name for row in rows}) == len(rows)
        for row in rows:
            check_values(row.fields)
            assert resolve(digits, row.fields | {"dataset_size": 50_000}).noise_multiplier is not None
            assert row.fields not in seen
            seen.append(row.fields)
    assert set(PAPER) <= {row.name for row in EXPERIMENTS["accuracy"]()}


def test_what_was_reached_within_an_epsilon(tmp_path: Path) -> None:
    row = Row("row", {"dataset": "mnist"})
    results = Results(tmp_path / "results.jsonl")
    for seed, last in ((1, 90.0), (2, 92.0)):
        curve = [[1.0, 0.4, 50.0, None], [2.0, 0.7, last, None]]
        results.add({"fields": row.fields, "variant": "", "seed": seed, "curve": curve})
    table = within({"small": lambda: [row], "none": lambda: [Row("other", {})]}, results, (0.3, 0.5, 0.7, 1.0))
    assert table.splitlines()[2:] == ["| small | row |  | 50.0 | 91.0 |  |"]


def test_the_picture_has_a_panel_for_each_setting_that_was_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "PICTURES", tmp_path)
    results = Results(tmp_path / "results.jsonl")
    accuracy(results)
    assert not list(tmp_path.iterdir())
    rows = {row.name: row for row in EXPERIMENTS["accuracy"]()}
    sizes = []
    for name in (
        "mnist-cnn-cross-entropy",
        "mnist-cnn-losing-less",
        "cifar10-scatternet-cnn-losing-less",
        "cifar10-cnn-losing-less",
        "fashion-mnist-scatternet-cnn-losing-less",
    ):
        curve = [[1.0, 0.4, 50.0, None], [2.0, 0.7, 60.0, None]]
        results.add({"fields": rows[name].fields, "variant": "", "seed": 1, "curve": curve})
        accuracy(results)
        with Image.open(tmp_path / "shamsabadi2023_accuracy.png") as picture:
            sizes.append(picture.size)
    assert sizes == [(420, 360), (420, 360), (840, 360), (1260, 360), (1260, 720)]  # three panels abreast
