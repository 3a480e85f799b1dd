"""What a run releases: one epsilon, no times, a report; and releases that a kill came between."""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from dpkernels.accounting import BudgetExceededError, Gaussian, Ledger, bound
from dpkernels.accounting.statement import rounded_up
from dpkernels.data import ArraySplit, ImageDataset
from dpkernels.training import RunFolder, RunResult, TrainConfig, loop, report, resolve, train
from dpkernels.training.privacy_report import write_report

Small = Callable[..., TrainConfig]
Run = Callable[..., RunResult]


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than these runs; the tests of the loop draw."""
    monkeypatch.setattr(report, "write_plot", lambda path, *_: path.touch())


def figures(folder: RunFolder) -> set[str]:
    """Every epsilon that is stated in the folder's files, to the digits of a statement."""
    metrics = json.loads(folder.metrics.read_text())
    with safe_open(str(folder.model), "pt") as file:
        of_model = float(file.metadata()["epsilon"])
    found = {rounded_up(metrics["epsilon"]), rounded_up(of_model)}
    for text in (metrics["statement"], folder.report.read_text()):
        found |= set(re.findall(r"\(([0-9.e+]+), 1e-05\)-differentially private", text))
    return found


@pytest.mark.parametrize("step", [1, 7, 12])
def test_a_run_states_one_epsilon(
    step: int, tmp_path: Path, small: Small, run: Run, interrupt_at: Callable[[int], Any]
) -> None:
    """Wherever it ended: that of its plan."""
    result = run(small(score_noise_multiplier=20.0), tmp_path / "run", progress=interrupt_at(step))
    plan = result.folder.read_config()[1]
    assert figures(result.folder) == {rounded_up(plan.epsilon)}
    spent = bound([plan.step_event.times(step)], plan.delta).upper
    everything = "".join(
        path.read_text() for path in (result.folder.metrics, result.folder.report, result.folder.config)
    )
    assert rounded_up(plan.epsilon) in everything
    if step < 12:
        assert f"{spent:.3f}" not in everything
        assert "it costs what the plan allows" in " ".join(everything.split())


