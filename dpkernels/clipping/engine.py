"""The ghost-clipping engine: per-example norms in one backward pass, clipped sums in a second.

The forward is the model's own. Pass 1 is autograd, asked for the gradients of the nodes that parameters enter and of no
parameter: each such node leaves a record of its activations and output gradients, and its squared per-example norms are
computed while both are hot. Pass 2 needs no autograd: from the records every use of a parameter adds its clipped sum.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves

from dpkernels.clipping import loss, rounding
from dpkernels.clipping.graph import (
    Graph,
    Meetings,
    Operand,
    Plan,
    UncapturedError,
    Use,
    chooses_by_data,
    leaf_of,
    make_plan,
    read,
)
from dpkernels.clipping.passes import Pass
from dpkernels.clipping.patch import patch
from dpkernels.clipping.proof import Root, assume_usual, prove
from dpkernels.clipping.state import StateWatch
from dpkernels.clipping.survey import survey
from dpkernels.layers import Ownership, Record
from dpkernels.layers.skinny import forward_of, is_skinny
from dpkernels.ops.clip import clip_factors, require_max_grad_norm

_MOST_PLANS = 64
Observer = Callable[[Record, dict[str, str]], None]


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


class GhostClipper:
    """Clips per-example gradients of ``model`` to L2 norm ``max_grad_norm`` over all its trainable parameters.

    Use ``result = clipper.backward(losses)`` with one loss per example, or an ordinary ``loss.backward()`` followed by
    ``result = clipper.take()``. Parameters are found in autograd's graph, whatever calls them. Until :meth:`detach` two
    forwards are replaced: that of linear layers with few outputs and many inputs by a faster one, and the model's own
    by one that notes the number of examples as it calls it.

    Args:
        model: any module. Operations without a rule of their own are handled exactly, but slowly.
        max_grad_norm: the bound C, in [1e-10, 1e10], or ``inf`` for no clipping.
        loss_reduction: how an ordinary scalar loss is reduced over the batch: "mean" or "sum". A loss that is neither,
            such as a mean with class weights, is refused as far as its graph shows.

    Raises:
        UnsupportedModelError: the model mixes examples or changes state in its training forward; names module and fix.
        ValueError, TypeError: an argument is out of range, or another clipper is attached to the model.
    """

    def __init__(
        self, model: nn.Module, max_grad_norm: float, *, loss_reduction: Literal["mean", "sum"] = "mean"
    ) -> None:
        if isinstance(max_grad_norm, bool) or not isinstance(max_grad_norm, (int, float)):
            raise TypeError(f"max_grad_norm must be a number, got {type(max_grad_norm).__name__}")
        require_max_grad_norm(max_grad_norm)
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f"loss_reduction must be 'mean' or 'sum', got {loss_reduction!r}")
        survey(model)
        loss.require_free(model)
        self.model = model
        self.max_grad_norm = float(max_grad_norm)
        self.loss_reduction = loss_reduction
        #: Number of examples in the physical batch, where somebody announced it; else the losses tell.
        self.expected_rows: int | None = None
        #: Whether it is proved whose each row is; without, the usual layout is assumed.
        self.proving = True
        #: Called with every record and the names of its operands' parameters, before the record is consumed.
        self.observer: Observer | None = None
        self._parameters = {id(p): (name, p) for name, p in model.named_parameters()}
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._result: ClippedSum | None = None  # of an ordinary backward
        self._losses = loss.Memory.empty()
        self._state = StateWatch(model)
        undo = [patch(m, forward_of(m)) for m in model.modules() if isinstance(m, nn.Linear) and is_skinny(m)]
        undo.append(patch(model, _remembering_rows(model)))
        self._release = weakref.finalize(self, _release, undo)
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
            RuntimeError: backward already ran on this batch or graph, examples are mixed, a trainable parameter took no
                part, or torch's bfloat16 products mix examples on this CPU (`clipping/products.py`).
        """
        if not isinstance(losses, Tensor) or losses.dim() != 1:
            got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise ValueError(
                "losses must be [batch], one loss per example (cross_entropy(..., reduction='none') for instance, "
                f"averaged over everything but the batch), got {got}"
            )
        batch = losses.size(0)
        if self.expected_rows is not None and batch != self.expected_rows:
            raise ValueError(f"losses must have one entry for each of {self.expected_rows} examples, got {batch}")
        self._require_taken()
        if losses.grad_fn is None and batch:
            raise RuntimeError(
                "losses must be computed from the model's parameters with gradients enabled: no parameter took part"
            )
        if losses.grad_fn is None or batch == 0:
            return self._clip([], 0)
        edge = GradientEdge(losses.grad_fn, losses.output_nr)
        return self._clip([(edge, torch.ones_like(losses), Ownership(batch))], batch)

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
        self._result = None
        self._state.discard()

    def detach(self) -> None:
        """Leave the model as it was, and ordinary backward calls to torch."""
        self._release()
        loss.forget(self)
        self.discard()
        self._state.close()

    def __enter__(self) -> GhostClipper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    # ---- the ordinary loop ------------------------------------------------------------------------------------------

    def owns(self, leaf: object) -> bool:
        """Whether a leaf of a graph is a parameter that is clipped."""
        return id(leaf) in self._parameters

    def ordinary_backward(self, roots: list[tuple[Any, int]], tensors: Any, options: dict[str, Any]) -> None:
        """What stands in for ``loss.backward()`` where the loss reaches the model: leaves a result to :meth:`take`."""
        self._require_taken()
        if options["create_graph"] or options["inputs"] is not None:
            raise RuntimeError(
                "gradients of private parameters are clipped per example, so that backward() takes no inputs= and no "
                "create_graph=True. For gradients of other tensors call torch.autograd.grad(loss, tensors, ...)."
            )
        graph = read([node for node, _ in roots])
        self._require_owned(graph)
        foreign = [leaf for leaf in map(leaf_of, graph.nodes) if leaf is not None and not self.owns(leaf)]
        others = [leaf for leaf in foreign if not isinstance(leaf, nn.Parameter)]
        keep = bool(options["retain_graph"])
        try:
            trainable = [p for p, (_, q) in self._parameters.items() if q.requires_grad]
            rows = self.expected_rows if self.expected_rows is not None else _remembered_rows(graph)
            if rows == 0:
                self._result = self._clip([], 0)
                return
            told, met = rows is not None, Meetings(graph, trainable, rows, self._constants())
            rows = met.rows if rows is None else rows
            seeds = loss.read(roots, rows, self.loss_reduction, met.__contains__, self._losses)
            starts: list[Root] = []
            for seed in seeds:
                size = seed.gradient.size(seed.axis) if seed.gradient.dim() else 1
                owner = Ownership(rows, seed.axis, 1, size // rows)
                starts.append((seed.root, seed.gradient, owner))
            self._result = self._clip(starts, rows, batch_first=not told, keep_graph=keep or bool(others))
        except RuntimeError as error:
            if not others:
                raise
            raise RuntimeError(
                f"{error} For the gradient of an input alone, call torch.autograd.grad(output, input)."
            ) from error
        if others:  # inputs that require a gradient get it as ever
            torch.autograd.backward(tensors, retain_graph=keep, inputs=others)

    def _require_taken(self) -> None:
        if self._result is not None:
            raise RuntimeError(
                "backward ran again on a batch whose gradients are already clipped: it would contribute twice. Sum the "
                "losses of a batch before one backward, then call optimizer.step(). A logical batch in several parts "
                "comes from PoissonLoader(..., physical_batch_size=...)."
            )

    # ---- both passes ------------------------------------------------------------------------------------------------

    def _clip(
        self, roots: Sequence[Root], batch: int, *, batch_first: bool = False, keep_graph: bool = False
    ) -> ClippedSum:
        trainable = {id(p): p for _, p in self._parameters.values() if p.requires_grad}
        self._state.compare()
        if batch == 0:
            zeros = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self.trainable().items()}
            device = next(iter(trainable.values())).device if trainable else None
            return ClippedSum(zeros, torch.zeros(0, dtype=torch.float64, device=device), 0, self.l2_bound)
        graph = read([edge.node for edge, _, _ in roots])
        plan = self._plan(graph, trainable, roots, batch)
        if batch_first and batch > 1:
            _require_batch_first(plan)
        _mark(graph, plan)
        gathered = Pass(graph, plan, batch, self._observe)
        gathered.run(roots, keep_graph)
        factors, norms = clip_factors(gathered.squared_norms(), max_grad_norm=self.max_grad_norm)
        sums = gathered.clipped_sums(factors)
        grads = {name: sums[id(p)].reshape(p.shape) for name, p in self.trainable().items()}
        return ClippedSum(grads, norms, batch, self.l2_bound)

    def _observe(self, record: Record, operands: Sequence[Operand]) -> None:
        if self.observer is not None:
            seen = replace(record, per_example=dict(record.per_example))
            self.observer(seen, {o.name: self._parameters[p][0] for o in operands for p in o.parameters})

    def _plan(self, graph: Graph, trainable: dict[int, nn.Parameter], roots: Sequence[Root], batch: int) -> Plan:
        """The plan for a graph, proved for its shapes."""
        key = (graph.key, frozenset(trainable)) if len(trainable) < len(self._parameters) else (graph.key,)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._make_plan(graph, trainable, roots, batch)
            if len(self._plans) == _MOST_PLANS:
                self._plans.pop(next(iter(self._plans)))
            self._plans[key] = plan
            return plan
        shapes = _shapes(graph, plan, batch)
        plan.steps += 1
        again = plan.steps & (plan.steps - 1) == 0  # two examples may have shared a tag
        switched = any(bool(graph.nodes[n]._saved_training) != training for n, training in plan.switches)
        known = shapes in plan.shapes and all(use.settled for use in plan.uses)
        routed = any(chooses_by_data(graph.nodes[n]) for n in plan.routes)
        if self.proving and (again or switched or routed or not known):
            self._prove(graph, plan, roots, batch)
        return plan

    def _make_plan(self, graph: Graph, trainable: dict[int, nn.Parameter], roots: Sequence[Root], batch: int) -> Plan:
        constants = self._constants()
        overruled: frozenset[int] = frozenset()
        while True:
            plan = make_plan(graph, trainable, batch, constants, overruled)
            self._require_all(graph, plan, trainable)
            failed = prove(graph, plan.uses, roots, batch) if batch > 1 and self.proving else []
            if not self.proving:
                assume_usual(graph, plan.uses, batch)
            if mixed := [use for use in failed if not use.optional]:
                self._refuse(mixed, batch)
            if not failed:
                break
            overruled |= {use.node for use in failed}
        self._finish(graph, plan, batch)
        plan.steps = 1
        return plan

    def _constants(self) -> frozenset[int]:
        """Where the model's tensors lie, which do not depend on examples."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return frozenset(t.untyped_storage().data_ptr() for t in tensors if t.numel())

    def _prove(self, graph: Graph, plan: Plan, roots: Sequence[Root], batch: int) -> None:
        if batch > 1 and (failed := prove(graph, plan.uses, roots, batch, plan.steps)):
            self._refuse(failed, batch)
        self._finish(graph, plan, batch)

    def _finish(self, graph: Graph, plan: Plan, batch: int) -> None:
        if (shapes := _shapes(graph, plan, batch)) is not None and batch > 1:
            plan.shapes.add(shapes)

    def _refuse(self, uses: list[Use], batch: int) -> None:
        named = sorted({self._parameters[p][0] for use in uses for o in use.operands for p in o.parameters})
        what = ", ".join(sorted({use.kind for use in uses}))
        raise UncapturedError(
            f"the gradients of {', '.join(named[:6])}{' and others' if len(named) > 6 else ''} (operation {what}) are "
            f"no sums over the {batch} examples: an example's loss changes what the model computes for another, or the "
            "rows of some tensor were reordered or merged so that they are no single example's. Batch normalization, "
            "losses over pairs or over the whole batch, sorting and shuffling do that, and packed sequences (pad "
            "sequences to one length instead). Let every example's loss depend on that example alone, in the order of "
            "the batch."
        )

    def _require_all(self, graph: Graph, plan: Plan, trainable: dict[int, nn.Parameter]) -> None:
        used = {p for use in plan.uses for operand in use.operands for p in operand.parameters}
        missing = [self._parameters[p][0] for p in trainable if p not in used]
        kinds = {type(node).__name__ for node in graph.nodes}
        if "CheckpointFunctionBackward" in kinds:
            raise UncapturedError(
                "activation checkpointing with use_reentrant=True hides a part of the model from the losses' graph: "
                "pass use_reentrant=False to torch.utils.checkpoint.checkpoint (gradient_checkpointing_kwargs="
                "{'use_reentrant': False} in transformers)"
            )
        if any("CompiledFunction" in kind for kind in kinds):
            raise UncapturedError(
                "torch.compile hides the operations of the model: compute the losses with the model that was not "
                "compiled, or compile it with backend='eager'"
            )
        if missing:
            raise UncapturedError(
                f"no gradient reached {', '.join(missing)}: the losses do not depend on "
                f"{'it' if len(missing) == 1 else 'them'}. Freeze what is not used with requires_grad_(False)."
            )
        self._require_owned(graph)

    def _require_owned(self, graph: Graph) -> None:
        """Refuse trainable parameters that are not clipped: nothing would bound their gradients."""
        for node in graph.nodes:
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, nn.Parameter) and leaf.requires_grad and id(leaf) not in self._parameters:
                names = [name for name, p in self.model.named_parameters() if p is leaf]
                raise UncapturedError(
                    f"the losses depend on parameter {names[0]!r}, which was added after the engine was attached: "
                    "inject adapters or replace layers first, and make the optimizer afterwards"
                    if names
                    else f"the losses depend on a trainable parameter of shape {tuple(leaf.shape)} outside of the "
                    "model that is clipped, maybe of a model with another private optimizer: make it a part of the "
                    "model, freeze it with requires_grad_(False), or detach() what it computes"
                )


def _release(undo: list[Callable[[], None]]) -> None:
    while undo:
        undo.pop()()


_ROWS = "dpkernels: examples of the forward"


def _remembering_rows(model: nn.Module) -> Callable[..., Any]:
    """The model's forward, which notes in the graph of its outputs how many examples it was given."""
    own = model.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            rows = _rows_of([t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)])
            leaves = tree_leaves(output)
            if not any(isinstance(leaf, Tensor) for leaf in leaves) and hasattr(output, "__dict__"):
                leaves = tree_leaves(vars(output))
            for leaf in leaves if rows is not None else ():
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                    _metadata(leaf.grad_fn)[_ROWS] = rows
        return output

    return forward


