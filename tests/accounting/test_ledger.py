"""The ledger: on disk before it is spent, never twice, never beyond the plan."""

import contextlib
import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpkernels.accounting import (
    BudgetExceededError,
    Gaussian,
    Laplace,
    Ledger,
    LedgerLockedError,
    SampledGaussian,
    bound,
    claim,
    plan,
)
from dpkernels.accounting import ledger as ledger_module

STEP = SampledGaussian(1.0, 0.01)


def small_plan(steps=40, **more):
    """Accounted by Rényi divergences, which is fast."""
    run = {"dataset_size": 1000, "batch_size": 10, "delta": 1e-5, "noise_multiplier": 1.0, "accountant": "rdp"}
    return plan(steps=steps, **run, **more)


def test_indices_count_up_and_events_are_what_was_used(tmp_path):
    for path in (None, tmp_path / "ledger.json"):
        with Ledger(path) as ledger:
            assert ledger.events() == ()
            assert ledger.epsilon(1e-5) == 0.0
            assert [ledger.reserve_step(STEP) for _ in range(20)] == list(range(20))
            ledger.record(Gaussian(8.0, 2), "normalization")
            assert ledger.reserve_step(STEP) == 20
            assert ledger.events() == (STEP.times(20), Gaussian(8.0, 2), STEP)
            assert ledger.epsilon(1e-5) == claim([STEP.times(21), Gaussian(8.0, 2)], 1e-5).upper
            assert ledger.steps == 21


def test_a_step_is_on_disk_before_the_call_returns(tmp_path):
    path = tmp_path / "ledger.json"
    with Ledger(path) as ledger:
        for index in range(40):
            assert ledger.reserve_step(STEP) == index
            on_disk = json.loads(path.read_text())["entries"]
            assert sum(entry["count"] for entry in on_disk) > index
        ledger.record(Laplace(2.0), "selection")
        assert json.loads(path.read_text())["entries"][-1]["what"] == "selection"


def test_resuming_after_a_clean_end_repeats_nothing_and_wastes_nothing(tmp_path):
    path = tmp_path / "ledger.json"
    for start in (0, 3, 6):
        with Ledger(path) as ledger:
            assert [ledger.reserve_step(STEP) for _ in range(3)] == [start, start + 1, start + 2]
    with Ledger(path) as ledger:
        assert ledger.events() == (STEP.times(9),)


def test_a_pause_changes_nothing(tmp_path):
    """50 + 50 steps with the ledger closed and reopened in between cost what 100 straight ones do."""
    path = tmp_path / "ledger.json"
    for _ in range(2):
        with Ledger(path) as ledger:
            for _ in range(50):
                ledger.reserve_step(STEP)
    with Ledger(path) as ledger:
        assert ledger.epsilon(1e-5) == claim([STEP.times(100)], 1e-5).upper


def test_changing_the_mechanism_releases_what_was_reserved_ahead(tmp_path):
    other = SampledGaussian(2.0, 0.01)
    with Ledger(tmp_path / "ledger.json") as ledger:
        assert [ledger.reserve_step(event) for event in (STEP, other, other, STEP)] == [0, 1, 2, 3]
        assert ledger.events() == (STEP, other.times(2), STEP)


def test_the_plan_is_a_guard(tmp_path):
    for path in (None, tmp_path / "ledger.json"):
        with Ledger(path, budget=small_plan(20)) as ledger:
            for _ in range(20):
                ledger.reserve_step(STEP)
            for spend in (lambda: ledger.reserve_step(STEP), lambda: ledger.record(Gaussian(1.0), "normalization")):
                before = (ledger.events(), path and path.read_bytes())
                with pytest.raises(BudgetExceededError, match="nothing was released"):
                    spend()
                assert (ledger.events(), path and path.read_bytes()) == before


