"""Whether what lies between the losses and a model's last layers keeps the examples apart, read from autograd's graph.

:func:`follow` walks from the tensors that the loss sums up towards the operations that parameters enter and carries
along which dimension is the batch. An operation that selects, sorts, shifts or sums across that dimension, a factor
that is one number for the whole batch, and every operation that is not listed here are refused. A dimension counts as
the batch if its size is a multiple of the number of examples and the examples are its major part, as in
[batch * positions, classes]; where sizes coincide by chance the guess is the first such dimension, and the tagged
backward decides (`clipping/proof.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class MixesExamples(RuntimeError):
    """An operation of the loss cannot be shown to keep the examples apart; the message is a clause that says why."""


class Constant(NamedTuple):
    """A tensor without batch dimension that scales or selects: public only if it is the same for every batch."""

    operation: str
    value: Tensor

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Constant:
        """Without what it was expanded by, such as the number of examples."""
        once = (slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
        return cls(name, tensor.detach()[tuple(once)])


class _Edge(NamedTuple):
    """A gradient on its way: the node that will receive it, as which of its outputs, and its batch dimension."""

    node: Any
    output: int
    axis: int


def operation(node: Any) -> str:
    """The name of a node without what torch adds: ``MulBackward0`` is ``Mul``."""
    name: str = node.name()
    return _short(name)


@functools.cache
def _short(name: str) -> str:
    return name.rsplit("::", 1)[-1].rstrip("0123456789").removesuffix("Backward")


def shape_of(node: Any, output: int) -> tuple[int, ...]:
    """The shape of a node's output."""
    return tuple(node._input_metadata[output].shape)


def below(nodes: list[Any]) -> Iterator[Any]:
    """All nodes that a backward from ``nodes`` passes, these first."""
    todo, seen = list(nodes), set(nodes)
    while todo:
        node = todo.pop()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                todo.append(child)


def leaves(nodes: list[Any]) -> list[Tensor]:
    """The tensors in whose ``.grad`` a backward from ``nodes`` accumulates."""
    return [node.variable for node in below(nodes) if hasattr(node, "variable")]


def follow(
    node: Any, output: int, axis: int, rows: int, *, stop: Callable[[Any], bool], constants: list[Constant]
) -> None:
    """Walk below one output of ``node`` whose batch dimension is ``axis``, down to operations that parameters enter.

    Args:
        rows: number of examples, at least 1.
        stop: whether a node is one that parameters enter: from there on, layouts are proved (`clipping/proof.py`).
        constants: receives the tensors that must be the same for every batch.

    Raises:
        MixesExamples: an operation mixes examples, or is not known.
    """
    seen: dict[tuple[Any, int], int] = {}
    todo = [_Edge(node, output, axis)] if rows > 1 else []
    while todo:
        edge = todo.pop()
        key, name = edge[:2], operation(edge.node)
        if key in seen:
            if seen[key] != edge.axis:
                raise MixesExamples(f"{name} is used with the batch in dimensions {seen[key]} and {edge.axis}")
            continue
        seen[key] = edge.axis
        if stop(edge.node):
            continue
        shape = shape_of(edge.node, edge.output)
        rule = _RULES.get(name)
        if rule is None:
            raise MixesExamples(f"{name} was applied to it, an operation that dpkernels does not know")
        step = _Step(edge.node, name, edge.output, shape, edge.axis, rows, constants)
        todo += rule(step)


