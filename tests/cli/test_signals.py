"""Ctrl-C and kill -9 on the real command, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dpkernels.accounting import Ledger
from dpkernels.cli import main
from dpkernels.training import load_checkpoint

ROOT = Path(__file__).parents[2]
RUN = ["--batch-size", "479", "--epochs", "10", "--noise-multiplier", "2"]  # thirty steps
STOP_AT = 20

#: The real command, which waits for a signal once it has made twenty steps. A checkpoint is due at every fifth.
SCRIPT = f"""
import signal, sys, time
from dpkernels.cli import main, train
from dpkernels.training import loop
from dpkernels.training.progress import Lines

class Waiting(Lines):
    def step(self, step):
        loop.CHECKPOINT_SECONDS = 0.0 if step % 5 == 3 else 1e6
        if step == {STOP_AT}:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            print("waiting", flush=True)
            while not signal.sigpending():
                time.sleep(0.01)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

loop.CHECKPOINT_SHARE = 1e9
train.default_progress = lambda quiet: Waiting()
sys.exit(main(sys.argv[1:]))
"""


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command in a process of its own, waiting for a signal."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "train", *RUN, *arguments, "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "waiting\n":
            return process
    process.kill()
    pytest.fail(f"the run ended early: {process.communicate()}")


def test_kill_and_resume_in_a_seeded_run(tmp_path: Path) -> None:
    out = tmp_path / "killed"
    process = start(out, "--seed", "3")
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert load_checkpoint(out / "checkpoint.pt").step == 18
    with Ledger(out / "ledger.json", seeded=True) as ledger:
        assert ledger.steps >= STOP_AT  # reserved before their noise was drawn
    assert not (out / "metrics.json").exists()
    assert main(["train", "--resume", "--out", str(out), "--quiet"]) == 0

    whole = tmp_path / "whole"
    assert main(["train", *RUN, "--seed", "3", "--out", str(whole), "--quiet"]) == 0
    one, other = (load_checkpoint(folder / "checkpoint.pt") for folder in (out, whole))
    assert one.step == other.step == 30
    assert all(torch.equal(one.model[name], other.model[name]) for name in one.model)


def test_ctrl_c_ends_cleanly_and_what_is_left_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(out)
    process.send_signal(signal.SIGINT)
    printed, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert error == ""
    metrics = json.loads((out / "metrics.json").read_text())
    assert not metrics["complete"]
    assert metrics["steps"] == load_checkpoint(out / "checkpoint.pt").step == STOP_AT
    assert "Stopped after 20 of 30 steps" in printed
    assert f"Go on with: dpkernels train --resume --out {out}" in printed
    assert metrics["statement"] in printed
    with Ledger(out / "ledger.json") as ledger:
        assert ledger.steps == STOP_AT  # what was reserved ahead came back
    assert main(["train", "--resume", "--out", str(out), "--quiet"]) == 0
    finished = json.loads((out / "metrics.json").read_text())
    assert finished["complete"]
    assert finished["steps"] == finished["planned_steps"] == 30
    assert finished["epsilon"] == metrics["epsilon"]