def test_the_guard_accounts_for_other_mechanisms(monkeypatch):
    """What the plan does not list has to fit into its epsilon; the steps that are left are worked out once."""
    calls = []
    account = ledger_module._claim
    monkeypatch.setattr(ledger_module, "_claim", lambda *query: calls.append(query) or account(*query))
    budget = small_plan(20)
    with Ledger(budget=budget) as ledger:
        ledger.record(Gaussian(50.0), "normalization")  # cheap: fits because no step has been made yet
        with pytest.raises(BudgetExceededError, match="0 steps are spent, and the plan allows 0 of this kind"):
            ledger.reserve_step(SampledGaussian(0.3, 0.01))
        with contextlib.suppress(BudgetExceededError):
            for _ in range(20):
                ledger.reserve_step(STEP)
        assert 0 < ledger.steps < 20
        assert ledger.bound(budget.delta, "rdp").upper <= budget.epsilon
        assert bound([*ledger.events(), STEP], budget.delta, "rdp").upper > budget.epsilon
        assert len(calls) < 20


def test_steps_are_reserved_for_half_a_second_ahead(tmp_path, monkeypatch):
    """Fast steps are written in growing blocks, slow ones one by one: a kill wastes little of either."""
    now = 0.0
    monkeypatch.setattr(ledger_module.time, "monotonic", lambda: now)
    with Ledger(tmp_path / "ledger.json") as ledger:
        written = []
        for seconds, steps in ((0.001, 600), (10.0, 600)):
            for _ in range(steps):
                now += seconds
                ledger.reserve_step(STEP)
                written.append(ledger.reserved)
        fast, slow = written[:600], written[600:]
        assert len(set(fast)) <= 10  # 1 + 2 + 4 + ... reaches 600 in ten blocks
        assert max(ahead - step for step, ahead in enumerate(fast)) <= ledger_module.MAX_BLOCK
        assert slow[-100:] == list(range(1101, 1201))


def test_the_plan_allows_what_it_composes_with():
    budget = small_plan(3, compose_with=[Gaussian(8.0, 2)])
    with Ledger(budget=budget) as ledger:
        ledger.record(Gaussian(8.0, 2), "normalization")
        for _ in range(3):
            ledger.reserve_step(STEP)
        assert ledger.bound(budget.delta, "rdp").upper == budget.epsilon


def test_one_live_owner(tmp_path):
    path = tmp_path / "ledger.json"
    code = "import sys; from dpkernels.accounting.ledger import Ledger; Ledger(sys.argv[1])"
    with Ledger(path) as ledger:
        with pytest.raises(LedgerLockedError, match="this process"):
            Ledger(path)
        with pytest.raises(LedgerLockedError, match="this process"):
            Ledger(tmp_path / "." / "ledger.json")
        child = subprocess.run([sys.executable, "-c", LIGHT + code, path], capture_output=True, text=True, check=False)
        assert child.returncode == 1
        assert "another live process" in child.stderr
        assert ledger.reserve_step(STEP) == 0
    with Ledger(path):
        pass


def test_a_forked_process_cannot_spend(tmp_path):
    ledger = Ledger(tmp_path / "ledger.json")
    ledger.reserve_step(STEP)
    child = os.fork()
    if child == 0:
        try:
            ledger.reserve_step(STEP)
        except RuntimeError:
            ledger.close()
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert ledger.reserve_step(STEP) == 1
    ledger.close()
    with pytest.raises(RuntimeError, match="closed"):
        ledger.reserve_step(STEP)


def test_a_ledger_is_not_copied(tmp_path):
    with Ledger(tmp_path / "ledger.json") as ledger, pytest.raises(TypeError, match="copied"):
        copy.deepcopy(ledger)


def test_only_a_seeded_ledger_rewinds(tmp_path):
    path = tmp_path / "ledger.json"
    with Ledger(path, seeded=True) as ledger:
        ledger.record(Gaussian(8.0), "normalization")
        for _ in range(10):
            ledger.reserve_step(STEP)
        ledger.rewind(4)
        assert ledger.events() == (Gaussian(8.0), STEP.times(4))
        assert ledger.reserve_step(STEP) == 4
        assert "NOT PRIVATE" in ledger.statement(1e-5)
    with pytest.raises(ValueError, match="seeded"):
        Ledger(path)
    with Ledger() as ledger, pytest.raises(RuntimeError, match="seeded"):
        ledger.rewind(0)


