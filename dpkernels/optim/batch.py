"""The logical batch of a private optimizer: its clipped sum as it grows, and where its examples came from."""

from __future__ import annotations

from weakref import WeakSet

from torch import Tensor

from dpkernels.clipping import ClippedSum
from dpkernels.random import Domain, Sample


class LogicalBatch:
    """What was gathered since the last step.

    Attributes:
        sums: clipped sums by parameter name, None before the first.
        sample: what the loader drew for it; None where no loader did.
        announced: (rows, last) of the physical batch at hand, where somebody announced it.
        clipped: whether the physical batch at hand is in the sums.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] | None = None
        self.sample: Sample | None = None
        self.announced: tuple[int, bool] | None = None
        self.clipped = False
        self._discarded: WeakSet[Sample] = WeakSet()

    @property
    def complete(self) -> bool:
        """Whether a step ends it: its last physical batch was announced, or none was."""
        return self.announced is None or self.announced[1]

    def announce(self, rows: int, last: bool, sample: Sample | None, step: int) -> None:
        """The next physical batch. One with a new sample, for the step that is next, begins the logical batch anew.

        Raises:
            RuntimeError: the batch before was not used, the logical batch before had no step, or this one's part is of
                another sample.
        """
        if sample is not None and self._may_begin(sample, step):
            if self.sample is None and self.sums is not None:
                raise RuntimeError(
                    "backward ran on a batch that the loader did not hand out, and no step() after it: call step(), or "
                    "optimizer.discard(), before the loader goes on"
                )
            self.discard()
            sample.key.claim(Domain.SAMPLING, sample.step)
            self.sample = sample
        if self.announced is not None:
            before, ended = self.announced
            if before and not self.clipped:
                raise RuntimeError(
                    f"the loader moved on, but no backward ran on the previous batch of {before} examples. Use every "
                    "batch before the next one is fetched: list(loader), and a framework that fetches ahead or "
                    "accumulates gradients over batches, do not (physical_batch_size divides a logical batch)"
                )
            if ended:
                raise RuntimeError("the loader moved on, but step() was not called after the previous logical batch")
        if sample is not self.sample:
            raise RuntimeError(
                "the batch is not of the logical batch at hand, which one loader must hand out whole: make a loader "
                "anew, which begins it again, or call optimizer.discard()"
            )
        self.announced, self.clipped = (rows, last), False

    def _may_begin(self, sample: Sample, step: int) -> bool:
        """Whether it was drawn for this step, and was not seen before."""
        return sample is not self.sample and sample not in self._discarded and sample.step == step

    def require_unclipped(self) -> None:
        """Raise RuntimeError if the physical batch at hand is in the sums."""
        if self.clipped:
            raise RuntimeError(
                "backward ran again on a batch that is already clipped: its examples would contribute twice. Sum the "
                "losses of one batch before a single backward. A logical batch in several parts comes from "
                "PoissonLoader(..., physical_batch_size=...); optimizer.discard() leaves one unfinished."
            )

    def add(self, result: ClippedSum) -> None:
        """Add the clipped sum of the physical batch at hand, once."""
        self.require_unclipped()
        if self.sums is None:
            self.sums = result.grads
        else:
            if self.sums.keys() != result.grads.keys():
                self.discard()
                raise RuntimeError("parameters were frozen or unfrozen within a logical batch; the batch is discarded")
            for name, value in result.grads.items():
                self.sums[name] += value
        self.clipped = True

    def discard(self) -> None:
        """Forget it. Nothing of it was released: its sample may be drawn again."""
        if self.sample is not None:
            self.sample.key.give_back(Domain.SAMPLING, self.sample.step)
            self._discarded.add(self.sample)
        self.forget()

    def forget(self) -> None:
        """Begin the next one; the sample of this one stays claimed."""
        self.sums, self.sample, self.announced, self.clipped = None, None, None, False
