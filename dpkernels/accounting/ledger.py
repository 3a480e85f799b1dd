"""The ledger: everything that was computed from private data and released, on disk before the noise is drawn.

On disk it is one small JSON file, replaced atomically and synced. Training steps are written in blocks ahead of their
use: a process that is killed leaves up to a block of reserved steps behind, and those stay spent, since their noise may
have been drawn. A lock of the file itself (`locked_file.py`) keeps two live processes from one ledger. Two copies of a
folder cannot be told apart.

This module imports the standard library only, so that a ledger opens in milliseconds.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dpkernels.accounting.locked_file import LockedFile
from dpkernels.accounting.mechanisms import (
    EVENT_TYPES,
    Event,
    check_delta,
    check_number,
    event_from_dict,
    is_within,
)

if TYPE_CHECKING:
    from dpkernels.accounting.bounds import Bound
    from dpkernels.accounting.planning import Plan

FORMAT = "dpkernels-ledger"
VERSION = 2
SECONDS_AHEAD = 0.5
"""One write reserves the steps of about so much training: that is what a kill wastes, and a write takes
milliseconds."""
MAX_BLOCK = 256


class BudgetExceededError(RuntimeError):
    """The release would cost more than the plan allows. Nothing was released and the ledger is as it was."""


@dataclass(frozen=True)
class Entry:
    """Releases of one kind in a row."""

    what: str
    event: Event
    is_step: bool
    noise_error: float = 0.0
    """Total variation of the noise of one of them from ideal."""


_STEP = "training step"


class Ledger:
    """What was spent. ``path`` None keeps it in memory only.

    Args:
        path: file of the ledger; an existing one is resumed, the folder must exist.
        budget: the plan that must not be exceeded.
        seeded: the randomness can be recomputed, so that the run is not private; only then ``rewind`` is allowed. Kept
            in the file.

    Raises:
        LedgerLockedError: another live process has the ledger open; also later, where the file was removed or replaced.
        ValueError: the file is not a ledger, is damaged, or was written with another ``seeded``.
        OSError: the folder cannot be written, the file has several names (hard links), or its file system or the
            system has no file locks.
    """

    def __init__(self, path: Path | str | None = None, budget: Plan | None = None, *, seeded: bool = False) -> None:
        self._path = None if path is None else Path(path)
        self._budget = budget
        self._seeded = seeded
        self._entries: list[Entry] = []
        self._ahead = 0  # steps of the last entry that are on disk but not handed out yet
        self._owner = os.getpid()
        self._file: LockedFile | None = None
        self._closed = False
        self._block, self._reserved_at = 1, -math.inf
        self._allowance: dict[tuple[tuple[Event, ...], Event], int] = {}
        if self._path is not None:
            self._file = LockedFile(self._path, self._document([]))
            try:
                self._entries = self._read(self._file.read())
            except BaseException:
                self._file.close()
                raise

    # ---- spending

    def reserve_step(self, event: Event, noise_error: float = 0.0) -> int:
        """Put one training step into the ledger before its noise is drawn, and return its index.

        The index counts the steps reserved before it, those of earlier processes and of their unused blocks included:
        it never repeats over the ledger's life, and may serve as nonce. ``noise_error`` bounds the total variation of
        the step's noise from ideal.

        Raises:
            BudgetExceededError: the step would exceed the budget.
            RuntimeError: the ledger is closed or belongs to another process.
        """
        self._check(event)
        if event.count != 1:
            raise ValueError(f"event must be one step, got count={event.count}")
        single = Entry(_STEP, event, True, _check_error(noise_error))
        if not (self._ahead and _single(self._entries[-1]) == single):
            self._reserve(single)
        self._ahead -= 1
        return self.reserved - self._ahead - 1

    def record(self, event: Event, what: str, noise_error: float = 0.0) -> None:
        """Put another release into the ledger before it is made, named ``what`` (a normalization, a selection).

        ``noise_error`` bounds the total variation of its noise from ideal. Raises as ``reserve_step`` does.
        """
        self._check(event)
        entries = _append(self._used(), Entry(str(what), event, False, _check_error(noise_error)))
        excess = self._excess(entries)
        if excess > 0 and self._budget is not None:
            raise BudgetExceededError(
                f"{what} would bring epsilon {excess:.3g} above the plan's ({self._allowed()}); nothing was released"
            )
        self._save(entries, 0)

    def _reserve(self, single: Entry) -> None:
        """Write a block of steps ahead, as many as are used up in about ``SECONDS_AHEAD``."""
        used = self._used()
        event = single.event
        most = self.most_steps(event)
        if self.steps >= most:
            raise BudgetExceededError(
                f"{self.steps} steps are spent, and the plan allows {most} of this kind ({self._allowed()}); nothing "
                "was released"
            )
        left = most - self.steps
        now = time.monotonic()
        self._block = (
            max(1, self._block // 2) if now - self._reserved_at > SECONDS_AHEAD else min(2 * self._block, MAX_BLOCK)
        )
        block = 1 if self._path is None else min(self._block, left)
        self._save(_append(used, replace(single, event=event.times(block))), block)
        self._reserved_at = now

    def most_steps(self, event: Event) -> int:
        """How many training steps the budget allows in all, those that were spent included, where the others are like
        ``event``: beside what else was spent, and what else is planned."""
        budget, single = self._budget, event.times(1)
        if budget is None:
            return sys.maxsize
        others = [entry for entry in self._used() if not (entry.is_step and entry.event.times(1) == single)]
        other_steps = sum(entry.event.count for entry in others if entry.is_step)
        key = (tuple(entry.event for entry in others), single)
        if key not in self._allowance:
            most = budget.steps - other_steps

            def excess(count: int) -> float:
                return self._excess([*others, Entry(_STEP, single.times(count), True)] if count else others)

            low, high = 0, most
            if most > 0 and excess(most) <= 0:
                low = most
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if excess(middle) <= 0 else (low, middle)
            self._allowance[key] = low
        return other_steps + self._allowance[key]

    def _allowed(self) -> str:
        assert self._budget is not None
        return f"epsilon {self._budget.epsilon:.6g} at delta={self._budget.delta:g}"

    def _excess(self, entries: Sequence[Entry]) -> float:
        """By how much epsilon of ``entries``, and of what is planned beside the steps, exceeds the budget's."""
        budget = self._budget
        if budget is None or is_within([entry.event for entry in entries], budget.events):
            return 0.0
        events = [entry.event for entry in entries]
        spent = _claim([*events, *_unspent(budget.compose_with, entries)], budget.delta, budget.accountant).upper
        allowed = budget.claim(0.0).upper
        return 0.0 if spent == allowed else spent - allowed  # both may be infinite

    # ---- reading

    @property
    def path(self) -> Path | None:
        return self._path

    @property
    def seeded(self) -> bool:
        return self._seeded

    @property
    def reserved(self) -> int:
        """Training steps in the ledger, those reserved ahead included."""
        return sum(entry.event.count for entry in self._entries if entry.is_step)

    @property
    def steps(self) -> int:
        """Training steps spent: handed out by this process, or reserved by an earlier one."""
        return self.reserved - self._ahead

    def entries(self) -> tuple[Entry, ...]:
        """What was spent, in order, with its names."""
        return tuple(self._used())

    def events(self) -> tuple[Event, ...]:
        """What was spent, in order."""
        return tuple(entry.event for entry in self._used())

    def bound(self, delta: float, accountant: str = "auto") -> Bound:
        """Lower and upper bound on epsilon at ``delta`` of what was spent so far, by ``dpkernels.accounting.claim``."""
        error = sum(entry.noise_error * entry.event.count for entry in self._used())
        return _claim(self.events(), check_delta(delta), accountant, error)

    def epsilon(self, delta: float) -> float:
        """Upper bound on epsilon at ``delta`` of what was spent; 0 before the first release, infinite where none can be
        stated."""
        return self.bound(delta).upper

    def claim(self, delta: float) -> Bound:
        """The bound to publish at ``delta``: with a budget that of its whole plan, however much of it was spent.

        Training that stops early may stop on something it saw, so that its result costs what it was allowed to spend.
        """
        spent, plan = self.bound(delta), self._budget
        if plan is None:
            return spent
        used = self._used()
        of_step = max((entry.noise_error for entry in used if entry.is_step), default=0.0)
        others = sum(entry.noise_error * entry.event.count for entry in used if not entry.is_step)
        planned = replace(plan, delta=check_delta(delta)).claim(
            max(of_step * plan.steps, plan.bound.noise_error) + others
        )
        return planned if spent.upper <= planned.upper else spent

    def statement(self, delta: float) -> str:
        """The privacy statement, fit for a model card: of the whole plan where there is one, else of what was spent."""
        from dpkernels.accounting.statement import statement

        return statement(self.claim(delta), delta, self.entries(), plan=self._budget, seeded=self._seeded)

    # ---- life

    def rewind(self, steps: int) -> None:
        """Forget the training steps after the first ``steps``: a seeded run repeats them with the same randomness.

        Raises RuntimeError for a ledger that is not seeded: fresh noise makes a repeated step another release.
        """
        if not self._seeded:
            raise RuntimeError(
                "only a seeded ledger can be rewound: repeating a step with fresh noise is another release"
            )
        self._check()
        if not 0 <= steps <= self.steps:
            raise ValueError(f"steps must lie in [0, {self.steps}], got {steps}")
        kept: list[Entry] = []
        for entry in self._used():
            count = min(entry.event.count, steps) if entry.is_step else entry.event.count
            if count:
                kept.append(replace(entry, event=entry.event.times(count)))
            steps -= count if entry.is_step else 0
        self._save(kept, 0)

    def commit(self) -> None:
        """Release the steps that were reserved ahead and not used. Harmless when called twice."""
        self._check()
        if self._ahead:
            self._save(self._used(), 0)

    def close(self) -> None:
        """Commit and let the next process in. A copy of the ledger in a forked process does nothing."""
        if self._closed or os.getpid() != self._owner:
            return
        try:
            self.commit()
        finally:
            self._closed = True
            if self._file is not None:
                self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a ledger cannot be copied or pickled: the same steps would be spent twice")

    # ---- inside

    def _check(self, event: object = None) -> None:
        if event is not None and not isinstance(event, EVENT_TYPES):
            raise TypeError(f"event must be an event of dpkernels.accounting, got {type(event).__name__}")
        if self._closed:
            raise RuntimeError("the ledger is closed")
        if os.getpid() != self._owner:
            raise RuntimeError("the ledger belongs to another process: a forked process must not spend from it")

    def _used(self) -> list[Entry]:
        """The entries without what was reserved ahead, which is always the tail of the last one."""
        if not self._ahead:
            return list(self._entries)
        *before, last = self._entries
        left = last.event.count - self._ahead
        return before + ([replace(last, event=last.event.times(left))] if left else [])

    def _save(self, entries: list[Entry], ahead: int) -> None:
        """Write first: where that fails, the ledger in memory stays what it was."""
        if self._file is not None:
            self._file.write(self._document(entries))
        self._entries, self._ahead = entries, ahead

    def _document(self, entries: Sequence[Entry]) -> bytes:
        document = {
            "format": FORMAT,
            "version": VERSION,
            "seeded": self._seeded,
            "entries": [
                {"what": e.what, "step": e.is_step, "noise_error": e.noise_error} | e.event.to_dict() for e in entries
            ],
        }
        return json.dumps(document, indent=1).encode()

    def _read(self, content: bytes) -> list[Entry]:
        try:
            document = json.loads(content)
            if document["format"] != FORMAT or document["version"] != VERSION:
                raise ValueError(f"format {document['format']!r} version {document['version']!r}")
            seeded = document["seeded"]
            entries = [_entry(values) for values in document["entries"]]
        except (ValueError, KeyError, TypeError, RecursionError) as reason:
            raise ValueError(
                f"{self._path} must be a {FORMAT} file of version {VERSION}, but it cannot be read: {reason}"
            ) from reason
        if seeded != self._seeded:
            raise ValueError(f"{self._path} was written with seeded={seeded}, got seeded={self._seeded}")
        return entries


