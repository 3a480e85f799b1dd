"""The ghost-clipping engine: per-example norms in one backward pass, clipped sums in a second.

The forward is the model's own. Pass 1 is autograd, asked for the gradients of the nodes that parameters enter and of no
parameter: each such node leaves a record of its activations and output gradients, and its squared per-example norms are
computed while both are hot. Pass 2 needs no autograd: from the records every use of a parameter adds its clipped sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from dpkernels.clipping import joint, loss, rounding
from dpkernels.clipping.graph import Graph, Operand, Plan, UncapturedError, Use, gradient_edge, make_plan, read
from dpkernels.clipping.patch import patch, unpatch
from dpkernels.clipping.products import require_apart
from dpkernels.clipping.proof import Root, prove
from dpkernels.clipping.saved import readable_twice
from dpkernels.clipping.survey import survey
from dpkernels.layers import STORED, Ownership, Record, SelectedRule, stored
from dpkernels.layers.moves import pull
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
    ``result = clipper.take()``. Parameters are found in autograd's graph, whatever calls them; of the model only the
    forward of linear layers with few outputs and many inputs is replaced, by a faster one, until :meth:`detach`.

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
        #: Called with every record and the names of its operands' parameters, before the record is consumed.
        self.observer: Observer | None = None
        self._parameters = {id(p): (name, p) for name, p in model.named_parameters()}
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._result: ClippedSum | None = None  # of an ordinary backward
        self._loss_weights: tuple[float, ...] = ()  # of the last one's parts
        self._patched = [module for module in model.modules() if is_skinny(module)]
        for module in self._patched:
            patch(module, forward_of(module))  # type: ignore[arg-type]
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

    def detach(self) -> None:
        """Leave the model as it was, and ordinary backward calls to torch."""
        for module in self._patched:
            unpatch(module)
        self._patched = []
        loss.forget(self)
        self.discard()

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

    def ordinary_backward(self, read_loss: loss.ReadLoss, keep_graph: bool = False) -> None:
        """What stands in for ``loss.backward()`` where the loss reaches the model: leaves a result to :meth:`take`."""
        self._require_taken()
        reduced = read_loss(self.loss_reduction, self.expected_rows)
        loss.require_same(reduced.weights, self._loss_weights)
        self._result = self._clip(reduced.roots, reduced.batch, batch_first=True, keep_graph=keep_graph)
        self._loss_weights = reduced.weights or self._loss_weights

    def _require_taken(self) -> None:
        if self._result is not None:
            raise RuntimeError(
                "backward ran again on a batch whose gradients are already clipped: it would contribute twice. Sum the "
                "losses of a batch before one backward, then call optimizer.step()."
            )

    # ---- both passes ------------------------------------------------------------------------------------------------

    def _clip(
        self, roots: Sequence[Root], batch: int, *, batch_first: bool = False, keep_graph: bool = False
    ) -> ClippedSum:
        trainable = {id(p): p for _, p in self._parameters.values() if p.requires_grad}
        if batch == 0:
            zeros = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self.trainable().items()}
            device = next(iter(trainable.values())).device if trainable else None
            return ClippedSum(zeros, torch.zeros(0, dtype=torch.float64, device=device), 0, self.l2_bound)
        graph = read([edge.node for edge, _, _ in roots])
        plan = self._plan(graph, trainable, roots, batch)
        if batch_first and batch > 1:
            _require_batch_first(plan)
        _mark(graph, plan)
        gathered = _Pass(graph, plan, batch, self._observe)
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
        switched = any(bool(graph.nodes[n]._saved_training) != training for n, training in plan.switches)
        if switched or plan.routes or shapes not in plan.shapes or not all(use.settled for use in plan.uses):
            self._prove(graph, plan, roots, batch)
        return plan

    def _make_plan(self, graph: Graph, trainable: dict[int, nn.Parameter], roots: Sequence[Root], batch: int) -> Plan:
        tensors = (*self.model.parameters(), *self.model.buffers())
        constants = frozenset(t.untyped_storage().data_ptr() for t in tensors if t.numel())
        overruled: frozenset[int] = frozenset()
        while True:
            plan = make_plan(graph, trainable, batch, constants, overruled)
            self._require_all(graph, plan, trainable)
            failed = prove(graph, plan.uses, roots, batch) if batch > 1 else []
            if mixed := [use for use in failed if not use.optional]:
                self._refuse(mixed, batch)
            if not failed:
                break
            overruled |= {use.node for use in failed}
        self._finish(graph, plan, batch)
        return plan

    def _prove(self, graph: Graph, plan: Plan, roots: Sequence[Root], batch: int) -> None:
        if batch > 1 and (failed := prove(graph, plan.uses, roots, batch)):
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
        for node in graph.nodes:
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, nn.Parameter) and leaf.requires_grad and id(leaf) not in self._parameters:
                names = [name for name, p in self.model.named_parameters() if p is leaf]
                raise UncapturedError(
                    f"the losses depend on parameter {names[0]!r}, which was added after the engine was attached: "
                    "construct the optimizer anew"
                    if names
                    else f"the losses depend on a trainable parameter of shape {tuple(leaf.shape)} outside of the "
                    "model that is clipped: make it a part of the model, freeze it with requires_grad_(False), or "
                    "detach() what it computes"
                )


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
        metadata = graph.nodes[use.node].metadata
        if metadata.get("dpkernels"):
            raise RuntimeError("backward ran twice through one graph, which would count its examples twice")
        metadata["dpkernels"] = True


class _Pass:
    """What is gathered of one physical batch, from its backward to its clipped sums."""

    def __init__(
        self, graph: Graph, plan: Plan, batch: int, observe: Callable[[Record, Sequence[Operand]], None]
    ) -> None:
        self.graph, self.plan, self.batch, self._observe = graph, plan, batch, observe
        self._own: list[tuple[Record, list[tuple[Operand | None, int, str]], Tensor]] = []
        self._shared: dict[int, list[joint.Part]] = defaultdict(list)
        self._busy = False  # a node's own backward runs

    # ---- pass 1

    def run(self, roots: Sequence[Root], keep_graph: bool) -> None:
        """Autograd for the gradients of the uses' outputs; each use is taken as its gradient comes by."""
        edges, last, handles = [], [], []
        for use in self.plan.uses:
            node = self.graph.nodes[use.node]
            if use.terminal:
                last.append(use)
                edges += [GradientEdge(node, output) for output in range(use.outputs)]
            else:
                handles.append(node.register_prehook(partial(self._hook, use)))
        try:
            got: Sequence[Tensor | None] = torch.autograd.grad(
                [edge for edge, _, _ in roots],
                edges,
                [g for _, g, _ in roots],
                retain_graph=keep_graph,
                allow_unused=True,
            )
        finally:
            for handle in handles:
                handle.remove()
        for use in last:
            self._take(use, got[: use.outputs])
            got = got[use.outputs :]

    def _hook(self, use: Use, grads: tuple[Tensor | None, ...]) -> None:
        if not self._busy:
            self._take(use, grads)

    def _take(self, use: Use, grads: Sequence[Tensor | None]) -> None:
        node = self.graph.nodes[use.node]
        if all(g is None for g in grads):
            grads = [torch.zeros(m.shape, dtype=m.dtype, device=m.device) for m in node._input_metadata[:1]]
        readable_twice(node)
        for g in grads:
            if g is not None:
                require_apart(g)
        with torch.no_grad():
            moved = tuple(o for o in use.operands if o.moves is not None)
            computed = tuple(o for o in use.operands if o.moves is None)
            if moved:
                record = self._record(use, moved, grads)
                self._observe(record, moved)
                self._keep(record, moved)
            for operand in computed:
                record = self._record(use, (operand,), grads)
                self._observe(record, (operand,))
                self._pull_back(operand, record)

    def _record(self, use: Use, operands: tuple[Operand, ...], grads: Sequence[Tensor | None]) -> Record:
        node, owner = self.graph.nodes[use.node], _owner(use, 0)
        shapes = {operand.name: operand.shape for operand in operands}
        if use.rule is None or grads[0] is None or owner is None or not use.rule.serves(node, shapes, owner):
            return self._own_backward(use, operands, grads)
        record = use.rule.record(node, [grads[0]] if len(grads) == 1 else grads, shapes, owner)
        if isinstance(use.rule, SelectedRule):
            (picked,) = [operand.picked for operand in operands if operand.picked is not None]
            use.rule.select(record, self.graph.nodes[picked]._saved_index)
        return record

    def _keep(self, record: Record, operands: tuple[Operand, ...]) -> None:
        own: list[tuple[Operand | None, int, str]] = []
        for operand in operands:
            (parameter,) = operand.parameters
            if parameter in self.plan.shared_uses:
                part = replace(record, per_example=dict(record.per_example))  # rules drop what they are done with
                self._shared[parameter].append(joint.Part(part, operand.name, operand.moves or ()))
            else:
                own.append((operand, parameter, operand.name))
        if own:
            squared = record.rule.squared_norms(record, frozenset(name for _, _, name in own))
            self._own.append((record, own, squared))

    def _pull_back(self, operand: Operand, record: Record) -> None:
        """Take the gradients of a computed operand back to its parameters, through what computed it."""
        grads = record.rule.gradients(record, operand.name).reshape(self.batch, *operand.shape)
        edge = gradient_edge(self.graph, operand.edge)
        leaves = [self._leaf(p) for p in operand.parameters]
        for parameter, gradient in zip(operand.parameters, _batched(edge, leaves, grads), strict=True):
            part = stored("gradient", gradient)
            if parameter in self.plan.shared_uses:
                self._shared[parameter].append(joint.Part(part, "gradient", ()))
            else:
                squared = part.rule.squared_norms(part, frozenset({"gradient"}))
                self._own.append((part, [(None, parameter, "gradient")], squared))

    def _leaf(self, parameter: int) -> Tensor:
        return next(
            leaf
            for node in self.graph.nodes
            if (leaf := getattr(node, "variable", None)) is not None and id(leaf) == parameter
        )

    def _own_backward(self, use: Use, operands: tuple[Operand, ...], grads: Sequence[Tensor | None]) -> Record:
        """The gradients of the operands by the node's own backward, for one example's rows at a time."""
        node = self.graph.nodes[use.node]
        given = [(output, g) for output, g in enumerate(grads) if g is not None]
        edges = [gradient_edge(self.graph, operand.edge) for operand in operands]
        per_example: dict[str, list[Tensor]] = {operand.name: [] for operand in operands}
        self._busy = True
        try:
            for example in range(self.batch):
                only = [owner.of(example, g) for output, g in given if (owner := _owner(use, output)) is not None]
                with torch.enable_grad():
                    got = torch.autograd.grad(
                        [GradientEdge(node, output) for output, _ in given],
                        edges,
                        only,
                        retain_graph=True,
                        allow_unused=True,
                    )
                for operand, g in zip(operands, got, strict=True):
                    per_example[operand.name].append(
                        given[0][1].new_zeros(operand.shape) if g is None else g.detach().reshape(operand.shape)
                    )
        finally:
            self._busy = False
        rows = {name: torch.stack(each) for name, each in per_example.items()}
        return Record(STORED, (), given[0][1].new_empty(self.batch, 0), frozenset(rows), rows)

    # ---- between the passes

    def squared_norms(self) -> list[Tensor]:
        """Of every group of parameters, [batch] each."""
        return [squared for _, _, squared in self._own] + [
            joint.squared_norms(parts, self.batch) for parts in self._shared.values()
        ]

    # ---- pass 2

    def clipped_sums(self, factors: Tensor) -> dict[int, Tensor]:
        """By parameter."""
        sums: dict[int, Tensor] = {}
        while self._own:
            record, own, _ = self._own.pop()  # freed as it is consumed
            values = record.rule.clipped_sums(record, factors, frozenset(name for _, _, name in own))
            for operand, parameter, name in own:
                moves = operand.moves if operand is not None and operand.moves is not None else ()
                sums[parameter] = pull(moves, values[name], 0)
        for parameter, parts in self._shared.items():
            sums[parameter] = joint.clipped_sum(parts, factors)
        return sums


def _owner(use: Use, output: int) -> Ownership | None:
    """Whose the rows of an output are; None where no gradient came to it when that was proved."""
    return use.owners[output][0] if use.owners[output] else None


def _batched(edge: Any, leaves: list[Tensor], grads: Tensor) -> Iterator[Tensor]:
    """Gradients [batch, *leaf] of leaves from gradients [batch, *value] of a value that was computed from them."""

    def run(value: Tensor, batched: bool) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(
            [edge], leaves, [value], is_grads_batched=batched, retain_graph=True, allow_unused=True
        )

    metadata = edge.node._input_metadata[edge.output_nr] if isinstance(edge, GradientEdge) else edge
    grads = grads.to(metadata.dtype)
    with torch.enable_grad():
        try:
            got = run(grads, batched=True)
        except RuntimeError:  # what vmap cannot do
            each = [run(g, batched=False) for g in grads]
            got = tuple(
                None if parts[0] is None else torch.stack([p for p in parts if p is not None])
                for parts in zip(*each, strict=True)
            )
    for leaf, g in zip(leaves, got, strict=True):
        yield leaf.new_zeros(len(grads), *leaf.shape) if g is None else g.detach()
