"""The benchmark of operators has an entry for each of them, and its figures are what they say."""

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import kernels
from benchmarks.models import layers
from dpkernels import _native
from dpkernels.bench import BASELINES
from tests.conformance.test_families import operators


def test_every_operator_has_an_entry() -> None:
    timed = {entry.operator for family in kernels.families() for entry in kernels.entries(family)}
    assert timed == set(operators("dpkernels"))


def test_shapes_are_those_of_the_baseline_models() -> None:
    seen = list(layers(torch.nn.Linear))
    assert {layer.label.split()[0] for layer in seen} == set(BASELINES)
    first = seen[0]
    assert first.input_shape == (512, 512)
    assert first.output_shape == (512, 32)
    assert len(list(layers(torch.nn.Conv2d))) > 15


def test_a_run_prints_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results" / "kernels.json"
    kernels.main(["--family", "clip", "--seconds", "0.001", "--json", str(file)])
    report = json.loads(file.read_text())
    assert all(value > 0 for value in report["ceilings"].values())
    assert len(report["results"]) == len(kernels.entries("clip"))
    printed = capsys.readouterr().out
    for result in report["results"]:
        assert result["operator"] in printed
        assert 0 < result["best"] <= result["median"]
        assert result["reference_best"] > 0
        assert torch.isfinite(torch.tensor([result["gb_per_s"], result["gflop_per_s"]])).all()


def test_one_operator_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    kernels.main(["--operator", "clip_factors", "--seconds", "0.001"])
    assert capsys.readouterr().out.count("clip_factors") == 1


def test_instruction_sets_take_turns_and_the_widest_is_left() -> None:
    seen: list[str] = []
    best = kernels.by_isa(lambda: seen.append(_native.active_isa()), _native.isas(), 0.0)
    turns = [isa for isa, before in zip(seen, ["", *seen], strict=False) if isa != before]
    assert turns == _native.isas() * kernels.TURNS or len(_native.isas()) == 1
    assert best.keys() == set(_native.isas())
    assert _native.active_isa() == _native.isas()[-1]


def test_a_line_says_how_much_longer_an_instruction_set_takes(capsys: pytest.CaptureFixture[str]) -> None:
    others = _native.isas()[:-1]
    if not others:
        pytest.skip("this CPU runs the baseline alone")
    kernels.main(["--operator", "clip_factors", "--seconds", "0.001", "--isa", *others])
    printed = capsys.readouterr().out
    assert all(re.search(rf"{isa} \d+\.\d\dx", printed) for isa in others)
