"""Training runs that are killed again and again: nothing is drawn that the ledger does not know, and nothing twice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dpkernels.accounting import Ledger
from dpkernels.training import RunFolder

# One process that imports everything once and forks a child for each attempt to train. A child writes down what it is
# about to draw noise for. It kills itself at the n-th passage of a point, or is killed after some time; the last one
# trains to the end.
NURSERY = """
import dataclasses, functools, hashlib, json, os, random, signal, sys, time
import torch
torch.set_num_threads(1)
from dpkernels.accounting import Ledger
from dpkernels.data import PoissonLoader, load_dataset
from dpkernels.features import normalization
from dpkernels.optim import DPSGD
from dpkernels.random import Key
from dpkernels.training import RunFolder, loop, resolve, train

path, seed, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
folder, digits, log = RunFolder(path), load_dataset("digits"), path + ".drawn"
given = {"dataset": "digits", "batch_size": 60, "epochs": 6.0 * (1 + rounds), "noise_multiplier": 4.0}
given["normalization"] = "private"

ONCE = {  # name: what is passed, and whether the kill comes before it
    "before the ledger takes a release": (Ledger, "record", True),
    "after the ledger took a release": (Ledger, "record", False),
}
POINTS = {
    "before a file is put in its place": (os, "replace", True),
    "after a file was put in its place": (os, "replace", False),
    "before a file is on the disk": (os, "fsync", True),
    "after a file is on the disk": (os, "fsync", False),
    "before a step is reserved": (Ledger, "reserve_step", True),
    "after a step was reserved": (Ledger, "reserve_step", False),
    "before a sample is drawn": (Key, "sample", True),
    "after a batch was handed out": (PoissonLoader, "__next__", False),
    "after a step's noise was drawn": (DPSGD, "_update", False),
    "before a checkpoint": (loop._Run, "_save", True),
}

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def kill_at(owner, name, before, passage):
    right, passed = getattr(owner, name), [0]

    @functools.wraps(right)
    def wrapped(*args, **kwargs):
        passed[0] += 1
        if before and passed[0] == passage:
            die()
        result = right(*args, **kwargs)
        if passed[0] == passage:
            die()
        return result

    setattr(owner, name, wrapped)

def note(what, key, step):
    line = f"{what} {hashlib.sha256(key.value.numpy().tobytes()).hexdigest()[:16]} {step}\\n"
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, line.encode())
    os.close(descriptor)

def write_down_draws():
    update, noisy = DPSGD._update, normalization._noisy

    def draw_step(self, sums, step):
        note("step", self.key, step)
        return update(self, sums, step)

    def draw_statistics(total, bound, noise_multiplier, key, step):
        note("statistics", key, step)
        return noisy(total, bound, noise_multiplier, key, step)

    DPSGD._update, normalization._noisy = draw_step, draw_statistics

def attempt(folder):
    if folder.exists:
        folder.reclaim()
        config, plan = folder.read_config()
        train(config, plan, digits, folder, resume=True)
    else:
        folder.claim()
        config = resolve(digits, given)
        train(config, dataclasses.replace(config.plan(), accountant="rdp"), digits, folder)  # the quickest

def spent():
    try:
        return json.load(open(folder.ledger))["entries"]
    except FileNotFoundError:
        return []

def drawn():
    return open(log).read().split("\\n")[:-1] if os.path.exists(log) else []

rng = random.Random(seed)
attempts = [(name, point, rng.randint(1, 5)) for name, point in POINTS.items() for _ in range(rounds)]
attempts += [("by the clock", None, None)] * 2 * rounds
rng.shuffle(attempts)
attempts = [(name, point, 1) for name, point in ONCE.items()] + attempts + [("", None, None)]
attempt(RunFolder(path + "-warm"))  # imports and tables that every child then has
reports = []
for name, point, passage in attempts:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            write_down_draws()
            if point is not None:
                kill_at(*point, passage)
            attempt(folder)
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    if name == "by the clock":
        time.sleep(rng.uniform(0, 0.6))
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    reports.append({"point": name, "status": status, "spent": spent(), "drawn": drawn()})
print(json.dumps(reports))
"""


def kills(tmp_path: Path, *, seed: int, rounds: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", NURSERY, tmp_path / "run", str(seed), str(rounds)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=550, check=False)
    assert result.returncode == 0, result.stderr
    reports: list[dict[str, Any]] = json.loads(result.stdout.splitlines()[-1])
    assert all(report["status"] in (-9, 0) for report in reports), result.stderr
    return reports


def counts(report: dict[str, Any]) -> tuple[Counter[str], Counter[str]]:
    """Of steps and of statistics, by the ledger and drawn."""
    spent: Counter[str] = Counter()
    for entry in report["spent"]:
        spent["step" if entry["step"] else "statistics"] += entry["count"]
    return spent, Counter(line.split()[0] for line in report["drawn"])


def assert_nothing_is_lost(tmp_path: Path, reports: list[dict[str, Any]]) -> None:
    for report in reports:
        spent, drawn = counts(report)
        assert spent["step"] >= drawn["step"], report["point"]
        assert spent["statistics"] >= drawn["statistics"] / 2, report["point"]  # a release has two sums
    drawn = [line.split() for line in reports[-1]["drawn"]]
    assert len({tuple(line) for line in drawn}) == len(drawn), "a nonce was used twice with one key"
    indices = [int(index) for what, _, index in drawn if what == "step"]
    assert len(set(indices)) == len(indices), "an index was handed out twice"
    folder = RunFolder(tmp_path / "run")
    metrics = json.loads(folder.metrics.read_text())
    assert reports[-1]["status"] == 0
    assert metrics["complete"]
    _, plan = folder.read_config()
    with Ledger(folder.ledger) as ledger:
        assert ledger.epsilon(plan.delta) <= plan.epsilon
        assert ledger.steps >= len(indices)


def test_a_run_that_is_killed_at_every_point(tmp_path: Path) -> None:
    reports = kills(tmp_path, seed=0, rounds=1)
    assert sum(report["status"] == -9 for report in reports) >= 8
    assert_nothing_is_lost(tmp_path, reports)


@pytest.mark.slow
def test_a_run_that_is_killed_a_hundred_times(tmp_path: Path) -> None:
    reports = kills(tmp_path, seed=1, rounds=9)
    assert sum(report["status"] == -9 for report in reports) >= 50  # a run may end before its kill
    assert_nothing_is_lost(tmp_path, reports)
