"""The loss of an ordinary ``loss.backward()``: what it sums up over the batch, and whether it keeps the examples apart.

Clipping bounds one example's share only if no other example changes that share before it is clipped. A mean that
divides by class weights of the whole batch, or the root of a mean, lets every example change all the others'. So does
the rounding of a mean: with one more example, 1/b is another number in every gradient. Therefore
``torch.autograd.backward`` is wrapped from the first clipper on, and while one is attached the graph of a loss that
reaches it is read before it runs:

- between the scalar and the losses that it sums up, known sums and means, and numbers as factors, are plain;
- from there to the operations that parameters enter, each must work on one example at a time (`clipping/walk.py`);
- the backward starts at the losses, where each weighs the same number whatever the batch: 1, for a plain mean.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpkernels.clipping import walk
from dpkernels.clipping.walk import Constant, MixesExamples, below, operation, shape_of

_TRAINER = "set model_accepts_loss_kwargs = False on a transformers Trainer"
_FIX = "Call optimizer.backward(losses) with one loss per example (reduction='none')."
_LINEAR = {"Add", "Alias", "Clone", "Neg", "Reshape", "ReshapeAlias", "Rsub", "Squeeze", "Sub", "ToCopy", "View"}

_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


class Seed(NamedTuple):
    """Where a backward starts: a gradient with the batch as the major part of dimension ``axis``."""

    root: GradientEdge
    gradient: Tensor
    axis: int


@dataclass
class Memory:
    """What must be the same for every batch, as the first one had it."""

    weights: dict[tuple[str, ...], set[float]]  # kind of part -> weights of an example's loss
    constants: dict[tuple[str, int], Tensor]  # operation and how often it was met -> operand without batch

    @classmethod
    def empty(cls) -> Memory:
        return cls({}, {})


class _Part(NamedTuple):
    """One reduction that the scalar is made of."""

    node: Any
    output: int
    kind: tuple[str, ...]  # operations met on the way, but factors
    mean: bool
    divisors: tuple[float, ...]  # numbers that it is divided by, the elements of a mean among them
    factor: float  # product of the numbers that it is multiplied by
    reduced: bool = True


def listen(clipper: Any) -> None:
    """Read the losses of ordinary backward calls from now on, as long as ``clipper`` lives or until :func:`forget`.

    ``clipper`` has ``owns(leaf)``, whether a leaf of a graph is a parameter that it clips, and
    ``ordinary_backward(roots, ...)``, which runs instead of torch's backward for a graph that holds such a leaf.
    """
    _listeners.add(clipper)
    if not hasattr(torch.autograd.backward, "_plain"):
        torch.autograd.backward = _reading(torch.autograd.backward)


def forget(clipper: Any) -> None:
    """End what :func:`listen` began."""
    _listeners.discard(clipper)


def _reading(backward: Any) -> Any:
    @functools.wraps(backward)
    def reading(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> Any:
        options = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
        nested = torch._C._current_graph_task_id() != -1  # what reentrant checkpointing runs within a backward
        clipper = None if nested or not _listeners else _reached(tensors, inputs)
        if clipper is None:
            return backward(tensors, grad_tensors, grad_variables=grad_variables, **options)
        given = grad_variables if grad_tensors is None else grad_tensors
        if any(g is not None for g in (given if isinstance(given, (tuple, list)) else (given,))):
            raise RuntimeError(f"backward(gradient=...) hides how the examples are weighted. {_FIX}")
        return clipper.ordinary_backward(_nodes(tensors), tensors, options)

    reading._plain = backward  # type: ignore[attr-defined]
    return reading


def _nodes(tensors: Any) -> list[tuple[Any, int]]:
    roots = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
    edges = [(r.node, r.output_nr) if isinstance(r, GradientEdge) else (r.grad_fn, r.output_nr) for r in roots]
    return [edge for edge in edges if edge[0] is not None]


def _reached(tensors: Any, inputs: Any) -> Any | None:
    """The clipper of a parameter that the backward of ``tensors`` reaches; None for the losses of other models.

    Raises:
        RuntimeError: there are several.
    """
    wanted = walk.leaves([node for node, _ in _nodes(tensors)])
    if inputs is not None:
        wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    reached = [clipper for clipper in list(_listeners) if any(clipper.owns(leaf) for leaf in wanted)]
    if len(reached) > 1:
        raise RuntimeError(
            "one loss reaches the models of two private optimizers: detach() what one model gives to the other, or "
            "freeze the other with requires_grad_(False) for this backward, or train both as one model"
        )
    return reached[0] if reached else None


def require_free(model: torch.nn.Module) -> None:
    """Raise ValueError if another clipper listens for parameters of ``model``."""
    if any(clipper.owns(p) for clipper in list(_listeners) for p in model.parameters()):
        raise ValueError(
            "model already has a GhostClipper or a private optimizer attached, and a second one would clip the "
            "same gradients again: call optimizer.clipper.detach() (or clipper.detach()) on the first, or delete "
            "it, before the model gets another"
        )


def read(
    roots: list[tuple[Any, int]],
    rows: int,
    loss_reduction: Literal["mean", "sum"],
    captured: Callable[[Any], bool],
    memory: Memory,
) -> list[Seed]:
    """The losses that a scalar sums up over ``rows`` examples, at least one, and what each weighs.

    Raises:
        RuntimeError: the loss is not the announced plain mean or sum of one loss per example, as far as its graph
            shows; or weights or operands differ from those of an earlier batch. Names what was found and the fix.
    """
    seeds: list[Seed] = []
    constants: list[Constant] = []
    weights: dict[tuple[str, ...], set[float]] = {}
    for node, output in roots:
        parts = list(_parts(node, output))
        for part in parts:
            if len(parts) + len(roots) > 2 and not _reaches(part.node, captured):
                raise RuntimeError(
                    "a part of the loss depends on no example: a penalty on weights cannot be clipped per example, use "
                    f"weight_decay; for the loss of another model call backward() on it alone. {_FIX}"
                )
            weight = _weight(part, rows, loss_reduction)
            under = part.node.next_functions[0][0]
            kind = part.kind if under is None else (*part.kind, operation(under))
            weights.setdefault(kind, set()).add(weight)
            try:
                new = list(_seeds(part, weight, rows, constants))
                for seed in new:
                    edge, axis = seed.root, seed.axis
                    walk.follow(edge.node, edge.output_nr, axis, rows, stop=captured, constants=constants)
            except MixesExamples as error:
                raise RuntimeError(
                    f"the loss must be a mean or a sum of one loss per example, but {error}. {_FIX}"
                ) from None
            seeds += new
    _require_same_weights(weights, memory)
    _require_same_constants(constants, memory)
    return seeds


# ---- from the scalar to what it sums up -----------------------------------------------------------------------------


def _parts(
    node: Any,
    output: int,
    kind: tuple[str, ...] = (),
    divisors: tuple[float, ...] = (),
    factor: float = 1.0,
    mean: bool = False,
) -> Iterator[_Part]:
    """Walk from a scalar's node to the reductions below it; divisors and factors were met on the way."""
    name = operation(node)
    reduction = getattr(node, "_saved_reduction", 0)
    if name == "AccumulateGrad":  # a parameter: its gradient does not pass through a layer
        return
    if name not in _LINEAR and name not in ("Mul", "Div"):
        kind += (name,)
    if name == "Mean":
        yield _Part(node, output, kind, True, (*divisors, math.prod(node._saved_self_sym_sizes)), factor)
    elif reduction == 1:
        of_labels = name in ("NllLoss", "NllLoss2D")
        if of_labels:
            _require_equal_weights(node)
        averaged = node._saved_target if of_labels else node._saved_self
        count = averaged.shape[:-1].numel() if name in _MARGINS else averaged.numel()
        yield _Part(node, output, kind, True, (*divisors, count), factor)
    elif name == "Sum" or reduction == 2:
        yield _Part(node, output, kind, mean, divisors, factor)
    else:
        if name in ("Mul", "Div"):
            first, second = ([child for child, _ in node.next_functions] + [None])[:2]
            other: Any = None
            if second is None:
                other = node._saved_other
            elif first is None and name == "Mul":
                other = node._saved_self
            counts = isinstance(other, Tensor) and name == "Div" and _is_count(other)
            if not counts and not walk.is_number(other):
                how = "multiplied by a tensor" if name == "Mul" else "divided by a tensor"
                also = "leave torch.amp.GradScaler out" if name == "Mul" else _TRAINER
                raise RuntimeError(
                    f"the loss is {how}, which may depend on the whole batch: use a number for a constant, and {also}. "
                    f"{_FIX}"
                )
            mean |= counts and not walk.is_number(other)
            if not math.isfinite(float(other)):
                raise RuntimeError(f"the loss has the factor {float(other)}. {_FIX}")
            if name == "Div":
                divisors += (float(other),)
            else:
                factor *= float(other)
        elif name not in _LINEAR and len(shape_of(node, output)):  # the loss of a batch of one, not reduced
            yield _Part(node, output, kind, mean, divisors, factor, reduced=False)
            return
        elif name not in _LINEAR:
            raise RuntimeError(
                f"the loss must be a mean or a sum of one loss per example, but {name} was applied to it. {_FIX}"
            )
        for i, (child, number) in enumerate(node.next_functions):
            if child is not None:
                yield from _parts(child, number, kind, divisors, factor * _coefficient(node, name, i), mean)


