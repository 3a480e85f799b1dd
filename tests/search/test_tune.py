"""Tuning: what is drawn, what it costs, that nothing of the other runs is left, and what may be gone on with."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from dpkernels.accounting import Gaussian, Ledger
from dpkernels.accounting.tuning import best_of_random_runs
from dpkernels.data import ImageDataset
from dpkernels.search import tune
from dpkernels.search.draws import Draw, parse_draw
from dpkernels.search.mechanism import NOISE_SHARE, Calibrated, Outlook, Search, calibrate
from dpkernels.search.tune import Tuned, TuneFolder, go_on, start
from dpkernels.search.workers import Job, Outcome, Watcher
from dpkernels.training import RunFolder, accuracy, load_checkpoint, load_trained, report
from dpkernels.training.build import build_model, build_optimizer, features_of
from tests.damage import COUNTS, mutations, outcomes

FIELDS = {"dataset": "digits", "epochs": 2.0, "batch_size": 479}
LR = parse_draw("lr=log:0.1:10")
RELEASED = ["config.json", "metrics.json", "model.safetensors", "report.md"]


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "write_plot", lambda path, *_: path.touch())


@pytest.fixture(scope="module")
def calibrated(digits: ImageDataset) -> Calibrated:
    return calibrate(Search(FIELDS, (LR,), 3.0, mean_runs=3.0), digits)


@pytest.fixture
def number(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """What K is."""
    return lambda runs: monkeypatch.setattr(tune, "draw_number_of_runs", lambda **_: runs)


class Eyes(Watcher):
    """Sees what nobody may, and stops at one step."""

    def __init__(self, stop_at: tuple[int, int] | None = None, copy: tuple[Path, Path] | None = None) -> None:
        self.jobs: Sequence[Job] = []
        self.metrics: list[dict[str, Any]] = []
        self.steps: list[tuple[int, int]] = []
        self.stop_at, self.copy = stop_at, copy

    def __call__(self, jobs: Sequence[Job], outlook: Outlook) -> Eyes:
        self.jobs = jobs
        return self

    def step(self, index: int, step: int) -> None:
        self.steps.append((index, step))
        if (index, step) == self.stop_at:
            if self.copy is not None:
                shutil.copytree(*self.copy)
            os.kill(os.getpid(), signal.SIGINT)

    def ended(self, index: int, outcome: Any) -> None:
        if outcome.complete:
            self.metrics.append(outcome.metrics)


def resume(path: Path, eyes: Eyes | None = None) -> tuple[Tuned, Eyes]:
    eyes = eyes or Eyes()
    return go_on(TuneFolder(path), processes=1, watcher=eyes), eyes


# ---- the mechanism


def test_draws_follow_what_is_stated() -> None:
    values = [LR.one() for _ in range(2000)]
    assert all(0.1 <= value <= 10 for value in values)
    logs = torch.tensor(values).log10()
    assert abs(logs.mean()) < 0.06  # standard error 0.013
    assert abs(logs.std() - 2 / math.sqrt(12)) < 0.04
    batch = parse_draw("batch-size=128,256")
    assert {batch.one() for _ in range(64)} == {128, 256}
    assert str(batch) == "batch_size from {128, 256}"
    assert 0.1 < parse_draw("momentum=uniform:0.1:0.5").one() < 0.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr", "lr must be a finite number > 0, got ''"),
        ("lr=0.1", "two different values"),
        ("lr=1,1", "two different values"),
        ("lr=log:1", "lr must be a finite number > 0, got ''"),
        ("lr=log:2:1", "0 < LOW < HIGH"),
        ("momentum=log:0:0.9", "0 < LOW < HIGH"),
        ("epochs=uniform:1:40", "draw of epochs must be from values"),
        ("seed=1,2", "draw must not be of"),
        ("epsilon=1,2", "draw must not be of"),
        ("speed=1,2", "speed is not a field"),
    ],
)
def test_bad_draws(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_draw(text)


def test_noise_is_calibrated_for_every_kind_of_run_together(digits: ImageDataset) -> None:
    draws = (LR, Draw("batch_size", "choice", (128, 479)), Draw("epochs", "choice", (2.0, 8.0)))
    fields = {"dataset": "digits", "score_noise_multiplier": 20.0}
    found = calibrate(Search(fields, draws, 3.0, "train", 5.0), digits)
    assert len(found.noise) == 4
    runs = [kind.events(sigma) for kind, sigma in found.noise.items()]
    assert all(Gaussian(20.0) in events for events in runs)  # the score is an event of every run
    again = best_of_random_runs(runs[0], 1e-5 * (1 - NOISE_SHARE), mean_runs=5.0, alternatives=runs[1:]).upper
    assert 3.0 * (1 - 1e-3) < found.bound.upper == again <= 3.0
    assert all(best_of_random_runs(events, 1e-5, mean_runs=5.0).upper <= again for events in runs)


def test_bad_searches() -> None:
    with pytest.raises(ValueError, match="draw must be given"):
        Search(FIELDS, (), 3.0)
    with pytest.raises(ValueError, match="different fields, got lr, lr"):
        Search(FIELDS, (LR, LR), 3.0)
    for name, value in (("seed", 1), ("noise_multiplier", 1.0), ("epsilon", 1.0)):
        with pytest.raises(ValueError, match=f"{name} must not be"):
            Search(FIELDS | {name: value}, (LR,), 3.0)
    with pytest.raises(ValueError, match="score_noise_multiplier must be given with"):
        Search(FIELDS, (LR,), 3.0, "train")


# ---- in a folder


def test_only_the_best_run_is_left(
    tmp_path: Path, digits: ImageDataset, calibrated: Calibrated, number: Any, in_this_process: list[int]
) -> None:
    number(4)
    folder = TuneFolder(tmp_path)
    start(calibrated, digits, folder)
    assert folder.secret.stat().st_mode & 0o077 == 0
    result, eyes = resume(tmp_path)
    assert in_this_process == [4]
    assert len({job.config.lr for job in eyes.jobs}) == 4
    accuracies = [metrics["test_accuracy"] for metrics in eyes.metrics]
    best = accuracies.index(max(accuracies))
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert result.metrics == metrics
    assert metrics["test_accuracy"] == accuracies[best]
    assert metrics["chosen"] == {"lr": eyes.jobs[best].config.lr}
    assert result.config == eyes.jobs[best].config

    assert sorted(path.name for path in tmp_path.iterdir()) == RELEASED
    assert metrics["epsilon"] == calibrated.bound.upper > eyes.jobs[0].plan.epsilon
    with safe_open(str(tmp_path / "model.safetensors"), "pt") as file:
        assert float(file.metadata()["epsilon"]) == calibrated.bound.upper
    assert accuracy(load_trained(tmp_path), digits.scaled(0.0, 1.0).test) == metrics["test_accuracy"]
    text = "".join((tmp_path / name).read_text() for name in RELEASED if name != "model.safetensors")
    for index, job in enumerate(eyes.jobs):
        assert (repr(job.config.lr) in text) == (index == best)
        assert repr(job.plan.epsilon) not in text
    statement = " ".join(metrics["statement"].split())
    assert "test set, which is treated as public" in statement
    assert "lr log-uniform from 0.1 to 10" in statement
    with pytest.raises(FileExistsError, match="already holds a result"):
        start(calibrated, digits, folder)
    assert resume(tmp_path)[0] == result  # as after a kill while the others were removed


def test_a_score_on_private_data_is_released_once_by_every_run(
    tmp_path: Path, digits: ImageDataset, number: Any, in_this_process: list[int]
) -> None:
    number(2)
    search = Search(FIELDS | {"score_noise_multiplier": 10.0}, (LR,), 3.0, "train", 3.0)
    start(calibrate(search, digits), digits, TuneFolder(tmp_path))
    ledgers: list[list[str]] = []

    class Reader(Eyes):
        def ended(self, index: int, outcome: Any) -> None:
            super().ended(index, outcome)
            with Ledger(RunFolder(self.jobs[index].folder).ledger) as ledger:
                ledgers.append([str(entry.event) for entry in ledger.entries() if not entry.is_step])

    result, eyes = resume(tmp_path, Reader())
    assert ledgers == [["Gaussian mechanism, noise multiplier 10"]] * 2
    scores = [metrics["train_accuracy"] for metrics in eyes.metrics]
    assert result.metrics is not None
    assert result.metrics["train_accuracy"] == max(scores)
    assert "noisy count of right answers on the training data" in " ".join(result.metrics["statement"].split())


def test_what_was_stopped_goes_on_and_what_was_killed_is_made_anew(
    tmp_path: Path,
    digits: ImageDataset,
    calibrated: Calibrated,
    number: Any,
    in_this_process: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    number(2)
    monkeypatch.setattr("dpkernels.training.loop.CHECKPOINT_SECONDS", 1e6)
    killed, stopped = tmp_path / "killed", tmp_path / "stopped"
    start(calibrated, digits, TuneFolder(stopped))
    result, eyes = resume(stopped, Eyes(stop_at=(1, 4), copy=(stopped, killed)))
    assert (result.metrics, result.stopped_by) == (None, signal.SIGINT)
    assert not (stopped / "metrics.json").exists()
    with pytest.raises(FileExistsError, match="broken off: go on with --resume"):
        start(calibrated, digits, TuneFolder(stopped))
    drawn = [job.config for job in eyes.jobs]

    finished, again = resume(stopped)
    assert [job.config for job in again.jobs] == drawn[1:]
    assert again.steps[0] == (0, 4)
    assert finished.config in drawn
    assert sorted(path.name for path in stopped.iterdir()) == RELEASED

    lost = TuneFolder(killed).run(1)
    with Ledger(lost.ledger) as ledger:
        assert ledger.steps > load_checkpoint(lost.checkpoint).step == 0
    finished, again = resume(killed)
    assert [job.config for job in again.jobs] == drawn[1:]  # the same hyper-parameters, and the first run as it was
    assert [step for _, step in again.steps] == list(range(7))
    assert again.metrics[0]["lost_steps"] == 0
    assert finished.config in drawn


def test_in_constant_time_runs_beyond_the_number_do_not_count(
    tmp_path: Path, digits: ImageDataset, number: Any, in_this_process: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpkernels.search.mechanism.CUT_SHARE", 0.9)  # for few of them
    search = Search(FIELDS, (LR,), 8.0, mean_runs=1.05, constant_time=True)
    found = calibrate(search, digits)
    assert found.slots is not None
    assert found.bound.upper <= 8.0
    number(1)
    start(found, digits, TuneFolder(tmp_path))
    result, eyes = resume(tmp_path)
    assert in_this_process == [found.slots]
    assert len(eyes.metrics) == found.slots > 1
    assert result.config == eyes.jobs[0].config


def test_noise_that_takes_too_much_of_delta_is_refused_before_the_first_run(
    tmp_path: Path, digits: ImageDataset, calibrated: Calibrated, small: Any, number: Any
) -> None:
    assert calibrated.bound.kept == pytest.approx(1e-5 / 256)
    config, kind = calibrated.draw(digits)
    plan = config.plan()
    features = features_of(config.features, digits.input_shape)
    for model in ("linear", "simple_vgg-4x1-8x1-16"):
        own = replace(config, model=model)
        network = build_model(own, digits, features)
        parameters = sum(p.numel() for p in network.parameters())
        optimizer = build_optimizer(own, plan, network, Ledger())
        share = (1 + math.exp(3.0)) * 3.0 * kind.steps * optimizer.noise_error
        # What is checked is no less than what the optimizer counts, to the power of two that it rounds up to.
        for allowed, fits in ((4 * share, True), (share / 4, False)):
            probe = replace(calibrated, delta=allowed * 256)
            if fits:
                probe.check_noise(own, parameters, 1)
            else:
                with pytest.raises(ValueError, match="epsilon must be smaller for"):
                    probe.check_noise(own, parameters, 1)
    number(1)
    dear = calibrate(Search(FIELDS, (LR,), 35.0, mean_runs=3.0), digits)
    with pytest.raises(ValueError, match="epsilon must be smaller for linear, got 35: what the noise of all runs"):
        start(dear, digits, TuneFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_no_run_and_a_failing_run(
    tmp_path: Path, digits: ImageDataset, calibrated: Calibrated, number: Any, in_this_process: list[int]
) -> None:
    number(0)
    start(calibrated, digits, TuneFolder(tmp_path / "none"))
    assert resume(tmp_path / "none")[0] == Tuned(None, None, None)
    assert not (tmp_path / "none").exists()
    with pytest.raises(FileNotFoundError, match="holds no tuning to resume"):
        resume(tmp_path / "none")

    number(1)
    folder = TuneFolder(tmp_path / "failing")
    start(calibrated, digits, folder)
    folder.run(0).checkpoint.write_bytes(b"damaged")
    with pytest.raises(RuntimeError, match="a run failed, so that nothing is released"):
        resume(folder.path)
    assert not (folder.path / "metrics.json").exists()
    folder.run(0).checkpoint.unlink()
    assert resume(folder.path)[0].metrics is not None


@COUNTS
def test_a_damaged_state(
    calibrated: Calibrated,
    digits: ImageDataset,
    number: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    count: int,
) -> None:
    """No run is begun where it cannot be read."""
    number(2)
    folder = TuneFolder(tmp_path / "out")
    start(calibrated, digits, folder)
    monkeypatch.setattr(tune, "run_jobs", lambda *_, **__: ([Outcome(), Outcome()], signal.SIGINT))
    good = folder.state.read_bytes()

    def read(content: bytes) -> None:
        folder.state.write_bytes(content)
        assert resume(folder.path)[0].stopped_by == signal.SIGINT

    read(good)
    counts, wrong = outcomes(read, mutations(good, count), "state.json")
    assert not wrong, wrong[:10]
    assert sum(counts.values()) == count
    assert counts["refused"]
