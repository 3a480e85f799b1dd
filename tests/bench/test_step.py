"""Results of whole steps from given figures: arithmetic, order, failures."""

from __future__ import annotations

from typing import Any

import pytest

from dpkernels.bench import MODELS, StepResult, measure
from dpkernels.bench.worker import Task


def test_speed_up_goes_through_the_ratios_to_the_ordinary_step(faked: list[Task]) -> None:
    results = {r.engine: r for r in measure(["mnist_cnn"], ["vmap", "dpkernels"], threads=2)}
    assert next(iter(results)) == "dpkernels"  # first, so that the others' lines can be compared with it
    assert results["dpkernels"].speed_up is None
    assert results["vmap"].speed_up == 5.0 / 1.25
    assert results["vmap"].memory_ratio == 5.0
    assert {r.batch for r in results.values()} == {MODELS["mnist_cnn"].batch}
    assert all(
        task.threads == 2 and task.seconds == 10 and task.batch is None and not task.channels_last for task in faked
    )


def test_without_dpkernels_there_is_no_speed_up(faked: list[Task]) -> None:
    (result,) = measure(["mnist_cnn"], ["vmap"], batch=3, channels_last=True)
    assert result.speed_up is None
    assert result.ratio == 5.0
    assert result.batch == 3
    assert {(task.batch, task.channels_last) for task in faked} == {(3, True)}


def test_a_failure_is_a_result_and_stops_nothing(faked: list[Task]) -> None:
    results = list(measure(["mnist_cnn", "resnet18"], ["dpkernels", "opacus-hooks", "vmap"]))
    assert [(r.model, r.engine) for r in results] == [
        (model, engine) for model in ("mnist_cnn", "resnet18") for engine in ("dpkernels", "opacus-hooks", "vmap")
    ]
    failed = [r for r in results if r.failure]
    assert [r.engine for r in failed] == ["opacus-hooks", "opacus-hooks"]
    assert failed[0] == StepResult(
        "mnist_cnn", "opacus-hooks", 512, failure="ModuleNotFoundError: No module named 'opacus'"
    )
    assert failed[0].memory_ratio is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"models": ["mnist"]}, "models must be of mnist_cnn, .*, got mnist"),
        ({"models": []}, "models must be of .*, got none"),
        ({"engines": ["dpkernels", "ordinary"]}, "engines must be of dpkernels, .*, got dpkernels, ordinary"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"seconds": -1.0}, "seconds must be at least 0, got -1.0"),
        ({"seconds": float("nan")}, "seconds must be at least 0, got nan"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: dict[str, Any], message: str, faked: list[Task]) -> None:
    with pytest.raises(ValueError, match=message):
        measure(**{"models": ["mnist_cnn"], "engines": ["dpkernels"], **arguments})
    assert faked == []
