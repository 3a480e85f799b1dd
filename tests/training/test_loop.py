"""Whole runs on real digits: what they leave, and that stops, kills and resumes lose nothing but what they must."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_model

from dpkernels import models
from dpkernels.accounting import Ledger, LedgerLockedError
from dpkernels.accounting.statement import rounded_up
from dpkernels.data import ImageDataset, PoissonLoader
from dpkernels.random import Domain, Key
from dpkernels.training import Execution, RunFolder, RunResult, TrainConfig, accuracy, load_checkpoint, loop, report
from dpkernels.training.interrupt import StopSignal

STEPS = 12
Small = Callable[..., TrainConfig]
Run = Callable[..., RunResult]


def parameters(folder: RunFolder) -> dict[str, torch.Tensor]:
    return load_checkpoint(folder.checkpoint).model


def same(one: RunFolder, other: RunFolder) -> bool:
    a, b = parameters(one), parameters(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, digits: ImageDataset, small: Small) -> RunResult:
    """The seeded small run, uninterrupted."""
    config = small(seed=5, schedule="cosine")
    folder = RunFolder(tmp_path_factory.mktemp("reference") / "run")
    folder.claim()
    return loop.train(config, config.plan(), digits, folder)


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than these runs; the reference run draws."""
    monkeypatch.setattr(report, "write_plot", lambda path, *_: path.touch())


def test_what_a_run_leaves(reference: RunResult, digits: ImageDataset) -> None:
    folder = reference.folder
    metrics = json.loads(folder.metrics.read_text())
    assert metrics == reference.metrics
    assert reference.stopped_by is None
    assert metrics["complete"]
    assert metrics["steps"] == metrics["planned_steps"] == STEPS
    assert metrics["lost_steps"] == 0
    assert 0.5 < metrics["test_accuracy"] <= 1
    assert 0 < metrics["epsilon"] < np.inf
    assert metrics["noise_multiplier"] == 2.0
    assert metrics["versions"].keys() == {"dpkernels", "torch", "numpy", "python"}
    assert not metrics["private"]
    assert metrics["statement"].startswith("NOT PRIVATE")

    history = [json.loads(line) for line in folder.history.read_text().splitlines()]
    assert [line["step"] for line in history] == [3, 6, 9, 12]
    assert [line["epoch"] for line in history] == [1, 2, 3, 4]
    epsilons = [line["epsilon"] for line in history]
    assert epsilons == sorted(epsilons)
    assert epsilons[-1] == metrics["epsilon"]
    assert not any("loss" in key or "norm" in key for line in history for key in line)
    assert history[-1]["test_accuracy"] == metrics["test_accuracy"]

    with Image.open(folder.plot) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 400
        assert len(np.unique(np.asarray(picture.convert("L")))) > 10

    model = models.create("linear", digits.input_shape, 10)
    load_model(model, str(folder.model))
    assert accuracy(model, digits.test) == metrics["test_accuracy"]
    with safe_open(str(folder.model), "pt") as file:
        assert file.metadata()["private"] == "false"
        assert json.loads(file.metadata()["pixel_range"]) == list(digits.test.value_range)
    with Ledger(folder.ledger, seeded=True) as ledger:
        assert ledger.steps == STEPS


