"""What a run of the zoo measures, keeps and draws; the processes that measure are replaced by figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.zoo import __main__ as command
from benchmarks.zoo import measure, report
from benchmarks.zoo.exactness import slow_nodes
from benchmarks.zoo.measure import CLIPPING, Row, Task
from benchmarks.zoo.models import MODELS
from dpkernels.bench import worker
from dpkernels.bench.worker import WorkerError

RATIOS = {"dpkernels": 1.25, CLIPPING: 1.2, "vmap": 9.0}
EXACT = {"rows": 3, "clipped": 2, "deviation": 1e-12, "ordinary_deviation": 2e-12, "refusal": None}


def figures(ratio: float) -> dict[str, Any]:
    return {"ordinary_ms": 8.0, "ms": 8 * ratio, "ratio": ratio, "ratio_low": 1.0, "ratio_high": 10.0, "pairs": 2}


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """What the processes were asked for; Opacus refuses everything."""
    asked: list[Task] = []

    def run(task: Task, module: str) -> Any:
        asked.append(task)
        if task.kind == "check":
            return {"parameters": 1234, "exact": EXACT, "slow": ["Repeat"]}
        if task.kind == "memory":
            return {"extra_mib": 40.0 if task.engines == ("ordinary",) else 60.0}
        if "opacus-hooks" in task.engines:
            raise WorkerError("NotImplementedError: no")
        return [figures(RATIOS[engine]) for engine in task.engines[1:]]

    monkeypatch.setattr(worker, "run", run)
    monkeypatch.setattr(command, "installed", lambda: ["dpkernels", "opacus-hooks", "vmap"])
    return asked


def test_a_row(tasks: list[Task]) -> None:
    row = measure.measure(Row("lstm", 64), ["opacus-hooks", "vmap"], repeats=2, threads=1)
    assert {engine: result.ratio for engine, result in row.results.items()} == {**RATIOS, "opacus-hooks": None}
    assert row.results["dpkernels"].memory_ratio == 1.5
    assert row.results["opacus-hooks"].failure == "NotImplementedError: no"
    assert (row.exact, row.slow, row.parameters) == (EXACT, ["Repeat"], 1234)
    assert [task.engines for task in tasks if task.kind == "time"] == [
        ("ordinary", "dpkernels", CLIPPING),
        ("ordinary", "opacus-hooks"),
        ("ordinary", "vmap"),
    ]
    assert measure.row_of(json.loads(json.dumps(row.as_json()))) == row
    again = len(tasks)
    assert measure.measure(row, ["vmap"], repeats=2, threads=1) == row
    assert len(tasks) == again


def test_a_run_goes_on_with_what_is_there(tasks: list[Task], tmp_path: Path) -> None:
    file = tmp_path / "results" / "zoo.json"
    command.main(["lstm", "--json", str(file)])
    command.main(["lstm", "gru", "--json", str(file), "--peers"])
    assert [task.model for task in tasks if task.kind == "check"] == ["lstm", "gru"]
    assert [task.engines[1] for task in tasks if task.kind == "time"] == [
        "dpkernels",
        "opacus-hooks",
        "vmap",
        "dpkernels",
        "opacus-hooks",
        "vmap",
    ]
    text = file.with_suffix(".md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| gru"))
    assert row.startswith(
        "| gru: GRU | 32 | 1,234 | 8.0 | **1.25** | 1.00 to 10.00 | 1.20 | 1.50 | fails | 9.00 (1.50) |"
    )
    assert row.endswith("| 2e-12 | Repeat |")
    assert "2 of 2 models: median 1.25" in text
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match=r"other conditions.*repeats: 20, now 3"):
        command.main(["lstm", "--json", str(file), "--repeats", "3"])


def test_names_and_numbers_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, reason in (
        (["nothing"], "nothing must be of gpt2"),
        (["lstm", "--repeats", "1"], "--repeats must be at least 2, got 1"),
        (["lstm", "--threads", "0"], "--threads must be at least 1, got 0"),
    ):
        with pytest.raises(SystemExit):
            command.main(arguments)
        assert reason in capsys.readouterr().err


def test_models_of_missing_libraries_are_left_out(
    tasks: list[Task], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "missing", lambda library: "timm is not installed" if library == "timm" else None)
    command.main(["cait", "lstm"])
    assert {task.model for task in tasks} == {"lstm"}
    assert "left out: timm is not installed" in capsys.readouterr().out


def test_what_failed_is_said(tasks: list[Task], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(task: Task, module: str) -> Any:
        raise WorkerError("RuntimeError: refused")

    monkeypatch.setattr(worker, "run", fail)
    row = measure.measure(Row("lstm", 64), [], repeats=2, threads=1)
    assert row.failure == "RuntimeError: refused"
    assert "failed: RuntimeError: refused" in report.line(row)
    with pytest.raises(ValueError, match="must hold a ratio"):
        report.plot([row], tmp_path / "zoo.png")
    monkeypatch.undo()
    assert replace(row, failure=None).results["dpkernels"].failure == "RuntimeError: refused"


def test_a_process_measures() -> None:
    """Without stand-ins: a model of plain torch, which starts quickly."""
    timed = worker.run(Task("time", "odd-layers", ("ordinary", "dpkernels", CLIPPING), 2, 1), "benchmarks.zoo.measure")
    assert [found["pairs"] for found in timed] == [2, 2]


def test_what_a_check_finds() -> None:
    found = measure.check(Task("check", "odd-layers"))
    assert found["parameters"] == sum(p.numel() for p in MODELS["odd-layers"].make()[0].parameters())
    assert found["exact"]["deviation"] < 1e-6


class Twice(torch.autograd.Function):
    """An operation of one's own, which no rule can know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x * weight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return 2 * g * weight, 2 * (g * x).sum(0)


def test_slow_operations_are_named() -> None:
    model = nn.Linear(4, 3)
    x, scale = torch.randn(5, 4), nn.Parameter(torch.ones(3))
    assert slow_nodes(model, model(x).sum(1)) == []
    model.register_parameter("scale", scale)
    assert slow_nodes(model, Twice.apply(model(x), scale).sum(1)) == ["Twice"]
