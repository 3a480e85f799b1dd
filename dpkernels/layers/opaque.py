"""Modules outside the registry: per-example gradients through expanded parameters.

Every trainable parameter below the module is expanded to [batch, ...] and the module runs on each example with its own
copy, under ``torch.func.vmap`` where that works and in a loop over examples otherwise. Autograd then delivers the
per-example gradients at the expansion, whatever the module computes. Slow and memory-hungry next to a layer of the
registry, but exact.

Which arguments belong to single examples is not told by their names, and by their sizes only where these differ from
the batch's. So a copy of the module is tried on scrambled arguments and parameters: the whole batch must give what the
examples give one by one. What has the batch's size and is shared by all examples all the same, such as a table of
positions or an attention mask, is found so; a module that computes across examples is refused.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from dpkernels.layers.base import OUTPUT_OF, Emit, Record, Rule
from dpkernels.layers.state import unchanged_buffers
from dpkernels.ops.clip import row_squared_norms, weighted_row_sum

#: Arguments of the batch's size that are not known to be per example, at most so many at once.
_MOST_UNKNOWN = 6


@dataclass
class _Role:
    """What is known of one tensor argument."""

    shared: bool = False  # at some call it had no dimension of the batch's size
    batches: set[int] = field(default_factory=set)  # batch sizes at which it had one
    found: bool | None = None  # whether it is per example, as a trial showed

    def per_example(self) -> bool | None:
        """Whether the argument is per example where it has the batch's size; None if that is not known."""
        if self.found is not None:
            return self.found
        if self.shared:
            return False
        return True if len(self.batches) > 1 else None


class _Call:
    """The arguments of one call, and which dimension of each tensor is the batch (-1: shared by all examples)."""

    def __init__(self, rule: OpaqueModule, leaves: list[Any], tree: TreeSpec, dims: list[int]) -> None:
        self.rule, self.leaves, self.tree, self.dims = rule, leaves, tree, dims
        self.batched = [i for i, dim in enumerate(dims) if dim >= 0]
        self.flat: list[Any] = []  # the output of the last run, flattened
        self.output_tree: TreeSpec | None = None
        self.output_dims: list[int] = []

    def run(self, body: nn.Module, parameters: dict[str, Tensor], tensors: list[Tensor]) -> list[Tensor]:
        """The tensors of the module's output on the batched arguments ``tensors``."""
        inputs = list(self.leaves)
        for i, t in zip(self.batched, tensors, strict=True):
            inputs[i] = t
        bound = inspect.BoundArguments(self.rule.signature, tree_unflatten(inputs, self.tree))
        named = {f"module.{slot}": p for slot, p in parameters.items()}
        output = functional_call(body, named, bound.args, bound.kwargs)
        self.flat, self.output_tree = tree_flatten(output)
        self.output_dims = self.rule.output_dims(output)
        for value in self.flat:
            if is_dataclass(value) or isinstance(value, PackedSequence):
                raise TypeError(
                    f"module {self.rule.path!r} has parameters of its own and returns a {type(value).__name__}, in "
                    "which dpkernels does not find the tensors: return a tensor, or a tuple, list or dictionary of them"
                )
        return [t for t in self.flat if isinstance(t, Tensor)]

    def run_whole(self, body: _Body) -> list[Tensor]:
        """The output for the arguments as they are."""
        return self.run(body, dict(body.module.named_parameters()), [self.leaves[i] for i in self.batched])

    def one(self, body: nn.Module, parameters: dict[str, Tensor], tensors: list[Tensor]) -> list[Tensor]:
        """The same for one example, without batch dimensions."""
        batches = [t.unsqueeze(self.dims[i]) for i, t in zip(self.batched, tensors, strict=True)]
        outputs = self.run(body, parameters, batches)
        for t, dim in zip(outputs, self.output_dims, strict=True):
            if t.dim() <= dim or t.size(dim) != 1:
                raise ValueError(
                    f"module {self.rule.path!r} must put out the batch in dimension {dim} of every tensor, but for one "
                    f"example gave shape {tuple(t.shape)}"
                )
        return [t.squeeze(dim) for t, dim in zip(outputs, self.output_dims, strict=True)]

    def over_examples(
        self, body: nn.Module, expanded: dict[str, Tensor], tensors: list[Tensor], rows: int, *, vectorized: bool
    ) -> list[Tensor]:
        """The outputs of all examples, the batch in dimension 0; parameters are [rows, ...]."""
        dims = [self.dims[i] for i in self.batched]
        if vectorized:
            one = functools.partial(self.one, body)
            return vmap(one, in_dims=(0, dims), randomness="different")(expanded, tensors)
        each = [
            self.one(
                body,
                {slot: p[i] for slot, p in expanded.items()},
                [t.select(d, i) for t, d in zip(tensors, dims, strict=True)],
            )
            for i in range(rows)
        ]
        return [torch.stack(parts) for parts in zip(*each, strict=True)]


