"""The ordinary ``loss.backward()``: what a scalar loss says about the gradients of single examples.

Clipping bounds one example's share only if no other example changes that share before it is clipped. A mean that
divides by class weights of the whole batch, or the root of a mean, lets every example change all the others'. So from
the first clipper on ``torch.autograd.backward`` is wrapped, and a loss that reaches a clipped model is read: between
the scalar and the losses that were reduced there may be sums, means and factors by numbers alone. The backward then
starts below these, with what the reduction gives each entry of one example's own loss: a mean over a batch is never
divided by its size, which would round every example's gradient by how many others there are.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpkernels.clipping.graph import kind_of, read, shape_of
from dpkernels.clipping.proof import Root
from dpkernels.layers import Ownership

Reduction: TypeAlias = Literal["mean", "sum"]
_FIX = "Call optimizer.backward(losses) with one loss per example (reduction='none')."
_LINEAR = {"Add", "Alias", "Clone", "Neg", "Reshape", "ReshapeAlias", "Rsub", "Squeeze", "Sub", "ToCopy", "View"}


@dataclass(frozen=True)
class Reduced:
    """A scalar loss, read."""

    roots: list[Root]  # where its backward starts, by examples
    batch: int
    weights: tuple[float, ...]  # of one example's loss in each part of the scalar, times the batch for a mean


ReadLoss: TypeAlias = Callable[[Reduction, int | None], Reduced]


class Listener(Protocol):
    """What a clipper shows to the ordinary loop."""

    def owns(self, leaf: object) -> bool:
        """Whether a leaf of a graph is a parameter that is clipped."""

    def ordinary_backward(self, read_loss: ReadLoss, keep_graph: bool) -> None:
        """Called instead of a backward that would reach such a leaf."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def listen(clipper: Listener) -> None:
    """Read the losses of ordinary backward calls from now on, as long as ``clipper`` lives or until :func:`forget`."""
    _listeners.add(clipper)
    if not hasattr(torch.autograd.backward, "_reads_losses"):
        torch.autograd.backward = _reading(torch.autograd.backward)


def require_free(model: torch.nn.Module) -> None:
    """Raise ValueError if another clipper listens for parameters of ``model``."""
    if any(clipper.owns(p) for clipper in _listeners for p in model.parameters()):
        raise ValueError(
            "model already has a GhostClipper attached: call its detach() first (optimizer.clipper.detach() for that "
            "of an optimizer)"
        )


def forget(clipper: Listener) -> None:
    """End what :func:`listen` began."""
    _listeners.discard(clipper)


def require_same(weights: tuple[float, ...], before: tuple[float, ...]) -> None:
    """Refuse weights that differ from those of an earlier batch: their numbers were computed from the batch.

    Raises:
        RuntimeError: they differ; names both and the fix.
    """
    for now, then in zip(weights, before, strict=True) if len(weights) == len(before) else ():
        if not math.isclose(now, then, rel_tol=1e-9):
            raise RuntimeError(
                f"the loss weights an example by {now:g}, in an earlier batch by {then:g}: a number that depends on "
                f"the batch, such as its size, lets every example change the others' gradients. {_FIX}"
            )


