"""The ledger: everything that was computed from private data and released, on disk before the noise is drawn.

On disk it is one small JSON file, replaced atomically and synced. Training steps are written in blocks ahead of their
use: a process that is killed leaves up to a block of reserved steps behind, and those stay spent, since their noise may
have been drawn. A lock that ends with its process keeps two live processes from one ledger. Two copies of a folder
cannot be told apart.

This module imports the standard library only, so that a ledger opens in milliseconds.
"""

from __future__ import annotations

import fcntl
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

from dpkernels.accounting.mechanisms import EVENT_TYPES, Event, check_delta, event_from_dict

if TYPE_CHECKING:
    from dpkernels.accounting.bounds import Bound
    from dpkernels.accounting.planning import Plan

FORMAT = "dpkernels-ledger"
VERSION = 1
SECONDS_AHEAD = 0.5
"""One write reserves the steps of about so much training: that is what a kill wastes, and a write takes
milliseconds."""
MAX_BLOCK = 256


class BudgetExceededError(RuntimeError):
    """The release would cost more than the plan allows. Nothing was released and the ledger is as it was."""


class LedgerLockedError(RuntimeError):
    """Another live process, or another ledger object of this one, has the ledger open."""


@dataclass(frozen=True)
class Entry:
    """Releases of one kind in a row."""

    what: str
    event: Event
    is_step: bool


_STEP = "training step"


