"""What is shown while a run goes on, and that nothing private is."""

from __future__ import annotations

import io
import sys

import pytest

from dpkernels.accounting import Plan
from dpkernels.training import EpochResult, default_progress
from dpkernels.training.progress import Bar, Lines, Progress, Silent


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Plan(100, 25, 2.0, 8, 2.0, 1e-5, None, (), "rdp")


def go_through(progress: Progress, plan: Plan) -> None:
    progress.begin(plan, 2)
    for step in range(3, 9):
        progress.step(step)
        if step % 4 == 0:
            progress.epoch(EpochResult(step, step / 4, 0.5 + step / 100, step / 5, 0.1))
    progress.end()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal(plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "110")
    progress = default_progress()
    assert isinstance(progress, Bar)
    go_through(progress, plan)
    last = terminal.getvalue().rstrip().split("\r")[-1]
    for part in ("epoch 2/2", "100%", "8/8", "test accuracy 58.0%, epsilon so far 1.60"):
        assert part in last
    assert "loss" not in terminal.getvalue()
    assert capsys.readouterr().out == ""


def test_a_line_an_epoch_elsewhere(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    """Without times, which tell of what was drawn."""
    progress = default_progress()
    assert isinstance(progress, Lines)
    go_through(progress, plan)
    printed, error = capsys.readouterr()
    assert printed.splitlines() == [
        "epoch 1  step 4/8  test accuracy 54.00%  epsilon so far 0.800",
        "epoch 2  step 8/8  test accuracy 58.00%  epsilon so far 1.600",
    ]
    assert error == ""


def test_nothing_when_quiet(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    progress = default_progress(quiet=True)
    assert isinstance(progress, Silent)
    go_through(progress, plan)
    assert capsys.readouterr() == ("", "")
