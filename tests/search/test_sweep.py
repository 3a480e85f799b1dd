"""A grid in a folder: every run once, what failed, what all of them cost, and the table."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dpkernels.accounting.statement import rounded_up
from dpkernels.accounting.tuning import all_runs
from dpkernels.search import Point, grid, run_sweep, sweep_report
from dpkernels.search.sweep_progress import SweepProgress
from dpkernels.search.workers import Outcome, Watcher
from dpkernels.training import RunFolder, report

BASE = {"dataset": "digits", "batch_size": 479, "epochs": 2.0, "noise_multiplier": 2.0, "lr": 2.0, "seed": 1}


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "write_plot", lambda path, *_: path.touch())


def go(points: list[Point], out: Path, watcher: Watcher | None = None) -> Any:
    return run_sweep(points, out, processes=1, begin=None if watcher is None else lambda rows, costs: watcher)


def test_a_grid_is_every_combination() -> None:
    points = grid({"dataset": "digits", "lr": 9.0}, {"lr": [0.5, 1.0], "model": ["linear", "a/b"]})
    assert [point.name for point in points] == [
        "lr=0.5,model=linear",
        "lr=0.5,model=a-b",
        "lr=1,model=linear",
        "lr=1,model=a-b",
    ]
    assert points[-1].fields == {"dataset": "digits", "lr": 1.0, "model": "a/b"}
    with pytest.raises(ValueError, match="lr must have different values"):
        grid({}, {"lr": [1.0, 1.0]})


def test_runs_are_made_once_and_their_cost_is_composed(tmp_path: Path, in_this_process: list[int]) -> None:
    points = [
        Point("large", BASE),
        Point("small", BASE | {"batch_size": 300, "lr": 1.0}),
        Point("failing", BASE | {"model": "mnist_cnn"}),
    ]
    result = go(points, tmp_path)
    assert {row.name: row.state for row in result.rows} == {"failing": "failed", "large": "done", "small": "done"}
    assert "(1, 28, 28)" in next(row.failure for row in result.rows if row.state == "failed")
    for row in result.rows:
        if row.state == "done":
            assert {path.name for path in (tmp_path / row.name).iterdir()} >= {
                "metrics.json",
                "model.safetensors",
                "history.jsonl",
                "checkpoint.pt",
                "privacy.png",
            }

    (cost,) = result.costs
    events = [event for row in result.rows for event in row.plan.events]
    assert cost.epsilon_of_all == all_runs(events, 1e-5, runs=1).upper
    assert max(row.plan.epsilon for row in result.rows) == cost.epsilon_of_one < cost.epsilon_of_all

    document = json.loads((tmp_path / "sweep.json").read_text())
    assert document == result.document
    assert not document["private"]
    assert document["cost"][0]["epsilon_of_all"] == cost.epsilon_of_all
    table = (tmp_path / "sweep.md").read_text()
    assert f"all 3 runs together epsilon {rounded_up(cost.epsilon_of_all)}" in table
    assert "Every result of a grid is released" in table
    assert "NOT PRIVATE" in table
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    accuracies = [row.accuracy for row in result.rows if row.accuracy is not None]
    assert [f"{accuracy:.2%}" in line for accuracy, line in zip(sorted(accuracies)[::-1], lines, strict=False)] == [
        True
    ] * len(accuracies)
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")

    go(points, tmp_path)
    assert in_this_process == [3, 1]  # what failed is tried again


def test_ctrl_c_and_the_same_command_again(tmp_path: Path, in_this_process: list[int]) -> None:
    class Interrupting(Watcher):
        def step(self, index: int, step: int) -> None:
            if (index, step) == (0, 3):
                os.kill(os.getpid(), signal.SIGINT)

    points = grid(BASE, {"lr": [1.0, 2.0]})
    stopped = go(points, tmp_path, Interrupting())
    assert stopped.stopped_by == signal.SIGINT
    assert [row.state for row in stopped.rows] == ["broken off", "not begun"]
    again = go(points, tmp_path)
    assert again.stopped_by is None
    assert [row.state for row in again.rows] == ["done", "done"]
    assert again.rows[0].metrics["lost_steps"] == 0
    assert again.costs == stopped.costs  # by the plan, wherever it stopped


def test_a_run_with_other_values_is_refused_before_any_is_made(tmp_path: Path, in_this_process: list[int]) -> None:
    go(grid(BASE, {"lr": [1.0]}), tmp_path)
    with pytest.raises(ValueError, match=r"lr=1 holds a run .* got epochs=1.0 \(was 2.0\)"):
        go(grid(BASE | {"epochs": 1.0}, {"lr": [0.5, 1.0]}), tmp_path)
    with pytest.raises(ValueError, match="batch_size must be at most"):
        go(grid(BASE, {"batch_size": [479, 9999]}), tmp_path)
    assert [path.name for path in sorted(tmp_path.glob("*/"))] == ["lr=1"]
    assert in_this_process == [1]


def test_progress_counts_examples_from_where_runs_go_on(
    tmp_path: Path, in_this_process: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """The bar does; the lines tell no time."""
    result = go(grid(BASE, {"lr": [1.0, 2.0]}), tmp_path)
    metrics, work = result.rows[0].metrics, result.rows[0].plan.batch_size
    assert metrics is not None
    for bar in (True, False):
        progress = SweepProgress(result.rows, bar=bar)  # of six steps each
        for step in (4, 5, 6):
            progress.step(0, step)
        progress.ended(0, Outcome(metrics))
        progress.step(1, 0)
        if progress._bar is not None:
            assert (progress._bar.n, progress._bar.total) == (2 * work, 8 * work)
        progress.ended(1, Outcome(failure="no luck"))
        if progress._bar is not None:
            assert (progress._bar.n, progress._bar.total) == (2 * work, 2 * work)
        assert capsys.readouterr().out.splitlines() == [
            f"1/2 runs  lr=1  test accuracy {metrics['test_accuracy']:.2%}",
            "2/2 runs  lr=2  FAILED: no luck",
        ]


def test_no_epsilon_of_a_single_run_without_that_of_all(tmp_path: Path, in_this_process: list[int]) -> None:
    result = go(grid({key: BASE[key] for key in BASE if key != "seed"}, {"lr": [1.0]}), tmp_path)
    assert result.document["private"]
    assert "a single run costs epsilon" in str(result.costs[0])
    assert sweep_report.summary(result.rows) is None
    config, plan = RunFolder(tmp_path / "lr=1").read_config()
    assert (config.lr, plan.epsilon) == (1.0, result.costs[0].epsilon_of_one)
