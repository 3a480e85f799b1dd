"""The papers' runner does each row once and sums up what lies there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.papers.runner import Row, main

DIGITS = {"dataset": "digits", "batch_size": 479, "epochs": 2.0, "noise_multiplier": 2.0}


def test_runs_are_made_once_and_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [Row("linear", DIGITS, (90.0, 0.1)), Row("other", DIGITS | {"lr": 1.0}, (80.0, None))]
    experiments = {"small": lambda: rows}
    report = tmp_path / "report.json"
    words = ["paper", "small", "--seeds", "2", "--out", str(tmp_path), "--report", str(report), "--quiet"]
    monkeypatch.setattr(sys, "argv", words)
    main(None, "paper", experiments)
    lines = json.loads(report.read_text())
    assert [(line["row"], line["seeds"]) for line in lines] == [("linear", 2), ("other", 2)]
    assert lines[0]["deviation"] >= 0
    printed = capsys.readouterr().out
    assert "| small | linear | 90.0 ± 0.1 |" in printed
    assert "| small | other | 80.0 |" in printed
    written = (tmp_path / "small" / "linear" / "0" / "metrics.json").stat().st_mtime_ns
    main(None, "paper", experiments)
    assert (tmp_path / "small" / "linear" / "0" / "metrics.json").stat().st_mtime_ns == written
    monkeypatch.setattr(sys, "argv", [*words[:1], "large", *words[2:]])
    with pytest.raises(SystemExit):
        main(None, "paper", experiments)