def _reading(backward: Any) -> Any:
    @functools.wraps(backward)
    def reading(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        options = (grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        if not _listeners:
            return backward(tensors, *options)
        losses = [tensors] if isinstance(tensors, (Tensor, GradientEdge)) else list(tensors)
        leaves = _leaves(losses)
        wanted = leaves if inputs is None else [inputs] if isinstance(inputs, Tensor) else list(inputs)
        reached = [clipper for clipper in _listeners if any(clipper.owns(leaf) for leaf in wanted)]
        if not reached:
            return backward(tensors, *options)
        if len(reached) > 1:
            raise RuntimeError(
                "one loss reaches the models of two private optimizers: detach() what one model gives to the other, or "
                "freeze the other with requires_grad_(False) for this backward, or train both as one model"
            )
        if create_graph or inputs is not None:
            raise RuntimeError(
                "gradients of private parameters are clipped per example, so that backward() takes no inputs= and no "
                "create_graph=True. For gradients of other tensors call torch.autograd.grad(loss, tensors, ...)."
            )
        (clipper,) = reached
        others = [leaf for leaf in leaves if not clipper.owns(leaf) and not isinstance(leaf, torch.nn.Parameter)]
        given = (grad_tensors,) if isinstance(grad_tensors, Tensor) else tuple(grad_tensors or ())
        try:
            clipper.ordinary_backward(
                functools.partial(_reduced, losses, given), keep_graph=bool(retain_graph) or bool(others)
            )
        except RuntimeError as error:
            if not others:
                raise
            raise RuntimeError(
                f"{error} For the gradients of inputs alone call torch.autograd.grad(loss, inputs)."
            ) from error
        if others:  # inputs that require a gradient get it as ever
            backward(tensors, grad_tensors, retain_graph, False, None, others)
        return None

    reading._reads_losses = True  # type: ignore[attr-defined]
    return reading


def _leaves(losses: list[Any]) -> list[Tensor]:
    """The tensors that a backward would fill."""
    nodes = [loss.grad_fn if isinstance(loss, Tensor) else loss.node for loss in losses]
    graph = read([node for node in nodes if node is not None])
    return [leaf for node in graph.nodes if (leaf := getattr(node, "variable", None)) is not None]


@dataclass(frozen=True)
class _Part:
    """One reduction that the scalar is made of."""

    mean: bool
    divisors: tuple[float, ...]  # numbers that it is divided by, the elements of a mean among them
    factor: float  # product of the numbers that it is multiplied by
    edges: tuple[tuple[Any, Callable[[Tensor], Tensor | None]], ...]  # below it, and its gradient from an entry's
    shape: tuple[int, ...]  # of what it reduced
    dtype: torch.dtype
    device: torch.device

    @property
    def weight(self) -> Fraction:
        """What an entry is multiplied by."""
        weight = Fraction(self.factor)
        for divisor in self.divisors:
            weight /= Fraction(divisor)
        return weight


def _reduced(losses: list[Any], given: Sequence[Tensor | None], reduction: Reduction, rows: int | None) -> Reduced:
    """The parts of the tensors that backward is called on, as starts of a backward.

    Raises:
        RuntimeError: the loss is no plain mean or sum over ``rows`` examples; names what was found and the fix.
    """
    if any(g is not None for g in given):
        raise RuntimeError(f"backward(gradient=...) hides how the examples are weighted. {_FIX}")
    if rows == 0 or (rows is None and _empty(losses)):  # nobody's share could change
        return Reduced([], 0, ())
    parts = [part for loss in losses if loss.grad_fn is not None for part in _parts(loss.grad_fn)]
    if rows is None and any(0 in part.shape for part in parts):
        return Reduced([], 0, ())
    batch = rows if rows is not None else min((p.shape[0] for p in parts if p.shape), default=1) or 1
    roots: list[Root] = []
    weights = []
    for part in parts:
        _require_plain(part, reduction, batch)
        weight = part.weight * (batch if reduction == "mean" else 1)
        weights.append(float(weight))
        shape = part.shape or (1,)
        owner = Ownership(batch, 0, 1, shape[0] // batch)
        entry = torch.full(part.shape, float(weight), dtype=part.dtype, device=part.device)
        for edge, gradient in part.edges:
            if (g := gradient(entry)) is not None:
                roots.append((edge, g, owner))
    return Reduced(roots, batch, tuple(weights))


def _empty(losses: list[Any]) -> bool:
    """Whether what was reduced has no entries: the scalar is 0 or not a number then."""
    if all(bool(loss.isfinite().all()) and bool(loss.any()) for loss in losses):
        return False
    graph = read([loss.grad_fn for loss in losses if loss.grad_fn is not None])
    return any(0 in shape_of(node) for node in graph.nodes if getattr(node, "variable", None) is None)


def _require_plain(part: _Part, reduction: Reduction, rows: int) -> None:
    entries = part.shape[0] if part.shape else 1
    if part.mean and reduction == "sum":
        raise RuntimeError("the loss is a mean over the batch: set loss_reduction='mean', which is the default")
    if reduction == "mean" and all(d % rows for d in part.divisors or (1.0,)):
        raise RuntimeError(
            f"the loss must be a mean over the {rows} examples of the batch, but a part of it is divided by "
            f"{' and '.join(map('{:g}'.format, part.divisors)) or 'nothing'}. Set loss_reduction='sum' for a "
            f"plain sum, and weight_decay for a penalty on the weights. {_FIX}"
        )
    if entries % rows:
        raise RuntimeError(
            f"the loss must be reduced over the {rows} examples of the batch, but {entries} entries were. {_FIX}"
        )


def _parts(node: Any, divisors: tuple[float, ...] = (), factor: float = 1.0, mean: bool = False) -> Iterator[_Part]:
    """Walk from a scalar's node to the reductions below it; divisors and factors were met on the way."""
    kind = kind_of(node)
    reduction = getattr(node, "_saved_reduction", 0)
    if kind == "AccumulateGrad":
        if node.variable.requires_grad:
            raise RuntimeError(
                "a part of the loss depends on parameters alone, not on an example (a penalty on weights): it cannot "
                f"be clipped per example. Use weight_decay instead. {_FIX}"
            )
        return
    if kind in ("Mean", "Sum"):
        shape = tuple(node._saved_self_sym_sizes)
        if kind == "Mean":
            divisors, mean = (*divisors, math.prod(shape)), True
        yield _part(node, node.next_functions[0], shape, divisors, factor, mean)
    elif reduction:
        unreduced = _UNREDUCED.get(kind)
        if unreduced is None:
            raise RuntimeError(f"the loss is reduced by {kind}, which is not known to be a plain mean or sum. {_FIX}")
        if reduction == 1:
            if kind in ("NllLoss", "NllLoss2D"):
                _require_equal_weights(node)
            averaged = node._saved_target if kind in ("NllLoss", "NllLoss2D") else unreduced.entries(node)
            divisors, mean = (*divisors, averaged.numel()), True
        yield unreduced.part(node, divisors, factor, mean)
    else:
        yield from _through(node, kind, divisors, factor, mean)


def _through(node: Any, kind: str, divisors: tuple[float, ...], factor: float, mean: bool) -> Iterator[_Part]:
    """What lies below a node that is no reduction."""
    below = [child for child, _ in node.next_functions if child is not None]
    if kind in ("Mul", "Div"):
        other: Any = node._saved_other if len(below) == 1 else None
        count = isinstance(other, Tensor) and kind == "Div" and not other.is_floating_point()
        if not count and not _is_number(other):
            how = "multiplied" if kind == "Mul" else "divided"
            raise RuntimeError(
                f"the loss is {how} by a tensor, which may depend on the whole batch: use a number for a constant. "
                f"{_FIX}"
            )
        mean |= count and not _is_number(other)
        if kind == "Div":
            divisors += (float(other),)
        else:
            factor *= float(other)
    elif kind not in _LINEAR and len(node._input_metadata[0].shape):  # the loss of a batch of one, not reduced
        (metadata,) = node._input_metadata
        if math.prod(metadata.shape) != 1:
            raise RuntimeError(f"the loss must be a scalar reduced over the examples of the batch. {_FIX}")
        yield _part(node, (node, 0), tuple(metadata.shape), divisors, factor, mean)
        return
    elif kind not in _LINEAR:
        raise RuntimeError(
            f"the loss must be a mean or a sum of one loss per example, but {kind} was applied to it. {_FIX}"
        )
    for child, sign in zip(below, _signs(node, kind, len(below)), strict=True):
        yield from _parts(child, divisors, factor * sign, mean)


def _signs(node: Any, kind: str, count: int) -> list[float]:
    alpha = float(getattr(node, "_saved_alpha", 1.0))
    both = {"Neg": [-1.0], "Add": [1.0, alpha], "Sub": [1.0, -alpha], "Rsub": [-alpha, 1.0]}.get(kind, [1.0])
    if len(both) == count:
        return both
    present = [sign for sign, (child, _) in zip(both, node.next_functions, strict=False) if child is not None]
    return present if len(present) == count else [1.0] * count


def _part(
    node: Any, below: tuple[Any, int], shape: tuple[int, ...], divisors: tuple[float, ...], factor: float, mean: bool
) -> _Part:
    metadata = node._input_metadata[0]
    edge, number = below
    if edge is None:
        return _Part(mean, divisors, factor, (), shape, metadata.dtype, metadata.device)
    start = GradientEdge(edge, number) if getattr(edge, "variable", None) is None else None
    if start is None:
        raise RuntimeError(f"the loss reduces a parameter itself, not the losses of examples. {_FIX}")
    dtype = edge._input_metadata[number].dtype
    return _Part(mean, divisors, factor, ((start, lambda entry: entry),), shape, dtype, metadata.device)


class _Unreduced:
    """A loss function that reduces what it computes; its gradient without the reduction."""

    def __init__(self, *arguments: str, targets: int = 1) -> None:
        self.arguments = arguments
        self.both = targets == 2  # self and target may both need gradients

    def entries(self, node: Any) -> Tensor:
        """A tensor with as many entries as were reduced."""
        kind = kind_of(node)
        if kind in ("NllLoss", "NllLoss2D", "MultiMarginLoss"):
            return node._saved_target
        x: Tensor = node._saved_self
        if kind == "MultilabelMarginLoss":
            return x[..., 0] if x.dim() > 1 else x[:1].sum()
        return x

    def part(self, node: Any, divisors: tuple[float, ...], factor: float, mean: bool) -> _Part:
        entries, x = self.entries(node), node._saved_self
        edges = []
        for position, (child, number) in enumerate(node.next_functions):
            if child is not None:
                edges.append((GradientEdge(child, number), functools.partial(self._gradient, node, position)))
        return _Part(mean, divisors, factor, tuple(edges), tuple(entries.shape), x.dtype, x.device)

    def _gradient(self, node: Any, position: int, entry: Tensor) -> Tensor:
        kind = kind_of(node)
        if position != 0:
            raise RuntimeError(f"the target of a loss ({kind}) depends on the model. {_FIX}")
        saved = {name: getattr(node, f"_saved_{name}") for name in self.arguments if name != "reduction"}
        if "ignore_index" in saved:
            saved["ignore_index"] = _signed(saved["ignore_index"])
        saved["reduction"] = 0
        if kind == "BinaryCrossEntropyWithLogits":
            return _bce_with_logits(entry, **saved)
        function = getattr(torch.ops.aten, _ATEN[kind])
        gradient: Tensor = function(entry, *(saved[name] for name in self.arguments))
        return gradient


def _bce_with_logits(
    entry: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, pos_weight: Tensor | None, reduction: int
) -> Tensor:
    """``w ((1 - y) s - p y (1 - s))`` with s the sigmoid of the logit and p the weight of positives."""
    s = self.sigmoid()
    gradient = s - target if pos_weight is None else (1 - target) * s - pos_weight * target * (1 - s)
    return entry * (gradient if weight is None else gradient * weight)


_ATEN = {
    "NllLoss": "nll_loss_backward",
    "NllLoss2D": "nll_loss2d_backward",
    "MseLoss": "mse_loss_backward",
    "SmoothL1Loss": "smooth_l1_loss_backward",
    "HuberLoss": "huber_loss_backward",
    "BinaryCrossEntropy": "binary_cross_entropy_backward",
    "MultiMarginLoss": "multi_margin_loss_backward",
    "SoftMarginLoss": "soft_margin_loss_backward",
    "MultilabelMarginLoss": "multilabel_margin_loss_backward",
}
_NLL = _Unreduced("self", "target", "weight", "reduction", "ignore_index", "total_weight")
_UNREDUCED = {
    "NllLoss": _NLL,
    "NllLoss2D": _NLL,
    "MseLoss": _Unreduced("self", "target", "reduction"),
    "SmoothL1Loss": _Unreduced("self", "target", "reduction", "beta"),
    "HuberLoss": _Unreduced("self", "target", "reduction", "delta"),
    "BinaryCrossEntropy": _Unreduced("self", "target", "weight", "reduction"),
    "BinaryCrossEntropyWithLogits": _Unreduced("self", "target", "weight", "pos_weight", "reduction"),
    "MultiMarginLoss": _Unreduced("self", "target", "p", "margin", "weight", "reduction"),
    "SoftMarginLoss": _Unreduced("self", "target", "reduction"),
    "MultilabelMarginLoss": _Unreduced("self", "target", "reduction", "is_target"),
}


def _signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63  # torch shows it unsigned


def _require_equal_weights(node: Any) -> None:
    """Cross entropy alone divides a mean by something else than how many there are."""
    ignored = _signed(node._saved_ignore_index)
    if node._saved_weight is not None:
        by = "class weights divides by the weights"
    elif bool((node._saved_target == ignored).any()):
        by = f"ignored labels ({ignored}) divides by the number of other labels"
    else:
        return
    raise RuntimeError(
        f"a mean with {by} of the whole batch, so that each label changes every example's gradient. {_FIX}"
    )


def _is_number(other: Any) -> bool:
    """Whether a factor was a Python number: torch saves it as a tensor that yields in type promotion."""
    if not isinstance(other, Tensor):
        return isinstance(other, (int, float))
    weakest = torch.float16 if other.is_floating_point() else torch.int8
    return other.dim() == 0 and torch.result_type(other, torch.tensor(1, dtype=weakest)) == weakest
