"""`dpkernels bench`: a table as it is measured, JSON, a plot; failures and Ctrl-C keep what there is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from dpkernels.bench import choices, worker
from dpkernels.bench.worker import Task, WorkerError
from dpkernels.cli import main

TINY = ["--batch", "4", "--seconds", "0", "--threads", "1"]


def test_a_measured_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A real process for the time; one for memory takes as long to start and is tested with the worker."""
    real = worker.run
    monkeypatch.setattr(worker, "run", lambda task: real(task) if task.kind == "time" else {"extra_mib": 8.0})
    out = tmp_path / "new" / "folder"
    assert main(["bench", "--models", "mnist_cnn", "--engines", "dpkernels", *TINY, "--out", str(out)]) == 0
    about, header, line = capsys.readouterr().out.splitlines()
    assert torch.__version__ in about
    assert header.split()[:4] == ["model", "engine", "ordinary", "private"]
    (result,) = json.loads((out / "step.json").read_text())["results"]
    assert (result["model"], result["engine"], result["batch"], result["failure"]) == (
        "mnist_cnn",
        "dpkernels",
        4,
        None,
    )
    assert result["pairs"] == worker.LEAST_PAIRS
    assert 0 < result["ratio_low"] <= result["ratio"] <= result["ratio_high"]
    assert f"{result['ratio']:.2f}" in line
    assert sorted(path.name for path in out.iterdir()) == ["step.json", "step.png"]
    with Image.open(out / "step.png") as image:
        assert image.format == "PNG"


def _figures(task: Task) -> dict[str, float]:
    if task.kind == "memory":
        return {"extra_mib": 8.0}
    return {"ordinary_ms": 1.0, "ms": 2.0, "ratio": 2.0, "ratio_low": 2.0, "ratio_high": 2.0, "pairs": 7}


def test_a_failing_engine_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(task: Task) -> dict[str, float]:
        if task.engine == "opacus-hooks":
            raise WorkerError("ModuleNotFoundError: No module named 'opacus'")
        return _figures(task)

    monkeypatch.setattr(worker, "run", run)
    arguments = ["bench", "--models", "mnist_cnn", "--engines", "opacus-hooks,vmap,dpkernels", *TINY]
    assert main(arguments) == 1
    _, _, ours, failed, peer = capsys.readouterr().out.splitlines()
    assert ours.split()[1] == "dpkernels"
    assert failed.split(maxsplit=1)[1].endswith("failed: ModuleNotFoundError: No module named 'opacus'")
    assert peer.endswith("1.00x as fast")
    assert main([*arguments, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [r["failure"] is None for r in document["results"]] == [True, False, True]


def test_ctrl_c_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(task: Task) -> dict[str, float]:
        if task.engine == "vmap":
            raise KeyboardInterrupt
        return _figures(task)

    monkeypatch.setattr(worker, "run", run)
    out = ["--out", str(tmp_path)]
    assert main(["bench", "--models", "mnist_cnn", "--engines", "dpkernels,vmap", *TINY, *out]) == 130
    printed = capsys.readouterr()
    assert "interrupted" in printed.err
    assert printed.out.splitlines()[-1].split()[1] == "dpkernels"
    (result,) = json.loads((tmp_path / "step.json").read_text())["results"]
    assert result["engine"] == "dpkernels"
    assert (tmp_path / "step.png").exists()


def test_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert main(["bench", "--explain", "mnist_cnn", *TINY, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert choices.LEGEND in printed
    document = json.loads((tmp_path / "explain.json").read_text())
    assert (document["model"], document["batch"]) == ("mnist_cnn", 4)
    for layer in document["layers"]:
        (line,) = [text for text in printed.splitlines() if text.startswith(f"{layer['layer']} ")]
        assert f"*{layer['chosen']} " in line
        assert line.count("*") == 1
    last = printed.splitlines()[-1]
    assert last.startswith(f"chosen {document['chosen_ms']:.2f} ms, best {document['best_ms']:.2f} ms: ")
    assert torch.get_num_threads() == threads


def test_explain_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--explain", "mnist_cnn", *TINY, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["layers"]) == 4
    assert document["versions"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--models", "mnist"], "--models must be of mnist_cnn, "),
        (["--models", ","], "--models must be of "),
        (["--engines", "dpkernels,ordinary"], "--engines must be of dpkernels, "),
        (["--batch", "0"], "--batch must be at least 1, got 0"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--explain", "nowhere"], "--explain must be of mnist_cnn, "),
        (["--explain", "mnist_cnn", "--threads", "0"], "--threads must be at least 1, got 0"),
        (["--explain", "mnist_cnn", "--seconds", "-1"], "--seconds must be at least 0, got -1.0"),
    ],
)
def test_bad_input(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["bench", *arguments, "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()
