"""Whether an ordinary ``loss.backward()`` starts from a plain mean or sum over the batch.

Clipping bounds one example's share only if no other example changes that share before it is clipped. A mean that
divides by class weights of the whole batch, or the root of a mean, lets every example change all the others'. So from
the first clipper on ``torch.autograd.backward`` is wrapped, and while one is attached it reads the graph between the
scalar and the losses that were reduced, before it runs: known sums and means, and numbers as factors, are plain.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

_FIX = "Call optimizer.backward(losses) with one loss per example (reduction='none')."
_LINEAR = {"Add", "Alias", "Clone", "Neg", "Reshape", "ReshapeAlias", "Rsub", "Squeeze", "Sub", "ToCopy", "View"}

_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_running: dict[int, list[list[_Part] | RuntimeError]] = {}  # thread -> what its backward calls start from, nested


@dataclass(frozen=True)
class _Part:
    """One reduction that the scalar is made of."""

    mean: bool
    divisors: tuple[float, ...]  # numbers that it is divided by, the elements of a mean among them
    factor: float  # product of the numbers that it is multiplied by
    reduced: bool = True

    @property
    def weight(self) -> float:
        """What it is multiplied by."""
        return self.factor / math.prod(self.divisors)


def listen(clipper: object) -> None:
    """Read the losses of ordinary backward calls from now on, as long as ``clipper`` lives or until :func:`forget`."""
    _listeners.add(clipper)
    if not hasattr(torch.autograd.backward, "_reads_losses"):
        torch.autograd.backward = _reading(torch.autograd.backward)


def forget(clipper: object) -> None:
    """End what :func:`listen` began."""
    _listeners.discard(clipper)


def require_plain(loss_reduction: Literal["mean", "sum"], rows: int) -> tuple[float, ...]:
    """Refuse the running backward unless its loss is the announced plain mean or sum over ``rows`` examples.

    A number that the caller computed from the batch cannot be told from a constant, but by changing.

    Returns:
        The weight of one example's loss in each part of the scalar, times ``rows`` for "mean"; none for an empty batch.

    Raises:
        RuntimeError: the loss is something else, or was not seen; names what was found and the fix.
    """
    weights: list[float] = []
    # On a GPU the engine calls from a thread of its own, while the caller's waits.
    own = _running.get(threading.get_ident())
    calls = [own] if own else list(_running.values())
    if not calls:
        raise RuntimeError(f"gradients came by another way than loss.backward(), so that the loss was not seen. {_FIX}")
    if rows == 0:  # nobody's share could change
        return ()
    for outermost, *_ in calls:
        if isinstance(outermost, RuntimeError):
            raise outermost
        for part in outermost:
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
            weights.append(part.weight * (rows if loss_reduction == "mean" else 1))
    return tuple(weights)


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
    def reading(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not _listeners:
            return backward(tensors, grad_tensors, *args, **kwargs)
        thread = threading.get_ident()
        _running.setdefault(thread, []).append(_read(tensors, grad_tensors))
        try:
            return backward(tensors, grad_tensors, *args, **kwargs)
        finally:
            _running[thread].pop()
            if not _running[thread]:
                del _running[thread]

    reading._reads_losses = True  # type: ignore[attr-defined]
    return reading


def _read(tensors: Any, grad_tensors: Any) -> list[_Part] | RuntimeError:
    """The parts of the tensors that backward is called on; an error, for whom it concerns, if they are not plain."""
    losses = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    given = (grad_tensors,) if isinstance(grad_tensors, Tensor) else tuple(grad_tensors or ())
    if any(g is not None for g in given):
        return RuntimeError(f"backward(gradient=...) hides how the examples are weighted. {_FIX}")
    try:
        return [part for loss in losses if loss.grad_fn is not None for part in _parts(loss.grad_fn)]
    except RuntimeError as error:
        return error


def _parts(node: Any, divisors: tuple[float, ...] = (), factor: float = 1.0, mean: bool = False) -> Iterator[_Part]:
    """Walk from a scalar's node to the reductions below it; divisors and factors were met on the way."""
    name = node.name().rsplit("::", 1)[-1].rstrip("0123456789").removesuffix("Backward")
    reduction = getattr(node, "_saved_reduction", 0)
    if name == "AccumulateGrad":  # a parameter: its gradient does not pass through a layer
        return
    if name == "Mean":
        yield _Part(True, (*divisors, math.prod(node._saved_self_sym_sizes)), factor)
    elif reduction == 1:
        of_labels = name in ("NllLoss", "NllLoss2D")
        if of_labels:
            _require_equal_weights(node)
        averaged = node._saved_target if of_labels else node._saved_self
        yield _Part(True, (*divisors, averaged.numel()), factor)
    elif name == "Sum" or reduction == 2:
        yield _Part(mean, divisors, factor)
    else:
        below = [child for child, _ in node.next_functions if child is not None]
        if name in ("Mul", "Div"):
            other: Any = node._saved_other if len(below) == 1 else None
            count = isinstance(other, Tensor) and name == "Div" and not other.is_floating_point()
            if not count and not _is_number(other):
                how = "multiplied" if name == "Mul" else "divided"
                raise RuntimeError(
                    f"the loss is {how} by a tensor, which may depend on the whole batch: use a number for a constant. "
                    f"{_FIX}"
                )
            mean |= count and not _is_number(other)
            if name == "Div":
                divisors += (float(other),)
            else:
                factor *= float(other)
        elif name not in _LINEAR and len(node._input_metadata[0].shape):  # the loss of a batch of one, not reduced
            yield _Part(mean, divisors, factor, reduced=False)
            return
        elif name not in _LINEAR:
            raise RuntimeError(
                f"the loss must be a mean or a sum of one loss per example, but {name} was applied to it. {_FIX}"
            )
        for child in below:
            yield from _parts(child, divisors, factor, mean)


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


def _is_number(other: Any) -> bool:
    """Whether a factor was a Python number: torch saves it as a tensor that yields in type promotion."""
    if not isinstance(other, Tensor):
        return isinstance(other, (int, float))
    weakest = torch.float16 if other.is_floating_point() else torch.int8
    return other.dim() == 0 and torch.result_type(other, torch.tensor(1, dtype=weakest)) == weakest
