"""The files of a run, damaged at random: each is refused by its name, or still says what a run can go on from."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dpkernels.accounting import Ledger
from dpkernels.data import ArraySplit, ImageDataset
from dpkernels.search.sweep import read_rows
from dpkernels.training import (
    EpochResult,
    Execution,
    RunFolder,
    TrainConfig,
    load_checkpoint,
    load_trained,
    report,
    train,
)
from dpkernels.training.diagnostics import Diagnostics, Snapshot
from dpkernels.training.privacy_report import write_report
from dpkernels.training.progress import Silent
from dpkernels.transfer import load_weights
from tests.damage import COUNTS, mutations, one_outcome, outcomes

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def stopped(
    tmp_path_factory: pytest.TempPathFactory, digits: ImageDataset, small: Callable[..., TrainConfig]
) -> RunFolder:
    """A run that was stopped at half its steps."""
    config = small(epochs=2.0, averaging=0.5)
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "run")
    folder.claim()
    result = train(config, config.plan(), digits, folder, execution=Execution(diagnostics=True), progress=Stop())
    assert (result.metrics["steps"], result.metrics["planned_steps"]) == (3, 6)
    return folder


class Stop(Silent):
    def step(self, step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def copy(stopped: RunFolder, tmp_path: Path) -> RunFolder:
    shutil.copytree(stopped.path, tmp_path / "runs" / "run")
    return RunFolder(tmp_path / "runs" / "run")


def restored(folder: RunFolder) -> list[Snapshot]:
    """Of the diagnostics, as a run that goes on takes them up and plots them."""
    rows = ArraySplit(torch.zeros(2, 1, 8, 8), torch.arange(2))
    diagnostics = Diagnostics(folder, folder.read_config()[0], rows, 2)
    diagnostics.restore(10**9)
    return diagnostics.snapshots


def plain(value: EpochResult) -> bool:
    return value.step >= 0 and 0 <= value.test_accuracy <= 1


READERS: dict[str, Callable[[RunFolder], object]] = {
    "checkpoint.pt": lambda folder: load_checkpoint(folder.checkpoint),
    "config.json": lambda folder: folder.read_config(),
    "diagnostics-PRIVATE.json": restored,
    "history.jsonl": lambda folder: [plain(line) or 1 / 0 for line in folder.read_history(10**9)],
    "ledger.json": lambda folder: Ledger(folder.ledger).close(),
    "metrics.json": lambda folder: folder.read_metrics(),
    "model.safetensors": lambda folder: load_trained(folder.path)(torch.rand(2, 1, 8, 8)),
}


JSON = [name for name in READERS if ".json" in name]


@COUNTS
@pytest.mark.parametrize("name", READERS)
def test_every_reader(copy: RunFolder, name: str, count: int) -> None:
    path = copy.path / name
    good = path.read_bytes()

    def read(content: bytes) -> object:
        path.write_bytes(content)
        return READERS[name](copy)

    read(good)
    counts, wrong = outcomes(read, mutations(good, count), name)
    assert not wrong, wrong[:10]
    assert sum(counts.values()) == count
    assert counts["refused"]
    assert name != "checkpoint.pt" or not counts["read"]


@COUNTS
def test_who_reads_metrics_of_others(copy: RunFolder, count: int) -> None:
    """A sweep's table, and the privacy report that an audit writes anew."""
    good = copy.metrics.read_bytes()

    def read(content: bytes) -> None:
        copy.metrics.write_bytes(content)
        for row in read_rows(copy.path.parent):
            f"{row.accuracy} {row.epsilon} {row.noise_error:g}"
        write_report(copy)

    counts, wrong = outcomes(read, mutations(good, count, seed=3), "metrics.json")
    assert not wrong, wrong[:10]
    assert counts["refused"]


@pytest.mark.parametrize("kind", ["FIFO", "folder", "device"])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file(copy: RunFolder, name: str, kind: str) -> None:
    path = copy.path / name
    path.unlink()
    {"FIFO": os.mkfifo, "folder": os.mkdir, "device": lambda path: os.symlink("/dev/zero", path)}[kind](path)
    # A ledger is known by where a link leads.
    named = "/dev/zero" if (name, kind) == ("ledger.json", "device") else name
    message = one_outcome(lambda: READERS[name](copy), named, seconds=1)
    assert f"{named}: expected a regular file, got a {kind}" in message


@pytest.mark.parametrize("name", [*JSON, "timing-PRIVATE.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"null",
        b"5",
        b'"text"',
        b"{}",
        b"[]",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"9" * 10_000,
        b"\xff\xfe",
        b"\0",
        b'{"format": 1, "config": [], "plan": 3}',
        b'{"seconds": 1e999, "epochs": [{"step": 1e999, "seconds": NaN}]}',
    ],
)
def test_documents_that_are_none(copy: RunFolder, name: str, content: bytes, digits: ImageDataset) -> None:
    (copy.path / name).write_bytes(content)
    if name == "timing-PRIVATE.json":  # nothing rests on it
        _resume(copy, digits)
        return
    read = READERS[name]
    if name == "history.jsonl" and not content:
        assert read(copy) == []
        return
    assert one_outcome(lambda: read(copy), name)