def killed_in_release(tmp_path: Path, config: TrainConfig, digits: ImageDataset, times: int = 1) -> RunFolder:
    """A run that was killed between the entry of its statistics and its first checkpoint, so often."""
    folder = RunFolder(tmp_path / "run")
    folder.claim()
    plan = config.plan()
    for attempt in range(times):
        if (child := os.fork()) == 0:
            loop._Run._save = lambda self: os._exit(9)  # type: ignore[assignment,method-assign]
            try:
                train(config, plan, digits, folder, resume=attempt > 0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not folder.checkpoint.exists()
    return folder


def entries(folder: RunFolder) -> list[tuple[str, int]]:
    return [(entry["what"], entry["count"]) for entry in json.loads(folder.ledger.read_text())["entries"]]


def test_statistics_that_a_kill_took_are_released_and_paid_for_again(
    tmp_path: Path, small: Small, run: Run, digits: ImageDataset, watcher: Any
) -> None:
    """Their noise may have been drawn, so the entry stays; the plan's epsilon is kept by leaving out steps."""
    config = small(normalization="private", norm_noise_multiplier=8.0, score_noise_multiplier=20.0, epochs=10.0)
    folder = killed_in_release(tmp_path, config, digits, times=2)
    assert entries(folder) == [("normalization statistics", 2)]
    notes: list[str] = []

    class Hearing(watcher):  # type: ignore[misc]
        def note(self, text: str) -> None:
            notes.append(text)

    result = run(config, folder.path, resume=True, progress=Hearing())
    (what, statistics), (step, made), score = entries(folder)
    plan = folder.read_config()[1]
    assert (what, statistics) == ("normalization statistics", 3)
    assert score == (loop.SCORE, 1)  # what else is planned keeps its room
    assert step == "training step"
    assert 0 < made < plan.steps
    assert result.metrics["complete"]
    assert result.metrics["lost_steps"] == plan.steps - made
    assert f"{plan.steps - made} of {plan.steps} steps are left out" in notes[0]
    with Ledger(folder.ledger, budget=plan) as ledger:
        assert ledger.epsilon(plan.delta) <= plan.epsilon
        one_more = [*ledger.events(), plan.step_event]
        assert bound(one_more, plan.delta).upper > plan.epsilon * (1 - 1e-6)
    assert figures(folder) == {rounded_up(plan.epsilon)}
    text = " ".join(result.metrics["statement"].split())
    assert (
        "Spent of it, or instead: - normalization statistics: Gaussian mechanism, noise multiplier 5.65685, 3" in text
    )
    again = run(config, folder.path, resume=True)
    assert again.metrics["complete"]
    assert again.metrics["train_accuracy"] == result.metrics["train_accuracy"]


def test_a_seeded_run_repeats_its_statistics(tmp_path: Path, small: Small, run: Run, digits: ImageDataset) -> None:
    config = small(normalization="private", norm_noise_multiplier=8.0, seed=3)
    folder = killed_in_release(tmp_path, config, digits)
    resumed = run(config, folder.path, resume=True)
    whole = run(config, tmp_path / "whole")
    assert entries(folder) == entries(whole.folder)
    weights = [torch.load(it.folder.checkpoint, weights_only=True)["model"] for it in (resumed, whole)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_a_plan_without_room_for_a_step_says_so(tmp_path: Path, small: Small, run: Run, digits: ImageDataset) -> None:
    """The statistics cost nearly all that the plan has."""
    config = small(normalization="private", norm_noise_multiplier=1.0, noise_multiplier=50.0)
    folder = killed_in_release(tmp_path, config, digits)
    with pytest.raises(BudgetExceededError, match="normalization statistics would bring epsilon"):
        run(config, folder.path, resume=True)
    assert entries(folder) == [("normalization statistics", 1)]


def test_no_released_file_tells_a_time(tmp_path: Path, small: Small, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose every batch takes an hour leaves the same files as a quick one, but for the one marked PRIVATE."""
    config = small(seed=1, score_noise_multiplier=20.0)
    clock, ticks = loop.time.monotonic, iter(range(0, 10**9, 3600))
    folders = []
    for name in ("quick", "slow"):
        with monkeypatch.context() as patch:
            if name == "slow":
                patch.setattr("dpkernels.training.timing.time.monotonic", lambda: clock() + next(ticks))
            folders.append(run(config, tmp_path / name).folder)
    quick, slow = folders
    names = sorted(path.name for path in quick.path.iterdir())
    assert names == sorted(path.name for path in slow.path.iterdir())
    private = [name for name in names if "PRIVATE" in name]
    assert private == [quick.timing.name]
    for name in set(names) - set(private) - {quick.checkpoint.name, quick.model.name}:
        one, other = ((folder.path / name).read_bytes() for folder in folders)
        assert one.replace(b"/quick", b"") == other.replace(b"/slow", b""), name
    metadata = [safe_open(str(folder.model), "pt").metadata() for folder in folders]  # written in any order
    assert metadata[0] == metadata[1]
    one, other = (torch.load(folder.checkpoint, weights_only=True) for folder in folders)
    assert one.keys() == other.keys() == {"format", "step", "model", "optimizer", "averaged", "fingerprint"}
    assert stat.S_IMODE(slow.timing.stat().st_mode) == 0o600
    times = json.loads(slow.timing.read_text())
    assert times["warning"].startswith("PRIVATE")
    assert times["seconds"] > 3600 * 4
    assert [entry["step"] for entry in times["epochs"]] == [3, 6, 9, 12]


def test_physical_batches_and_progress_leave_no_trace(tmp_path: Path, small: Small, run: Run) -> None:
    """How many rows were drawn decides how many physical batches a step has; no file tells."""
    config = small(seed=1)
    whole, parts = (run(config, tmp_path / str(rows), physical_batch_size=rows).folder for rows in (10_000, 7))
    for path in (whole.ledger, whole.config, whole.report):
        other = (parts.path / path.name).read_text().replace("/7)", "/10000)").replace("/7`", "/10000`")
        if path is not whole.report:  # which holds an accuracy
            assert path.read_text() == other
        assert len(path.read_text()) == pytest.approx(len(other), abs=20)
    keys = [set(json.loads(folder.metrics.read_text())) for folder in (whole, parts)]
    assert keys[0] == keys[1]


def test_a_target_that_noise_cannot_carry_is_refused_before_the_first_step(
    tmp_path: Path, small: Small, run: Run
) -> None:
    with pytest.raises(ValueError, match=r"epsilon must be smaller for this model, got 45: with ideal noise .* up to"):
        run(small(epsilon=45.0, noise_multiplier=None), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_noise_that_carries_no_epsilon_is_reported_without_one(tmp_path: Path, small: Small, run: Run) -> None:
    with pytest.warns(UserWarning, match="no epsilon will be stated"):
        result = run(small(noise_multiplier=0.25), tmp_path / "run")
    assert result.metrics["epsilon"] is None
    assert not result.metrics["private"]
    history = result.folder.read_history(12)
    assert history[-1].epsilon is None
    assert result.metrics["statement"].startswith("No epsilon can be stated at delta=1e-05")
    text = result.folder.report.read_text()
    assert "**No epsilon can be stated at delta 1e-05**" in text
    assert "differentially private" not in text


def test_the_report(tmp_path: Path, small: Small, run: Run, interrupt_at: Callable[[int], Any]) -> None:
    config = small(normalization="private", norm_noise_multiplier=8.0)
    result = run(config, tmp_path / "run", progress=interrupt_at(5))
    folder, text = result.folder, result.folder.report.read_text()
    assert result.metrics["statement"] in text
    epsilon = result.metrics["epsilon"]
    for words in (
        "# Privacy report: linear on digits",
        f"**({rounded_up(epsilon)}, 1e-05)-differentially private**, for adding or removing one example",
        f"at most e^epsilon = {rounded_up(math.exp(epsilon))} times as likely",
        "The run stopped early: 5 of 12 planned steps were made. It costs what was planned.",
        f"Accuracy on the public test split: {result.metrics['test_accuracy']:.2%}.",
        "| size | 1437 training examples, a public nominal number; the true one is not stated |",
        "| classes | 10: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 |",
        "| private | the training split: examples and labels |",
        "| public | the test split (360 examples)",
        "| preprocessing | pixels scaled to [-1, 1] by fixed numbers |",
        "| preprocessing | channels normalized by statistics of the training split, released with noise",
        "- normalization statistics: Gaussian mechanism",
        "| bound on the norm of an example's gradient | 0.1 |",
        "| noise multiplier | 2 |",
        "**Several examples of one person.**",
        "**Other runs on the same data.**",
        "None was run in this folder",
        f"| torch | {torch.__version__} |",
        f"| {folder.timing.name}, ",
    ):
        assert words in text, words
    reports = [{"lower_bound": 0.7, "claim": 1.0, "delta": 1e-5, "confidence": 0.95, "canaries": 10}]
    folder.audit.write_text(json.dumps([*reports, {**reports[0], "lower_bound": 1.2}]))
    write_report(folder)
    text = folder.report.read_text()
    assert "| 1 | 0.7 | 1e-05 | 0.95 | not contradicted |\n| 1 | 1.2 | 1e-05 | 0.95 | REFUTED |" in text
    assert "costs the claimed epsilon of each as well" in text
    folder.audit.write_text("[{")
    write_report(folder)
    assert "audit.json lies in this folder, but it cannot be read." in folder.report.read_text()


def test_the_report_of_a_seeded_run_says_so(tmp_path: Path, small: Small, run: Run) -> None:
    text = run(small(seed=4, epochs=1.0), tmp_path / "run").folder.report.read_text()
    assert text.split("\n")[2].startswith("**NOT PRIVATE**: the noise came from a seed")
    assert "| seed | 4 |" in text


def test_names_with_bars_keep_the_table(tmp_path: Path, small: Small, digits: ImageDataset) -> None:
    from dataclasses import replace

    folder = RunFolder(tmp_path / "run")
    folder.claim()
    config = small(epochs=1.0)
    classes = ("a|b", "two\nlines", *digits.classes[2:])
    train(config, config.plan(), replace(digits, classes=classes), folder)
    assert "| classes | 10: a\\|b, two lines, 2," in folder.report.read_text()


@pytest.mark.parametrize("model", ["scatternet_linear", "ScatterNet-Linear"])
def test_a_model_that_stands_on_features_brings_them(digits: ImageDataset, model: str) -> None:
    config = resolve(digits, {"dataset": "digits", "model": model})
    assert (config.features, config.normalization, config.norm_noise_multiplier) == ("scatternet", "private", 32.0)
    assert config.model == model
    assert config.compose_with == (Gaussian(32.0 / 2**0.5),)
    chosen = resolve(digits, {"dataset": "digits", "model": model, "features": "scatternet-whitened"})
    assert chosen.features == "scatternet-whitened"
    assert resolve(digits, {"dataset": "digits", "model": "linear"}).features == "none"


def test_features_that_the_user_brings_are_left_alone(digits: ImageDataset) -> None:
    split = ArraySplit(torch.zeros(20, 81, 2, 2), torch.arange(20) % 10)
    brought = ImageDataset("brought", digits.classes, split, split, 20)
    config = resolve(brought, {"dataset": "brought", "model": "scatternet_linear", "delta": 1e-3})
    assert (config.features, config.normalization) == ("none", resolve(brought, {"dataset": "brought"}).normalization)


@pytest.mark.parametrize("model", ["scatternet_linear", "scatternet-cnn"])
def test_such_a_model_refuses_pixels(tmp_path: Path, digits: ImageDataset, run: Run, model: str) -> None:
    given = {"dataset": "digits", "model": model, "features": "none", "noise_multiplier": 2.0, "epochs": 1.0}
    config = resolve(digits, given)
    with pytest.raises(
        ValueError, match=f"features must be given with {model} on images, got none: this model is made"
    ):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
