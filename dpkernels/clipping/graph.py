"""Where parameters enter autograd's graph.

A walk from the losses finds every node that the backward passes. What depends on parameters alone (views, casts,
standardized or low-rank weights) is *shared* by all examples; the nodes where shared values meet the batch are the
*uses* of parameters. A :class:`Plan` says which nodes these are, by which rules they are clipped and how their operands
came from parameters. It is made once for each structure of a graph and found again by its key.

What is shared must not depend on any example: a node that combines parameters with a tensor of unknown origin is a use,
and `clipping/proof.py` proves that its rows are those of single examples. Where a node only may give every example a
copy of its own (an expansion), it is first taken for a use, and counts as shared where the proof fails (``overruled``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from dpkernels.layers import RULES, Ownership, Rule, SelectedRule
from dpkernels.layers.conv import ConvRule
from dpkernels.layers.linear import LinearRule
from dpkernels.layers.moves import Move, Permuted, Picked, Reshaped, move
from dpkernels.layers.standardized import Standardization

Shape = tuple[int, ...]
Edge = tuple[int, int]  # (number of the node, which of its outputs)

#: Products with a tensor whose rows may be examples: where these nodes keep it, for each input into which no gradient
#: flows, "" where nothing is kept (the term of a sum). Optional inputs that may be left out are not listed.
_KEPT: dict[str, dict[int, str]] = {
    "Mm": {0: "self", 1: "mat2"},
    "Addmm": {0: "", 1: "mat1", 2: "mat2"},
    "Bmm": {0: "self", 1: "mat2"},
    "Mv": {0: "self", 1: "vec"},
    "Convolution": {0: "input"},
    "_SkinnyLinear": {0: ""},
    "NativeLayerNorm": {0: "input"},
    "NativeGroupNorm": {0: "input"},
    "NativeBatchNorm": {0: "input"},
}
#: Where these keep what is no differentiable input at all.
_PICKING = {
    "Embedding": "indices",
    "EmbeddingBag": "indices",
    "Index": "indices",
    "IndexSelect": "index",
    "Gather": "index",
}
_SWITCHED = ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")
#: Nodes that choose rows by an index.
ROUTING = frozenset(
    [
        "Index",
        "IndexPut",
        "MaskedSelect",
        "MaskedScatter",
        "Take",
        "Sort",
        "Topk",
        "Gather",
        "Scatter",
        "ScatterAdd",
        "IndexSelect",
        "IndexAdd",
        "IndexCopy",
        "Kthvalue",
    ]
)


class Graph(NamedTuple):
    """The nodes of one backward."""

    nodes: list[Any]  # those of the roots first
    children: list[list[tuple[int, int]]]  # of each node: (number, which output), (-1, 0) where no gradient flows
    key: tuple[Any, ...]  # equal for graphs of equal structure over the same leaves


def read(roots: Sequence[Any]) -> Graph:
    """Walk from the nodes of ``roots`` to all that their backward passes."""
    nodes = list(dict.fromkeys(roots))
    numbers = {node: number for number, node in enumerate(nodes)}
    children: list[list[tuple[int, int]]] = []
    key: list[Any] = [len(nodes)]
    for node in nodes:  # grows
        key.append(type(node))
        below = []
        for child, output in node.next_functions:
            if child is None:
                below.append((-1, 0))
                key.append(-1)
                continue
            number = numbers.get(child)
            if number is None:
                number = numbers[child] = len(nodes)
                nodes.append(child)
            below.append((number, output))
            key.append(number)
            key.append(output)
        if not below and (leaf := getattr(node, "variable", None)) is not None:
            key.append(id(leaf))
        children.append(below)
    return Graph(nodes, children, tuple(key))


@dataclass(frozen=True)
class Operand:
    """An input of a node that comes from parameters alone."""

    name: str  # as the rule calls it
    position: int
    edge: Edge
    shape: Shape
    parameters: tuple[int, ...]  # ids; several, or one that is computed from, unless ``moves`` is given
    moves: tuple[Move, ...] | None = None  # from the one parameter
    picked: int | None = None  # the node whose index says which entries of the operand are the parameter's
    standardized: Standardization | None = None


@dataclass(eq=False)
class Use:
    """A node where parameters meet the batch."""

    node: int
    kind: str
    rule: Rule | None  # None: its own backward, one example at a time
    operands: tuple[Operand, ...]
    outputs: int  # of the node
    optional: bool  # whether it may be shared as well
    terminal: bool = False  # no other use lies below
    owners: list[list[Ownership]] = field(default_factory=list)  # whose each output's rows can be
    settled: bool = False
    ambiguous: bool = False  # nonzero gradients were seen that fit several owners


@dataclass
class Plan:
    """What to do with graphs of one structure."""

    uses: list[Use]
    routes: list[int]  # nodes that choose rows by data
    switches: list[tuple[int, bool]]  # nodes with a training mode, and whether they were in it
    shapes: set[tuple[Any, ...]] = field(default_factory=set)  # of the uses, without the batch: proved
    steps: int = 0  # that it served
    shared_uses: dict[int, int] = field(default_factory=dict)  # parameter -> number of uses, where several


class _Shared(NamedTuple):
    """A value that depends on parameters alone."""

    parameters: tuple[int, ...]
    moves: tuple[Move, ...] | None
    picked: int | None


class UncapturedError(RuntimeError):
    """A graph has parts that cannot be clipped per example."""


def kind_of(node: Any) -> str:
    """The name of a node without "Backward" and what follows."""
    name = node.name().rsplit("::", 1)[-1].rstrip("0123456789")
    return str(name.removesuffix("Backward"))


def shape_of(node: Any, output: int = 0) -> Shape:
    """The shape of an output of a node."""
    return tuple(node._input_metadata[output].shape)


def make_plan(
    graph: Graph,
    trainable: Mapping[int, nn.Parameter],
    batch: int,
    constants: frozenset[int],
    overruled: frozenset[int],
) -> Plan:
    """Find the uses of parameters.

    Args:
        graph: the walk.
        trainable: the parameters to look for, by id.
        batch: the number of examples.
        constants: where tensors lie that do not depend on examples (``data_ptr`` of their storage).
        overruled: nodes that could give every example a copy of its own, but do not.
    """
    kinds = ["" if leaf_of(node) is not None else kind_of(node) for node in graph.nodes]
    shared: dict[int, _Shared] = {}
    uses: dict[int, Use] = {}
    for number in _children_first(graph):
        node, below = graph.nodes[number], graph.children[number]
        leaf = leaf_of(node)
        if leaf is not None:
            if id(leaf) in trainable:
                shared[number] = _Shared((id(leaf),), (), None)
            continue
        mine = [(position, edge) for position, edge in enumerate(below) if edge[0] in shared]
        if not mine:
            continue
        only = all(child < 0 or child in shared for child, _ in below)
        brings = _brings_batch(graph, number, kinds[number], batch, constants) if only else None
        if only and (brings is False or (brings is None and number in overruled)):
            shared[number] = _derive(graph, number, kinds[number], [(edge, shared[edge[0]]) for _, edge in mine])
            continue
        uses[number] = _use(graph, number, kinds[number], mine, shared, optional=only and brings is None)
    _mark_terminal(graph, uses)
    routes = [n for n, kind in enumerate(kinds) if kind in ROUTING and n not in shared]
    counts: dict[int, int] = {}
    for use in uses.values():
        for operand in use.operands:
            for parameter in operand.parameters:
                counts[parameter] = counts.get(parameter, 0) + 1
    switches = [(n, bool(graph.nodes[n]._saved_training)) for n, kind in enumerate(kinds) if kind in _SWITCHED]
    return Plan(list(uses.values()), routes, switches, shared_uses={p: n for p, n in counts.items() if n > 1})


def leaf_of(node: Any) -> torch.Tensor | None:
    """The tensor in whose ``.grad`` a node would accumulate; None for other nodes."""
    return getattr(node, "variable", None)


def _edge_shape(graph: Graph, edge: Edge) -> Shape:
    leaf = leaf_of(graph.nodes[edge[0]])
    return tuple(leaf.shape) if leaf is not None else shape_of(graph.nodes[edge[0]], edge[1])


def gradient_edge(graph: Graph, edge: Edge) -> Any:
    """What torch.autograd.grad takes to differentiate by an edge."""
    leaf = leaf_of(graph.nodes[edge[0]])
    return leaf if leaf is not None else GradientEdge(graph.nodes[edge[0]], edge[1])


def _children_first(graph: Graph) -> Iterator[int]:
    done, stack = set(), [(number, False) for number in range(len(graph.nodes))][::-1]
    while stack:
        number, ready = stack.pop()
        if number in done:
            continue
        if ready:
            done.add(number)
            yield number
            continue
        stack.append((number, True))
        stack += [(child, False) for child, _ in graph.children[number] if child >= 0 and child not in done]


def _derive(graph: Graph, number: int, kind: str, inputs: list[tuple[Edge, _Shared]]) -> _Shared:
    """What a node makes of shared values. Moves are known for its first output; see :func:`_moves`."""
    parameters = tuple(dict.fromkeys(p for _, value in inputs for p in value.parameters))
    (edge, value), *others = inputs
    if others or value.moves is None:
        return _Shared(parameters, None, None)
    before = _moves(graph, edge, value)
    steps = None if before is None else move(graph.nodes[number], kind, 0, _edge_shape(graph, edge))
    if steps is None:
        return _Shared(parameters, None, None)
    picked = number if any(isinstance(step, Picked) for step in steps) else value.picked
    assert before is not None
    return _Shared(parameters, (*before, *steps), picked)


def _moves(graph: Graph, edge: Edge, value: _Shared) -> tuple[Move, ...] | None:
    """The moves from the parameter to this very output of a node: those of its first, but for the last step."""
    if edge[1] == 0 or value.moves is None:
        return value.moves
    node = graph.nodes[edge[0]]
    (below,) = [e for e in graph.children[edge[0]] if e[0] >= 0]
    first, own = (move(node, kind_of(node), output, _edge_shape(graph, below)) for output in (0, edge[1]))
    if first is None or own is None:
        return None
    return (*value.moves[: len(value.moves) - len(first)], *own)


def _brings_batch(graph: Graph, number: int, kind: str, batch: int | None, constants: frozenset[int]) -> bool | None:
    """Whether a node whose differentiable inputs are all shared combines them with data of the batch.

    Data are tensors that may have examples for rows: all that are not constants of the model, single numbers, or
    positions. True: it does, and so must have rows of single examples. False: it does not. None: it does not, but may
    give every example a copy of its own (an expansion, positions that are looked up for each example).
    """
    node, below = graph.nodes[number], graph.children[number]
    fits = batch is not None and any(size and size % batch == 0 for size in shape_of(node))
    if kind in _PICKING:
        picks = getattr(node, f"_saved_{_PICKING[kind]}")
        tensors = [t for t in (picks if isinstance(picks, (tuple, list)) else [picks]) if t is not None]
        return None if all(_constant(t, constants) for t in tensors) and fits else _data(tensors, constants)
    shapes, shape = [_edge_shape(graph, edge) for edge in below if edge[0] >= 0], shape_of(node)
    without = [position for position, (child, _) in enumerate(below) if child < 0]
    if kind in _KEPT:
        names = [_KEPT[kind][position] for position in without if position in _KEPT[kind]]
        kept = [getattr(node, f"_saved_{name}") if name else None for name in names]
        if _data([t for t in kept if t is not None], constants):
            return True
        return any(t is None for t in kept) and shape not in shapes
    if kind in ("Expand", "Repeat"):
        return None if fits else False
    if kind == "Scatter" and len(shape) == 1:  # selected entries of a weight
        return not _constant(node._saved_index, constants)
    if kind == "Cat":
        return None if without and fits else False
    # Elementwise: what does not stretch a shared value has no rows of examples in it.
    return bool(without) and shape not in shapes


def _data(tensors: list[torch.Tensor], constants: frozenset[int]) -> bool:
    return any(not _constant(t, constants) for t in tensors)


def _constant(tensor: torch.Tensor, constants: frozenset[int]) -> bool:
    """Whether a tensor cannot depend on examples: what the model keeps, one number, or integers that tell positions."""
    if tensor.dim() == 0 or tensor.untyped_storage().data_ptr() in constants:
        return True
    if tensor.is_floating_point() or tensor.dtype == torch.bool:
        return False
    line = tensor[tuple(0 if stride == 0 else slice(None) for stride in tensor.stride())].squeeze()
    if line.dim() == 1:  # consecutive
        return bool((line.diff() == 1).all())
    return line.dim() == 2 and bool((line[1:, 1:] == line[:-1, :-1]).all())  # a function of the difference of two


def chooses_by_data(node: Any) -> bool:
    """Whether a node of :data:`ROUTING` has an index that may depend on examples: one that is more than positions."""
    index = getattr(node, "_saved_indices", getattr(node, "_saved_index", None))
    tensors = [t for t in (index if isinstance(index, (tuple, list)) else [index]) if t is not None]
    # One number everywhere is what data may give by chance.
    return (
        not tensors or _data(tensors, frozenset()) or any(t.numel() == 0 or bool(t.min() == t.max()) for t in tensors)
    )


def _use(
    graph: Graph, number: int, kind: str, mine: list[tuple[int, Edge]], shared: dict[int, _Shared], optional: bool
) -> Use:
    node, positions = graph.nodes[number], frozenset(position for position, _ in mine)
    rule = next((r for r in RULES if positions <= r.nodes.get(kind, {}).keys()), None)
    operands = []
    for position, edge in mine:
        value, shape = shared[edge[0]], _edge_shape(graph, edge)
        name = rule.nodes[kind][position] if rule is not None else f"operand {position}"
        moves = _moves(graph, edge, value)
        standardized = _standardization(graph, edge, shared) if moves is None else None
        operands.append(Operand(name, position, edge, shape, value.parameters, moves, value.picked, standardized))
    if any(operand.picked is not None for operand in operands):
        rule, operands = _selected(rule, kind, operands)
    return Use(number, kind, rule, tuple(operands), len(node._input_metadata), optional)


def _standardization(graph: Graph, edge: Edge, shared: dict[int, _Shared]) -> Standardization | None:
    """The batch normalization of a parameter's rows that an operand of its shape comes from, if it does."""

    def source(number: int) -> int:
        while leaf_of(graph.nodes[number]) is None and kind_of(graph.nodes[number]) in VIEWS:
            number = graph.children[number][0][0]
        return number

    norm = source(edge[0])
    if leaf_of(graph.nodes[norm]) is not None or kind_of(graph.nodes[norm]) != "NativeBatchNorm":
        return None
    weight, gain, offset = graph.children[norm]
    leaf = leaf_of(graph.nodes[source(weight[0])]) if weight[0] >= 0 else None
    if leaf is None or offset[0] >= 0 or not graph.nodes[norm]._saved_training:
        return None
    of_gain = shared[gain[0]].parameters if gain[0] >= 0 else ()
    rows = (1, len(leaf), leaf.numel() // len(leaf))
    if tuple(leaf.shape) != _edge_shape(graph, edge) or shape_of(graph.nodes[norm]) != rows or id(leaf) in of_gain:
        return None
    return Standardization(norm, id(leaf), gain if gain[0] >= 0 else None, of_gain)


def _selected(rule: Rule | None, kind: str, operands: list[Operand]) -> tuple[Rule | None, list[Operand]]:
    """The rule of selected weights where they are the weights of a layer, scattered and then moved as a layer does."""
    (weight,) = [operand for operand in operands if operand.picked is not None]
    tail = weight.moves[1:] if weight.moves else None
    fits = {
        LinearRule: tail is not None and tail[1:] == (Permuted((1, 0)),) and isinstance(tail[0], Reshaped),
        ConvRule: tail == (Reshaped(weight.shape),),
    }
    if isinstance(rule, (LinearRule, ConvRule)) and weight.name == "weight" and fits.get(type(rule), False):
        plain = Operand("weight", weight.position, weight.edge, weight.shape, weight.parameters, (), weight.picked)
        return SelectedRule(rule), [plain if operand is weight else operand for operand in operands]
    computed = Operand(weight.name, weight.position, weight.edge, weight.shape, weight.parameters)
    return rule, [computed if operand is weight else operand for operand in operands]


def _mark_terminal(graph: Graph, uses: dict[int, Use]) -> None:
    leads: dict[int, bool] = {}  # whether a use lies strictly below
    for number in _children_first(graph):
        leads[number] = any(c >= 0 and (c in uses or leads.get(c, False)) for c, _ in graph.children[number])
    for number, use in uses.items():
        use.terminal = not leads[number]


class Meetings:
    """Where the way from a scalar loss down first meets operations that parameters enter.

    The view by which a linear layer takes its merged rows apart belongs to it, as that of instance norm does, which
    merges examples and channels.
    """

    def __init__(self, graph: Graph, parameters: Collection[int], rows: int | None, constants: frozenset[int]) -> None:
        shared: set[int] = set()
        perhaps: set[int] = set()  # shared, or each example's own copy
        self._met: dict[Any, None] = {}
        for number in _children_first(graph):
            node, below = graph.nodes[number], [child for child, _ in graph.children[number]]
            kind = "" if (leaf := leaf_of(node)) is not None else kind_of(node)
            if leaf is not None:
                shared |= {number} if id(leaf) in parameters else set()
            elif any(child in shared for child in below):
                copied = len(below) > 1 and any(child in perhaps for child in below)
                only = not copied and all(child < 0 or child in shared for child in below)
                brings = _brings_batch(graph, number, kind, rows, constants) if only else True
                if not brings:
                    shared.add(number)
                if brings is None or (not brings and any(child in perhaps for child in below)):
                    perhaps.add(number)
                if brings is not False:
                    self._met[node] = None
            elif kind in VIEWS and graph.nodes[below[0]] in self._met:
                self._met[node] = None

    @property
    def rows(self) -> int:
        """The number of examples, where nobody told it: what all meetings have in their first dimension.

        Raises:
            UncapturedError: they differ.
        """
        found: set[int] = set()
        for node in self._met:
            if kind_of(node) in VIEWS or not shape_of(node):
                continue
            views = [n for n in self._met if kind_of(n) in VIEWS and n.next_functions[0][0] is node]
            merged = kind_of(node) == "NativeBatchNorm"  # instance norm is one of [1, batch * channels, ...]
            found |= {shape_of(n)[0] for n in views or ([] if merged else [node])}
        if len(found) == 1:
            return found.pop()
        raise UncapturedError(
            "a scalar loss does not tell how many examples the batch has, and the model's inputs do not either: they "
            "differ in their first dimension, or parts of the model were called. Call optimizer.backward(losses) with "
            "one loss per example (reduction='none')."
        )

    def __contains__(self, node: Any) -> bool:
        return node in self._met


VIEWS = ("View", "UnsafeView", "ReshapeAlias", "Reshape")