def _claim(events: Sequence[Event], delta: float, accountant: str, noise_error: float = 0.0) -> Bound:
    from dpkernels.accounting.accountants import claim

    return claim(events, delta, accountant, noise_error=noise_error)  # type: ignore[arg-type]


def _check_error(value: object) -> float:
    return check_number("noise_error", value, 0.0, 1.0, "a number from 0 to 1")


def _entry(values: dict[str, Any]) -> Entry:
    values = dict(values)
    what, is_step, error = values.pop("what"), values.pop("step"), values.pop("noise_error")
    return Entry(str(what), event_from_dict(values), bool(is_step), _check_error(error))


def _single(entry: Entry) -> Entry:
    return replace(entry, event=entry.event.times(1))


def _append(entries: list[Entry], entry: Entry) -> list[Entry]:
    """``entries`` with ``entry`` at the end, joined to the last one where they are of one kind."""
    if entries and _single(entries[-1]) == _single(entry):
        last = entries[-1]
        return [*entries[:-1], replace(last, event=last.event.times(last.event.count + entry.event.count))]
    return [*entries, entry]


def _unspent(planned: Sequence[Event], entries: Sequence[Entry]) -> list[Event]:
    """What is planned beside the steps and not among the entries yet."""
    left: dict[Event, int] = {}
    for event in planned:
        left[event.times(1)] = left.get(event.times(1), 0) + event.count
    for entry in entries:
        if not entry.is_step and entry.event.times(1) in left:
            left[entry.event.times(1)] -= entry.event.count
    return [event.times(count) for event, count in left.items() if count > 0]
