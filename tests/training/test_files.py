"""Checkpoints and the run folder: whole or not there, and nothing read that could run code."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dpkernels.training import Checkpoint, EpochResult, RunFolder, TrainConfig, load_checkpoint
from dpkernels.training.files import write_atomically, write_json, write_text


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half of the n")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    write_text(path, "new")
    assert path.read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_json_refuses_what_json_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "x.json", {"epsilon": float("inf")})
    assert not (tmp_path / "x.json").exists()


def checkpoint() -> Checkpoint:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return Checkpoint(5, model.state_dict(), optimizer.state_dict())


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    saved = checkpoint()
    saved.save(tmp_path / "c.pt")
    loaded = load_checkpoint(tmp_path / "c.pt")
    assert loaded.step == 5
    assert torch.equal(loaded.model["weight"], saved.model["weight"])
    momentum = saved.optimizer["state"][0]["momentum_buffer"]
    assert torch.equal(loaded.optimizer["state"][0]["momentum_buffer"], momentum)


class Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("kind", ["truncated", "empty", "text", "code", "other"])
def test_a_checkpoint_that_is_none(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "c.pt"
    checkpoint().save(path)
    whole = path.read_bytes()
    contents = {
        "truncated": whole[: len(whole) // 2],
        "empty": b"",
        "text": b"not a checkpoint",
        "code": pickle.dumps(Bomb(tmp_path / "ran")),
    }
    if kind == "other":
        torch.save({"format": 1, "weights": torch.zeros(1)}, path)
    else:
        path.write_bytes(contents[kind])
    with pytest.raises(ValueError, match=r"c\.pt must hold a checkpoint of format 2"):
        load_checkpoint(path)
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_without_a_digest_is_of_an_earlier_version(tmp_path: Path) -> None:
    torch.save({"format": 1, **vars(checkpoint())}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match=r"c\.pt .* does not end with a digest, .* go on with that version"):
        load_checkpoint(tmp_path / "c.pt")


def test_claim_and_reclaim(tmp_path: Path, small: Callable[..., TrainConfig]) -> None:
    folder = RunFolder(tmp_path / "a" / "b")
    with pytest.raises(FileNotFoundError, match=r"holds no run to resume: config\.json is missing"):
        folder.reclaim()
    folder.claim()
    assert list(folder.path.iterdir()) == []
    folder.leave()
    assert not folder.path.exists()
    folder.claim()
    config = small(seed=3)
    plan = config.plan()
    folder.write_config(config, plan, {"torch": "2"})
    assert folder.read_config() == (config, plan)
    folder.reclaim()
    with pytest.raises(FileExistsError, match="already holds a run: go on with --resume"):
        folder.claim()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(OSError, match="must be writable"):
            RunFolder(path).claim()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("this user may write into a folder without write permission")
    with pytest.raises(OSError, match="must be writable"):
        RunFolder(folder).claim()


@pytest.mark.parametrize("damage", ["{", "{}", '{"format": 2}', '{"format": 1, "config": {}, "plan": {}}'])
def test_a_damaged_configuration(tmp_path: Path, damage: str) -> None:
    folder = RunFolder(tmp_path)
    folder.config.write_text(damage)
    with pytest.raises(ValueError, match=r"config\.json(: expected JSON| must be a configuration of format 1, but)"):
        folder.read_config()


def test_history_forgets_what_a_kill_took_away(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.read_history(99) == []
    lines = [EpochResult(step, step / 3, 0.5, 1.0, 0.1) for step in (3, 6, 9)]
    folder.write_history(lines)
    assert [json.loads(line)["step"] for line in folder.history.read_text().splitlines()] == [3, 6, 9]
    assert folder.read_history(6) == lines[:2]
    folder.history.write_text('{"step": 3')
    with pytest.raises(ValueError, match=r"history\.jsonl, line 1: expected JSON"):
        folder.read_history(9)
