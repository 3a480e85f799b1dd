"""How far all runs of a sweep are, and how long the rest takes: a bar on a terminal, a line a run elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from tqdm import tqdm

from dpkernels.search.sweep_report import Row
from dpkernels.search.workers import Outcome, Watcher
from dpkernels.training.progress import remaining, terminal_size


class SweepProgress(Watcher):
    """A line on the standard output whenever a run ends, with the time left; on a terminal a bar below.

    Runs differ in batch size: what is counted is examples, which take about the same time each.
    """

    def __init__(self, rows: Sequence[Row], *, bar: bool) -> None:
        self._rows = rows
        self._at: list[int | None] = [None] * len(rows)
        self._work = [row.plan.batch_size for row in rows]
        self._total = sum(row.plan.steps * row.plan.batch_size for row in rows)
        self._done = 0
        self._over = 0
        self._start: float | None = None  # of the first run: processes take seconds to begin
        self._bar: tqdm | None = None
        if bar and rows:
            columns, lines = terminal_size()
            shape = "{desc} {percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
            self._bar = tqdm(
                desc=self._count(), total=self._total, ncols=columns, nrows=lines, bar_format=shape, smoothing=0
            )

    def step(self, index: int, step: int) -> None:
        if self._start is None:
            self._start = time.monotonic()
            if self._bar is not None:
                self._bar.reset()
        before, self._at[index] = self._at[index], step
        work = self._work[index]
        if before is None:  # what an earlier sweep did takes no time of this one
            self._total -= step * work
            if self._bar is not None:
                self._bar.total = self._total
        else:
            self._advance((step - before) * work)

    def ended(self, index: int, outcome: Outcome) -> None:
        row = self._rows[index]
        if outcome.failure is None and not outcome.complete:
            return  # stopped: who stopped it says so
        self._over += 1
        if outcome.complete and outcome.metrics is not None:
            how = f"test accuracy {outcome.metrics['test_accuracy']:.2%}"
        else:
            self._advance((row.plan.steps - (self._at[index] or 0)) * self._work[index], counted=False)
            how = f"FAILED: {outcome.failure}"
        left = None if self._start is None else remaining(time.monotonic() - self._start, self._done, self._total)
        line = f"{self._count()}  {row.name}  {how}"
        if self._bar is None:
            print(line + (f"  ({left} left)" if left and self._over < len(self._rows) else ""), flush=True)
        else:
            self._bar.set_description_str(self._count(), refresh=False)
            tqdm.write(line, file=sys.stdout)
        if self._over == len(self._rows):
            self.end()

    def end(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()

    def _advance(self, work: int, counted: bool = True) -> None:
        if counted:
            self._done += work
            if self._bar is not None:
                self._bar.update(work)
        else:  # given up: no longer ahead, and no time was spent on it
            self._total -= work
            if self._bar is not None:
                self._bar.total = self._total

    def _count(self) -> str:
        return f"{self._over}/{len(self._rows)} runs"