def _coefficient(node: Any, name: str, position: int) -> float:
    """What a linear operation multiplies one of its inputs by."""
    if name == "Neg":
        return -1.0
    if name in ("Add", "Sub", "Rsub") and position == (name != "Rsub"):
        return float(node._saved_alpha) * (1.0 if name == "Add" else -1.0)
    return 1.0


def _reaches(node: Any, captured: Callable[[Any], bool]) -> bool:
    """Whether a captured module is below ``node``."""
    return any(captured(each) for each in below([node]))


def _is_count(other: Tensor) -> bool:
    return other.dim() == 0 and not other.is_floating_point() and not other.is_complex() and other.dtype != torch.bool


def _require_equal_weights(node: Any) -> None:
    """Cross entropy alone divides a mean by something else than how many there are."""
    ignored = (node._saved_ignore_index + 2**63) % 2**64 - 2**63  # torch shows it unsigned
    if node._saved_weight is not None:
        by = "class weights divides by the weights"
    elif bool((node._saved_target == ignored).any()):
        by = f"ignored labels ({ignored}) divides by the number of other labels"
    else:
        return
    raise RuntimeError(
        f"a mean with {by} of the whole batch, so that each label changes every example's gradient. {_FIX}"
    )


def _weight(part: _Part, rows: int, loss_reduction: Literal["mean", "sum"]) -> float:
    """What one example's loss weighs, times ``rows`` for "mean": equal ones have equal bits."""
    if not part.reduced and rows != 1:
        raise RuntimeError(f"the loss must be a scalar reduced over the {rows} examples of the batch. {_FIX}")
    if part.mean and loss_reduction == "sum":
        raise RuntimeError("the loss is a mean over the batch: set loss_reduction='mean', which is the default")
    if loss_reduction == "mean" and all(d % rows for d in part.divisors or (1.0,)):
        raise RuntimeError(
            f"the loss must be a mean over the {rows} examples of the batch, but a part of it is divided by "
            f"{' and '.join(map('{:g}'.format, part.divisors)) or 'nothing'}. Set loss_reduction='sum' for a "
            f"plain sum. {_FIX}"
        )
    return _ratio(part, rows if loss_reduction == "mean" else 1)