class _Step:
    """One node of the walk, for the rule of its operation."""

    def __init__(
        self, node: Any, name: str, output: int, shape: tuple[int, ...], axis: int, rows: int, constants: list[Constant]
    ) -> None:
        self.node, self.name, self.output = node, name, output
        self.shape, self.axis, self.rows, self.constants = shape, axis, rows, constants

    def inputs(self) -> Iterator[tuple[Any, int, tuple[int, ...]]]:
        """Node, output number and shape of every input that a gradient flows to, but leaves."""
        for child, number in self.node.next_functions:
            if child is not None and operation(child) != "AccumulateGrad":
                yield child, number, shape_of(child, number)

    def mixes(self, how: str) -> MixesExamples:
        return MixesExamples(f"{self.name} {how}")

    def to(self, child: Any, number: int, shape: tuple[int, ...], axis: int) -> _Edge:
        """An input whose batch lies in ``axis``, which must be as large as the output's."""
        if not 0 <= axis < len(shape) or shape[axis] != self.shape[self.axis]:
            raise self.mixes(f"takes {list(shape)} to {list(self.shape)}, across the examples")
        return _Edge(child, number, axis)

    def same(self, axis: int | None = None) -> list[_Edge]:
        """All inputs have the batch in ``axis``, by default the output's."""
        return [self.to(*each, self.axis if axis is None else axis) for each in self.inputs()]

    def check_saved(self) -> None:
        """Every tensor that the node keeps must have the batch where the output has it."""
        for attribute in _saved_tensors(self.node.__class__):
            value = getattr(self.node, attribute)
            for tensor in value if isinstance(value, tuple) else (value,):
                if isinstance(tensor, Tensor):
                    self.check_operand(tensor, self.axis - len(self.shape) + tensor.dim())

    def check_operand(self, tensor: Tensor | None, axis: int) -> None:
        """``tensor`` must have its batch in ``axis``, or be a constant."""
        size = self.shape[self.axis]
        if tensor is None:
            return
        if 0 <= axis < tensor.dim() and tensor.size(axis) == size and (size == 1 or tensor.stride(axis) != 0):
            return
        if tensor.numel() != 1:
            self.constants.append(Constant.of(self.name, tensor))
        elif not is_number(tensor) and self.name in _FACTORS:
            raise self.mixes("has a tensor of one element as operand, which may depend on the whole batch")


@functools.cache
def _saved_tensors(kind: Any) -> list[str]:
    names = (name for name in dir(kind) if name.startswith("_saved_"))
    return [name for name in names if "_sym_" not in name and not name.startswith("_saved_result")]


def is_number(value: Any) -> bool:
    """Whether a factor was a Python number: torch saves it as a float64 or int64 that yields in type promotion."""
    if not isinstance(value, Tensor):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    weakest = {torch.float64: torch.float16, torch.int64: torch.int8}.get(value.dtype)
    return (
        weakest is not None
        and value.dim() == 0
        and torch.result_type(value, torch.ones((), dtype=weakest, device=value.device)) == weakest
    )


def is_range(index: Tensor, size: int) -> bool:
    """Whether an index is ``torch.arange(size)``, which leaves every example where it is."""
    same = index.numel() == size and index.dim() > 0 and index.size(0) == size and index.dtype != torch.bool
    return same and torch.equal(index.flatten(), torch.arange(size, device=index.device, dtype=index.dtype))


def _signed(dim: int, dims: int) -> int:
    """A dimension as torch saves it, sometimes unsigned, counted from the front."""
    dim = dim - 2**64 if dim >= 2**63 else dim
    return dim + dims if dim < 0 else dim


# ---- rules: the batch dimension of an operation's inputs, given its output's ----------------------------------------


def _elementwise(step: _Step) -> list[_Edge]:
    step.check_saved()
    edges = []
    for child, number, shape in step.inputs():
        axis = step.axis - len(step.shape) + len(shape)
        if axis < 0 or shape[axis] != step.shape[step.axis]:
            raise step.mixes(f"combines the losses with {list(shape)}, one value for all examples")
        edges.append(_Edge(child, number, axis))
    return edges


def _along(step: _Step) -> list[_Edge]:
    """Works along one or several dimensions and keeps them."""
    node = step.node
    dims = node._saved_dims if hasattr(node, "_saved_dims") else node._saved_dim
    dims = dims if isinstance(dims, tuple) else (dims,)
    if not dims or any(_signed(dim, len(step.shape)) == step.axis for dim in dims):
        raise step.mixes("works along the batch dimension")
    return step.same()


