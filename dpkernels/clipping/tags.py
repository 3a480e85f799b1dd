"""The tagged backward: which row of a captured gradient is whose is proven, not guessed from sizes.

Example i's loss weighs ``t_i``, a power of two with a random exponent and sign, in an additional backward through the
same graph. A row of an output gradient that belongs to example i alone must become ``t_i`` times itself, to the bit: a
backward is linear in what it starts from, and multiplying by a power of two commutes with every rounding as long as
nothing leaves the normal numbers, since it changes exponents and signs alone. A row that another example's loss
reaches as well, or one that is another example's, does not. So batch norm, contrastive losses, rows in another order,
time first with as many steps as examples, and tables that happen to have as many rows as the batch are all found,
without a tolerance.

Where numbers may have left the normal range (subnormal or infinite ones, in half precision or of hopelessly small
gradients), backwards with signs alone decide: those commute with every rounding. Each takes one bit of the examples'
codes, so that all together tell the same examples apart. A row of zeros proves nothing: its module is looked at again
in the next steps until there was something to see. The rows of examples that are not finite are left out, since
clipping drops them.

Checks are due for every new sequence of captured calls and shapes, then at growing intervals; and at every step where
the graph moves rows by what is in the data.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpkernels.clipping import fingerprint
from dpkernels.clipping.loss import Seed
from dpkernels.clipping.walk import below, is_range, operation, shape_of

_BITS = 6  # of an example's code: a sign and an exponent from 0 to 31
_PATIENCE = 16  # steps in a row in which modules without any gradient are looked at


class Print(NamedTuple):
    """What is kept of one captured gradient [rows, ...]."""

    path: str
    bits: Tensor  # int64 [rows]
    nonzero: Tensor  # bool [rows]
    finite: Tensor  # bool [rows]


class Prints:
    """The captured gradients of one backward, in the order of the calls of each module."""

    def __init__(self, tags: Tensor | None = None) -> None:
        self._tags = tags
        self.of: dict[tuple[Hashable, int], Print] = {}
        self._calls: dict[Hashable, int] = {}

    def add(self, key: Hashable, path: str, gradient: Tensor) -> None:
        """Keep ``gradient`` divided by the tags."""
        rows = gradient.detach().reshape(gradient.size(0), -1)
        finite = rows.isfinite().all(1)
        if self._tags is not None:  # exact: a power of two
            wide = rows.float() if rows.element_size() < 4 else rows
            rows = (wide * (1 / self._tags).to(wide).unsqueeze(1)).to(rows.dtype)
        call = self._calls[key] = self._calls.get(key, -1) + 1
        self.of[key, call] = Print(path, fingerprint.of_rows(rows), (rows != 0).any(1), finite)


@dataclass
class _Sequence:
    """What is known of one sequence of captured calls."""

    steps: int = 0
    unseen: set[Hashable] = field(default_factory=set)  # calls that had no gradient yet
    moves_rows: bool = False


class Checks:
    """When a tagged backward is due, and what it found."""

    def __init__(self) -> None:
        self.enabled = True
        self._known: dict[Hashable, _Sequence] = {}
        self._generator = torch.Generator().manual_seed(0)  # apart from the user's random numbers

    def due(self, calls: Hashable, rows: int) -> bool:
        """Whether the backward at hand must be checked. One example alone has nobody to be mixed with."""
        if rows < 2 or not self.enabled:
            return False
        sequence = self._known.get(calls)
        if sequence is None:
            sequence = self._known[calls] = _Sequence()
        sequence.steps += 1
        return (
            sequence.steps & (sequence.steps - 1) == 0
            or sequence.moves_rows
            or (bool(sequence.unseen) and sequence.steps <= _PATIENCE)
        )

    def forget(self, calls: Hashable) -> None:
        """A check did not come to its end: the sequence is as new."""
        self._known.pop(calls, None)

    def backward(
        self,
        seeds: list[Seed],
        calls: Hashable,
        rows: int,
        *,
        look: Callable[[list[Tensor], Tensor | None], Prints],
        real: Callable[[list[Tensor]], Prints],
        moves_rows: bool,
    ) -> None:
        """The backward of ``seeds``, and what must be seen of it.

        Args:
            look: runs a backward from other gradients, times tags or not, of which nothing is left but its prints.
            real: runs the real one, and leaves the graph as it is.
            moves_rows: the graph does so by what is in the data.

        Raises:
            RuntimeError: a row is not its example's alone, or the backward is not the same when it runs twice.
        """
        codes = self._codes(rows)
        gradients = [seed.gradient for seed in seeds]
        tagged = look(weighted(seeds, powers(codes)), powers(codes))
        plain = real(gradients)
        wrong = self._wrong(tagged, plain)
        if wrong and not any(self._wrong(look(weighted(seeds, tag), tag), plain) for tag in signs(codes)):
            wrong = []
        if not wrong:
            self._saw(calls, plain, codes, moves_rows)
            return
        if self._wrong(look(gradients, None), plain):
            raise RuntimeError(
                "the backward does not give the same gradients when it runs twice, so that it cannot be checked that "
                "each belongs to one example: call torch.use_deterministic_algorithms(True), and leave random "
                "operations out of the backward"
            )
        raise RuntimeError(
            f"the gradient of module {wrong[0]!r} has rows that are not those of single examples: row i must depend on "
            "losses[i] alone. Something computes with several examples (a normalization over the batch, a contrastive "
            "loss), puts them in another order than the losses, or has something else than examples in dimension 0 "
            "(time steps, or a table of positions that happens to be as long as the batch). Keep the batch first and "
            "the examples apart from the input to the losses; call a position table on [batch, positions] indices."
            + (f" The same holds for {', '.join(wrong[1:4])}." if len(wrong) > 1 else "")
        )

    def _codes(self, rows: int) -> Tensor:
        """int64 [rows]: a code for every example, each about as often, and all different where rows allow it."""
        return torch.randperm(rows, generator=self._generator) % 2**_BITS

    def _wrong(self, tagged: Prints, plain: Prints) -> list[str]:
        """Paths of modules whose rows are not their examples', or whose calls differ between the two backwards."""
        paths = {p.path for key, p in (tagged.of | plain.of).items() if key not in tagged.of or key not in plain.of}
        for key in tagged.of.keys() & plain.of.keys():
            a, b = tagged.of[key], plain.of[key]
            if len(a.bits) != len(b.bits) or bool(((a.bits != b.bits) & b.finite).any()):
                paths.add(a.path)
        return sorted(paths)

    def _saw(self, calls: Hashable, plain: Prints, codes: Tensor, moves_rows: bool) -> None:
        """Remember what a check without finding has proven."""
        sequence = self._known[calls]
        sequence.moves_rows = moves_rows
        told = {
            key
            for key, p in plain.of.items()
            if len(codes[(p.nonzero & p.finite).cpu()].unique()) > 1  # else any order of rows looks right
        }
        before: set[Hashable] = sequence.unseen if sequence.steps > 1 else set(plain.of)
        sequence.unseen = before - told