def _ratio(part: _Part, times: int) -> float:
    """Factor times ``times`` by divisors, rounded once."""
    numerator, denominator = float(part.factor).as_integer_ratio()
    numerator *= times
    for divisor in part.divisors:
        over, under = float(divisor).as_integer_ratio()
        numerator, denominator = numerator * under, denominator * over
    if denominator == 0:
        raise RuntimeError(f"the loss is divided by 0. {_FIX}")
    return numerator / denominator


def _require_same_weights(weights: dict[tuple[str, ...], set[float]], memory: Memory) -> None:
    """Refuse weights that differ from those of an earlier batch: their numbers were computed from the batch."""
    for kind, now in weights.items():
        before = memory.weights.setdefault(kind, now)
        for weight in now - before:
            raise RuntimeError(
                f"the loss weights an example by {weight:g}, in an earlier batch by "
                f"{' or '.join(map('{:g}'.format, sorted(before)))}: a number that depends on the batch, such as its "
                f"size, lets every example change the others' gradients. {_FIX}"
            )


def _require_same_constants(constants: list[Constant], memory: Memory) -> None:
    """Refuse operands without batch dimension that differ from those of an earlier batch."""
    for number, (name, value) in enumerate(constants):
        before = memory.constants.setdefault((name, number), value)
        same = before.shape == value.shape and before.dtype == value.dtype
        if same and before.data_ptr() == value.data_ptr() and before._version == value._version:
            continue
        if not (same and before.device == value.device and torch.equal(before, value)):
            raise RuntimeError(
                f"{name} of the loss has an operand of shape {tuple(value.shape)} that all examples share and that is "
                "not the one of an earlier batch: computed from the batch, it lets every example change the others' "
                f"gradients. {_FIX}"
            )


