"""What private optimizers share: clipping, the accumulator of a logical batch, noise once per step, the ledger."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpkernels.accounting import Ledger, Plan, statement
from dpkernels.accounting.mechanisms import event_from_dict
from dpkernels.clipping import ClippedSum, GhostClipper
from dpkernels.ops.noise import total_variation
from dpkernels.random import Domain, Key

Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]]


@dataclass(frozen=True)
class Privacy:
    """How a private optimizer is set up; the keyword arguments that all of them share.

    Attributes:
        plan: the privacy plan; gives noise, expected batch size and budget.
        noise_multiplier, batch_size: instead of a plan: noise standard deviation divided by the sensitivity, and the
            expected number of examples in a logical batch, which every sum is divided by.
        max_grad_norm: the bound C on an example's gradient norm over all parameters together.
        ledger: where spent steps are recorded; by default one in memory, bound to the plan's budget.
        seed: makes the noise reproducible, for tests. The run is then not private, and says so.
        loss_reduction: as for :class:`dpkernels.GhostClipper`.
    """

    plan: Plan | None = None
    max_grad_norm: float | None = None
    noise_multiplier: float | None = None
    batch_size: int | None = None
    ledger: Ledger | None = None
    seed: int | None = None
    loss_reduction: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        if self.max_grad_norm is None:
            raise TypeError("max_grad_norm must be given: the bound on one example's gradient norm")
        if self.plan is not None:
            if not isinstance(self.plan, Plan):
                raise TypeError(f"plan must be a plan made by dpkernels.plan(...), got {type(self.plan).__name__}")
            if self.noise_multiplier is not None or self.batch_size is not None:
                raise ValueError("give either plan, or noise_multiplier and batch_size, not both")
        else:
            if self.noise_multiplier is None or self.batch_size is None:
                raise TypeError("give plan, or both noise_multiplier and batch_size")
            if not (isinstance(self.noise_multiplier, (int, float)) and 0 <= self.noise_multiplier < math.inf):
                raise ValueError(f"noise_multiplier must be a finite number >= 0, got {self.noise_multiplier!r}")
            if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
                raise ValueError(f"batch_size must be a positive integer, got {self.batch_size!r}")
            if self.ledger is not None:
                raise ValueError("a ledger needs a plan: without one there is no sampling rate to account for")
        if self.sigma > 0 and self.max_grad_norm == math.inf:
            raise ValueError("max_grad_norm=inf needs noise_multiplier=0: without a bound no noise is enough")

    @property
    def sigma(self) -> float:
        """The noise multiplier."""
        noise_multiplier = self.plan.noise_multiplier if self.plan is not None else self.noise_multiplier
        assert noise_multiplier is not None
        return float(noise_multiplier)

    @property
    def denominator(self) -> int:
        """The expected batch size, which sums are divided by whatever the actual one."""
        batch_size = self.plan.batch_size if self.plan is not None else self.batch_size
        assert batch_size is not None
        return batch_size


class PrivateOptimizer(Optimizer):
    """Base of the private optimizers. A step adds noise once to the clipped sum of one logical batch.

    With a loader bound to it, the loader says how many examples come next and when a logical batch ends; ``step()``
    acts then and is without effect before. Without a loader each ``step()`` ends a logical batch.
    """

    _privacy: Privacy

    def __init__(
        self, model: nn.Module, groups: list[dict[str, Any]], defaults: dict[str, Any], privacy: Privacy
    ) -> None:
        super().__init__(groups, defaults)
        self._check_groups(model)
        self._privacy = privacy
        seeded = privacy.seed is not None
        self._key = Key.fresh() if privacy.seed is None else Key.from_seed(privacy.seed)
        self._ledger: Ledger | None = None
        if privacy.plan is not None:
            self._ledger = privacy.ledger or Ledger(budget=privacy.plan, seeded=seeded)
            if self._ledger.seeded != seeded:
                raise ValueError(f"ledger was made with seeded={self._ledger.seeded}, but seed is {privacy.seed!r}")
        self._steps = 0  # logical steps taken, those before a loaded state included
        self._unsampled_steps = 0  # of these, without a bound loader
        self._bound = False
        self._sums: dict[str, Tensor] | None = None  # the accumulator of the logical batch
        self._announced: tuple[int, bool] | None = None  # (rows, last) of the physical batch at hand
        self._clipped = False  # the physical batch at hand is in the accumulator
        assert privacy.max_grad_norm is not None
        self._clipper = GhostClipper(  # last: what failed above leaves the model as it was
            model, privacy.max_grad_norm, loss_reduction=privacy.loss_reduction
        )
        if privacy.plan is not None and (refusal := privacy.plan.claim(privacy.plan.steps * self.noise_error).refusal):
            warnings.warn(f"no epsilon will be stated at the plan's delta: {refusal}", stacklevel=3)

    def _check_groups(self, model: nn.Module) -> None:
        names = {p: name for name, p in model.named_parameters()}
        covered = [p for group in self.param_groups for p in group["params"]]
        if any(p not in names for p in covered):
            raise ValueError("params must be parameters of model, got one that is not")
        left_out = [names[p] for p in names if p.requires_grad and p not in set(covered)]
        if left_out:
            raise ValueError(f"params must cover every trainable parameter; freeze or add {', '.join(left_out)}")
        if any("max_grad_norm" in group for group in self.param_groups):
            raise ValueError("max_grad_norm is one bound over all parameters, it cannot differ between groups")

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def bind(self, plan: Plan) -> None:
        """Called by a loader that will announce its batches.

        Raises:
            ValueError: the loader draws by another plan, or the optimizer has none.
        """
        if plan != self._privacy.plan:
            raise ValueError("the loader's plan is not the optimizer's plan: give both the same")
        self._bound = True

    def begin_physical_batch(self, rows: int, last: bool) -> None:
        """Called by the loader before it hands out a batch of ``rows`` examples; ``last``: it ends a logical batch.

        Raises:
            RuntimeError: the previous batch had no backward, or the previous logical batch no step.
        """
        if self._announced is not None:
            self._collect()
            before, ended = self._announced
            if before and not self._clipped:
                raise RuntimeError(
                    f"the loader moved on, but no backward ran on the previous batch of {before} examples"
                )
            if ended:
                raise RuntimeError("the loader moved on, but step() was not called after the previous logical batch")
        self._announced, self._clipped = (rows, last), False
        self._clipper.expected_rows = rows

    def backward(self, losses: Tensor) -> None:
        """Clip the gradients of ``losses``, one loss per example, and add them to the logical batch.

        Args:
            losses: [batch], where ``losses[i]`` depends on example i alone.

        Raises:
            ValueError: ``losses`` is not [batch] with the announced number of examples.
            RuntimeError: backward already ran on this batch, or the engine found a fault; see ``GhostClipper``.
        """
        self._require_unclipped()
        self._add(self._clipper.backward(losses))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Add noise to the logical batch's sum and update, if the loader said that the logical batch ends here.

        Raises:
            ValueError: a closure is given. RuntimeError: no backward ran, or the plan's budget is spent.
        """
        if closure is not None:
            raise ValueError("closure must be None: evaluating a loss again inside a step would use the batch again")
        self._collect()
        rows, last = self._announced or (None, True)
        if not self._clipped and rows != 0:
            raise RuntimeError("step() needs a backward on the batch at hand first")
        if not last:
            return
        sums = self._sums
        index = self._spend()  # from here on the step is spent, whatever happens
        self._forget_batch()
        trainable = self._clipper.trainable()
        if sums is None:
            sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in trainable.items()}
        self._update({trainable[name]: value for name, value in sums.items()}, index)

    @abstractmethod
    def _update(self, sums: dict[nn.Parameter, Tensor], step: int) -> None:
        """Update the parameters from the clipped sums with the noise of logical step ``step``."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear ``p.grad``. The sum of an unfinished logical batch stays."""
        super().zero_grad(set_to_none)

    def _require_unclipped(self) -> None:
        self._collect()
        if self._clipped:
            raise RuntimeError(
                "backward ran again on a batch that is already clipped: its examples would contribute twice. Sum the "
                "losses of one batch before a single backward."
            )

    def _collect(self) -> None:
        """Take the result of an ordinary ``loss.backward()``, if there is one."""
        if self._clipper.has_result:
            self._add(self._clipper.take())

    def _add(self, result: ClippedSum) -> None:
        if self._sums is None:
            self._sums = result.grads
        else:
            if self._sums.keys() != result.grads.keys():
                self._forget_batch()
                raise RuntimeError("parameters were frozen or unfrozen within a logical batch; the batch is discarded")
            for name, value in result.grads.items():
                self._sums[name] += value
        self._clipped = True

    def _forget_batch(self) -> None:
        self._sums, self._announced, self._clipped = None, None, False
        self._clipper.expected_rows = None
        self._clipper.discard()

    # ---- what subclasses need for their update ----------------------------------------------------------------------

    def _in_order(self, sums: dict[nn.Parameter, Tensor]) -> tuple[list[nn.Parameter], list[dict[str, Any]]]:
        """The parameters that are updated, in the order of the groups, and each one's group."""
        pairs = [(p, group) for group in self.param_groups for p in group["params"] if p in sums]
        return [p for p, _ in pairs], [group for _, group in pairs]

    def _noise(self, step: int) -> dict[str, Any]:
        """Noise of one logical step and the divisor, as the operators of ``ops/update.py`` take them.

        Sums and noise are rounded to a grid whose spacing gamma is a power of two with gamma sqrt(d) <= 1e-4 C over all
        d values. Rounding moves a value by gamma / 2 at most, so that two neighbouring sums lie at most
        ``l2_bound + gamma sqrt(d)`` apart; rounded noise added on the grid equals rounding the noisy sum, which closes
        the floating-point leak of Mironov (2012).
        """
        arguments = {"denominator": self._privacy.denominator}
        sigma, bound = self._privacy.sigma, self._clipper.max_grad_norm
        if sigma == 0:
            return arguments
        root = math.sqrt(sum(p.numel() for group in self.param_groups for p in group["params"]))
        grid = 2.0 ** math.floor(math.log2(1e-4 * bound / root))
        return arguments | {
            "key": self._key.value,
            "domain": Domain.NOISE,
            "step": step,
            "noise_std": sigma * (self._clipper.l2_bound + grid * root),
            "grid": grid,
        }

    # ---- accounting -------------------------------------------------------------------------------------------------

    def _spend(self) -> int:
        """Enter one step into the ledger; returns its index, which no other step's noise shares."""
        plan = self._privacy.plan
        index = self._steps
        if self._ledger is not None and plan is not None:
            index = self._ledger.reserve_step(plan.step_event, self.noise_error)
        self._steps += 1
        if not self._bound:
            self._unsampled_steps += 1
        return index

    @property
    def plan(self) -> Plan | None:
        """The privacy plan."""
        return self._privacy.plan

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
            RuntimeError: there is no plan, or a step was taken without a bound loader, so that nothing is known of how
                its batch was sampled.
        """
        if self._ledger is None or self._privacy.plan is None:
            raise RuntimeError(
                "epsilon is unknown without a plan: how batches are sampled is part of the guarantee. Construct the "
                "optimizer with dpkernels.plan(...) and give both to a PoissonLoader."
            )
        if self._unsampled_steps:
            raise RuntimeError(
                f"epsilon is unknown: {self._unsampled_steps} of {self._steps} steps took a batch that did not come "
                "from a PoissonLoader bound to this optimizer (PoissonLoader(dataset, plan, optimizer=optimizer))"
            )
        return self._ledger.epsilon(self._privacy.plan.delta if delta is None else delta)

    def privacy_statement(self) -> str:
        """What the run costs by its plan, in words fit for a model card."""
        plan = self._privacy.plan
        if self._ledger is None or plan is None:
            return statement.WITHOUT_PLAN
        if self._unsampled_steps:
            return statement.unsampled(self._unsampled_steps, self._steps)
        return self._ledger.statement(plan.delta)

    @property
    def noise_error(self) -> float:
        """Bound on the total variation of one step's noise from ideal: a power of two, so that all steps have one, and
        0 without noise."""
        noise = self._noise(0)
        if "noise_std" not in noise:
            return 0.0
        values = sum(p.numel() for group in self.param_groups for p in group["params"])
        error = total_variation(values, noise_std=noise["noise_std"], grid=noise["grid"])
        return 2.0 ** math.ceil(math.log2(error))

    # ---- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torch's state and what was spent. It holds no key and nothing of an unfinished logical batch."""
        state = super().state_dict()
        state["privacy"] = {
            "noise_multiplier": self._privacy.sigma,
            "max_grad_norm": self._clipper.max_grad_norm,
            "batch_size": self._privacy.denominator,
            "steps": self._steps,
            "unsampled_steps": self._unsampled_steps,
            "spent": [] if self._ledger is None else [event.to_dict() for event in self._ledger.events()],
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a saved state. An unfinished logical batch is discarded, and what was spent stays spent.

        A ledger in memory takes over what the state says was spent; one on disk knows it already. In a seeded run the
        steps after the saved one are repeated with the same noise.

        Raises:
            ValueError: the state is not a private optimizer's, or was made with another noise, bound or batch size.
        """
        saved = state_dict.get("privacy")
        if saved is None:
            raise ValueError("state_dict must come from a private optimizer: it has no entry 'privacy'")
        mine = {
            "noise_multiplier": self._privacy.sigma,
            "max_grad_norm": self._clipper.max_grad_norm,
            "batch_size": self._privacy.denominator,
        }
        for name, value in mine.items():
            if saved[name] != value:
                raise ValueError(f"state_dict was saved with {name}={saved[name]}, this optimizer has {value}")
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "privacy"})
        self._forget_batch()
        self._restore_spent(saved)
        self._steps, self._unsampled_steps = saved["steps"], max(saved["unsampled_steps"], self._unsampled_steps)

    def _restore_spent(self, saved: dict[str, Any]) -> None:
        ledger, plan = self._ledger, self._privacy.plan
        if ledger is None or plan is None:
            return
        if ledger.seeded:
            ledger.rewind(min(saved["steps"], ledger.steps))
        if ledger.steps >= saved["steps"]:  # an earlier state of this very run: spent stays spent
            return
        if ledger.path is not None:
            raise ValueError(
                f"state_dict was saved after {saved['steps']} steps, but {ledger.path} knows of {ledger.steps}: it is "
                "not the ledger of that run"
            )
        for event in map(event_from_dict, saved["spent"]):
            if event.times(1) == plan.step_event:
                for _ in range(event.count):
                    ledger.reserve_step(plan.step_event, self.noise_error)
            else:
                ledger.record(event, "before the state was saved")

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a private optimizer cannot be copied or pickled, since its noise and its ledger belong to one process: "
            "save state_dict() and load it into a new optimizer"
        )


def require_range(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Raise unless ``value`` is a number with low <= value < high."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < high:
        raise ValueError(f"{name} must be a number in [{low:g}, {high:g}), got {value!r}")


def as_groups(model: nn.Module, params: Parameters | None) -> list[dict[str, Any]]:
    """Parameter groups as torch takes them; all trainable parameters of the model where none are given."""
    if params is None:
        return [{"params": [p for p in model.parameters() if p.requires_grad]}]
    groups = list(params)
    if groups and not isinstance(groups[0], dict):
        return [{"params": groups}]
    return groups  # type: ignore[return-value]
