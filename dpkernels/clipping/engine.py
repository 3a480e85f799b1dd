"""The ghost-clipping engine: per-example norms in one backward pass, clipped sums in a second.

Pass 1 is autograd: every captured module emits a record of its activations and output gradients, and its squared
per-example norms are computed while both are hot. Pass 2 needs no autograd: from the kept records each layer adds its
clipped sum. With ``memory="lean"`` no record is kept; instead autograd runs backward a second time, and the clipped
sums are taken as the records come by.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpkernels.clipping import loss, rounding
from dpkernels.clipping.patch import is_patched, patch, unpatch
from dpkernels.clipping.products import require_apart
from dpkernels.clipping.survey import survey
from dpkernels.layers import Layer, Record, Rule
from dpkernels.ops.clip import clip_factors, require_max_grad_norm


@dataclass(frozen=True)
class ClippedSum:
    """The sum over a physical batch of clipped per-example gradients. It holds no noise yet: do not release it.

    Attributes:
        grads: parameter name -> float64 tensor in the parameter's shape: sum over examples of the clipped gradient.
        norms: float64 [batch], each example's gradient norm before clipping. Private.
        batch_size: number of examples. Private too under Poisson sampling.
        l2_bound: largest L2 norm by which one example can change ``grads``, rounding included.
    """

    grads: dict[str, Tensor] = field(repr=False)
    norms: Tensor = field(repr=False)
    batch_size: int = field(repr=False)
    l2_bound: float


@dataclass
class _Batch:
    """What has been gathered of one physical batch, from its forward to its clipped sum. Parameters are keyed by id:
    a tensor's own hash is computed in Python, and small models are bound by such calls."""

    uses: Counter[int] = field(default_factory=Counter)  # calls in the forward
    emitted: Counter[int] = field(default_factory=Counter)  # records in the backward
    records: list[tuple[Record, Tensor]] = field(default_factory=list)  # kept, with their squared norms
    squared: list[Tensor] = field(default_factory=list)  # squared norms of records that were not kept
    reused: list[Record] = field(default_factory=list)  # of parameters that were used several times
    sums: dict[int, Tensor] = field(default_factory=dict)
    weights: Tensor | None = None  # clip factors times loss scale, once the norms are known
    rows: int | None = None
    task: int | None = None  # autograd's number of the ordinary backward that fills this batch