# ---- where the backward starts --------------------------------------------------------------------------------------


def _seeds(part: _Part, weight: float, rows: int, constants: list[Constant]) -> Iterator[Seed]:
    """The inputs of the reduction, each element of which weighs ``weight``."""
    node, name = part.node, operation(part.node)
    if not part.reduced:
        shape = shape_of(node, part.output)
        if math.prod(shape) != 1:
            raise MixesExamples(f"it has shape {list(shape)}")
        yield Seed(GradientEdge(node, part.output), _full(node, part.output, weight), 0)
        return
    if math.prod(shape_of(node, part.output)) != 1:
        raise MixesExamples(f"{name} leaves {list(shape_of(node, part.output))}")
    if name in ("Mean", "Sum"):
        ((child, number),) = node.next_functions
        if child is None or operation(child) == "AccumulateGrad":
            return
        yield Seed(
            GradientEdge(child, number), _full(child, number, weight), _axis(name, shape_of(child, number), rows)
        )
        return
    gradient = _FUSED.get(name)
    (child, number), *others = node.next_functions
    if gradient is None or child is None or any(other is not None for other, _ in others):
        raise MixesExamples(f"{name} reduced it, whose backward dpkernels does not know for these inputs")
    if operation(child) == "AccumulateGrad":
        return
    x = node._saved_self
    axis = _axis(name, tuple(x.shape), rows) if x.dim() > (name in _OF_CLASSES) else 0
    if x.dim() == 1 and name in _OF_CLASSES and rows != 1:
        raise MixesExamples(f"{name} has the labels of one example")
    for operand in ("target", "weight", "pos_weight"):
        value = getattr(node, f"_saved_{operand}", None)
        aligned = name in _OF_CLASSES or not isinstance(value, Tensor) or value.dim() == x.dim()
        has_batch = aligned and operand != "pos_weight" and not (name in _OF_CLASSES and operand == "weight")
        if not isinstance(value, Tensor) or (value.dim() == 0 and rows == 1):
            continue
        if not (has_batch and value.size(0) == x.size(0) and (value.stride(0) or len(x) == 1)):
            constants.append(Constant.of(f"{name}.{operand}", value))
    with torch.no_grad():
        yield Seed(GradientEdge(child, number), gradient(node, weight), axis)


