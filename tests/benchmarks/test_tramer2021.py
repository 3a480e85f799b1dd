"""The paper's experiments are configurations, and the runner does each once and sums up what lies there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.papers.tramer2021 import __main__ as runner
from benchmarks.papers.tramer2021.experiments import EXPERIMENTS, SIZES, Row, classic_noise
from dpkernels.data import load_dataset
from dpkernels.training import resolve
from dpkernels.training.config import check_values

DIGITS = {"dataset": "digits", "batch_size": 479, "epochs": 2.0, "noise_multiplier": 2.0}


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


def test_runs_are_made_once_and_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row("linear", DIGITS, (90.0, 0.1)), Row("other", DIGITS | {"lr": 1.0})]
    for module in (runner, sys.modules["benchmarks.papers.tramer2021.experiments"]):
        monkeypatch.setattr(module, "EXPERIMENTS", {"small": lambda: rows})
    report = tmp_path / "report.json"
    words = ["tramer2021", "small", "--seeds", "2", "--out", str(tmp_path), "--report", str(report), "--quiet"]
    monkeypatch.setattr(sys, "argv", words)
    runner.main()
    lines = json.loads(report.read_text())
    assert [(line["row"], line["seeds"]) for line in lines] == [("linear", 2), ("other", 2)]
    assert lines[0]["deviation"] >= 0
    assert "| small | linear | 90.0 ± 0.1 |" in capsys.readouterr().out
    written = (tmp_path / "small" / "linear" / "0" / "metrics.json").stat().st_mtime_ns
    runner.main()
    assert (tmp_path / "small" / "linear" / "0" / "metrics.json").stat().st_mtime_ns == written
    monkeypatch.setattr(sys, "argv", [*words[:1], "large", *words[2:]])
    with pytest.raises(SystemExit):
        runner.main()
