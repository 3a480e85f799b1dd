"""Ctrl-C and termination as a wish to stop, heard between two batches."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """While active, SIGINT and SIGTERM set `number` instead of breaking off whatever runs. The second one breaks off.

    An exception in the middle of an update would leave parameters of which nobody knows whether their noise is in.
    Only the main thread receives signals; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Callable[..., Any] | int | None] = {}

    def __bool__(self) -> bool:
        """Whether to stop."""
        return self.number is not None

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def ignore_interrupts(worker: int) -> None:
    """For data loading workers: a terminal sends Ctrl-C to them too, and the main process decides when they end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