def _full(node: Any, output: int, weight: float) -> Tensor:
    about = node._input_metadata[output]
    return torch.full((), weight, dtype=about.dtype, device=about.device).expand(tuple(about.shape))


def _axis(name: str, shape: tuple[int, ...], rows: int) -> int:
    """The batch dimension of what is reduced: the first whose size is a multiple of the batch's."""
    axis = next((dim for dim, size in enumerate(shape) if size >= rows and size % rows == 0), None)
    if axis is None and rows == 1:
        return 0
    if axis is None:
        raise MixesExamples(f"{name} is taken over {list(shape)}, which has no dimension of {rows} examples")
    return axis


def _like(node: Any, weight: float, shape: Any = None) -> Tensor:
    """The gradient of a loss without reduction, of its input's shape unless told otherwise."""
    x = node._saved_self
    return x.new_full(x.shape if shape is None else shape, weight)


def _nll(backward: Any) -> Callable[[Any, float], Tensor]:
    def gradient(node: Any, weight: float) -> Tensor:
        x, target = node._saved_self, node._saved_target
        ignored = (node._saved_ignore_index + 2**63) % 2**64 - 2**63
        upstream = _like(node, weight, target.shape)
        result: Tensor = backward(upstream, x, target, node._saved_weight, 0, ignored, node._saved_total_weight)
        return result

    return gradient


def _with_logits(node: Any, weight: float) -> Tensor:
    x, target = node._saved_self, node._saved_target
    gradient: Tensor = x.sigmoid() - target
    if node._saved_pos_weight is not None:
        positive = node._saved_pos_weight * target
        gradient = (positive + 1 - target) * x.sigmoid() - positive
    if node._saved_weight is not None:
        gradient = gradient * node._saved_weight
    return gradient * weight


_aten = torch.ops.aten
_OF_CLASSES = {"NllLoss", "NllLoss2D", "MultiMarginLoss", "MultilabelMarginLoss"}  # reduce classes, too
_MARGINS = {"MultiMarginLoss", "MultilabelMarginLoss"}
#: Losses that torch reduces in one step with their formula: the gradient of their input where each element, or each
#: example's label, weighs the same.
_FUSED: dict[str, Callable[[Any, float], Tensor]] = {
    "NllLoss": _nll(_aten.nll_loss_backward.default),
    "NllLoss2D": _nll(_aten.nll_loss2d_backward.default),
    "MseLoss": lambda n, w: _aten.mse_loss_backward.default(_like(n, w), n._saved_self, n._saved_target, 0),
    "SmoothL1Loss": lambda n, w: _aten.smooth_l1_loss_backward.default(
        _like(n, w), n._saved_self, n._saved_target, 0, n._saved_beta
    ),
    "HuberLoss": lambda n, w: _aten.huber_loss_backward.default(
        _like(n, w), n._saved_self, n._saved_target, 0, n._saved_delta
    ),
    "BinaryCrossEntropy": lambda n, w: _aten.binary_cross_entropy_backward.default(
        _like(n, w), n._saved_self, n._saved_target, n._saved_weight, 0
    ),
    "BinaryCrossEntropyWithLogits": _with_logits,
    "SoftMarginLoss": lambda n, w: _aten.soft_margin_loss_backward.default(
        _like(n, w), n._saved_self, n._saved_target, 0
    ),
    "MultiMarginLoss": lambda n, w: _aten.multi_margin_loss_backward.default(
        _like(n, w, n._saved_target.shape),
        n._saved_self,
        n._saved_target,
        n._saved_p,
        n._saved_margin,
        n._saved_weight,
        0,
    ),
    "MultilabelMarginLoss": lambda n, w: _aten.multilabel_margin_loss_backward.default(
        _like(n, w, n._saved_target.shape[:-1]), n._saved_self, n._saved_target, 0, n._saved_is_target
    ),
}