class GhostClipper:
    """Clips per-example gradients of ``model`` to L2 norm ``max_grad_norm`` over all its trainable parameters.

    Use ``result = clipper.backward(losses)`` with one loss per example, or an ordinary ``loss.backward()`` followed by
    ``result = clipper.take()``. The batch comes first in every captured activation.

    Args:
        model: any module; layers outside the registry are handled exactly, but slowly.
        max_grad_norm: the bound C, in [1e-10, 1e10], or ``inf`` for no clipping.
        memory: "keep" holds activations and output gradients between the passes; "lean" runs backward twice instead
            (only with :meth:`backward`).
        loss_reduction: how an ordinary scalar loss is reduced over the batch: "mean" or "sum". A loss that is neither,
            such as a mean with class weights, is refused as far as its graph shows.

    Raises:
        UnsupportedModelError: the model mixes examples or changes state in its training forward; names module and fix.
        ValueError, TypeError: an argument is out of range, or another clipper is attached to the model.
    """

    def __init__(
        self,
        model: nn.Module,
        max_grad_norm: float,
        *,
        memory: Literal["keep", "lean"] = "keep",
        loss_reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        if isinstance(max_grad_norm, bool) or not isinstance(max_grad_norm, (int, float)):
            raise TypeError(f"max_grad_norm must be a number, got {type(max_grad_norm).__name__}")
        require_max_grad_norm(max_grad_norm)
        if memory not in ("keep", "lean"):
            raise ValueError(f"memory must be 'keep' or 'lean', got {memory!r}")
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', got {loss_reduction!r}")
        rules = survey(model)
        if any(is_patched(module) for module in model.modules()):
            raise ValueError("model already has a GhostClipper attached: call its detach() first")
        self.model = model
        self.max_grad_norm = float(max_grad_norm)
        self.memory = memory
        self.loss_reduction = loss_reduction
        #: Number of examples in the physical batch, where somebody announced it; else the first captured module tells.
        self.expected_rows: int | None = None
        self._parameters = {id(p): (name, p) for name, p in model.named_parameters()}
        self._watched: dict[int, RemovableHandle] = {}
        self._explicit = False  # inside backward(losses)
        self._batch = _Batch()
        self._result: ClippedSum | None = None  # of an ordinary backward
        self._loss_weights: tuple[float, ...] = ()  # of the last one's parts
        self._modules = [rule.module for rule in rules]
        for rule in rules:
            patch(rule.module, self._captured(rule))
        loss.listen(self)

    @property
    def l2_bound(self) -> float:
        """Largest L2 norm by which one example can change a clipped sum, rounding included."""
        return rounding.l2_bound(self.max_grad_norm)

    @property
    def has_result(self) -> bool:
        """Whether an ordinary backward has left a result to :meth:`take`."""
        return self._result is not None

    def trainable(self) -> dict[str, nn.Parameter]:
        """The parameters that are clipped now, by name: those with ``requires_grad``."""
        return {name: p for name, p in self._parameters.values() if p.requires_grad}

    def backward(self, losses: Tensor) -> ClippedSum:
        """Both passes for one loss per example.

        Args:
            losses: [batch], where ``losses[i]`` depends on example i alone.

        Returns:
            The clipped sum of the gradients of ``losses[i]``.

        Raises:
            ValueError: ``losses`` is not [batch].
            RuntimeError: backward already ran on this batch or graph, a captured activation does not have the batch
                first, a trainable parameter took no part, a gradient reached a parameter outside its module, or torch's
                bfloat16 products mix examples on this CPU (`clipping/products.py`).
        """
        if not isinstance(losses, Tensor) or losses.dim() != 1:
            got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(
                "losses must be [batch], one loss per example (cross_entropy(..., reduction='none') for instance, "
                f"averaged over everything but the batch), got {got}"
            )
        if self.expected_rows is not None and losses.size(0) != self.expected_rows:
            raise ValueError(
                f"losses must have one entry for each of {self.expected_rows} examples, got {losses.size(0)}"
            )
        self._require_taken()
        self._batch = _Batch(uses=self._batch.uses, rows=losses.size(0))
        self._explicit = True
        ones, lean = torch.ones_like(losses), self.memory == "lean"
        try:
            torch.autograd.backward(losses, ones, retain_graph=lean)
            norms = self._weigh(loss_scale=1.0)
            if lean:
                torch.autograd.backward(losses, ones)
            return self._sum(norms)
        finally:
            self._explicit, self._batch = False, _Batch()

    def take(self) -> ClippedSum:
        """The result of the ordinary ``loss.backward()`` that just ran; see :meth:`backward` for what that raises.

        Raises:
            RuntimeError: no backward has run since the last result was taken.
        """
        if self._result is None:
            raise RuntimeError("no backward has run since the last result was taken")
        result, self._result = self._result, None
        return result

    def discard(self) -> None:
        """Forget what was gathered and not taken."""
        self._result, self._batch = None, _Batch()

    def detach(self) -> None:
        """Leave the model as it was before the clipper was attached."""
        for module in self._modules:
            unpatch(module)
        for handle in self._watched.values():
            handle.remove()
        loss.forget(self)
        self._modules, self._watched = [], {}
        self.discard()

    def __enter__(self) -> GhostClipper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    # ---- forward ----------------------------------------------------------------------------------------------------

    def _captured(self, rule: Rule) -> Callable[..., Any]:
        """The forward that stands in for the module's own while the clipper is attached."""
        own_forward = rule.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if isinstance(rule, Layer) and (reason := rule.refusal(rule.module)) is not None:
                raise RuntimeError(f"{rule.path}: {reason}")
            if not torch.is_grad_enabled() or not rule.active():
                return own_forward(*args, **kwargs)
            in_backward = torch._C._current_graph_task_id() != -1  # checkpointing recomputes: not another use
            for parameter in rule.slots().values():
                if not in_backward:
                    self._batch.uses[id(parameter)] += 1
                if id(parameter) not in self._watched:
                    self._watch(parameter, rule.path)
            return rule.call(self._emit, own_forward, *args, **kwargs)

        return _never_compiled(forward)

    def _watch(self, parameter: nn.Parameter, path: str) -> None:
        """Autograd gives captured parameters no gradient: one that gets one is used outside its module."""
        if id(parameter) not in self._parameters:
            raise RuntimeError(f"a parameter of module {path!r} was replaced after attaching: detach and attach again")
        name, _ = self._parameters[id(parameter)]

        def complain(p: Tensor) -> None:
            if p.grad is None:  # what the captured module itself sends
                return
            p.grad = None
            raise RuntimeError(
                f"a gradient reached parameter {name!r} outside the forward of its module (a penalty on weights, or a "
                "functional call): it cannot be clipped per example. Use weight_decay for a penalty, and call the "
                "module, not its parameter."
            )

        self._watched[id(parameter)] = parameter.register_post_accumulate_grad_hook(complain)

    # ---- pass 1: records and norms ----------------------------------------------------------------------------------

    def _emit(self, ctx: Any, record: Record) -> None:
        if not self._explicit:
            self._enter_ordinary_backward()
        batch, parameters = self._batch, [id(p) for p in record.slots.values()]
        summing = batch.weights is not None
        if getattr(ctx, "emitted_for", None) is not (batch if summing else None):
            raise RuntimeError(f"{record.rule.path}: backward ran twice through one graph, which would count twice")
        ctx.emitted_for = object() if summing else batch
        self._check_rows(record)
        require_apart(record.output_grad)
        reused = any(batch.uses[p] > 1 for p in parameters)
        if summing:
            if not reused:
                self._add(record)
            return
        batch.emitted.update(parameters)
        if reused:
            batch.reused.append(record)
            return
        squared = record.rule.squared_norms(record, frozenset(record.slots))
        if self.memory == "keep":
            batch.records.append((record, squared))
        else:
            batch.squared.append(squared)

    def _enter_ordinary_backward(self) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._batch.task:
            return
        self._require_taken()
        if self.memory == "lean":
            raise RuntimeError("memory='lean' runs backward twice: call backward(losses) with one loss per example")
        self._batch = _Batch(uses=self._batch.uses, rows=self.expected_rows, task=task)
        torch.autograd.Variable._execution_engine.queue_callback(self._leave_ordinary_backward)

    def _leave_ordinary_backward(self) -> None:
        try:
            weights = loss.require_plain(self.loss_reduction, self._batch.rows or 0)
            loss.require_same(weights, self._loss_weights)
            self._loss_weights = weights or self._loss_weights
            scale = float(self._batch.rows or 1) if self.loss_reduction == "mean" else 1.0
            self._result = self._sum(self._weigh(scale))
        finally:
            self._batch = _Batch()

    def _require_taken(self) -> None:
        if self._result is not None:
            raise RuntimeError(
                "backward ran again on a batch whose gradients are already clipped: it would contribute twice. Sum the "
                "losses of a batch before one backward, then call optimizer.step()."
            )

    def _check_rows(self, record: Record) -> None:
        if self._batch.rows is None:
            self._batch.rows = record.output_grad.size(0) if record.output_grad.dim() else 0
        for tensor in (record.output_grad, *record.saved):
            if tensor.dim() == 0 or tensor.size(0) != self._batch.rows:
                raise RuntimeError(
                    f"module {record.rule.path!r} must have the batch first, {self._batch.rows} rows, but saw a tensor "
                    f"of shape {tuple(tensor.shape)}. Rows that are not examples cannot be clipped: keep the batch in "
                    "dimension 0 and do not merge it with others."
                )

    # ---- between the passes: clip factors ---------------------------------------------------------------------------

    def _weigh(self, loss_scale: float) -> Tensor:
        """Set the weight of each example; returns the norms."""
        batch = self._batch
        missing = {name: p for name, p in self.trainable().items() if id(p) not in batch.emitted}
        for parameter in missing.values():
            parameter.grad = None  # what a bypass may have left
        if missing:
            raise RuntimeError(
                f"no per-example gradient arrived for {', '.join(missing)}: the module was not called, was bypassed, "
                "or ran under reentrant checkpointing (use use_reentrant=False). Freeze what is not used with "
                "requires_grad_(False)."
            )
        self._set_reused_apart()
        squared = batch.squared + [squared for _, squared in batch.records]
        if batch.reused:
            gradients = (self._joint_gradient(i) for i in range(batch.rows or 0))
            joint = [sum(float(g.square().sum()) for g in gradient.values()) for gradient in gradients]
            squared.append(torch.tensor(joint, dtype=torch.float64, device=batch.reused[0].output_grad.device))
        batch.weights, norms = clip_factors(squared, max_grad_norm=self.max_grad_norm, loss_scale=loss_scale)
        return norms

    def _set_reused_apart(self) -> None:
        """Move records whose parameters turned out to have several (a reuse that the forward could not count)."""
        batch, counted_apart = self._batch, _ids(self._batch.reused)
        several = {p for p, count in batch.emitted.items() if count > 1} | counted_apart
        if not several:
            return
        if self.memory == "lean" and several - counted_apart:
            names = ", ".join(self._parameters[p][0] for p in several - counted_apart)
            raise RuntimeError(f"memory='lean' cannot train {names}: reused under reentrant checkpointing. Use 'keep'.")
        batch.reused += [r for r, _ in batch.records if several & _ids([r])]
        batch.records = [(r, s) for r, s in batch.records if not several & _ids([r])]

    def _joint_gradient(self, example: int) -> dict[int, Tensor]:
        """One example's gradient of the parameters that were used several times, summed over the uses."""
        total: dict[int, Tensor] = {}
        for record in self._batch.reused:
            one = torch.ones(1, dtype=torch.float64, device=record.output_grad.device)
            sums = record.rule.clipped_sums(record.example(example), one, frozenset(record.slots))
            for slot, parameter in record.slots.items():
                p = id(parameter)
                total[p] = total[p] + sums[slot] if p in total else sums[slot]
        return total

    # ---- pass 2: clipped sums ---------------------------------------------------------------------------------------

    def _sum(self, norms: Tensor) -> ClippedSum:
        batch = self._batch
        assert batch.weights is not None
        while batch.records:
            record, _ = batch.records.pop()  # freed as it is consumed
            self._add(record)
        for i in range(batch.rows or 0) if batch.reused else ():
            if batch.weights[i] != 0:
                for parameter, gradient in self._joint_gradient(i).items():
                    self._accumulate(parameter, gradient * batch.weights[i])
        for p in _ids(batch.reused) - batch.sums.keys():  # every example was skipped
            self._accumulate(p, torch.zeros_like(self._parameters[p][1], dtype=torch.float64))
        grads = {name: batch.sums[id(p)] for name, p in self.trainable().items()}
        return ClippedSum(grads, norms, batch.rows or 0, self.l2_bound)

    def _add(self, record: Record) -> None:
        assert self._batch.weights is not None
        sums = record.rule.clipped_sums(record, self._batch.weights, frozenset(record.slots))
        for slot, parameter in record.slots.items():
            self._accumulate(id(parameter), sums[slot])

    def _accumulate(self, parameter: int, value: Tensor) -> None:
        known = self._batch.sums.get(parameter)
        self._batch.sums[parameter] = value if known is None else known.add_(value)


def _ids(records: list[Record]) -> set[int]:
    return {id(p) for record in records for p in record.slots.values()}


def _never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compiler.disable`` where a compiler looks, and no wrapper otherwise."""
    outside = torch.compiler.disable(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (outside if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call