def _reduction(step: _Step) -> list[_Edge]:
    """Reduces some dimensions, which are kept with size 1 or removed."""
    edges = []
    for child, number, shape in step.inputs():
        dims = getattr(step.node, "_saved_dim", None)
        dims = dims if isinstance(dims, tuple) else () if dims is None else (dims,)
        removed = {_signed(dim, len(shape)) for dim in dims} or set(range(len(shape)))
        kept = [dim for dim in range(len(shape)) if dim not in removed]
        if len(step.shape) == len(shape):
            axis = step.axis
        elif len(step.shape) == len(kept):
            axis = kept[step.axis]
        else:
            raise step.mixes(f"takes {list(shape)} to {list(step.shape)}")
        if axis in removed:
            raise step.mixes("reduces the batch dimension before the end of the loss")
        edges.append(step.to(child, number, shape, axis))
    return edges


def _reshape(step: _Step) -> list[_Edge]:
    """Keeps the row-major order of all elements."""
    before = math.prod(step.shape[: step.axis])
    edges = []
    for child, number, shape in step.inputs():
        axis = next(
            (
                dim
                for dim in range(len(shape))
                if math.prod(shape[:dim]) == before and shape[dim] % step.rows == 0 and shape[dim] >= step.rows
            ),
            None,
        )
        if axis is None and step.rows > 1:
            raise step.mixes(f"takes {list(shape)} to {list(step.shape)}, which merges examples with something else")
        if axis is not None:
            edges.append(_Edge(child, number, axis))
    return edges


def _permute(step: _Step) -> list[_Edge]:
    dims = len(step.shape)
    if step.name == "Permute":
        axis = _signed(step.node._saved_dims[step.axis], dims)
    else:
        pair = (0, 1) if step.name == "T" else (step.node._saved_dim0, step.node._saved_dim1)
        first, second = (_signed(dim, dims) for dim in pair)
        axis = {first: second, second: first}.get(step.axis, step.axis)
    return step.same(axis)


def _remove(step: _Step) -> list[_Edge]:
    """Takes one entry of a dimension: select, unbind."""
    dim = _signed(step.node._saved_dim, len(step.shape) + 1)
    return step.same(step.axis + (dim <= step.axis))


def _stack(step: _Step) -> list[_Edge]:
    dim = _signed(step.node._saved_dim, len(step.shape))
    if dim == step.axis:
        raise step.mixes("joins tensors along the batch dimension")
    return step.same(step.axis - (dim < step.axis))


def _concatenate(step: _Step) -> list[_Edge]:
    if _signed(step.node._saved_dim, len(step.shape)) == step.axis and len(step.node.next_functions) > 1:
        raise step.mixes("joins tensors along the batch dimension")
    return step.same()


def _repeat(step: _Step) -> list[_Edge]:
    repeats = step.node._saved_repeats
    if repeats[step.axis] != 1:
        raise step.mixes("repeats the examples")
    return [step.to(*each, step.axis - len(step.shape) + len(each[2])) for each in step.inputs()]


def _index(step: _Step) -> list[_Edge]:
    """``x[torch.arange(batch), labels]`` and ``x[:, indices]`` leave the first dimension as it is."""
    first, *rest = step.node._saved_indices
    others = sum(index is not None for index in rest)
    if first is None:
        plain = others <= 1
    else:
        plain = all(index is not None for index in rest[:others]) and is_range(first, step.shape[0])
    if step.axis != 0 or not plain:
        raise step.mixes("picks examples by an index or a mask")
    return step.same()


def _first(step: _Step) -> list[_Edge]:
    """Works on each entry of dimension 0 by itself."""
    if step.axis != 0:
        raise step.mixes(f"is applied with the batch in dimension {step.axis}")
    return step.same()


def _convolution(step: _Step) -> list[_Edge]:
    (child, number), *parameters = step.node.next_functions
    _require_leaves(step, parameters)
    if child is None or operation(child) == "AccumulateGrad":
        return []
    if step.axis != 0:
        raise step.mixes(f"is applied with the batch in dimension {step.axis}")
    return [step.to(child, number, shape_of(child, number), 0)]


