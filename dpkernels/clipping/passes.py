"""The two passes over one physical batch: records and norms in autograd's backward, clipped sums from the records."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpkernels.clipping import joint
from dpkernels.clipping.graph import Edge, Graph, Operand, Plan, UncapturedError, Use, gradient_edge
from dpkernels.clipping.products import require_apart
from dpkernels.clipping.proof import Root
from dpkernels.clipping.saved import readable_twice
from dpkernels.layers import STORED, Ownership, Record, SelectedRule, stored
from dpkernels.layers.moves import pull
from dpkernels.layers.standardized import STANDARDIZED, Standardization


class Pass:
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
                self._require_known(use, record)
                self._observe(record, moved)
                self._keep(record, moved)
            for operand in computed:
                record = self._record(use, (operand,), grads)
                self._require_known(use, record)
                self._observe(record, (operand,))
                if operand.standardized is not None and STANDARDIZED.fits(record):
                    self._standardized(operand.standardized, record)
                else:
                    self._pull_back(operand, record)

    def _require_known(self, use: Use, record: Record) -> None:
        """Where gradients were too small to prove whose rows are whose, any owner gives the same sums, unless something
        is not finite: the example that is dropped for it must be the one that it belongs to."""
        if self.batch == 1 or all(len(owners) <= 1 or owners[0].plain for owners in use.owners):
            return
        for t in (record.output_grad, *record.saved, *record.per_example.values()):
            if t.is_floating_point() and not bool(t.isfinite().all()):
                raise UncapturedError(
                    f"values that are not finite came before it was proved which rows of an operation ({use.kind}) "
                    "belong to which example, since its gradients were zero so far: scale the inputs, or start from "
                    "other weights"
                )

    def _record(self, use: Use, operands: tuple[Operand, ...], grads: Sequence[Tensor | None]) -> Record:
        node, owners = self.graph.nodes[use.node], [_owner(use, output) for output in range(len(grads))]
        shapes = {operand.name: operand.shape for operand in operands}
        owner = use.rule.owner(owners, grads) if use.rule is not None else None
        if use.rule is None or owner is None or not use.rule.serves(node, shapes, owner):
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

    def _standardized(self, about: Standardization, record: Record) -> None:
        """Take the record of a convolution by a standardized weight, whose norm and sum have a closed form."""
        node = self.graph.nodes[about.node]
        of_weight, of_gain = STANDARDIZED.of(record, self._leaf(about.parameter), node._saved_weight, node._saved_eps)
        self._add(of_weight, "weight", about.parameter)
        if about.gain is not None:
            self._pull_to(about.gain, about.of_gain, of_gain)

    def _pull_back(self, operand: Operand, record: Record) -> None:
        """Take the gradients of a computed operand back to its parameters, through what computed it."""
        grads = record.rule.gradients(record, operand.name).reshape(self.batch, *operand.shape)
        self._pull_to(operand.edge, operand.parameters, grads)

    def _pull_to(self, edge: Edge, parameters: Sequence[int], grads: Tensor) -> None:
        """Take the gradients [batch, *value] of the value at an edge back to the parameters that it depends on."""
        leaves = [self._leaf(p) for p in parameters]
        for parameter, gradient in zip(
            parameters, _batched(gradient_edge(self.graph, edge), leaves, grads), strict=True
        ):
            self._add(stored("gradient", gradient), "gradient", parameter)

    def _add(self, record: Record, operand: str, parameter: int) -> None:
        """Take a record of one parameter's gradients."""
        if parameter in self.plan.shared_uses:
            self._shared[parameter].append(joint.Part(record, operand, ()))
        else:
            squared = record.rule.squared_norms(record, frozenset({operand}))
            self._own.append((record, [(None, parameter, operand)], squared))

    def _leaf(self, parameter: int) -> Tensor:
        return next(
            leaf
            for node in self.graph.nodes
            if (leaf := getattr(node, "variable", None)) is not None and id(leaf) == parameter
        )

    def _own_backward(self, use: Use, operands: tuple[Operand, ...], grads: Sequence[Tensor | None]) -> Record:
        """The gradients of the operands by the node's own backward, for one example's rows at a time."""
        if self.batch > 1:
            warnings.warn(
                f"dpkernels has no rule for parameters of {use.kind} as they are used here: its backward runs once for "
                "each example, which is exact but slow. dpkernels.layers.register() takes a rule (docs/rules.md)",
                stacklevel=2,
            )
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
        for parameter, parts in self._shared.items():
            self._shared[parameter] = joint.join(parts)
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