def _resume(folder: RunFolder, digits: ImageDataset) -> int:
    folder.reclaim()
    config, plan = folder.read_config()
    return int(train(config, plan, digits, folder, resume=True).metrics["steps"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpoint.pt", "config.json", "history.jsonl", "metrics.json", "ledger.json"])
def test_runs_go_on_or_tell_why_not(
    stopped: RunFolder, digits: ImageDataset, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "write_plot", lambda path, *_: path.touch())
    good = (stopped.path / name).read_bytes()
    folder = RunFolder(tmp_path / "run")

    def resume(content: bytes) -> int:
        shutil.rmtree(folder.path, ignore_errors=True)
        shutil.copytree(stopped.path, folder.path)
        (folder.path / name).write_bytes(content)
        return _resume(folder, digits)

    counts, wrong = outcomes(resume, mutations(good, 60, seed=2), name, seconds=10)
    assert not wrong, wrong[:10]
    assert sum(counts.values()) == 60
    assert name != "checkpoint.pt" or not counts["read"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan": {"steps": 5}}, "steps must be 6 for its epochs and sizes, got 5"),
        ({"plan": {"steps": "6"}}, "steps must be 6 for its epochs and sizes, got '6'"),
        ({"plan": {"noise_multiplier": 1.0}}, "noise_multiplier must be that of the configuration, got 1.0"),
        ({"plan": {"noise_multiplier": None}}, "noise_multiplier must be that of the configuration, got None"),
        ({"plan": {"accountant": "none"}}, "accountant must be"),
        ({"config": {"epochs": 1.0}}, "steps must be 3 for its epochs and sizes, got 6"),
        ({"config": {"epsilon": 3.0, "noise_multiplier": None}, "plan": {"noise_multiplier": 0.5}}, "target epsilon 3"),
        ({"config": {"lr": "fast"}}, "lr must be a finite number > 0, got 'fast'"),
    ],
)
def test_a_plan_must_be_that_of_its_configuration(copy: RunFolder, changes: dict[str, Any], words: str) -> None:
    document = json.loads(copy.config.read_text())
    for part, values in changes.items():
        document[part] |= values
    copy.config.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"config\.json must be a configuration of format 1, but: ") as caught:
        copy.read_config()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"step": "3"}, "step must be a count, got '3'"),
        ({"step": -3}, "step must be a count, got -3"),
        ({"test_accuracy": 1.5}, r"test_accuracy must be a fraction in [0, 1], got 1.5"),
        ({"epsilon": -1.0}, "epsilon must be a number >= 0 or null, got -1.0"),
        ({"epoch": None}, "epoch must be a number >= 0, got None"),
        ({"seconds": 3}, "unexpected keyword argument 'seconds'"),
    ],
)
def test_lines_of_a_history_are_checked(tmp_path: Path, line: dict[str, Any], words: str) -> None:
    folder = RunFolder(tmp_path)
    good = {"step": 3, "epoch": 1.0, "test_accuracy": 0.5, "epsilon": 1.0, "lr": 0.1}
    folder.history.write_text(json.dumps(good) + "\n" + json.dumps(good | {"step": 6} | line) + "\n")
    with pytest.raises(ValueError, match=r"history\.jsonl, line 2 is damaged: ") as caught:
        folder.read_history(9)
    assert words in str(caught.value)


def test_a_history_goes_forward(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_history([EpochResult(step, 1.0, 0.5, 1.0, 0.1) for step in (3, 3)])
    with pytest.raises(ValueError, match="line 2 is damaged: step 3 follows step 3"):
        folder.read_history(9)


def test_a_checkpoint_of_another_model_names_both_files(copy: RunFolder, digits: ImageDataset) -> None:
    document = json.loads(copy.config.read_text())
    document["config"]["model"] = "simple_vgg-4x1-8"
    copy.config.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"checkpoint\.pt does not fit the run that config\.json describes"):
        _resume(copy, digits)


def test_a_checkpoint_is_still_a_file_of_torch(copy: RunFolder) -> None:
    """The digest is the comment of the archive, which readers of archives know."""
    found = torch.load(copy.checkpoint, weights_only=True)
    assert found["step"] == 3
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity(), torch.nn.Linear(64, 10))
    report = load_weights(model, copy.checkpoint, fresh=())
    assert report.matched == ("2.weight", "2.bias")
    assert torch.equal(model[2].weight, load_checkpoint(copy.checkpoint).model["2.weight"])


def test_every_bit_of_a_checkpoint_counts(copy: RunFolder) -> None:
    good = copy.checkpoint.read_bytes()
    for place in [*range(0, len(good), 997), *range(len(good) - 100, len(good))]:
        damaged = bytearray(good)
        damaged[place] ^= 1
        copy.checkpoint.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"checkpoint\.pt must hold a checkpoint of format 2, .* digest"):
            load_checkpoint(copy.checkpoint)
        if place < len(good) - 100:  # as weights it is held to its digest too
            with pytest.raises(
                ValueError, match=r"checkpoint\.pt must hold tensors .* its digest is of another content"
            ):
                load_weights(torch.nn.Linear(64, 10), copy.checkpoint, fresh=())
    for content in (good + b"\0", good[:-1], good[1:], good + good):
        copy.checkpoint.write_bytes(content)
        with pytest.raises(ValueError, match=r"does not end with a digest|its digest is"):
            load_checkpoint(copy.checkpoint)
