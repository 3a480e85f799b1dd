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
from dpkernels.random import Domain, Key, Sample

_NOMINAL_TOLERANCE = 0.1


class Listener(Protocol):
    """What a private optimizer shows to its loader, and hears from it."""

    @property
    def key(self) -> Key:
        """The generator's key; its sampling streams are the loader's."""

    @property
    def next_step(self) -> int:
        """The step of the plan that it takes next: the one that is to be drawn."""

    def bind(self, plan: Plan) -> None:
        """Called once, when the loader is made; raises where the optimizer was planned otherwise."""

    def begin_physical_batch(self, rows: int, last: bool, sample: Sample) -> None:
        """Called before each physical batch is handed out; `last`: it ends its logical batch, that of `sample`.

        Claims the sample where it begins, and raises where a batch before was not used.
        """

    def holds(self, sample: Sample) -> bool:
        """Whether it has used all that was handed out of `sample`, and waits for the rest or for a step."""


@dataclass(frozen=True)
class _Part:
    """A physical batch."""

    sample: Sample
    rows: int
    last: bool


class PoissonLoader:
    """Draws the logical batches of `plan` and hands them out in physical batches.

    At every step each example is in the batch with probability plan.sampling_rate, independently of all others and of
    all other steps, by the secure generator; so batches differ in size, and one may be empty (it comes as a batch of 0
    rows, and its step counts). A logical batch of more than `physical_batch_size` examples comes in several physical
    ones, in the order of the data set; the last of them ends it, and `optimizer` is told so.

    **One pass over the loader is the whole plan**: a `for` loop runs all steps that are left, a second loop goes on
    where the first one stopped (also in the middle of a logical batch), and after the last step there is nothing more,
    which warns. `epochs()` divides the pass into epochs, `take(n)` runs the next n steps.

    **A step's sample is drawn once.** A loader draws for the step that `optimizer` takes next. So a loader made anew
    goes on where the optimizer stands, and several loaders may take turns, at the ends of logical batches. What was
    handed out and not used when a loop or a loader is left comes again: the logical batch is begun again, with the same
    sample, and what was accumulated of it is discarded. Workers fetch ahead; what they fetched and nobody was handed
    when a loader is left was used for no step, and whoever goes on draws it again, at the same step. The key refuses a
    sample that a step was taken with, or that another optimizer's loader has drawn.

    dataset: anything with a length and indexing by example: a map-style torch Dataset, a list, or, fetched without
        Python per example, a tensor, a tuple of tensors, a TensorDataset or an ImageSplit.
    plan: gives the sampling rate and the number of steps. The rate applies to every example that the data set really
        has, and plan.dataset_size is not compared with the length except for a warning at a difference of more than a
        tenth: the two need not agree, since data sets that differ by an example must be treated alike.
    optimizer: what is told about each batch, a private optimizer; None where nobody needs to know.
    physical_batch_size: at most so many rows at once; None hands out each logical batch whole.
    steps: hand out so many logical batches, by default all that are left of the plan.
    start_step: the step to begin with. By default, and with an optimizer always, the one that the optimizer takes next;
        without one the first that `key` has not drawn. With the same seeded key a loader that starts at a later step
        draws what the first one would have drawn there.
    key: the generator's key, of this optimizer's loaders alone; None takes the optimizer's, or a fresh one. A seeded
        one (`Key.from_seed`) is for tests: the run is not private then, and an optimizer whose key is fresh refuses it.
    num_workers, collate_fn, pin_memory, worker_init_fn: as for torch.utils.data.DataLoader. Which examples are drawn
        does not depend on them; the drawing is done in this process. collate_fn is never called with an empty list: the
        empty batch is made from what it returns for the first example, once and twice. That is tried when the loader is
        made, by workers with their first batch.

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
        start_step: int | None = None,
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
        key = _choose_key(key, optimizer)
        start = _choose_start(start_step, plan, optimizer, key)
        left = plan.steps - start
        if steps is not None:
            _check_int("steps", steps, at_least=0, at_most=left)
        rows = fetcher(dataset, collate_fn)
        if num_workers == 0:  # else in the workers: a data set may open its files in the process that reads them
            rows.prepare()
        if abs(len(rows) - plan.dataset_size) > _NOMINAL_TOLERANCE * plan.dataset_size:
            warnings.warn(
                f"dataset has {len(rows)} examples, the plan was made for dataset_size={plan.dataset_size}: logical "
                f"batches will have {plan.sampling_rate * len(rows):.1f} examples on average, not {plan.batch_size}",
                stacklevel=2,
            )

        self.plan = plan
        self._size = len(rows)
        self._physical = physical_batch_size
        self._key = key
        self._optimizer = optimizer
        self._limit = left if steps is None else steps  # logical batches to hand out
        self._handed = 0  # of these, whole
        self._next = start
        self._sample: Sample | None = None  # of the batch that was handed out last
        self._within = False  # that batch did not end its logical batch
        self._parts: deque[_Part] = deque()  # what is being fetched
        self._ready: tuple[_Part, Any] | None = None
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
        """Batches that a pass over the loader hands out in all: logical ones, where these come whole.

        Raises TypeError with a `physical_batch_size`: how many physical batches there are depends on the samples.
        """
        if self._physical is not None:
            raise TypeError(
                "the number of physical batches is not known before they are drawn: loader.plan.steps is that of the "
                "logical ones. Where a framework needs len(loader), leave physical_batch_size out, or set its maximal "
                "number of steps so high that the loader ends first."
            )
        return self._handed + max(0, min(self._limit - self._handed, self.plan.steps - self.next_step))

    @property
    def next_step(self) -> int:
        """The first step of the plan whose logical batch was not handed out whole: where a resumed loader starts."""
        return self._next if self._optimizer is None else max(self._next, self._optimizer.next_step)

    def __iter__(self) -> Iterator[Any]:
        self._resume()
        if self._exhausted:
            self._warn()
        return self

    def __next__(self) -> Any:
        """The next physical batch, after the optimizer was told about it.

        Where the optimizer refuses (its last batch was not used), the batch is kept and comes again. Where fetching
        fails, so does every later call: a logical batch that lost a part must not be trained on.
        """
        if self._exhausted:
            raise StopIteration
        step = self._next if self._within else self.next_step
        if self._ready is None or self._ready[0].sample.step != step:
            self._ready = self._fetch(step)
        part, batch = self._ready
        if self._optimizer is not None:
            self._optimizer.begin_physical_batch(part.rows, part.last, part.sample)
        elif not self._within:
            self._key.claim(Domain.SAMPLING, step)
        self._ready = None
        self._sample, self._within = part.sample, not part.last
        self._next = step + part.last
        self._handed += part.last
        return batch

    @property
    def epoch(self) -> int:
        """The number of whole passes over plan.dataset_size examples, in expectation, before the step of the batch that
        was handed out last: 0 during the first."""
        step = self._next if self._sample is None else self._sample.step
        return step * self.plan.batch_size // self.plan.dataset_size

    def epochs(self) -> Iterator[Iterator[Any]]:
        """For each epoch that is left of the plan, its physical batches: `for batches in loader.epochs()`.

        An epoch is a pass over plan.dataset_size examples, in expectation (see `epoch`); the last one may be shorter.
        All of them together are the steps that are left: what is left of an epoch after `break` comes with the next.
        """
        size, batch, last = self.plan.dataset_size, self.plan.batch_size, self.plan.steps - 1
        if self._exhausted:
            self._warn()
            return
        for epoch in range(self.next_step * batch // size, last * batch // size + 1):
            yield self._until(min(-(-(epoch + 1) * size // batch), self.plan.steps))

    def take(self, steps: int) -> Iterator[Any]:
        """The physical batches of the next `steps` logical batches, or of all that are left where those are fewer.

        Where a logical batch has been begun, the rest of it is the first. Steps that are not run stay for later.
        """
        _check_int("steps", steps, at_least=0)
        self._resume()
        end = self._handed + steps
        while self._handed < end and not self._exhausted:
            yield next(self)

    def _until(self, end: int) -> Iterator[Any]:
        self._resume()
        while (self._within or self.next_step < end) and not self._exhausted:
            yield next(self)

    @property
    def _exhausted(self) -> bool:
        return not self._within and (self._handed == self._limit or self.next_step >= self.plan.steps)

    def _warn(self) -> None:
        warnings.warn(
            f"nothing is left of the loader's {self._limit} steps, and one pass over it goes through all of them: "
            "leave out the loop over epochs, or write `for batches in loader.epochs()`",
            stacklevel=3,
        )

    def _resume(self) -> None:
        """Begin the logical batch at hand again, if the optimizer has not used what was handed out of it."""
        sample, optimizer = self._sample, self._optimizer
        if sample is None or optimizer is None or optimizer.holds(sample):
            return
        if self._within or optimizer.next_step == sample.step:
            self._handed -= not self._within
            self._next, self._within = optimizer.next_step, False
            self._ready, self._batches = None, None

    def _fetch(self, step: int) -> tuple[_Part, Any]:
        if self._failed:
            raise RuntimeError(f"the loader failed in the middle of step {step}; make another, which goes on there")
        try:
            for _ in range(2):
                if self._batches is None:
                    self._parts.clear()
                    self._batches = iter(self._loader)
                for batch in self._batches:
                    part = self._parts.popleft()
                    if part.sample.step == step:
                        return part, batch
                    break
                self._batches = None  # the optimizer took other steps, and what was fetched ahead is of the past
        except BaseException:
            self._failed = True
            raise
        raise AssertionError(f"step {step} was not drawn")

    def _draw(self) -> Iterator[list[int]]:
        """The indices of each physical batch. Workers fetch ahead of what is handed out, so parts wait here."""
        step = self.next_step
        for _ in range(self._limit - self._handed):
            if step >= self.plan.steps:
                return
            sample = Sample(self._key, step)
            drawn = poisson_sample(self._key, step, self._size, self.plan.sampling_rate)
            parts = drawn.split(self._physical or max(1, len(drawn)))
            for number, part in enumerate(parts, start=1):
                self._parts.append(_Part(sample, len(part), last=number == len(parts)))
                yield part.tolist()
            step = max(step + 1, self.next_step)


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


def _choose_start(start_step: int | None, plan: Plan, optimizer: Listener | None, key: Key) -> int:
    stands = min(key.free(Domain.SAMPLING) if optimizer is None else optimizer.next_step, plan.steps)
    if start_step is None:
        return stands
    _check_int("start_step", start_step, at_least=0, at_most=plan.steps)
    if optimizer is not None and start_step != stands:
        raise ValueError(f"start_step must be where the optimizer stands, {stands}, got {start_step}: leave it out")
    if start_step < stands:
        raise ValueError(f"start_step must be at least {stands}, got {start_step}: key drew the samples before that")
    return start_step


def _check_int(name: str, value: object, at_least: int, at_most: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < at_least or (at_most is not None and value > at_most):
        wanted = f"at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise ValueError(f"{name} must be {wanted}, got {value}")
