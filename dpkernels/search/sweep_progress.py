"""How far all runs of a sweep are: a bar on a terminal, with the time that is left, and a line a run, without times."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tqdm import tqdm

from dpkernels.search.sweep_report import Row
from dpkernels.search.workers import Outcome, Watcher
from dpkernels.training.progress import terminal_size


class SweepProgress(Watcher):
    """A line on the standard output whenever a run ends; on a terminal a bar below, which alone tells time, since lines
    are kept in logs (see `dpkernels.training.timing`).

    Runs differ in batch size: what is counted is examples, which take about the same time each.
    """

    def __init__(self, rows: Sequence[Row], *, bar: bool) -> None:
        self._rows = rows
        self._at: list[int | None] = [None] * len(rows)
        self._work = [row.plan.batch_size for row in rows]
        self._over = 0
        self._bar: tqdm | None = None
        if bar and rows:
            columns, lines = terminal_size()
            shape = "{desc} {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
            total = sum(row.plan.steps * row.plan.batch_size for row in rows)
            self._bar = tqdm(desc=self._count(), total=total, ncols=columns, nrows=lines, bar_format=shape, smoothing=0)

    def step(self, index: int, step: int) -> None:
        if self._bar is not None and not any(self._at):
            self._bar.reset()  # processes take seconds to begin
        before, self._at[index] = self._at[index], step
        work = self._work[index]
        if before is None:  # what an earlier sweep did takes no time of this one
            self._leave_out(step * work)
        elif self._bar is not None:
            self._bar.update((step - before) * work)

    def ended(self, index: int, outcome: Outcome) -> None:
        row = self._rows[index]
        if outcome.failure is None and not outcome.complete:
            return  # stopped: who stopped it says so
        self._over += 1
        if outcome.complete and outcome.metrics is not None:
            how = f"test accuracy {outcome.metrics['test_accuracy']:.2%}"
        else:
            self._leave_out((row.plan.steps - (self._at[index] or 0)) * self._work[index])
            how = f"FAILED: {outcome.failure}"
        line = f"{self._count()}  {row.name}  {how}"
        if self._bar is None:
            print(line, flush=True)
        else:
            self._bar.set_description_str(self._count(), refresh=False)
            tqdm.write(line, file=sys.stdout)
        if self._over == len(self._rows):
            self.end()

    def end(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()

    def _leave_out(self, work: int) -> None:
        """It is no longer ahead, and no time was spent on it."""
        if self._bar is not None:
            self._bar.total -= work

    def _count(self) -> str:
        return f"{self._over}/{len(self._rows)} runs"
