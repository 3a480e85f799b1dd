"""Random cases of the privacy law: no example contributes more than ``l2_bound``, in floating point.

A case is a model, a batch D + x of awkward numbers, and how it is clipped; a seed draws it. Three sums are compared: of
D + x, of D + x without x's loss, and of D.

- Without its loss x is dropped by selection in a batch of the same shape, where torch computes all others as before.
  The difference is what x contributes, whatever x is, and the law holds of it exactly.
- In D, with x's row removed and all rows behind it moved up, torch may round the others otherwise. The engine is given
  rows of activations and output gradients: examples whose rows are the same bits in both batches must contribute the
  same but for the rounding of the float64 sum, and where that is so of all, the law holds of the sums of D + x and D.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkernels.clipping import ClippedSum, GhostClipper
from dpkernels.clipping.graph import UncapturedError
from dpkernels.layers import Record
from tests.configurations import LAYERS, NETWORKS, Configuration, Framed

PRECISIONS = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "autocast": torch.float32,
}
MODELS: dict[str, Configuration] = LAYERS | NETWORKS
DOORS = ("losses", "losses", "sum", "mean")
WIDE = 5.4  # how many times as many decades float64 has as float32
ROUNDING = 1e-9  # of the sum over n examples in float64, times n C: clipping/rounding.py

Kind = Callable[[Tensor, Tensor, int, float], None]


# ---- awkward inputs: what the model takes, and the gradient of the losses with respect to its output -----------------


def _powers(shape: tuple[int, ...], reach: float) -> Tensor:
    """Numbers of random magnitudes from 10^-reach to 10^reach."""
    return 10 ** torch.empty(shape, dtype=torch.float64).uniform_(-reach, reach)


def _along(values: Tensor, dim: int, size: int) -> Tensor:
    """A vector's shape along one dimension of ``values``."""
    return torch.empty(size).view(*(size if d == dim % values.dim() else 1 for d in range(values.dim())))


def _numbers(x: Tensor, probe: Tensor) -> Tensor:
    """The input where it is of numbers, else the output gradient."""
    return x if x.is_floating_point() else probe


