"""`dpkernels audit`: a lower bound beside each claim, in a table, a plot and a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from dpkernels.cli import main
from dpkernels.optim import PrivateOptimizer

SMALL = ["audit", "--canaries", "300", "--epochs", "1", "--batch-size", "512", "--seed", "3"]


def test_audit_of_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "audit"
    assert main([*SMALL, "--epsilon", "2", "16", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "NOT PRIVATE" in printed
    assert "linear on digits: 300 canaries" in printed
    assert "does not prove the claim" in printed
    assert str(out / "audit.png") in printed
    reports = json.loads((out / "audit.json").read_text())
    assert [round(report["claim"]) for report in reports] == [2, 16]
    for report in reports:
        assert 0 <= report["lower_bound"] < report["claim"]
        assert report["canaries"] == 300
        assert f"{report['lower_bound']:.3f}" in printed
    assert reports[1]["lower_bound"] > 1
    with Image.open(out / "audit.png") as image:
        assert image.format == "PNG"


def test_the_report_of_a_run_in_the_folder_takes_the_audit_up(tmp_path: Path) -> None:
    short = ["--epochs", "1", "--batch-size", "479", "--epsilon", "3", "--quiet"]
    assert main(["train", *short, "--out", str(tmp_path)]) == 0
    report = tmp_path / "report.md"
    assert "None was run in this folder" in report.read_text()
    assert main([*SMALL, "--epsilon", "16", "--out", str(tmp_path)]) == 0
    (found,) = json.loads((tmp_path / "audit.json").read_text())
    line = f"| {found['claim']:.4g} | {found['lower_bound']:.4g} | 1e-05 | 0.95 | not contradicted |"
    assert line in report.read_text()
    assert main(["train", "--resume", "--out", str(tmp_path), "--quiet"]) == 0
    assert line in report.read_text()


def test_an_epsilon_that_is_not_stated_is_not_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--epsilon", "45", "--out", str(tmp_path)]) == 2
    assert "--epsilon must be smaller, got 45" in capsys.readouterr().err


def test_refuted_claim(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrivateOptimizer, "_noise", lambda self, step: {"denominator": self._privacy.denominator})
    assert main([*SMALL, "--epsilon", "1", "--out", str(tmp_path)]) == 1
    assert "REFUTED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--canaries", "0"], "--canaries must be a positive number"),
        (["--epsilon", "-1"], "--epsilon must be a finite number > 0, got -1.0"),
        (["--confidence", "1"], "--confidence must lie strictly between 0 and 1, got 1.0"),
        (["--dataset", "nowhere"], "--dataset must be one of"),
        (["--epsilon"], "expected at least one argument"),
    ],
)
def test_bad_input(tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--out", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