def powers(codes: Tensor) -> Tensor:
    """float64 [rows]: signed powers of two, a different one for each code."""
    size = torch.ldexp(torch.ones(len(codes), dtype=torch.float64), codes // 2)
    return torch.where(codes % 2 == 0, size, -size)


def signs(codes: Tensor) -> Iterator[Tensor]:
    """float64 [rows] for each bit of the codes: 1 or -1."""
    for bit in range(_BITS):
        yield 1.0 - 2.0 * ((codes >> bit) & 1).double()


def weighted(seeds: list[Seed], tags: Tensor) -> list[Tensor]:
    """The seeds' gradients, with example i's times ``tags[i]``."""
    result = []
    for seed in seeds:
        if seed.axis is None:
            result.append(seed.gradient)
            continue
        size = seed.gradient.size(seed.axis)
        each = tags.repeat_interleave(size // len(tags))
        shape = [size if dim == seed.axis else 1 for dim in range(seed.gradient.dim())]
        result.append(seed.gradient * each.view(shape).to(seed.gradient))
    return result


class Graph(NamedTuple):
    """What a check must know of the graph below the seeds."""

    leaves: list[Tensor]
    moves_rows: bool  # by what is in the data


def survey(seeds: list[Seed], rows: int) -> Graph:
    """Walk the whole graph."""
    roots = [s.root.node if isinstance(s.root, GradientEdge) else s.root.grad_fn for s in seeds]
    leaves, moves = [], False
    for node in below([root for root in roots if root is not None]):
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        moves = moves or _moves_rows(node, rows)
    return Graph(leaves, moves)


def _moves_rows(node: Any, rows: int) -> bool:
    """Whether a node takes examples by indices that may differ at the next step."""
    name = operation(node)
    if name not in _MOVING:
        return False
    child, number = node.next_functions[0]
    shape = shape_of(child, number) if child is not None else shape_of(node, 0)

    def is_batch(dim: int, size: int) -> bool:
        return size >= rows and (size % rows == 0 if dim == 0 else size == rows)

    if name in ("Index", "IndexPut"):
        given = [(dim, i) for dim, i in enumerate(node._saved_indices) if i is not None and dim < len(shape)]
        paired = len(given) > 1  # as in x[torch.arange(batch), labels]
        return any(is_batch(dim, shape[dim]) and not (paired and is_range(i, shape[dim])) for dim, i in given)
    dim = getattr(node, "_saved_dim", None)
    if not isinstance(dim, int):
        return True
    dim = dim - 2**64 if dim >= 2**63 else dim
    dim = dim + len(shape) if dim < 0 else dim
    return dim < len(shape) and is_batch(dim, shape[dim])


_MOVING = {"Index", "IndexPut", "IndexSelect", "IndexAdd", "IndexCopy", "Gather", "Scatter", "ScatterAdd"} | {
    *("ScatterReduce", "Sort", "Topk", "Take", "MaskedSelect", "MaskedScatter", "Kthvalue")
}


@contextmanager
def parked(leaves: list[Tensor]) -> Iterator[None]:
    """Within the context leaves start without ``.grad``; afterwards they have what they had."""
    before = [(leaf, leaf.grad) for leaf in leaves]
    try:
        for leaf, grad in before:
            if grad is not None:
                leaf.grad = None
        yield
    finally:
        for leaf, grad in before:
            leaf.grad = grad