def _norm(step: _Step) -> list[_Edge]:
    (child, number), *parameters = step.node.next_functions
    _require_leaves(step, parameters)
    if step.name in ("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm") and step.node._saved_training:
        raise step.mixes("normalizes with the values of the whole batch")
    normalized = getattr(step.node, "_saved_normalized_shape", None)
    last = len(step.shape) - len(normalized) if normalized is not None else 1
    if step.axis >= last:
        raise step.mixes("normalizes across the examples")
    if child is None or operation(child) == "AccumulateGrad":
        return []
    return [step.to(child, number, shape_of(child, number), step.axis)]


def _require_leaves(step: _Step, inputs: Iterable[tuple[Any, int]]) -> None:
    if any(child is not None and operation(child) != "AccumulateGrad" for child, _ in inputs):
        raise step.mixes("has weights that are computed")


#: Operation -> (position among the node's inputs, saved attribute) of its left and right factor.
_PRODUCTS = {
    "Mm": ((0, "_saved_self"), (1, "_saved_mat2")),
    "Bmm": ((0, "_saved_self"), (1, "_saved_mat2")),
    "Mv": ((0, "_saved_self"), (1, "_saved_vec")),
    "Addmm": ((1, "_saved_mat1"), (2, "_saved_mat2")),
    "Addmv": ((1, "_saved_mat"), (2, "_saved_vec")),
    "Baddbmm": ((1, "_saved_batch1"), (2, "_saved_batch2")),
}


def _product(step: _Step) -> list[_Edge]:
    """Matrix products: the batch is a row of the left factor, a column of the right one, or a matrix of both."""
    batched, dims = step.name in ("Bmm", "Baddbmm"), len(step.shape)
    edges = []
    for side, (position, attribute) in enumerate(_PRODUCTS[step.name]):
        child, number = step.node.next_functions[position]
        has_batch = (batched and step.axis == 0) or step.axis == (dims - 2 if side == 0 and dims > 1 else dims - 1)
        if step.name in ("Mv", "Addmv"):
            has_batch = side == 0
        if child is None:
            other = getattr(step.node, attribute)  # kept for the other factor's gradient
            if isinstance(other, Tensor):
                step.check_operand(other, step.axis if has_batch else -1)
        elif operation(child) != "AccumulateGrad":
            if not has_batch:
                raise step.mixes("multiplies examples with each other")
            edges.append(step.to(child, number, shape_of(child, number), step.axis))
    added = {"Addmm", "Addmv", "Baddbmm"}
    if step.name in added:
        _require_leaves(step, step.node.next_functions[:1])
    return edges


def _per_row(step: _Step) -> list[_Edge]:
    """A loss without reduction of [batch, classes, ...], one value for each label."""
    if step.axis != 0:
        raise step.mixes(f"is applied with the batch in dimension {step.axis}")
    step.check_operand(step.node._saved_target, 0)
    step.check_operand(getattr(step.node, "_saved_weight", None), -1)
    return step.same()


def _ctc(step: _Step) -> list[_Edge]:
    """[time, batch, classes] to [batch]."""
    return step.same(1)


def _names(names: str) -> list[str]:
    return names.split()


#: Where a tensor of one element scales, selects or bounds the losses.
_FACTORS: frozenset[str] = frozenset(
    _names(
        "Mul Div Pow Where MaskedFill Minimum Maximum Clamp Lerp Addcmul Addcdiv Xlogy Atan Fmod Remainder "
        "Hypot Copysign LogAddExp LogAddExp2 MseLoss SmoothL1Loss HuberLoss BinaryCrossEntropy "
        "BinaryCrossEntropyWithLogits SoftMarginLoss Mm Bmm Mv Addmm Addmv Baddbmm"
    )
)


def _scatter(step: _Step) -> list[_Edge]:
    dim = _signed(step.node._saved_dim, len(step.shape))
    if dim == step.axis:
        raise step.mixes("writes across the examples")
    return step.same()