class Ledger:
    """What was spent. ``path`` None keeps it in memory only.

    Args:
        path: file of the ledger; an existing one is resumed, the folder must exist.
        budget: the plan that must not be exceeded.
        seeded: the randomness can be recomputed, so that the run is not private; only then ``rewind`` is allowed. Kept
            in the file.

    Raises:
        LedgerLockedError: another live process has the ledger open.
        ValueError: the file is not a ledger, is damaged, or was written with another ``seeded``.
        OSError: the folder cannot be written.
    """

    def __init__(self, path: Path | str | None = None, budget: Plan | None = None, *, seeded: bool = False) -> None:
        self._path = None if path is None else Path(path)
        self._budget = budget
        self._seeded = seeded
        self._entries: list[Entry] = []
        self._ahead = 0  # steps of the last entry that are on disk but not handed out yet
        self._owner = os.getpid()
        self._lock: _Lock | None = None
        self._closed = False
        self._block, self._reserved_at = 1, -math.inf
        self._allowance: dict[tuple[tuple[Event, ...], Event], int] = {}
        if self._path is not None:
            self._lock = _Lock(self._path)
            try:
                if self._path.exists():
                    self._entries = self._read()
                else:
                    self._write(self._entries)
            except BaseException:
                self._lock.release()
                raise

    # ---- spending

    def reserve_step(self, event: Event) -> int:
        """Put one training step into the ledger before its noise is drawn, and return its index.

        The index counts the steps reserved before it, those of earlier processes and of their unused blocks included:
        it never repeats over the ledger's life, and may serve as nonce.

        Raises:
            BudgetExceededError: the step would exceed the budget.
            RuntimeError: the ledger is closed or belongs to another process.
        """
        self._check(event)
        if event.count != 1:
            raise ValueError(f"event must be one step, got count={event.count}")
        if not (self._ahead and self._entries[-1].event.times(1) == event):
            self._reserve(event)
        self._ahead -= 1
        return self.reserved - self._ahead - 1

    def record(self, event: Event, what: str) -> None:
        """Put another release into the ledger before it is made, named ``what`` (a normalization, a selection).

        Raises as ``reserve_step`` does.
        """
        self._check(event)
        entries = _append(self._used(), Entry(str(what), event, False))
        excess = self._excess(entries)
        if excess > 0 and self._budget is not None:
            raise BudgetExceededError(
                f"{what} would bring epsilon {excess:.3g} above the plan's {self._budget.epsilon:.6g} at "
                f"delta={self._budget.delta:g}; nothing was released"
            )
        self._save(entries, 0)

    def _reserve(self, single: Event) -> None:
        """Write a block of steps ahead, as many as are used up in about ``SECONDS_AHEAD``."""
        used = self._used()
        left = self._most_steps(single) - sum(e.event.count for e in used if e.is_step and e.event.times(1) == single)
        now = time.monotonic()
        self._block = (
            max(1, self._block // 2) if now - self._reserved_at > SECONDS_AHEAD else min(2 * self._block, MAX_BLOCK)
        )
        block = 1 if self._path is None else min(self._block, left)
        self._save(_append(used, Entry(_STEP, single.times(block), True)), block)
        self._reserved_at = now

    def _most_steps(self, single: Event) -> int:
        """How many training steps like ``single`` the budget allows in all, next to what else was spent.

        Raises BudgetExceededError where they are used up already.
        """
        budget = self._budget
        if budget is None:
            return sys.maxsize
        others = [entry for entry in self._used() if not (entry.is_step and entry.event.times(1) == single)]
        key = (tuple(entry.event for entry in others), single)
        if key not in self._allowance:
            most = budget.steps - sum(entry.event.count for entry in others if entry.is_step)

            def excess(count: int) -> float:
                return self._excess([*others, Entry(_STEP, single.times(count), True)] if count else others)

            low, high = 0, most
            if most > 0 and excess(most) <= 0:
                low = most
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if excess(middle) <= 0 else (low, middle)
            self._allowance[key] = low
        used = self.steps - sum(entry.event.count for entry in others if entry.is_step)
        if used >= self._allowance[key]:
            raise BudgetExceededError(
                f"{used} steps are spent, and the plan allows {self._allowance[key]} of this kind (epsilon "
                f"{budget.epsilon:.6g} at delta={budget.delta:g}); nothing was released"
            )
        return self._allowance[key]

    def _excess(self, entries: Sequence[Entry]) -> float:
        """By how much epsilon of ``entries`` exceeds the budget's."""
        budget = self._budget
        if budget is None or _within(entries, budget.events):
            return 0.0
        return _bound([entry.event for entry in entries], budget.delta, budget.accountant).upper - budget.epsilon

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
        """Lower and upper bound on epsilon at ``delta`` of what was spent."""
        return _bound(self.events(), check_delta(delta), accountant)

    def epsilon(self, delta: float) -> float:
        """Upper bound on epsilon at ``delta`` of what was spent; 0 before the first release."""
        return self.bound(delta).upper

    def statement(self, delta: float) -> str:
        """The privacy statement of what was spent, fit for a model card."""
        from dpkernels.accounting.statement import statement

        releases = [(entry.what, entry.event) for entry in self._used()]
        return statement(
            self.events(), self.bound(delta), delta, releases=releases, seeded=self._seeded, planned=self._budget
        )

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
            if self._lock is not None:
                self._lock.release()

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
        if self._path is not None:
            self._write(entries)
        self._entries, self._ahead = entries, ahead

    def _write(self, entries: Sequence[Entry]) -> None:
        assert self._path is not None
        document = {
            "format": FORMAT,
            "version": VERSION,
            "seeded": self._seeded,
            "entries": [{"what": e.what, "step": e.is_step} | e.event.to_dict() for e in entries],
        }
        temporary = self._path.with_name(self._path.name + ".new")
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _read(self) -> list[Entry]:
        assert self._path is not None
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
            if document["format"] != FORMAT or document["version"] != VERSION:
                raise ValueError(f"format {document['format']!r} version {document['version']!r}")
            seeded = document["seeded"]
            entries = [_entry(values) for values in document["entries"]]
        except (ValueError, KeyError, TypeError) as reason:
            raise ValueError(
                f"{self._path} must be a {FORMAT} file of version {VERSION}, but it cannot be read: {reason}"
            ) from reason
        if seeded != self._seeded:
            raise ValueError(f"{self._path} was written with seeded={seeded}, got seeded={self._seeded}")
        return entries


class _Lock:
    """An exclusive lock on PATH.lock. The operating system ends it with the process, and forked children do not hold
    it."""

    def __init__(self, path: Path) -> None:
        self._key = (os.getpid(), os.path.realpath(path))
        if self._key in _HELD:
            raise LedgerLockedError(f"{path} is already open in this process")
        self._file = open(path.with_name(path.name + ".lock"), "a", encoding="utf-8")  # noqa: SIM115
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as reason:
            self._file.close()
            raise LedgerLockedError(f"{path} is open in another live process") from reason
        _HELD.add(self._key)

    def release(self) -> None:
        _HELD.discard(self._key)
        self._file.close()


_HELD: set[tuple[int, str]] = set()  # (process, file): record locks do not keep a process from itself


def _bound(events: Sequence[Event], delta: float, accountant: str) -> Bound:
    from dpkernels.accounting.accountants import bound

    return bound(events, delta, accountant)  # type: ignore[arg-type]


def _entry(values: dict[str, Any]) -> Entry:
    values = dict(values)
    what, is_step = values.pop("what"), values.pop("step")
    return Entry(str(what), event_from_dict(values), bool(is_step))


def _append(entries: list[Entry], entry: Entry) -> list[Entry]:
    """``entries`` with ``entry`` at the end, joined to the last one where they are of one kind."""
    if entries:
        last = entries[-1]
        if (last.what, last.is_step, last.event.times(1)) == (entry.what, entry.is_step, entry.event.times(1)):
            return [*entries[:-1], replace(last, event=last.event.times(last.event.count + entry.event.count))]
    return [*entries, entry]


def _within(entries: Sequence[Entry], allowed: Sequence[Event]) -> bool:
    """Whether the entries are part of what is allowed, mechanism by mechanism: then no accounting is needed."""
    left: dict[Event, int] = {}
    for event in allowed:
        left[event.times(1)] = left.get(event.times(1), 0) + event.count
    for entry in entries:
        left[entry.event.times(1)] = left.get(entry.event.times(1), 0) - entry.event.count
    return all(count >= 0 for count in left.values())
