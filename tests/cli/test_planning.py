"""`dpkernels plan` and `dpkernels epsilon`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpkernels.cli import main

PLAN = ["plan", "--dataset-size", "60000", "--batch-size", "512", "--delta", "1e-5"]


def test_plan_prints_the_statement(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--epochs", "40", "--noise-multiplier", "1.23"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("noise multiplier 1.23, 4688 steps\n")
    assert "1e-05)-differentially private." in printed
    assert "probability 512/60000 (Poisson sampling)" in " ".join(printed.split())


def test_plan_as_json_meets_its_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--steps", "100", "--epsilon", "1", "--accountant", "rdp", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0.99 < found["epsilon"] <= 1
    assert found["epsilon_lower"] <= found["epsilon"]
    assert found["steps"] == 100
    assert found["sampling_rate"] == 512 / 60000
    assert found["noise_multiplier"] > 0.5
    assert "differentially private" in found["statement"]


def test_the_noise_of_iteration_stands_beside(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figure_9 = ["plan", "--dataset-size", "50000", "--batch-size", "512", "--delta", "1e-5", "--epochs", "10"]
    figure_9 += ["--epsilon", "3", "--accountant", "rdp", "--iteration"]
    assert main([*figure_9, "--json", "--plot", str(tmp_path / "figure9.png")]) == 0
    found = json.loads(capsys.readouterr().out)
    last, every = (found[f"amplification_by_iteration{which}_noise_multiplier"] for which in ("", "_releasing_epochs"))
    assert found["noise_multiplier"] < last < every
    assert (tmp_path / "figure9.png").read_bytes().startswith(b"\x89PNG")
    assert main(figure_9) == 0
    assert f"noise multiplier {last:.6g} with amplification by iteration (convex" in capsys.readouterr().out
    assert main([*figure_9[:7], "--epochs", "1.5", *figure_9[9:]]) == 2
    assert "--epochs must be a whole number" in capsys.readouterr().err


def test_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    """Plain Gaussian with mu = 1: 4.3772 exactly, and an upper bound is printed."""
    steps = ["--noise-multiplier", "10", "--steps", "100", "--delta", "1e-5", "--accountant", "pld"]
    assert main(["epsilon", *steps, "--sampling-rate", "1"]) == 0
    assert 4.3771 <= float(capsys.readouterr().out) < 4.39
    assert main(["epsilon", *steps, "--batch-size", "7", "--dataset-size", "7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sampling_rate"] == 1
    assert found["epsilon_lower"] <= found["epsilon"] == pytest.approx(4.3772, abs=1e-3)


def test_no_noise_has_no_finite_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["epsilon", "--noise-multiplier", "0", "--sampling-rate", "0.1", "--steps", "1", "--delta", "1e-5"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == "inf\n"
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epsilon"] is None


SMALL = ["--dataset-size", "100", "--batch-size", "10"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", *SMALL], "one of the arguments --epochs --steps is required"),
        (["plan", *SMALL, "--epochs", "1", "--steps", "1"], "not allowed with argument"),
        (["plan", *SMALL, "--epochs", "0"], "--epochs must be a finite number > 0, got 0.0"),
        (["plan", *SMALL, "--steps", "0"], "--steps must be a positive integer, got 0"),
        (["plan", *SMALL, "--steps", "1", "--epsilon", "-1"], "--epsilon must be a finite number > 0, got -1.0"),
        (
            ["plan", *SMALL, "--steps", "1", "--noise-multiplier", "0"],
            "--noise-multiplier must be > 0 in a plan, got 0",
        ),
        (["plan", *SMALL, "--steps", "1", "--delta", "1"], "--delta must be a probability with 0 < delta < 1, got 1.0"),
        (["plan", "--dataset-size", "0", "--batch-size", "1", "--steps", "1"], "--dataset-size must be a positive"),
        (
            ["plan", "--dataset-size", "5", "--batch-size", "6", "--steps", "1"],
            "--batch-size must be at most dataset_s",
        ),
        (["plan", "--batch-size", "6", "--steps", "1"], "required: --dataset-size"),
        (["epsilon", "--noise-multiplier", "1", "--steps", "5"], "required: --delta"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        ([], "required: COMMAND"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    printed, error = capsys.readouterr()
    assert printed == ""
    assert error.startswith("dpkernels")
    assert error.count("\n") == 1
    assert message in error


EPSILON = {"--noise-multiplier": "1", "--sampling-rate": "0.1", "--steps": "5", "--delta": "1e-5"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--noise-multiplier": "-1"}, "--noise-multiplier must be a finite number >= 0, got -1.0"),
        ({"--sampling-rate": "0"}, "--sampling-rate must be a probability with 0 < sampling_rate <= 1, got 0.0"),
        ({"--sampling-rate": "1.5"}, "--sampling-rate must be a probability with 0 < sampling_rate <= 1, got 1.5"),
        ({"--sampling-rate": None}, "--sampling-rate must be given, or both batch_size and dataset_size"),
        ({"--batch-size": "3"}, "--sampling-rate must be given alone"),
        ({"--sampling-rate": None, "--batch-size": "3", "--dataset-size": "2"}, "--batch-size must lie in [1, datas"),
        ({"--steps": "0"}, "--steps must be a positive integer, got 0"),
        ({"--delta": "0"}, "--delta must be a probability with 0 < delta < 1, got 0.0"),
    ],
)
def test_bad_input_of_epsilon(changes: dict[str, str | None], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    values = {name: value for name, value in {**EPSILON, **changes}.items() if value is not None}
    assert main(["epsilon", *(part for pair in values.items() for part in pair)]) == 2
    assert message in capsys.readouterr().err
