"""Progress: a bar on a terminal, a line an epoch elsewhere. Neither training loss nor norms: both are private."""

from __future__ import annotations

import shutil
import sys
from typing import Protocol

from tqdm import tqdm

from dpkernels.accounting import Plan
from dpkernels.training.run_folder import EpochResult


class Progress(Protocol):
    """What hears how a run gets on."""

    def note(self, text: str) -> None:
        """What is worth knowing before the first step."""

    def begin(self, plan: Plan, step: int) -> None: ...

    def step(self, step: int) -> None:
        """`step` steps of the plan are spent."""

    def epoch(self, result: EpochResult) -> None: ...

    def end(self) -> None: ...


class Silent:
    """Shows nothing."""

    def note(self, text: str) -> None:
        pass

    def begin(self, plan: Plan, step: int) -> None:
        pass

    def step(self, step: int) -> None:
        pass

    def epoch(self, result: EpochResult) -> None:
        pass

    def end(self) -> None:
        pass


class Lines(Silent):
    """A line an epoch on the standard output. It tells no time, since lines are kept in logs: see `timing.py`."""

    def note(self, text: str) -> None:
        print(text, flush=True)

    def begin(self, plan: Plan, step: int) -> None:
        self._plan = plan

    def epoch(self, result: EpochResult) -> None:
        spent = "" if result.epsilon is None else f"  epsilon so far {result.epsilon:.3f}"
        print(
            f"epoch {result.epoch:.4g}  step {result.step}/{self._plan.steps}  "
            f"test accuracy {result.test_accuracy:.2%}{spent}",
            flush=True,
        )


class Bar(Silent):
    """A tqdm bar on the standard error."""

    def note(self, text: str) -> None:
        print(text, flush=True)

    def begin(self, plan: Plan, step: int) -> None:
        columns, lines = terminal_size()
        self._bar = tqdm(
            desc=_epoch(plan, step), total=plan.steps, initial=step, unit="step", ncols=columns, nrows=lines
        )
        self._plan = plan

    def step(self, step: int) -> None:
        self._bar.set_description(_epoch(self._plan, step), refresh=False)
        self._bar.update(step - self._bar.n)

    def epoch(self, result: EpochResult) -> None:
        spent = "" if result.epsilon is None else f", epsilon so far {result.epsilon:.2f}"
        self._bar.set_postfix_str(f"test accuracy {result.test_accuracy:.1%}{spent}")

    def end(self) -> None:
        self._bar.close()


def terminal_size() -> tuple[int, int]:
    """Columns and lines. tqdm's own shows nothing where a terminal claims to have no size."""
    columns, lines = shutil.get_terminal_size()
    return columns, lines


def _epoch(plan: Plan, step: int) -> str:
    done = step * plan.batch_size // plan.dataset_size
    return f"epoch {done}" + ("" if plan.epochs is None else f"/{plan.epochs:g}")


def default_progress(quiet: bool = False) -> Progress:
    """A bar where the standard error is a terminal, else lines; nothing when `quiet`."""
    if quiet:
        return Silent()
    return Bar() if sys.stderr.isatty() else Lines()