class OpaqueModule(Rule):
    """A module, with all that is below it, whose computation dpkernels does not know."""

    def __init__(self, module: nn.Module, path: str) -> None:
        super().__init__(module, path)
        self.signature = inspect.signature(module.forward)
        self._vmap = True  # until it fails
        self._roles: dict[tuple[Any, ...], _Role] = {}
        self._tried: set[Any] = set()  # kinds of calls that a trial confirmed

    def slots(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def call(self, emit: Emit, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = self.signature.bind(*args, **kwargs).arguments
        leaves, tree = tree_flatten(arguments)
        if any(isinstance(value, PackedSequence) for value in arguments.values()):
            raise TypeError(
                f"module {self.path!r} got a PackedSequence, which merges examples with time steps: give it the padded "
                "[batch, time, features] tensor, and pick each example's last valid step from its output"
            )
        rows, dims = self._arguments(leaves, tree, arguments, forward)
        call, body = _Call(self, leaves, tree, dims), _Body(self.module, forward)
        expanded = {slot: _Expand.apply(self, emit, slot, p, rows) for slot, p in self.slots().items()}
        with unchanged_buffers(self.module, self.path):
            outputs = self._over_examples(call, body, expanded, rows)
        whole = [t.movedim(0, dim) for t, dim in zip(outputs, call.output_dims, strict=True)]
        for t, dim in zip(whole, call.output_dims, strict=True):
            if t.grad_fn is not None:
                cast(dict[str, Any], t.grad_fn.metadata)[OUTPUT_OF] = (emit, dim)
        stacked = iter(whole)
        flat = [next(stacked) if isinstance(value, Tensor) else value for value in call.flat]
        assert call.output_tree is not None
        return tree_unflatten(flat, call.output_tree)

    def _over_examples(self, call: _Call, body: nn.Module, expanded: dict[str, Tensor], rows: int) -> list[Tensor]:
        """The outputs with the batch in dimension 0."""
        tensors = [call.leaves[i] for i in call.batched]
        if rows == 0:  # neither rung takes an empty batch: run on it as it is, tied to the expansions that will report
            nothing = sum(p.sum() for p in expanded.values())
            outputs = call.run(body, {slot: p.detach() for slot, p in self.slots().items()}, tensors)
            return [t.movedim(dim, 0) + nothing for t, dim in zip(outputs, call.output_dims, strict=True)]
        if self._vmap:
            try:
                return call.over_examples(body, expanded, tensors, rows, vectorized=True)
            except Exception:  # whatever torch.func cannot do; the loop raises what is the module's own fault
                self._vmap = False
        try:
            return call.over_examples(body, expanded, tensors, rows, vectorized=False)
        except RuntimeError as error:
            if "modified inplace" not in str(error):
                raise
            raise RuntimeError(
                f"module {self.path!r} writes to its parameters in its forward: what it computes from private data and "
                "keeps has no noise. Let nothing but the optimizer write to them."
            ) from error

    # ---- which arguments are the examples' ---------------------------------------------------------------------------

    def _arguments(
        self, leaves: list[Any], tree: TreeSpec, arguments: dict[str, Any], forward: Callable[..., Any]
    ) -> tuple[int, list[int]]:
        """The batch size, and the batch dimension of every argument (-1: none)."""
        dims, _ = tree_flatten({name: self._argument_dims(name, value) for name, value in arguments.items()})
        tensors = [i for i, dim in enumerate(dims) if dim >= 0 and leaves[i].dim() > dim]
        if not tensors:
            raise ValueError(
                f"module {self.path!r} has parameters of its own and got no tensor with a batch, so that its examples "
                "cannot be told apart: pass it a tensor with the batch first, or hold the parameter in the module that "
                "has one"
            )
        first = next((i for i in tensors if leaves[i].requires_grad), tensors[0])
        rows = leaves[first].size(dims[first])
        unknown = []
        for i in range(len(dims)):
            if i == first or dims[i] < 0:
                continue
            role = self._roles.setdefault((str(tree), i), _Role())
            if leaves[i].dim() <= dims[i] or leaves[i].size(dims[i]) != rows:
                role.shared, dims[i] = True, -1
                continue
            if rows > 1:
                role.batches.add(rows)
            per_example = role.per_example()
            if per_example is None and rows > 1:
                unknown.append(i)
            elif per_example is False:
                dims[i] = -1
        kind = (str(tree), self.module.training, tuple(t.dim() if isinstance(t, Tensor) else None for t in leaves))
        if rows > 1 and (unknown or kind not in self._tried):
            dims = self._try(leaves, tree, dims, unknown, rows)
            for i in unknown:
                self._roles[str(tree), i].found = dims[i] >= 0
            self._tried.add(kind)
        return rows, dims

    def _argument_dims(self, name: str, value: Any) -> Any:
        """The tree of ``value`` with the dimension in which each tensor may have the batch, -1 for other values."""
        mask = isinstance(self.module, nn.MultiheadAttention) and name == "attn_mask" and isinstance(value, Tensor)
        if mask and value.dim() != 2:
            raise ValueError(
                f"attn_mask of module {self.path!r} must be 2-D (shared by all examples), got {value.dim()}-D"
            )
        hidden = isinstance(self.module, nn.RNNBase) and name == "hx"
        return tree_map(lambda leaf: (1 if hidden else 0) if isinstance(leaf, Tensor) else -1, value)

    def output_dims(self, output: Any) -> list[int]:
        """The batch dimension of every tensor of an output."""
        if isinstance(self.module, nn.RNNBase):  # (output, hidden): hidden states are [layers, batch, features]
            return [0] + [1] * (len(tree_flatten(output)[0]) - 1)
        return [0 for t in tree_flatten(output)[0] if isinstance(t, Tensor)]

    def _try(self, leaves: list[Any], tree: TreeSpec, dims: list[int], unknown: list[int], rows: int) -> list[int]:
        """``dims``, with those of ``unknown`` arguments such that examples give one by one what the batch gives."""
        if len(unknown) > _MOST_UNKNOWN:
            raise ValueError(f"module {self.path!r} got {len(unknown)} tensors of the batch's size, which are too many")
        with _trial(self.module) as module:
            body = _Body(module, module.forward)
            for scramble in (True, False):  # as they are, where the module does not take scrambled values
                values = _values(leaves, module, scramble=scramble)
                try:
                    whole = _Call(self, values, tree, dims).run_whole(body)
                except Exception:
                    continue
                if any(bool(t.isfinite().any()) for t in whole):
                    break
            else:
                if not unknown:  # nothing to decide, and what is wrong with the call itself will show
                    return dims
                whole = []
            for size in range(len(unknown) + 1):
                for shared in itertools.combinations(unknown, size):
                    attempt = [-1 if i in shared else dim for i, dim in enumerate(dims)]
                    if whole and self._agrees(_Call(self, values, tree, attempt), body, whole, rows):
                        return attempt
            if not unknown and not _close(whole, _Call(self, values, tree, dims).run_whole(body)):
                return dims  # it draws random numbers in eval mode, too
        raise ValueError(
            f"module {self.path!r} has parameters of its own and must work on one example at a time, with the batch "
            "first in every output and in every argument that is not shared by all examples; but a batch gives "
            "something else than its examples one by one"
        )

    def _agrees(self, call: _Call, body: _Body, whole: list[Tensor], rows: int) -> bool:
        parameters = dict(body.module.named_parameters())
        expanded = {slot: p.detach().expand(rows, *p.shape) for slot, p in parameters.items()}
        tensors = [call.leaves[i] for i in call.batched]
        try:
            outputs = call.over_examples(body, expanded, tensors, rows, vectorized=False)
        except Exception:  # such arguments are not what the module takes
            return False
        return _close(whole, [t.movedim(0, dim) for t, dim in zip(outputs, call.output_dims, strict=True)])

    def squared_norms(self, record: Record, slots: frozenset[str]) -> Tensor:
        (grads,) = record.per_example.values()
        return row_squared_norms(grads.flatten(1))

    def clipped_sums(self, record: Record, weights: Tensor, slots: frozenset[str]) -> dict[str, Tensor]:
        ((slot, grads),) = record.per_example.items()
        return {slot: weighted_row_sum(grads.flatten(1), weights).view(grads.shape[1:])}


@contextmanager
def _trial(module: nn.Module) -> Iterator[nn.Module]:
    """A copy to try, so that nothing of a trial stays: in full precision, with random parameters, in which no zero
    hides what an argument does, and in eval mode, since dropout would draw other numbers."""
    device = next(module.parameters()).device
    wide = any(p.dtype == torch.float64 for p in module.parameters())
    with (
        torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
        torch.autocast(device.type, enabled=False),
        torch.no_grad(),
    ):
        copied = copy.deepcopy(module).eval().to(torch.float64 if wide else torch.float32)
        generator = torch.Generator().manual_seed(0)
        for p in copied.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator))
        yield copied