@pytest.mark.parametrize(
    "damage",
    [
        *("", "{", "{}", "null", "[" * 100_000),
        '{"format": "other", "version": 1}',
        '{"format": "dpkernels-ledger", "version": 1}',
    ],
)
def test_a_damaged_file_is_refused_and_left_alone(tmp_path, damage):
    path = tmp_path / "ledger.json"
    path.write_text(damage)
    with pytest.raises(ValueError, match="must be a dpkernels-ledger file"):
        Ledger(path)
    assert path.read_text() == damage


def test_a_write_that_fails_changes_nothing(tmp_path, monkeypatch):
    with Ledger(tmp_path / "ledger.json") as ledger:
        ledger.reserve_step(STEP)
        with monkeypatch.context() as broken:
            broken.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
            with pytest.raises(OSError, match="disk full"):
                ledger.record(Gaussian(1.0), "normalization")
        assert ledger.events() == (STEP,)
        assert ledger.reserve_step(STEP) == 1


def test_wrong_arguments(tmp_path):
    with Ledger() as ledger:
        with pytest.raises(TypeError, match="event"):
            ledger.reserve_step(1.0)
        with pytest.raises(ValueError, match="one step"):
            ledger.reserve_step(STEP.times(2))
    with pytest.raises(OSError):
        Ledger(tmp_path / "nowhere" / "ledger.json")


LIGHT = f"""
import sys, types
package = types.ModuleType("dpkernels")  # the ledger alone: nothing heavy is imported
package.__path__ = [{str(Path(__file__).parents[2] / "dpkernels")!r}]
accounting = types.ModuleType("dpkernels.accounting")
accounting.__path__ = [package.__path__[0] + "/accounting"]
sys.modules |= {{"dpkernels": package, "dpkernels.accounting": accounting}}
"""

WORKER = """
import os, signal, time, random
from dpkernels.accounting.ledger import Ledger, BudgetExceededError
from dpkernels.accounting.mechanisms import SampledGaussian

assert not {"numpy", "torch", "scipy"} & set(sys.modules)
path, drawn, kills, steps = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
step = SampledGaussian(1.0, 0.01)

class Budget:  # what the ledger reads of a plan, without the accountants
    pass

budget = Budget()
budget.steps, budget.events = steps, (step.times(steps),)
budget.delta, budget.epsilon, budget.accountant = 1e-5, 1.0, "auto"

def work():
    ledger = Ledger(path, budget)
    with open(drawn, "a", buffering=1) as file:
        while True:
            try:
                index = ledger.reserve_step(step)
            except BudgetExceededError:
                os._exit(0)
            file.write(f"{index}\\n")
            time.sleep(2e-4)  # the noise of this step is drawn here

killed, rng = 0, random.Random(0)
while True:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(1)
    if killed < kills:
        time.sleep(rng.expovariate(1 / 0.004))
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGKILL:
        killed += 1
    else:
        print(killed, status)
        break
"""


def test_two_hundred_kills(tmp_path):
    """Killed at random moments and resumed: no index is used twice, none is missing from the file, and the run ends at
    its budget."""
    path, drawn, steps = tmp_path / "ledger.json", tmp_path / "drawn", 8_000
    command = [sys.executable, "-S", "-E", "-c", LIGHT + WORKER, path, drawn, "200", str(steps)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == ["200", "0"], result.stderr
    indices = [int(line) for line in drawn.read_text().split()]
    assert len(set(indices)) == len(indices)
    assert indices == sorted(indices)
    assert indices[-1] == steps - 1
    with Ledger(path) as ledger:
        assert ledger.events() == (STEP.times(steps),)