def test_no_key_is_in_any_file(tmp_path: Path, small: Small, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[bytes] = []

    class Spy(PoissonLoader):
        def __init__(self, *arguments: Any, key: Key, **more: Any) -> None:
            keys.append(bytes(key.value.tolist()))
            super().__init__(*arguments, key=key, **more)

    monkeypatch.setattr(loop, "PoissonLoader", Spy)
    result = run(small(epochs=1.0), tmp_path / "run")
    assert len(keys) == 1
    for file in result.folder.path.iterdir():
        content = file.read_bytes()
        assert keys[0] not in content
        assert keys[0].hex().encode() not in content
    assert result.metrics["private"]


def test_two_runs_without_a_seed_differ(tmp_path: Path, small: Small, run: Run) -> None:
    one, other = (run(small(epochs=1.0), tmp_path / name) for name in "ab")
    assert not same(one.folder, other.folder)


def test_physical_batches_change_only_rounding(tmp_path: Path, small: Small, run: Run, reference: RunResult) -> None:
    result = run(small(seed=5, schedule="cosine"), tmp_path / "run", physical_batch_size=100)
    whole, parts = parameters(reference.folder), parameters(result.folder)
    for name, value in whole.items():
        assert torch.allclose(parts[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("step", [1, 5, 11])
def test_a_stopped_seeded_run_goes_on_to_the_same_parameters(
    step: int, tmp_path: Path, small: Small, run: Run, reference: RunResult, interrupt_at: Callable[[int], Any]
) -> None:
    config = small(seed=5, schedule="cosine")
    stopped = run(config, tmp_path / "run", progress=interrupt_at(step))
    assert stopped.stopped_by == signal.SIGINT
    assert not stopped.metrics["complete"]
    assert stopped.metrics["steps"] == step
    plan = stopped.folder.read_config()[1]
    assert stopped.metrics["epsilon"] == plan.epsilon  # since it may have stopped on purpose
    assert stopped.folder.read_history(step)[-1].epsilon < 0.999 * plan.epsilon
    assert f"({rounded_up(plan.epsilon)}, 1e-05)-differentially private" in stopped.metrics["statement"]
    assert stopped.folder.plot.exists()
    resumed = run(config, tmp_path / "run", resume=True)
    assert resumed.metrics["complete"]
    assert same(resumed.folder, reference.folder)
    steps = [[line.step for line in result.folder.read_history(STEPS)] for result in (resumed, reference)]
    assert steps[0] == steps[1]
    assert resumed.seconds > stopped.seconds
    assert resumed.metrics["epsilon"] == reference.metrics["epsilon"]


def test_a_stop_in_the_middle_of_a_logical_batch_discards_it(
    tmp_path: Path, small: Small, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(seed=5)
    whole = run(config, tmp_path / "whole", physical_batch_size=100)
    handed_out = 0

    class Interrupting(PoissonLoader):
        def __next__(self) -> Any:
            nonlocal handed_out
            handed_out += 1
            if handed_out == 13:  # five physical batches a step: in the third
                os.kill(os.getpid(), signal.SIGINT)
            return super().__next__()

    monkeypatch.setattr(loop, "PoissonLoader", Interrupting)
    stopped = run(config, tmp_path / "run", physical_batch_size=100)
    assert 0 < stopped.metrics["steps"] < STEPS
    assert handed_out == 13
    with Ledger(stopped.folder.ledger, seeded=True) as ledger:
        assert ledger.steps == stopped.metrics["steps"]
    resumed = run(config, tmp_path / "run", resume=True, physical_batch_size=100)
    assert same(resumed.folder, whole.folder)


@pytest.fixture
def rare_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first checkpoint and the last."""
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 1e6)


@pytest.mark.usefixtures("rare_checkpoints")
def test_a_killed_seeded_run_repeats_the_lost_steps(
    tmp_path: Path, small: Small, run: Run, reference: RunResult, copy_at: Callable[..., Any], watcher: Any
) -> None:
    config = small(seed=5, schedule="cosine")
    run(config, tmp_path / "run", progress=copy_at(7, tmp_path / "run", tmp_path / "killed"))
    killed = RunFolder(tmp_path / "killed")
    assert load_checkpoint(killed.checkpoint).step == 0
    killed.checkpoint.with_name(".checkpoint.pt.new").write_bytes(b"killed while this was written")
    again = watcher()
    resumed = run(config, killed.path, resume=True, progress=again)
    assert again.steps == list(range(1, STEPS + 1))
    assert same(resumed.folder, reference.folder)
    assert [result.step for result in again.epochs] == [3, 6, 9, 12]
    assert len(killed.history.read_text().splitlines()) == 4


@pytest.mark.usefixtures("rare_checkpoints")
def test_steps_lost_to_a_kill_stay_spent(
    tmp_path: Path, small: Small, run: Run, copy_at: Callable[..., Any], watcher: Any
) -> None:
    config = small(epochs=12.0)  # 36 steps, reserved in blocks
    plan = config.plan()
    run(config, tmp_path / "run", progress=copy_at(18, tmp_path / "run", tmp_path / "killed"))
    killed = RunFolder(tmp_path / "killed")
    again = watcher()
    resumed = run(config, killed.path, resume=True, progress=again)
    first = again.steps[0]
    assert 18 < first <= plan.steps
    assert again.steps == list(range(first, plan.steps + 1))
    assert resumed.metrics["complete"]
    assert resumed.metrics["steps"] == plan.steps
    assert resumed.metrics["lost_steps"] == first - 1
    assert resumed.metrics["epsilon"] == plan.epsilon
    with Ledger(killed.ledger) as ledger:
        assert ledger.steps == plan.steps
    assert [json.loads(line)["step"] for line in killed.history.read_text().splitlines()] == list(
        range(3 * -(-first // 3), plan.steps + 1, 3)
    )


def test_resuming_a_finished_run_reports_again(tmp_path: Path, small: Small, run: Run, watcher: Any) -> None:
    first = run(small(seed=5), tmp_path / "run")
    first.folder.metrics.unlink()
    again = watcher()
    second = run(small(seed=5), tmp_path / "run", resume=True, progress=again)
    assert again.steps == again.epochs == []
    assert second.folder.metrics.exists()
    assert second.metrics["test_accuracy"] == first.metrics["test_accuracy"]


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, small: Small, run: Run) -> None:
    config = small()
    run(config, tmp_path / "a")
    stale = RunFolder(tmp_path / "a")
    stale.ledger.unlink()  # who deletes the ledger does not get its steps back
    with pytest.raises(ValueError, match="not the ledger of that run"):
        run(config, tmp_path / "a", resume=True)


def test_a_run_on_other_features_is_refused(
    tmp_path: Path, small: Small, run: Run, interrupt_at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DPKERNELS_CACHE", str(tmp_path / "cache"))
    config = small(features="scatternet")
    folder = run(config, tmp_path / "run", progress=interrupt_at(2)).folder
    with monkeypatch.context() as changed:
        changed.setattr("dpkernels.training.build.UNIT", (-1.0, 1.0))
        with pytest.raises(ValueError, match="begun by another version, whose scatternet features were others"):
            run(config, folder.path, resume=True)
    assert run(config, folder.path, resume=True).metrics["complete"]


def test_a_missing_checkpoint(tmp_path: Path, small: Small, run: Run, watcher: Any) -> None:
    config = small(epochs=1.0)
    folder = run(config, tmp_path / "run").folder
    folder.checkpoint.unlink()
    with pytest.raises(FileNotFoundError, match=r"checkpoint\.pt is missing, though something is spent: training step"):
        run(config, folder.path, resume=True)
    folder.ledger.unlink()  # as after a kill before the first step
    again = watcher()
    run(config, folder.path, resume=True, progress=again)
    assert again.steps == [1, 2, 3]


def test_two_processes_in_one_folder(tmp_path: Path, small: Small, run: Run) -> None:
    config = small()
    folder = RunFolder(tmp_path)
    with Ledger(folder.ledger), pytest.raises(LedgerLockedError):
        run(config, tmp_path)
    assert folder.ledger.exists()  # the other's


def test_a_run_that_could_not_begin_leaves_nothing(tmp_path: Path, small: Small, run: Run) -> None:
    with pytest.raises(ValueError, match=r"\(1, 28, 28\)"):
        run(small(model="mnist_cnn"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    run(small(epochs=1.0, seed=1), tmp_path / "run")


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adaptive_optimizers(optimizer: str, tmp_path: Path, small: Small, run: Run) -> None:
    config = small(optimizer=optimizer, lr=0.05, weight_decay=0.01, seed=1)
    assert run(config, tmp_path / "run").metrics["test_accuracy"] > 0.5


def test_a_moving_average_is_what_the_run_leaves(
    tmp_path: Path,
    small: Small,
    run: Run,
    reference: RunResult,
    digits: ImageDataset,
    interrupt_at: Callable[[int], Any],
) -> None:
    config = small(seed=5, schedule="cosine", averaging=0.3)
    weights: list[dict[str, torch.Tensor]] = []
    plain = reference.folder.read_history(STEPS)

    def spy(run_: Any) -> None:
        weights.append({name: value.clone() for name, value in run_.model.state_dict().items()})

    with pytest.MonkeyPatch.context() as patch:
        logical_step = loop._Run._logical_step
        patch.setattr(loop._Run, "_logical_step", lambda self, *a: (logical_step(self, *a), spy(self))[0])
        whole = run(config, tmp_path / "whole")
    assert same(whole.folder, reference.folder)  # training itself is as without
    expected = weights[0]
    for count, current in enumerate(weights[1:], start=1):
        decay = min(0.3, (1 + count) / (10 + count))
        expected = {name: decay * value + (1 - decay) * current[name] for name, value in expected.items()}
    model = models.create("linear", digits.input_shape, 10)
    load_model(model, str(whole.folder.model))
    for name, value in model.state_dict().items():
        assert torch.allclose(value, expected[name], rtol=1e-5, atol=1e-6)
    history = whole.folder.read_history(STEPS)
    assert [line.last_iterate_accuracy for line in history] == [line.test_accuracy for line in plain]
    assert accuracy(model, digits.test) == whole.metrics["test_accuracy"] == history[-1].test_accuracy

    run(config, tmp_path / "run", progress=interrupt_at(5))
    resumed = run(config, tmp_path / "run", resume=True)
    other = models.create("linear", digits.input_shape, 10)
    load_model(other, str(resumed.folder.model))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


def test_the_score_is_a_count_with_noise_of_a_stream_of_its_own(
    tmp_path: Path, small: Small, run: Run, reference: RunResult, digits: ImageDataset
) -> None:
    config = small(seed=5, schedule="cosine", score_noise_multiplier=25.0)
    result = run(config, tmp_path / "run")
    assert same(result.folder, reference.folder)
    model = models.create("linear", digits.input_shape, 10)
    load_model(model, str(result.folder.model))
    size, key = len(digits.train), Key.from_seed(5)
    right = round(accuracy(model, digits.train) * size)
    noise = key.grid_normal(Domain.SCORE, 0, 1, noise_std=25.0, grid=1.0).item()
    assert result.metrics["train_accuracy"] == (right + noise) / config.dataset_size
    assert noise != 0
    with Ledger(result.folder.ledger, seeded=True) as ledger:
        assert [entry.event for entry in ledger.entries() if entry.what == loop.SCORE] == [config.score_event]


def test_workers(tmp_path: Path, small: Small, run: Run, reference: RunResult) -> None:
    result = run(small(seed=5, schedule="cosine"), tmp_path / "run", workers=1)
    assert same(result.folder, reference.folder)


def test_labels_out_of_range(tmp_path: Path, small: Small, digits: ImageDataset) -> None:
    from dataclasses import replace

    wrong = replace(digits, classes=digits.classes[:9])
    folder = RunFolder(tmp_path)
    folder.claim()
    config = small()
    with pytest.raises(ValueError, match=r"train labels must lie in \[0, 8\], got labels from 0 to 9"):
        loop.train(config, config.plan(), wrong, folder)


@pytest.mark.parametrize(("name", "value"), [("physical_batch_size", 0), ("workers", -1), ("workers", 1.5)])
def test_execution_is_checked(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=f"{name} must be"):
        Execution(**{name: value})


def test_the_second_signal_breaks_off() -> None:
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background process may ignore it
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert stop
            assert stop.number == signal.SIGINT
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, inherited)


def test_stop_signal_outside_the_main_thread() -> None:
    heard: list[bool] = []

    def go() -> None:
        with StopSignal() as stop:
            heard.append(bool(stop))

    thread = threading.Thread(target=go)
    thread.start()
    thread.join()
    assert heard == [False]
