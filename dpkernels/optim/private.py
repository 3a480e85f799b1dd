"""What private optimizers share: clipping, the accumulator of a logical batch, noise once per step, the ledger."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpkernels.accounting import Event, Ledger, Plan, statement
from dpkernels.accounting.mechanisms import event_from_dict
from dpkernels.clipping import ClippedSum, GhostClipper
from dpkernels.ops.noise import require_grid, require_stream, total_variation
from dpkernels.optim.batch import LogicalBatch
from dpkernels.optim.groups import ANEW, require_groups, require_whole
from dpkernels.optim.privacy import FIXED, Privacy
from dpkernels.random import Domain, Key, Sample

#: Why a step is not covered by the plan, as "k of n steps ...".
_UNPLANNED = "were taken without a privacy plan"
_UNANNOUNCED = "took a batch that PoissonLoader(dataset, plan, optimizer=optimizer) did not hand out"
_BY_HAND = "took a batch that was announced by begin_physical_batch and not by a PoissonLoader"

_uncovered: WeakKeyDictionary[Ledger, Counter[str]] = WeakKeyDictionary()  # of all optimizers that spent from it


class PrivateOptimizer(Optimizer):
    """Base of the private optimizers. A step adds noise once to the clipped sum of one logical batch.

    With a loader bound to it, the loader says how many examples come next and when a logical batch ends; ``step()``
    acts then and is without effect before. Without a loader each ``step()`` ends a logical batch.

    A step counts as Poisson-sampled if the loader that drew its sample announced every batch that went into it, and
    each was used once, in order. What is compared is the number of rows: other data with as many rows in place of an
    announced batch cannot be seen.
    """

    _privacy: Privacy

    def __init__(
        self, model: nn.Module, groups: list[dict[str, Any]], defaults: dict[str, Any], privacy: Privacy
    ) -> None:
        super().__init__(groups, defaults)
        self._privacy = privacy
        self._names = {id(p): name for name, p in model.named_parameters()}
        seeded = privacy.seed is not None
        self._key = Key.fresh() if privacy.seed is None else Key.from_seed(privacy.seed)
        self._ledger: Ledger | None = None
        if privacy.plan is not None:
            self._ledger = privacy.ledger or Ledger(budget=privacy.plan, seeded=seeded)
            if self._ledger.seeded != seeded:
                raise ValueError(f"ledger was made with seeded={self._ledger.seeded}, but seed is {privacy.seed!r}")
        self._steps = 0  # logical steps taken, those before a loaded state included
        self._uncovered: Counter[str] = Counter()  # of these, why the plan does not cover them
        if self._ledger is not None:
            self._uncovered = _uncovered.setdefault(self._ledger, self._uncovered)
        self._batch = LogicalBatch()
        self._rates: list[Any] = []  # learning rates at the last physical batch
        assert privacy.max_grad_norm is not None
        self._clipper = GhostClipper(  # what fails above leaves the model as it was
            model, privacy.max_grad_norm, loss_reduction=privacy.loss_reduction
        )
        try:
            self._require_ready()
        except BaseException:
            self._clipper.detach()
            raise
        for p in model.parameters():  # what an ordinary backward left there is not private
            p.grad = None
        if privacy.plan is not None and (refusal := privacy.plan.claim(privacy.plan.steps * self.noise_error).refusal):
            warnings.warn(f"no epsilon will be stated at the plan's delta: {refusal}", stacklevel=3)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters of the model that the optimizer was made for, such as ones that no group held.

        Raises:
            ValueError: they are no parameters of that model, are in a group already, or the group has an option that
                is one for all parameters. The groups stay as they were then.
        """
        super().add_param_group(param_group)
        if hasattr(self, "_clipper"):  # else a group of the constructor
            try:
                self._require_groups()
            except BaseException:
                self.param_groups.pop()
                raise

    def _require_groups(self) -> None:
        require_groups(self.param_groups, self._names, FIXED)

    def _require_ready(self) -> None:
        """Raise ValueError unless a step would update every trainable parameter of the model, and with noise.

        Called before anything is spent: what changed since the optimizer was made is found here.
        """
        self._require_groups()
        require_whole(self.param_groups, self._clipper.model, self._names)
        if self._clipper.max_grad_norm != self.max_grad_norm:
            raise ValueError(f"max_grad_norm of the clipper was changed after the optimizer was made. {ANEW}")
        if self._privacy.sigma > 0:
            std, grid = self._noise_scale()
            try:
                require_stream(self._key.value, Domain.NOISE, 0, 0, self._values)
                require_grid(std, grid)
            except ValueError as error:
                raise ValueError(
                    f"no noise can be drawn for noise_multiplier={self.noise_multiplier:g}, "
                    f"max_grad_norm={self.max_grad_norm:g} and {self._values} parameters: {error}"
                ) from error

    def __setattr__(self, name: str, value: object) -> None:
        if name in FIXED:
            raise AttributeError(
                f"{name} is fixed when the optimizer is made, because the privacy guarantee rests on it. {ANEW}"
            )
        super().__setattr__(name, value)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What a gradient scaler asks before it steps."""
        raise RuntimeError(
            "a torch.amp.GradScaler scales losses before they are clipped, and expects to unscale p.grad: leave it out "
            "and call optimizer.backward(losses) and optimizer.step(). bfloat16 needs no scaling"
        )

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def bind(self, plan: Plan) -> None:
        """Called by a loader that will announce its batches.

        Raises:
            ValueError: the loader draws by another plan, or the optimizer has none.
        """
        if plan != self._privacy.plan:
            raise ValueError("the loader's plan is not the optimizer's plan: give both the same")

    @property
    def next_step(self) -> int:
        """The number of the next logical step, from 0: in a ledger, how many are spent. Its noise and its sample have
        this number."""
        return self._ledger.steps if self._ledger is not None else max(self._steps, self._key.free(Domain.NOISE))

    def begin_physical_batch(self, rows: int, last: bool, sample: Sample | None = None) -> None:
        """Called by the loader before it hands out a batch of ``rows`` examples; ``last``: it ends a logical batch.

        ``sample`` is what the logical batch was drawn with; a step without it is not covered by the plan. Another
        sample for the step at hand begins its logical batch again: what was accumulated for it is discarded.

        Raises:
            RuntimeError: the previous batch had no backward, or the previous logical batch no step; or the sample was
                drawn from its key before.
        """
        self._collect()
        self._batch.announce(rows, last, sample, self.next_step)
        rates = [group.get("lr") for group in self.param_groups]
        if self._batch.sums is not None and rates != self._rates:
            warnings.warn(
                "the learning rate changed within a logical batch: step a scheduler only where optimizer.step() "
                "returned True, not after every physical batch",
                stacklevel=3,
            )
        self._rates = rates
        self._clipper.expected_rows = rows

    def holds(self, sample: Sample) -> bool:
        """Whether all batches that were announced with ``sample`` are in the logical batch at hand."""
        self._collect()
        return sample is self._batch.sample and self._batch.clipped

    def discard(self) -> None:
        """Forget the logical batch at hand. Nothing of it was released: its sample is drawn again."""
        self._batch.discard()
        self._clear()

    def backward(self, losses: Tensor) -> None:
        """Clip the gradients of ``losses``, one loss per example, and add them to the logical batch.

        Args:
            losses: [batch], where ``losses[i]`` depends on example i alone.

        Raises:
            ValueError: ``losses`` is not [batch] with the announced number of examples.
            RuntimeError: backward already ran on this batch, or the engine found a fault; see ``GhostClipper``.
        """
        self._collect()
        self._batch.require_unclipped()
        self._add(self._clipper.backward(losses))

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> bool:  # type: ignore[override]
        """Add noise to the logical batch's sum and update, if the loader said that the logical batch ends here.

        ``closure`` is called once before, and must run the backward if nothing else does.

        Returns:
            Whether the parameters were updated: False within a logical batch of several physical ones. A learning rate
            scheduler is to be stepped where it is True.

        Raises:
            RuntimeError: no backward ran, or the plan's budget is spent. ValueError: the model or the groups have
                changed so that not all of it would be trained. Nothing is spent then.
        """
        if closure is not None:
            with torch.enable_grad():
                closure()
        self._collect()
        batch = self._batch
        if not batch.clipped and (batch.announced is None or batch.announced[0]):
            raise RuntimeError(
                "step() needs a backward on the batch at hand first: optimizer.backward(losses), or loss.backward()"
            )
        if not batch.complete:
            return False
        self._require_ready()
        sums = batch.sums
        index = self._spend()  # from here on the step is spent, whatever happens
        batch.forget()
        self._clear()
        trainable = self._clipper.trainable()
        if sums is None:
            sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in trainable.items()}
        self._update({trainable[name]: value for name, value in sums.items()}, index)
        return True

    @abstractmethod
    def _update(self, sums: dict[nn.Parameter, Tensor], step: int) -> None:
        """Update the parameters from the clipped sums with the noise of logical step ``step``."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``p.grad``. The sum of an unfinished logical batch stays."""
        super().zero_grad(set_to_none)

    def _collect(self) -> None:
        """Take the result of an ordinary ``loss.backward()``, if there is one."""
        if self._clipper.has_result:
            self._add(self._clipper.take())

    def _add(self, result: ClippedSum) -> None:
        try:
            self._batch.add(result)
        finally:
            if self._batch.sums is None:  # discarded
                self._clear()

    def _clear(self) -> None:
        """Nothing is announced and nothing gathered."""
        self._clipper.expected_rows = None
        self._clipper.discard()

    # ---- what subclasses need for their update ----------------------------------------------------------------------

    def _in_order(self, sums: dict[nn.Parameter, Tensor]) -> tuple[list[nn.Parameter], list[dict[str, Any]]]:
        """The parameters that are updated, in the order of the groups, and each one's group."""
        pairs = [(p, group) for group in self.param_groups for p in group["params"] if p in sums]
        return [p for p, _ in pairs], [group for _, group in pairs]

    def _noise(self, step: int) -> dict[str, Any]:
        """Noise of one logical step and the divisor, as the operators of ``ops/update.py`` take them."""
        arguments = {"denominator": self._privacy.denominator}
        if self._privacy.sigma == 0:
            return arguments
        std, grid = self._noise_scale()
        return arguments | {
            "key": self._key.value,
            "domain": Domain.NOISE,
            "step": step,
            "noise_std": std,
            "grid": grid,
        }

    def _noise_scale(self) -> tuple[float, float]:
        """Standard deviation of the noise on the sums, and the grid that both are rounded to.

        The grid's spacing gamma is a power of two with gamma sqrt(d) <= 1e-4 C over all d values. Rounding moves a
        value by gamma / 2 at most, so that two neighbouring sums lie at most ``l2_bound + gamma sqrt(d)`` apart;
        rounded noise added on the grid equals rounding the noisy sum, which closes the floating-point leak of Mironov
        (2012).
        """
        root = math.sqrt(self._values)
        grid = 2.0 ** math.floor(math.log2(1e-4 * self._clipper.max_grad_norm / root))
        return self._privacy.sigma * (self._clipper.l2_bound + grid * root), grid

    @property
    def _values(self) -> int:
        """How many values the groups hold."""
        return sum(p.numel() for group in self.param_groups for p in group["params"])

    # ---- accounting -------------------------------------------------------------------------------------------------

    def _spend(self) -> int:
        """Enter one step into the ledger; returns its index, which no other step's noise shares."""
        plan, index = self._privacy.plan, self.next_step
        if self._ledger is not None and plan is not None:
            index = self._ledger.reserve_step(plan.step_event, self.noise_error)
        self._key.claim(Domain.NOISE, index)
        self._steps += 1
        if plan is None:
            self._uncovered[_UNPLANNED] += 1
        elif self._batch.sample is None:
            self._uncovered[_UNANNOUNCED if self._batch.announced is None else _BY_HAND] += 1
        return index

    @property
    def plan(self) -> Plan | None:
        """The privacy plan."""
        return self._privacy.plan

    @property
    def noise_multiplier(self) -> float:
        """Noise standard deviation divided by the sensitivity of the clipped sum."""
        return self._privacy.sigma

    @property
    def max_grad_norm(self) -> float:
        """The bound on an example's gradient norm."""
        assert self._privacy.max_grad_norm is not None
        return self._privacy.max_grad_norm

    @property
    def batch_size(self) -> int:
        """The expected number of examples in a logical batch, which sums are divided by."""
        return self._privacy.denominator

    @property
    def ledger(self) -> Ledger | None:
        """What was spent; None without a plan."""
        return self._ledger

    @property
    def key(self) -> Key:
        """The generator's key."""
        return self._key

    @property
    def clipper(self) -> GhostClipper:
        """The engine."""
        return self._clipper

    @property
    def steps(self) -> int:
        """Logical steps taken."""
        return self._steps

    def epsilon(self, delta: float | None = None) -> float:
        """What was really spent at ``delta`` (default: the plan's): an upper bound, 0 before the first step, infinite
        where none can be stated.

        What a run that ended early costs is the plan's epsilon, which ``privacy_statement`` states.

        Raises:
            RuntimeError: there is no plan, or the plan does not cover a step, since its batch did not come from the
                loader, so that nothing is known of how it was sampled.
        """
        if self._ledger is None or self._privacy.plan is None:
            raise RuntimeError(
                "epsilon is unknown without a plan: how batches are sampled is part of the guarantee. Construct the "
                "optimizer with dpkernels.plan(...) and give both to a PoissonLoader."
            )
        if self._uncovered:
            raise RuntimeError(f"epsilon is unknown: {self._not_covered()}")
        return self._ledger.epsilon(self._privacy.plan.delta if delta is None else delta)

    def privacy_statement(self) -> str:
        """What the run costs by its plan, in words fit for a model card."""
        plan = self._privacy.plan
        if self._ledger is None or plan is None:
            return statement.WITHOUT_PLAN
        if self._uncovered:
            return f"Not private: {self._not_covered()}."
        return self._ledger.statement(plan.delta)

    def _not_covered(self) -> str:
        steps = self._steps if self._ledger is None else self._ledger.steps
        return ", and ".join(f"{count} of {steps} steps {why}" for why, count in self._uncovered.items())

    @property
    def noise_error(self) -> float:
        """Bound on the total variation of one step's noise from ideal: a power of two, so that all steps have one, and
        0 without noise."""
        if self._privacy.sigma == 0:
            return 0.0
        std, grid = self._noise_scale()
        return 2.0 ** math.ceil(math.log2(total_variation(self._values, noise_std=std, grid=grid)))

    # ---- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's state and what was spent. It holds no key and nothing of an unfinished logical batch."""
        state = super().state_dict()
        state["privacy"] = {
            "noise_multiplier": self._privacy.sigma,
            "max_grad_norm": self._clipper.max_grad_norm,
            "batch_size": self._privacy.denominator,
            "steps": self._steps,
            "uncovered": dict(self._uncovered),
            "spent": [] if self._ledger is None else [event.to_dict() for event in self._ledger.events()],
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state. An unfinished logical batch is discarded, and what was spent stays spent.

        A ledger in memory takes over what the state says was spent: of every mechanism the larger count is kept, so
        that an older state of this run gives nothing back, and the state of another run forgets neither. A ledger on
        disk must know it already. In a seeded run the steps after the saved one are repeated, with the same samples and
        the same noise.

        Raises:
            ValueError: the state is not a private optimizer's, was made with another noise, bound or batch size, or is
                not of the run whose ledger is on disk.
            BudgetExceededError: what the state says was spent is not in the plan's budget.
        """
        saved = state_dict.get("privacy")
        if saved is None:
            raise ValueError("state_dict must come from a private optimizer: it has no entry 'privacy'")
        mine = {
            "noise_multiplier": self._privacy.sigma,
            "max_grad_norm": self._clipper.max_grad_norm,
            "batch_size": self._privacy.denominator,
        }
        if missing := (mine.keys() | {"steps", "uncovered", "spent"}) - saved.keys():
            raise ValueError(f"state_dict was saved by another version: its privacy has no {sorted(missing)}")
        for name, value in mine.items():
            if saved[name] != value:
                raise ValueError(f"state_dict was saved with {name}={saved[name]}, this optimizer has {value}")
        self.discard()
        self._restore_spent(saved)
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "privacy"})
        self._steps = saved["steps"]
        self._uncovered |= Counter(saved["uncovered"])

    def _restore_spent(self, saved: dict[str, Any]) -> None:
        ledger, plan = self._ledger, self._privacy.plan
        if ledger is not None and ledger.seeded:
            ledger.rewind(min(saved["steps"], ledger.steps))
        if self._key.seeded:
            for domain in (Domain.NOISE, Domain.SAMPLING):
                self._key.give_back(domain, saved["steps"])
        if ledger is None or plan is None:
            return
        more = _counts(map(event_from_dict, saved["spent"])) - _counts(ledger.events())
        if more and ledger.path is not None:
            missing = "; ".join(str(event.times(count)) for event, count in more.items())
            raise ValueError(
                f"state_dict says that more was spent than {ledger.path} knows of ({missing}): it is not the ledger of "
                "that run"
            )
        for event, count in more.items():
            if event == plan.step_event:
                for _ in range(count):
                    ledger.reserve_step(plan.step_event, self.noise_error)
            else:
                ledger.record(event.times(count), "before the state was saved")

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a private optimizer cannot be copied or pickled, since its noise and its ledger belong to one process: "
            "save state_dict() and load it into a new optimizer"
        )


def _counts(events: Iterable[Event]) -> Counter[Event]:
    """How often each mechanism was used."""
    counts: Counter[Event] = Counter()
    for event in events:
        counts[event.times(1)] += event.count
    return counts
