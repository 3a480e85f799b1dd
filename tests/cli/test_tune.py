"""`dpkernels tune` from arguments to what it prints, which is nothing of other runs."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from dpkernels.cli import main, tune
from dpkernels.search import tune as search

RUN = ["tune", "--epochs", "2", "--batch-size", "479", "--draw", "lr=log:0.1:10", "--processes", "1"]


@pytest.fixture(autouse=True)
def _three_runs(monkeypatch: pytest.MonkeyPatch, in_this_process: list[int]) -> None:
    monkeypatch.setattr(search, "draw_number_of_runs", lambda **_: 3)


def test_what_is_shown_depends_on_nothing_but_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[int] = []

    class Stopping(tune.TimeProgress):
        def step(self, index: int, step: int) -> None:
            super().step(index, step)
            if (index, step) == (1, 2) and not stopped:
                stopped.append(step)
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(tune, "TimeProgress", Stopping)
    monkeypatch.setattr(tune, "PACE_SECONDS", 0.0)
    assert main([*RUN, "--mean-runs", "4", "--out", str(tmp_path)]) == 130
    printed, error = capsys.readouterr()
    lines = printed.splitlines()
    assert lines[0] == "drawn for every run: lr log-uniform from 0.1 to 10"
    assert lines[1].startswith("number of runs: truncated negative binomial with mean 4 and shape 1;")
    assert "all runs together cost epsilon 3 at delta 1e-05" in lines[2]
    assert lines[3].startswith("half of all tunings like this one take up to 00:0")
    assert f"Go on with: dpkernels tune --resume --out {tmp_path}" in lines[4]
    assert len(lines) == 6
    assert "accuracy" not in printed
    assert error == ""

    assert main([*RUN, "--out", str(tmp_path)]) == 2
    assert "go on with --resume" in capsys.readouterr().err
    assert main(["tune", "--resume", "--lr", "2", "--out", str(tmp_path)]) == 2
    assert "keeps what it began with, got lr" in capsys.readouterr().err
    assert main(["tune", "--resume", "--out", str(tmp_path), "--quiet"]) == 0
    printed, _ = capsys.readouterr()
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert printed.startswith(f"chosen         lr {metrics['chosen']['lr']:.4g}\n")
    assert printed.count("test accuracy  ") == 1
    assert f"epsilon {metrics['epsilon']:.4g} at delta 1e-05, the choice included" in printed
    assert metrics["statement"] in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draw", "epochs=log:1:9"], "argument --draw: draw of epochs must be from values"),
        (["--lr", "2"], "--lr must be given once, got 2.0"),
        (["--mean-runs", "0.5"], "--mean-runs must be a number of at least 1"),
        (["--shape", "-2"], "--shape must be a number above -1"),
        (["--epsilon", "-1"], "--epsilon must be a finite number > 0, got -1.0"),
        (["--model", "mnist_cnn"], "(1, 28, 28)"),
        (["--noise-multiplier", "1"], "unrecognized arguments"),
        (["--seed", "1"], "unrecognized arguments"),
        (["--resume"], "keeps what it began with"),
    ],
)
def test_bad_input(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*RUN, *arguments, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "out").exists()
