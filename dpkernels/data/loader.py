"""The Poisson loader: the batches of a privacy plan."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader

from dpkernels.accounting import Plan
from dpkernels.data.rows import Collate, fetcher
from dpkernels.data.sampling import poisson_sample
from dpkernels.random import Key

_NOMINAL_TOLERANCE = 0.1


class Listener(Protocol):
    """What a private optimizer shows to its loader, and hears from it."""

    @property
    def key(self) -> Key:
        """The generator's key; its sampling streams are the loader's."""

    def bind(self, plan: Plan) -> None:
        """Called once, when the loader is made; raises where the optimizer was planned otherwise."""

    def begin_physical_batch(self, rows: int, last: bool) -> None:
        """Called before each physical batch is handed out; `last`: it ends its logical batch."""


@dataclass(frozen=True)
class _Announcement:
    step: int
    rows: int
    last: bool


class PoissonLoader:
    """Draws the logical batches of `plan` and hands them out in physical batches.

    At every step each example is in the batch with probability plan.sampling_rate, independently of all others and of
    all other steps, by the secure generator; so batches differ in size, and one may be empty (it comes as a batch of 0
    rows, and its step counts). A logical batch of more than `physical_batch_size` examples comes in several physical
    ones, in the order of the data set; the last of them ends it, and `optimizer` is told so.

    The loader is passed through once: a `for` loop over it runs all steps that are left, a second loop goes on where
    the first one stopped (also in the middle of a logical batch), and after the last step there is nothing more. No
    batch is ever handed out twice. `take(n)` runs the next n steps, for work between them.

    dataset: anything with a length and indexing by example: a map-style torch Dataset, a list, or, fetched without
        Python per example, a tensor, a tuple of tensors, a TensorDataset or an ImageSplit.
    plan: gives the sampling rate and the number of steps. The rate applies to every example that the data set really
        has, and plan.dataset_size is not compared with the length except for a warning at a difference of more than a
        tenth: the two need not agree, since data sets that differ by an example must be treated alike.
    optimizer: what is told about each batch (`bind`, `begin_physical_batch`); None where nobody needs to know.
    physical_batch_size: at most so many rows at once; None hands out each logical batch whole.
    steps, start_step: draw the steps start_step .. start_step + steps - 1 of the plan, by default all that are left.
        With the same seeded key a loader that starts at a later step draws what the first one would have drawn there.
    key: the generator's key; None takes the optimizer's, or a fresh one. A seeded one (`Key.from_seed`) is for tests:
        the run is not private then, and an optimizer whose own key is fresh refuses it.
    num_workers, collate_fn, pin_memory, worker_init_fn: as for torch.utils.data.DataLoader. Which examples are drawn
        does not depend on them; the drawing is done in this process. collate_fn is never called with an empty list.

    Raises TypeError or ValueError that names the argument.
    """

    def __init__(
        self,
        dataset: Any,
        plan: Plan,
        *,
        optimizer: Listener | None = None,
        physical_batch_size: int | None = None,
        steps: int | None = None,
        start_step: int = 0,
        key: Key | None = None,
        num_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must be a dpkernels.accounting.Plan, got {type(plan).__name__}")
        if key is not None and not isinstance(key, Key):
            raise TypeError(f"key must be a dpkernels.random.Key or None, got {type(key).__name__}")
        if physical_batch_size is not None:
            _check_int("physical_batch_size", physical_batch_size, at_least=1)
        _check_int("num_workers", num_workers, at_least=0)
        _check_int("start_step", start_step, at_least=0, at_most=plan.steps)
        left = plan.steps - start_step
        if steps is not None:
            _check_int("steps", steps, at_least=0, at_most=left)
        rows = fetcher(dataset, collate_fn)
        if abs(len(rows) - plan.dataset_size) > _NOMINAL_TOLERANCE * plan.dataset_size:
            warnings.warn(
                f"dataset has {len(rows)} examples, the plan was made for dataset_size={plan.dataset_size}: logical "
                f"batches will have {plan.sampling_rate * len(rows):.1f} examples on average, not {plan.batch_size}",
                stacklevel=2,
            )

        self.plan = plan
        self._size = len(rows)
        self._physical = physical_batch_size
        self._key = _choose_key(key, optimizer)
        self._steps = range(start_step, start_step + (left if steps is None else steps))
        self._next_step = start_step
        self._step = start_step  # of the batch handed out last
        self._optimizer = optimizer
        self._announcements: deque[_Announcement] = deque()
        self._ready: tuple[_Announcement, Any] | None = None
        self._failed = False
        self._batches: Iterator[Any] | None = None
        self._loader: DataLoader[Any] = DataLoader(
            rows,
            batch_sampler=_Draws(self._draw),
            collate_fn=_as_it_is,
            num_workers=num_workers,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
        )
        if optimizer is not None:
            optimizer.bind(plan)

    def __len__(self) -> int:
        """Logical batches that this loader draws in all, whatever has been handed out."""
        return len(self._steps)

    @property
    def next_step(self) -> int:
        """The first step of the plan whose logical batch was not handed out whole: where a resumed loader starts."""
        return self._next_step

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next physical batch, after the optimizer was told about it.

        Where the optimizer refuses (its last batch was not used), the batch is kept and comes again. Where fetching
        fails, so does every later call: a logical batch that lost a part must not be trained on.
        """
        if self._ready is None:
            self._ready = self._fetch()
        announcement, batch = self._ready
        if self._optimizer is not None:
            self._optimizer.begin_physical_batch(announcement.rows, announcement.last)
        self._ready = None
        self._step = announcement.step
        if announcement.last:
            self._next_step = announcement.step + 1
        return batch

    @property
    def epoch(self) -> int:
        """The number of whole passes over plan.dataset_size examples, in expectation, before the step of the batch that
        was handed out last: 0 during the first."""
        return self._step * self.plan.batch_size // self.plan.dataset_size

    def take(self, steps: int) -> Iterator[Any]:
        """The physical batches of the next `steps` logical batches, or of all that are left where those are fewer.

        Where a logical batch has been begun, the rest of it is the first. Steps that are not run stay for later.
        """
        _check_int("steps", steps, at_least=0)
        end = min(self._next_step + steps, self._steps.stop)
        while self._next_step < end:
            yield next(self)

    def _fetch(self) -> tuple[_Announcement, Any]:
        if self._failed:
            raise RuntimeError(
                f"the loader failed in the middle of step {self._next_step}; make another with "
                f"start_step={self._next_step}"
            )
        try:
            if self._batches is None:
                self._batches = iter(self._loader)
            batch = next(self._batches)
        except StopIteration:
            raise
        except BaseException:
            self._failed = True
            raise
        return self._announcements.popleft(), batch

    def _draw(self) -> Iterator[list[int]]:
        """The indices of each physical batch. Workers fetch ahead of what is handed out, so announcements wait here."""
        for step in self._steps:
            drawn = poisson_sample(self._key, step, self._size, self.plan.sampling_rate)
            parts = drawn.split(self._physical or max(1, len(drawn)))
            for number, part in enumerate(parts, start=1):
                self._announcements.append(_Announcement(step, len(part), last=number == len(parts)))
                yield part.tolist()


class _Draws:
    """What DataLoader calls a batch sampler."""

    def __init__(self, draw: Callable[[], Iterator[list[int]]]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[list[int]]:
        return self._draw()


def _as_it_is(batch: Any) -> Any:
    return batch


def _choose_key(key: Key | None, optimizer: Listener | None) -> Key:
    if optimizer is None:
        return Key.fresh() if key is None else key
    if key is not None and key.seeded and not optimizer.key.seeded:
        raise ValueError("key must not be seeded where the optimizer's key is fresh: the sample would be known")
    return optimizer.key if key is None else key


def _check_int(name: str, value: object, at_least: int, at_most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < at_least or (at_most is not None and value > at_most):
        wanted = f"at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise ValueError(f"{name} must be {wanted}, got {value}")
