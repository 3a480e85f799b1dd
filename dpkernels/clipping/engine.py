"""The ghost-clipping engine: per-example norms in one backward pass, clipped sums in a second.

Pass 1 is autograd: every captured module emits a record of its activations and output gradients, and its squared
per-example norms are computed while both are hot. Pass 2 needs no autograd: from the kept records each layer adds its
clipped sum. With ``memory="lean"`` no record is kept; instead autograd runs backward a second time, and the clipped
sums are taken as the records come by.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dpkernels.clipping import loss, rounding, tags, walk
from dpkernels.clipping.inputs import require_inputs_alone
from dpkernels.clipping.loss import Seed
from dpkernels.clipping.patch import is_patched, never_compiled, patch, release
from dpkernels.clipping.products import require_apart
from dpkernels.clipping.state import StateWatch
from dpkernels.clipping.survey import survey
from dpkernels.layers import OUTPUT_OF, Layer, OpaqueModule, Record, Rule
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
    calls: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # of which module, on which shape
    emitted: Counter[int] = field(default_factory=Counter)  # records in the backward
    records: list[tuple[Record, Tensor]] = field(default_factory=list)  # kept, with their squared norms
    squared: list[Tensor] = field(default_factory=list)  # squared norms of records that were not kept
    reused: list[Record] = field(default_factory=list)  # of parameters that were used several times
    sums: dict[int, Tensor] = field(default_factory=dict)
    weights: Tensor | None = None  # clip factors, once the norms are known
    rows: int | None = None
    looked_at: bool = False  # nothing is gathered: the rows of its records are checked


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
            raise ValueError(
                "model already has a GhostClipper or a private optimizer attached, and a second one would clip the "
                "same gradients again: call optimizer.clipper.detach() (or clipper.detach()) on the first, or delete "
                "it, before the model gets another"
            )
        self.model = model
        self.max_grad_norm = float(max_grad_norm)
        self.memory = memory
        self.loss_reduction = loss_reduction
        #: Number of examples in the physical batch, where somebody announced it; else the first captured module tells.
        self.expected_rows: int | None = None
        self._parameters = {id(p): (name, p) for name, p in model.named_parameters()}
        self._watched: dict[int, RemovableHandle] = {}
        self._running = False  # a backward of ours is under way
        self._looking = False  # the graph is read: what checkpointing recomputes for that is no use
        self._batch = _Batch()
        self._result: ClippedSum | None = None  # of an ordinary backward
        self._losses = loss.Memory.empty()
        self._checks = tags.Checks()
        self._prints: tags.Prints | None = None  # of the backward under way, while it is checked
        self._state = StateWatch(model)
        self._opaque = any(isinstance(rule, OpaqueModule) for rule in rules)
        self._modules = [rule.module for rule in rules]
        for rule in rules:
            patch(rule.module, self._captured(rule))
        self._release = weakref.finalize(self, release, self._modules, self._watched)
        self._release.atexit = False
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
        return self._run([Seed(losses, torch.ones_like(losses), 0)], losses.size(0))

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
        self._state.discard()

    def detach(self) -> None:
        """Leave the model as it was before the clipper was attached."""
        self._release()
        loss.forget(self)
        self._state.close()
        self.discard()

    def __enter__(self) -> GhostClipper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    # ---- forward ----------------------------------------------------------------------------------------------------

    def _captured(self, rule: Rule) -> Callable[..., Any]:
        """The forward that stands in for the module's own while the clipper is attached, and lives."""
        own_forward = rule.module.forward
        reference = weakref.ref(self)

        def forward(*args: Any, **kwargs: Any) -> Any:
            clipper = reference()
            if clipper is None:
                return own_forward(*args, **kwargs)
            if isinstance(rule, Layer) and (reason := rule.refusal(rule.module)) is not None:
                raise RuntimeError(f"{rule.path}: {reason}")
            if not torch.is_grad_enabled() or not rule.active():
                return own_forward(*args, **kwargs)
            clipper._count(rule, args)
            return rule.call(clipper._emit, own_forward, *args, **kwargs)

        return never_compiled(forward)

    def _count(self, rule: Rule, args: tuple[Any, ...]) -> None:
        """A captured module is called."""
        slots = rule.slots()
        for parameter in slots.values():
            if id(parameter) not in self._watched:
                self._watch(parameter, rule.path)
        if self._looking or torch._C._current_graph_task_id() != -1:  # checkpointing recomputes: not another use
            return
        batch = self._batch
        batch.uses.update(map(id, slots.values()))
        batch.calls.append((id(rule), args[0].shape[1:] if args and isinstance(args[0], Tensor) else ()))

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

    # ---- the backwards ----------------------------------------------------------------------------------------------

    def captured(self, node: Any) -> int | None:
        """The batch dimension of a node's output where it is that of one of this clipper's modules, else None."""
        if node.name() in _CAPTURES:
            return 0 if node.emit.__self__ is self else None
        if not self._opaque:
            return None
        emit, dimension = node.metadata.get(OUTPUT_OF, (None, None))
        return dimension if emit is not None and emit.__self__ is self else None

    def ordinary_backward(self, node: Any, roots: list[tuple[Any, int]], tensors: Any, options: dict[str, Any]) -> None:
        """Run an ordinary ``loss.backward()``; see :mod:`dpkernels.clipping.loss`. ``node`` is a captured call."""
        if self.memory == "lean":
            raise RuntimeError("memory='lean' runs backward twice: call backward(losses) with one loss per example")
        self._require_taken()
        shape, dimension = walk.shape_of(node, 0), self.captured(node)
        rows = shape[dimension] if dimension is not None and shape else 0
        if self.expected_rows not in (None, rows):
            raise RuntimeError(
                f"a module must have the batch first, {self.expected_rows} rows, but put out {list(shape)}. Rows that "
                "are not examples cannot be clipped: keep the batch in dimension 0 and do not merge it with others."
            )
        if rows:
            try:
                seeds = loss.read(roots, rows, self.loss_reduction, self.captured, self._losses)
            except RuntimeError as error:
                if self._parameters.keys() >= {id(leaf) for leaf in walk.leaves([node for node, _ in roots])}:
                    raise
                raise RuntimeError(
                    f"{error} For the gradient of an input alone, call torch.autograd.grad(output, input)."
                ) from None
        else:  # nobody's share could change; the mean of nothing is not a number, and neither are its gradients
            seeds = loss.nothing(roots)
        self._result = self._run(seeds, rows, **options)

    def _run(self, seeds: list[Seed], rows: int, *, retain_graph: bool | None = None, **options: Any) -> ClippedSum:
        self._require_taken()
        calls = tuple(self._batch.calls)
        self._batch = _Batch(uses=self._batch.uses, rows=rows)
        self._running = True
        lean = self.memory == "lean"
        due = self._checks.due(calls, rows)
        try:
            self._state.compare()
            gradients = [seed.gradient for seed in seeds]
            if due:
                self._checked(seeds, calls, rows, options)
            else:
                self._backward(seeds, gradients, retain_graph=lean or retain_graph, **options)
            norms = self._weigh()
            if lean:
                self._backward(seeds, gradients, retain_graph=retain_graph, **options)
            return self._sum(norms)
        except BaseException:
            if due:
                self._checks.forget(calls)
            raise
        finally:
            self._running, self._prints, self._batch = False, None, _Batch()

    @staticmethod
    def _backward(seeds: list[Seed], gradients: list[Tensor], **options: Any) -> None:
        loss.plain_backward([seed.root for seed in seeds], gradients, **options)

    def _checked(self, seeds: list[Seed], calls: tuple[Any, ...], rows: int, options: dict[str, Any]) -> None:
        """The backward, and before it the tagged one: what is captured must be each example's own."""
        late = [n for n, p in self.model.named_parameters() if p.requires_grad and id(p) not in self._parameters]
        if late:
            raise RuntimeError(
                f"parameter {late[0]!r} came into the model after its optimizer was made, which does not know it: "
                "inject adapters or replace layers first, and make the optimizer afterwards"
            )
        self._looking = True
        try:
            graph = tags.survey(seeds, rows)
        finally:
            self._looking = False
        foreign = [leaf for leaf in graph.leaves if id(leaf) not in self._parameters]

        def look(gradients: list[Tensor], tag: Tensor | None) -> tags.Prints:
            with tags.parked(foreign):
                return self._printed(seeds, gradients, tag, options)

        def real(gradients: list[Tensor]) -> tags.Prints:
            self._prints = prints = tags.Prints()
            self._backward(seeds, gradients, retain_graph=True, **options)
            self._prints = None
            return prints

        self._checks.backward(seeds, calls, rows, look=look, real=real, moves_rows=graph.moves_rows)

    def _printed(
        self, seeds: list[Seed], gradients: list[Tensor], tag: Tensor | None, options: dict[str, Any]
    ) -> tags.Prints:
        """A backward that is looked at, and leaves nothing."""
        batch, self._batch = self._batch, _Batch(rows=self._batch.rows)
        self._prints = prints = tags.Prints(tag)
        self._batch.looked_at = True
        try:
            self._backward(seeds, gradients, retain_graph=True, **options)
        finally:
            self._batch, self._prints = batch, None
        return prints

    # ---- pass 1: records and norms ----------------------------------------------------------------------------------

    def _emit(self, ctx: Any, record: Record) -> None:
        if not self._running:
            require_inputs_alone(ctx, self._parameters.keys())
            return
        self._check_rows(record)
        batch, parameters = self._batch, [id(p) for p in record.slots.values()]
        if self._prints is not None:
            self._prints.add((id(record.rule), *record.slots), record.rule.path, record.output_grad)
            if batch.looked_at:
                return
        summing = batch.weights is not None
        if getattr(ctx, "emitted_for", None) is not (batch if summing else None):
            raise RuntimeError(f"{record.rule.path}: backward ran twice through one graph, which would count twice")
        ctx.emitted_for = object() if summing else batch
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

    def _require_taken(self) -> None:
        if self._result is not None:
            raise RuntimeError(
                "backward ran again on a batch whose gradients are already clipped: it would contribute twice. Sum the "
                "losses of a batch before one backward, then call optimizer.step(). A logical batch in several parts "
                "comes from PoissonLoader(..., physical_batch_size=...)."
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

    def _weigh(self) -> Tensor:
        """Set the weight of each example; returns the norms."""
        batch, trainable = self._batch, self.trainable()
        if not trainable:
            raise RuntimeError(
                "none of the parameters that the model had when its optimizer was made is trainable now: where "
                "adapters were injected or layers replaced, make the optimizer afterwards"
            )
        missing = {name: p for name, p in trainable.items() if id(p) not in batch.emitted}
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
        batch.weights, norms = clip_factors(squared, max_grad_norm=self.max_grad_norm, loss_scale=1.0)
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


#: Autograd's nodes of captured calls: their context has ``emit``, a method of the clipper.
_CAPTURES = {"_CaptureBackward", "_ExpandBackward"}


def _ids(records: list[Record]) -> set[int]:
    return {id(p) for record in records for p in record.slots.values()}