def _values(leaves: list[Any], module: nn.Module, *, scramble: bool) -> list[Any]:
    """Arguments like ``leaves`` in the module's precision; scrambled, no two entries agree by chance."""
    dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
    generator = torch.Generator().manual_seed(1)

    def value(t: Tensor) -> Tensor:
        t = t.detach().to(dtype) if t.is_floating_point() else t.detach()
        if not scramble:
            return t
        if t.is_floating_point():
            return torch.randn(t.shape, generator=generator).to(t)
        if t.dtype == torch.bool:
            return (torch.rand(t.shape, generator=generator) < 0.5).to(t.device)
        order = torch.randperm(t.numel(), generator=generator).to(t.device)
        return t.reshape(-1)[order].view(t.shape)

    return [value(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _close(a: list[Tensor], b: list[Tensor]) -> bool:
    """Whether tensors agree but for rounding."""
    if [t.shape for t in a] != [t.shape for t in b]:
        return False
    return all(
        torch.allclose(x.double(), y.double(), rtol=1e-3, atol=1e-3, equal_nan=True) for x, y in zip(a, b, strict=True)
    )


class _Body(nn.Module):
    """The module's own forward, without its hooks: these run once, around the call."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._own_forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._own_forward(*args, **kwargs)


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rule: OpaqueModule, emit: Emit, slot: str, parameter: Tensor, rows: int) -> Tensor:
        ctx.rule, ctx.emit, ctx.slot, ctx.parameter = rule, emit, slot, parameter
        return parameter.expand(rows, *parameter.shape)

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor) -> tuple[None, ...]:
        (grads,) = output_grads
        ctx.emit(ctx, Record(ctx.rule, {ctx.slot: ctx.parameter}, (), grads, {ctx.slot: grads}))
        return (None,) * 5