def _rows_of(inputs: list[Tensor]) -> int | None:
    """What all inputs have in their first dimension, but for those that have 1 there; None where they differ."""
    sizes = {t.size(0) for t in inputs if t.dim()}
    several = sizes - {1}
    if len(several) == 1:
        return several.pop()
    return 1 if sizes == {1} else None


def _metadata(node: Any) -> dict[Any, Any]:
    """A dictionary that lives as long as a node; torch's types take the attribute for a method."""
    found: dict[Any, Any] = node.metadata
    return found


def _remembered_rows(graph: Graph) -> int | None:
    """The number of examples in the forward of the model that a graph came from; None if no such forward is in it."""
    found = {rows for node in graph.nodes if (rows := _metadata(node).get(_ROWS)) is not None}
    if len(found) > 1:
        raise UncapturedError(
            f"the loss depends on forwards of {' and '.join(map(str, sorted(found)))} examples: of a batch every "
            "example takes part in each. Call optimizer.backward(losses) with one loss per example (reduction='none')."
        )
    return found.pop() if found else None


def _shapes(graph: Graph, plan: Plan, batch: int) -> tuple[Any, ...] | None:
    """Shapes of the uses' outputs without the batch, and whose their rows are; None where a shape does not fit.

    The uses take the owners for this batch.
    """
    found: list[Any] = []
    for use in plan.uses:
        metadata = graph.nodes[use.node]._input_metadata
        if not use.owners:
            use.owners = [[Ownership(1, 0, 1, m.shape[0])] if batch == 1 and len(m.shape) else [] for m in metadata]
        for output, owners in enumerate(use.owners):
            if not owners:
                found.append(None)
                continue
            shape, owner = tuple(metadata[output].shape), owners[0]
            if owner.batch != batch or shape[owner.dim] != owner.batch * owner.outer * owner.inner:
                resized = [o for owner in owners if (o := owner.resized(shape, batch)) is not None]
                if not resized:
                    return None
                owners[:] = resized
                owner = resized[0]
            found.append((owner.dim, owner.outer, owner.inner, shape[: owner.dim], shape[owner.dim + 1 :]))
    return tuple(found)


def _require_batch_first(plan: Plan) -> None:
    """A scalar does not say which example is which, but that the first dimension of what it reduces is the batch. So
    it must be somewhere in the model. One loss per example says it, whatever the model's layout."""
    owners = [use.owners[0][0] for use in plan.uses if use.owners and use.owners[0]]
    if not any(owner.dim == 0 and owner.outer == 1 for owner in owners):
        raise UncapturedError(
            "an ordinary loss.backward() needs the batch in the first dimension of the model's tensors, and here it is "
            "in another everywhere. Call optimizer.backward(losses) with one loss per example (reduction='none')."
        )


def _mark(graph: Graph, plan: Plan) -> None:
    """Refuse a graph that was clipped before, and remember that this one is."""
    for use in plan.uses:
        metadata = _metadata(graph.nodes[use.node])
        if metadata.get("dpkernels"):
            raise RuntimeError("backward ran twice through one graph, which would count its examples twice")
        metadata["dpkernels"] = True