_RULES: dict[str, Callable[[_Step], list[_Edge]]] = {
    "_MeanSquare": _Step.same,  # of each example, in losses/losing_less.py
    "Scatter": _scatter,
    **dict.fromkeys(
        _names(
            "Add Sub Rsub Mul Div Neg Abs Exp Exp2 Expm1 Log Log1P Log2 Log10 Sqrt Rsqrt Pow Reciprocal Sin Cos "
            "Tan Asin Acos Atan Atan2 Sinh Cosh Tanh Asinh Acosh Atanh Sigmoid LogSigmoid Logit Softplus Elu Gelu "
            "Silu Mish Relu LeakyRelu Hardtanh Hardswish Hardsigmoid Hardshrink Softshrink Threshold Clamp "
            "ClampMin ClampMax Minimum Maximum Where MaskedFill Erf Erfc Erfinv Lgamma Digamma Sgn Sign Floor "
            "Ceil Round Trunc Frac Lerp Addcmul Addcdiv Xlogy Fmod Remainder Hypot Copysign LogAddExp LogAddExp2 "
            "NanToNum Sinc Expand Alias Clone ToCopy NativeDropout FusedDropout PreluKernel MseLoss SmoothL1Loss "
            "HuberLoss BinaryCrossEntropy BinaryCrossEntropyWithLogits SoftMarginLoss Detach Lift Contiguous"
        ),
        _elementwise,
    ),
    **dict.fromkeys(
        _names(
            "LogSoftmax Softmax SoftmaxBackwardData Cumsum Cumprod Cummax Cummin Logcumsumexp Flip Roll Sort Topk "
            "Gather IndexSelect Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes Glu"
        ),
        _along,
    ),
    **dict.fromkeys(
        _names(
            "Sum Mean Amax Amin Max Min Median Nanmedian Nansum Logsumexp LinalgVectorNorm Norm Var Std Prod "
            "Aminmax Mode Kthvalue"
        ),
        _reduction,
    ),
    **dict.fromkeys(_names("View UnsafeView Reshape ReshapeAlias Squeeze Unsqueeze Flatten Unflatten"), _reshape),
    **dict.fromkeys(("Permute", "Transpose", "T"), _permute),
    **dict.fromkeys(("Select", "Unbind"), _remove),
    "Stack": _stack,
    "Cat": _concatenate,
    "Repeat": _repeat,
    "Index": _index,
    "Slice": lambda step: step.same(),
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys(("Convolution", "ConvolutionOverrideable", "MkldnnConvolution", "CudnnConvolution"), _convolution),
    **dict.fromkeys(
        _names("NativeLayerNorm FusedRmsNorm NativeGroupNorm NativeBatchNorm CudnnBatchNorm MiopenBatchNorm"), _norm
    ),
    **dict.fromkeys(
        _names(
            "AvgPool1D AvgPool2D AvgPool3D AdaptiveAvgPool2D AdaptiveAvgPool3D MkldnnAdaptiveAvgPool2D "
            "MaxPool2DWithIndices MaxPool3DWithIndices AdaptiveMaxPool2D AdaptiveMaxPool3D MaxUnpool2D "
            "ConstantPadNd ReflectionPad1D ReflectionPad2D ReflectionPad3D ReplicationPad1D ReplicationPad2D "
            "ReplicationPad3D Im2Col Col2Im PixelShuffle PixelUnshuffle UpsampleNearest1D UpsampleNearest2D "
            "UpsampleNearest3D UpsampleLinear1D UpsampleBilinear2D UpsampleBicubic2D UpsampleTrilinear3D "
            "UpsampleNearestExact1D UpsampleNearestExact2D UpsampleNearestExact3D GridSampler2D GridSampler3D "
            "ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention "
            "ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention"
        ),
        _first,
    ),
    **dict.fromkeys(("NllLoss", "NllLoss2D", "MultiMarginLoss", "MultilabelMarginLoss"), _per_row),
    "CtcLoss": _ctc,
}
