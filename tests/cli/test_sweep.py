"""`dpkernels sweep` from arguments to table and exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpkernels.accounting.statement import rounded_up
from dpkernels.cli import main

RUN = ["--epochs", "2", "--noise-multiplier", "2", "--processes", "1"]


@pytest.mark.usefixtures("in_this_process")
def test_a_grid_and_the_same_command_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", *RUN, "--grid", "lr=1,2", "--grid", "batch-size=479", "--out", str(tmp_path)]
    assert main(words) == 0
    printed, _ = capsys.readouterr()
    document = json.loads((tmp_path / "sweep.json").read_text())
    (cost,) = document["cost"]
    together = f"all 2 runs together epsilon {rounded_up(cost['epsilon_of_all'])}, at delta 1e-05"
    assert cost["epsilon_of_all"] > cost["epsilon_of_one"]
    assert printed.count(together) == 2  # before the first run and after the last
    assert "2/2 runs  lr=2,batch_size=479  test accuracy" in printed
    assert "Every result of a grid is released" in printed
    assert "NOT PRIVATE" not in printed
    assert main(words) == 0
    assert "Everything is done already." in capsys.readouterr().out


@pytest.mark.usefixtures("in_this_process")
def test_seeds_and_a_failing_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", *RUN, "--batch-size", "479", "--grid", "model=linear,mnist_cnn", "--seeds", "3,4"]
    assert main([*words, "--out", str(tmp_path), "--quiet"]) == 1
    printed, _ = capsys.readouterr()
    assert printed.count("\nFAILED  model=mnist_cnn,seed=") == 2
    assert "NOT PRIVATE" in printed
    assert [run["state"] for run in json.loads((tmp_path / "sweep.json").read_text())["runs"]] == [
        "done",
        "done",
        "failed",
        "failed",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "speed=1,2"], "argument --grid: speed is not a field"),
        (["--grid", "lr=1,fast"], "argument --grid: lr must be a finite number > 0, got 'fast'"),
        (["--grid", "lr=0"], "argument --grid: lr must be a finite number > 0, got 0.0"),
        (["--grid", "lr=1", "--grid", "lr=2"], "--lr must be given once, got it twice"),
        (["--grid", "lr=1", "--lr", "2"], "--lr must be given once, got 2.0"),
        (["--seeds", "a"], "seed must be an integer, got 'a'"),
        (["--processes", "0"], "--processes must be a positive integer, got 0"),
    ],
)
def test_bad_input(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["sweep", *RUN[:4], "--batch-size", "479", *arguments, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