def plain(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    """As drawn."""


def duplicates(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    """All others are the same example."""
    x[:], probe[:] = x[target].clone(), probe[target].clone()


def zero_input(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    x[target] = 0


def zero_inputs(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    x.zero_()


def zero_gradient(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    probe[target] = 0


def cancelling(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    """One activation everywhere, and output gradients that alternate along some dimension, with something left over."""
    x[:] = x.flatten(1)[:, 0].view(-1, *(1,) * (x.dim() - 1)).expand_as(x).clone()
    signs = probe.movedim(int(torch.randint(1, probe.dim(), ())), -1)
    pairs = signs.shape[-1] // 2 * 2
    signs[..., 1:pairs:2] = -signs[..., 0:pairs:2] * (1 + 10 ** -float(torch.randint(3, 30, ())))
    signs[..., pairs:] *= 10 ** -float(torch.randint(0, 34, ()))


def magnitudes(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    """Every number of a magnitude of its own, half of them zero."""
    for values in (x, probe) if x.is_floating_point() else (probe,):
        values.mul_(_powers(values.shape, reach) * torch.randint(2, values.shape))


def disjoint(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    """Positions with features of their own, large in the input and small in the gradient or the other way round."""
    if not x.is_floating_point() or min(x.dim(), probe.dim()) < 3:
        return
    position, feature = [(1, -1), (-1, 1)][int(torch.randint(2, ()))]
    size = max(x.shape[position], probe.shape[position])
    magnitude = _powers((size,), reach)
    for values, factor in ((x, magnitude), (probe, _powers((size,), 2) / magnitude)):
        at = torch.arange(values.shape[position]).view_as(_along(values, position, values.shape[position]))
        column = torch.arange(values.shape[feature]).view_as(_along(values, feature, values.shape[feature]))
        values.mul_(factor[at] * (at % 2 == column % 2))


def huge_entry(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    _numbers(x, probe)[target].view(-1)[0] = 3e38


def huge(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    _numbers(x, probe)[target] *= 4e37


def subnormal(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    _numbers(x, probe)[target] *= 1e-42


def nan(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    _numbers(x, probe)[target].view(-1)[-1] = math.nan


def infinite(x: Tensor, probe: Tensor, target: int, reach: float) -> None:
    _numbers(x, probe)[target].view(-1)[0] = -math.inf


KINDS: list[Kind] = [
    plain,
    duplicates,
    zero_input,
    zero_inputs,
    zero_gradient,
    cancelling,
    magnitudes,
    disjoint,
    huge_entry,
    huge,
    subnormal,
    nan,
    infinite,
]


# ---- a case ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One batch, one model, one way to clip. Exponents are powers of 10."""

    name: str
    seed: int
    framed: bool
    precision: str
    labels: bool  # cross entropy where outputs are vectors; else the losses are linear in the outputs
    door: str  # "losses": backward(losses); "mean" and "sum": an ordinary backward
    train: str  # "all", "weights" or "biases"
    kind: Kind
    others: int  # rows of D
    physical: int  # rows of a physical batch
    weights: float  # exponent that the parameters are scaled by
    inputs: float  # exponent of the inputs
    outputs: float  # exponent of the gradients of the losses with respect to the outputs
    bound: float  # max_grad_norm

    @classmethod
    def draw(cls, name: str, seed: int) -> Case:
        """Two cases of three are of usual magnitudes, where all of an example's numbers count."""
        rng = Random(f"{name} {seed}")
        usual = rng.random() < 2 / 3
        scale, balance = (rng.uniform(-1, 1), 0.0) if usual else (rng.uniform(-30, 30), rng.uniform(-60, 60))
        others = rng.choice((0, 1, 2, 5, 6, 7, 8, 12, 17)) if rng.random() < 0.99 else 299
        door = rng.choice(DOORS)
        return cls(
            name=name,
            seed=seed,
            framed=name in LAYERS and rng.random() < 0.5,
            precision=rng.choice(list(PRECISIONS)),
            labels=rng.random() < 0.3,
            door=door,
            train=rng.choice(("all", "all", "weights", "biases")),
            kind=rng.choice((*KINDS, plain, plain, plain)),
            others=others,
            physical=rng.choice((others + 1, others + 1, others // 2 + 1, others // 3 + 1)),
            weights=0.0 if usual else rng.choice((0.0, rng.uniform(-3, 3))),
            inputs=scale,
            outputs=balance / 2 - scale,
            bound=10 ** (rng.uniform(-6, 3) if usual else rng.uniform(-10, 10)),
        )

    def make(self) -> nn.Module:
        torch.manual_seed(self.seed)
        model = _build(self.name, self.framed, self.precision)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(10**self.weights)
        kept = [
            p for n, p in model.named_parameters() if self.train == "all" or ("bias" in n) == (self.train == "biases")
        ]
        if kept:
            model.requires_grad_(False)
        for p in kept:
            p.requires_grad_(True)
        return model

    def batch(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, int]:
        """Inputs of D + x, gradients of the losses with respect to outputs of ``shape``, and x's place."""
        rows = self.others + 1
        x, probe = MODELS[self.name].sample(rows), torch.randn(rows, *shape, dtype=torch.float64)
        target = int(torch.randint(rows, ()))
        ten, wide = torch.tensor(10.0, dtype=torch.float64), WIDE if self.precision == "float64" else 1
        x = x.double() if x.is_floating_point() else x
        self.kind(x, probe, target, 28.0 * wide)
        if x.is_floating_point():
            x *= ten ** (self.inputs * wide)
        probe *= ten ** (self.outputs * wide)
        return x, probe, target


def _context(precision: str) -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if precision == "autocast" else nullcontext()


def _build(name: str, framed: bool, precision: str) -> nn.Module:
    """The layer alone, or between others."""
    configuration = MODELS[name]
    return (Framed(configuration) if framed else configuration.make()).to(PRECISIONS[precision])


def _cast(x: Tensor, precision: str) -> Tensor:
    return x.to(PRECISIONS[precision]) if x.is_floating_point() else x


@functools.cache
def _output_shape(name: str, framed: bool, precision: str) -> tuple[int, ...] | None:
    """Shape of one example's output; None where torch itself cannot run the layer in this precision."""
    model, x = _build(name, framed, precision), MODELS[name].sample(2)
    try:
        with _context(precision):
            y = model(_cast(x, precision))
        y.sum().backward()
    except RuntimeError:
        assert precision not in ("float32", "float64")
        return None
    return tuple(y.shape[1:])


# ---- the law ---------------------------------------------------------------------------------------------------------


class Batches:
    """A case's data, and their clipped sums in its physical batches."""

    def __init__(self, case: Case, clipper: GhostClipper, x: Tensor, probe: Tensor) -> None:
        self.case, self.clipper, self.x, self.probe = case, clipper, x, probe
        self._given: list[Tensor] = []  # in the backward that runs: what its records hold, the batch first
        clipper.observer = self._see

    def _see(self, record: Record, names: dict[str, str]) -> None:
        tensors = (*record.saved, record.output_grad, *record.per_example.values())
        self._given += [t.detach().reshape(t.size(0), -1) for t in tensors]

    def total(self, rows: Tensor, counted: Tensor, door: str) -> tuple[Tensor, list[Tensor]]:
        """Clipped sum [parameters] over ``rows``, and all that the engine was given of them.

        counted: bool of all rows; the losses of the others are NaN, which drops them.
        """
        factors = torch.where(counted, 1.0, math.nan).double()
        sums, pieces = torch.zeros(0, dtype=torch.float64), []
        for part in rows.split(self.case.physical):
            pieces.append(self._given)
            result = self._clipped(part, factors, door)
            flat = torch.cat([g.flatten() for g in result.grads.values()])
            sums = sums + flat if len(sums) else flat
            self._given = []
        return sums, [torch.cat(same) for same in zip(*pieces, strict=True)] if _one_way(pieces) else []

    def _clipped(self, part: Tensor, factors: Tensor, door: str) -> ClippedSum:
        case, factor, probe = self.case, factors[part], self.probe[part]
        labels = probe.argmax(1) if case.labels and probe.dim() == 2 else None
        whole = door != "losses" and labels is not None and not factor.isnan().any()  # torch reduces the loss itself
        with _context(case.precision):
            try:
                y = self.clipper.model(_cast(self.x[part], case.precision))
            except IndexError:
                assert not len(part)  # torch's instance norm takes no empty batch
                return self.clipper.backward(torch.zeros(0))
            if labels is not None:
                losses = F.cross_entropy(y, labels, reduction=door if whole else "none")
            else:
                losses = (y.double() * probe).flatten(1).sum(1)
        losses = losses if whole else losses * factor.to(losses.dtype)
        if door == "losses":
            return self.clipper.backward(losses)
        (losses if whole else losses.mean() if door == "mean" else losses.sum()).backward()
        return self.clipper.take()


def _one_way(pieces: list[list[Tensor]]) -> bool:
    """Whether the engine computed every physical batch in the same way, with records of the same kind."""
    return len({tuple(t.size(1) for t in piece) for piece in pieces}) == 1


def _same_rows(a: list[Tensor], b: list[Tensor], rows: int) -> Tensor:
    """bool [rows], which rows are the same in all tensors, NaN equal to NaN."""
    if not _one_way([a, b]) or not a:
        return torch.zeros(rows, dtype=torch.bool)
    pairs = [(s.reshape(len(s), -1), t.reshape(len(t), -1)) for s, t in zip(a, b, strict=True)]
    equal = [((s == t) | (s.isnan() & t.isnan())).all(1) for s, t in pairs]
    return torch.stack(equal).all(0)


@dataclass(frozen=True)
class Outcome:
    """How much a case says."""

    contribution: float  # of x, in units of max_grad_norm
    alike: float  # share of D that torch computed in D + x as in D


def verify(case: Case) -> Outcome | None:
    """Assert the law; None where torch cannot run the layer in the case's precision, or nothing is clipped: the first
    gradients of an operation that could have several layouts were zero, and some number was not finite.

    Raises AssertionError: an example contributed more than the bound, or the door made a difference.
    """
    shape = _output_shape(case.name, case.framed, case.precision)
    if shape is None:
        return None
    try:
        return _verify(case, shape)
    except UncapturedError as error:
        if "values that are not finite came before it was proved" in str(error):
            return None
        raise


def _verify(case: Case, shape: tuple[int, ...]) -> Outcome:
    model = case.make()
    x, probe, target = case.batch(shape)
    reduction = "sum" if case.door == "sum" else "mean"
    with GhostClipper(model, case.bound, loss_reduction=reduction) as clipper:
        batches = Batches(case, clipper, x, probe)
        everyone = torch.arange(len(x))
        others = everyone != target
        rounding = ROUNDING * len(x) * case.bound
        whole, _ = batches.total(everyone, others | True, case.door)
        dropped, given = batches.total(everyone, others, case.door)
        removed, given_without = batches.total(everyone[others], others, case.door)
        assert float((whole - dropped).norm()) <= clipper.l2_bound, "x contributes more than the bound"
        if case.door != "losses":
            plain, _ = batches.total(everyone, others | True, "losses")
            assert torch.equal(whole, plain), "the way to call backward makes a difference"
        contribution = float((whole - dropped).norm()) / case.bound
        if not case.others:
            assert not removed.any()
            assert not dropped.any()
            return Outcome(contribution, 1.0)
        alike = _same_rows([t[others] for t in given], given_without, case.others)
        if not alike.all():  # torch rounded some of D otherwise: no claim of these, so drop them too
            counted = others.clone()
            counted[others] = alike
            dropped, _ = batches.total(everyone, counted, case.door)
            removed, _ = batches.total(everyone[others], counted, case.door)
        else:
            assert float((whole - removed).norm()) <= clipper.l2_bound, "x moves the sum by more than the bound"
        assert float((dropped - removed).norm()) <= rounding, "x moves what others contribute"
        return Outcome(contribution, float(alike.double().mean()))
