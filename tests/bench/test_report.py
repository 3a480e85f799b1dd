"""Measured steps as lines, JSON and a picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dpkernels.bench import StepResult, measure, report
from dpkernels.bench.worker import Task


def test_lines(faked: list[Task]) -> None:
    ours, failed, peer = (report.line(r) for r in measure(["mnist_cnn"], ["dpkernels", "opacus-hooks", "vmap"]))
    assert ours.split() == ["mnist_cnn", "dpkernels", "10.0ms", "12.5ms", "1.25", "1.12-1.38", "1.50x"]
    assert peer.split() == [
        "mnist_cnn",
        "vmap",
        "10.0ms",
        "50.0ms",
        "5.00",
        "4.50-5.50",
        "5.00x",
        "4.00x",
        "as",
        "fast",
    ]
    assert failed.split(maxsplit=2) == [
        "mnist_cnn",
        "opacus-hooks",
        "failed: ModuleNotFoundError: No module named 'opacus'",
    ]
    assert len(report.HEADER) == len(peer)


def test_without_memory_figures_there_is_a_dash() -> None:
    result = StepResult("mnist_cnn", "vmap", 1, None, 1.0, 2.0, 2.0, 2.0, 2.0, 7)
    assert report.line(result).endswith(" -")


def test_document(faked: list[Task]) -> None:
    results = list(measure(["mnist_cnn"], ["dpkernels", "opacus-hooks", "vmap"]))
    document = json.loads(json.dumps(report.document(results, threads=3, seconds=10.0), allow_nan=False))
    assert document["machine"]["threads"] == 3
    assert document["machine"]["processor"]
    assert document["versions"]["torch"] == torch.__version__
    assert {"dpkernels", "numpy", "python"} <= set(document["versions"])
    assert document["date"].endswith("Z")
    ours, failed, peer = document["results"]
    assert (ours["ratio"], ours["memory_ratio"], ours["speed_up"]) == (1.25, 1.5, None)
    assert failed["failure"].startswith("ModuleNotFoundError")
    assert peer["speed_up"] == 4.0


@pytest.mark.parametrize("engines", [["dpkernels"], ["dpkernels", "opacus-hooks", "vmap"]])
def test_plot(engines: list[str], tmp_path: Path, faked: list[Task]) -> None:
    results = list(measure(["mnist_cnn", "resnet18"], engines))
    report.plot(results, tmp_path / "step.png")
    assert [path.name for path in tmp_path.iterdir()] == ["step.png"]
    with Image.open(tmp_path / "step.png") as image:
        assert image.format == "PNG"
        pixels = np.asarray(image.convert("RGB"))
    # Default colours of the first engines' bars; what failed has none.
    colours = {"dpkernels": (31, 119, 180), "vmap": (255, 127, 14)}
    for engine, colour in colours.items():
        assert ((pixels == colour).all(-1).sum() > 1000) == (engine in engines)


def test_nothing_to_plot_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="results must hold a ratio, got none"):
        report.plot([StepResult("mnist_cnn", "vmap", 1, failure="no")], tmp_path / "step.png")
    assert list(tmp_path.iterdir()) == []
