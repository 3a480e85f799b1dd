"""What the engine chooses in each layer of a model, beside its alternatives: predicted, and measured on their data."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpkernels.bench.models import MODELS
from dpkernels.clipping import GhostClipper
from dpkernels.layers import Record
from dpkernels.layers.conv import ConvRule

#: A choice that takes longer than the best alternative by more than this is marked.
TOLERANCE = 0.15
LEAST_ROUNDS = 3

_CONV_WAYS: dict[str, dict[str, Any]] = {
    "stored": {"store": True, "strategy": "direct"},
    "direct": {"store": False, "strategy": "direct"},
    "gram": {"store": False, "strategy": "gram"},
}

LEGEND = """\
Norms and clipped sum of each layer, in ms; * is the engine's choice, in brackets what the cost model predicts, relative
to its cheapest. Convolutions: stored keeps every example's gradient for the sum, direct computes it twice, gram takes
norms from pairs of positions. Other layers have one way."""


@dataclass(frozen=True)
class Way:
    """One way to compute a layer's norms and clipped sum."""

    ms: float  #: median
    predicted: float | None = None  #: cost relative to the layer's cheapest way; None where no cost model decides


@dataclass(frozen=True)
class LayerChoice:
    """What the engine does in one layer, and what it might have done."""

    layer: str
    type: str
    input_shape: tuple[int, ...]  #: of an example
    output_shape: tuple[int, ...]
    chosen: str
    ways: dict[str, Way]

    @property
    def fastest(self) -> str:
        """The way that took the least time."""
        return min(self.ways, key=lambda name: self.ways[name].ms)

    @property
    def excess(self) -> float:
        """By which part of the fastest way's time the choice is slower."""
        return self.ways[self.chosen].ms / self.ways[self.fastest].ms - 1

    @property
    def slow(self) -> bool:
        """Whether the choice is slower than the fastest way by more than :data:`TOLERANCE`."""
        return self.excess > TOLERANCE

    @property
    def memory_spared(self) -> bool:
        """Whether a way that was predicted to be cheaper was refused for its memory."""
        predicted = self.ways[self.chosen].predicted
        return predicted is not None and predicted > 1


@dataclass(frozen=True)
class Seen:
    """An operation of a step with trainable parameters, as the engine saw it."""

    record: Record
    parameters: dict[str, str]  #: operand -> name

    @property
    def layer(self) -> str:
        """The module that the parameters belong to."""
        return next(iter(self.parameters.values())).rpartition(".")[0]


def records(model: str, batch: int | None = None) -> list[Seen]:
    """The operations of one step of a model in :data:`MODELS`, in the order of the forward."""
    return records_of(*MODELS[model].make(batch))


def records_of(network: nn.Module, x: Tensor, y: Tensor) -> list[Seen]:
    """The operations of one step on examples [batch, ...] with labels [batch], in the order of the forward."""
    seen: list[Seen] = []
    with GhostClipper(network, max_grad_norm=1.0) as clipper:
        clipper.observer = lambda record, names: seen.append(Seen(record, names))
        clipper.backward(F.cross_entropy(network(x), y, reduction="none"))
    return seen[::-1]


def explain(model: str, *, batch: int | None = None, seconds: float = 0.3) -> Iterator[LayerChoice]:
    """Every captured layer of a model, as soon as it is measured, in the order of the forward.

    Args:
        model: a name in :data:`MODELS`.
        batch: examples; None: the model's own.
        seconds: of timing for each layer; each way runs a few times at least, interleaved with the others.

    Raises:
        ValueError: the model is not known, or a number is out of range.
    """
    if model not in MODELS:
        raise ValueError(f"explain must be of {', '.join(MODELS)}, got {model}")
    for argument, number, least in (("batch", batch, 1), ("seconds", seconds, 0)):
        if number is not None and not number >= least:
            raise ValueError(f"{argument} must be at least {least}, got {number}")
    network, x, y = MODELS[model].make(batch)
    types = {path: type(module).__name__ for path, module in network.named_modules()}
    return (choice(s.record, seconds, s.layer, types.get(s.layer, "")) for s in records_of(network, x, y))


def choice(record: Record, seconds: float, layer: str = "", kind: str = "") -> LayerChoice:
    """One layer's choice and its alternatives, measured."""
    chosen, runs, costs = ways(record)
    times = _interleaved(runs, seconds)
    least = min(costs.values(), default=1.0)
    return LayerChoice(
        layer,
        kind,
        tuple(record.saved[0].shape[1:]) if record.saved else (),
        tuple(record.output_grad.shape[1:]),
        chosen,
        {name: Way(ms, costs[name] / least if name in costs else None) for name, ms in times.items()},
    )


def ways(record: Record) -> tuple[str, dict[str, Callable[[], Tensor]], dict[str, float]]:
    """Which way the engine takes through a record, what runs each way and returns the squared norms, and what the cost
    model predicts of them."""
    rule = record.rule
    if isinstance(rule, ConvRule) and "weight" in operands_of(record):
        plan = rule.plan(record)
        runs = {name: _run(record, **forced) for name, forced in _CONV_WAYS.items()}
        return plan.way, runs, plan.costs
    return "only", {"only": _run(record)}, {}


def operands_of(record: Record) -> frozenset[str]:
    """The operands that a record holds gradients of."""
    stored = frozenset(record.per_example)
    return stored or record.operands


def _run(record: Record, **forced: Any) -> Callable[[], Tensor]:
    operands = operands_of(record)
    weights = torch.full((record.output_grad.size(0),), 0.5, dtype=torch.float64)

    def run() -> Tensor:
        fresh = replace(record, per_example=dict(record.per_example))
        norms = record.rule.squared_norms(fresh, operands, **forced)
        record.rule.clipped_sums(fresh, weights, operands)
        return norms

    return run


def _interleaved(runs: dict[str, Callable[[], Tensor]], seconds: float) -> dict[str, float]:
    """Median milliseconds of each."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin, rounds = time.perf_counter(), 0
    while rounds < LEAST_ROUNDS or time.perf_counter() - begin < seconds:
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
        rounds += 1
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def line(choice: LayerChoice) -> str:
    """A row of the table."""
    cells = ""
    for name, way in choice.ways.items():
        predicted = "" if way.predicted is None else f" ({way.predicted:.2f})"
        cells += f"  {'*' if name == choice.chosen else ' '}{name} {way.ms:>8.3f}{predicted:<8}"
    shapes = f"{_shape(choice.input_shape)} -> {_shape(choice.output_shape)}"
    mark = ""
    if choice.slow:
        mark = f"  <- {choice.fastest} is faster: {100 * choice.excess:.0f}% lost"
    if choice.memory_spared:
        mark += "  (stored would take too much memory)"
    return f"{choice.layer:<24}{choice.type:<11}{shapes:<26}{cells.rstrip()}{mark}"


def total(choices: list[LayerChoice]) -> str:
    """The last line: what was chosen against the best of what was measured."""
    chosen, best = _sums(choices)
    slow = sum(c.slow for c in choices)
    return (
        f"chosen {chosen:.2f} ms, best {best:.2f} ms: {100 * (chosen / best - 1):.1f}% lost; "
        f"{slow} of {len(choices)} layers by more than {100 * TOLERANCE:.0f}%"
    )


def as_json(choices: list[LayerChoice]) -> dict[str, Any]:
    """The rows and their sums for a JSON document."""
    chosen, best = _sums(choices)
    rows = [
        {**asdict(c), "fastest": c.fastest, "slow": c.slow, "memory_spared": c.memory_spared, "excess": c.excess}
        for c in choices
    ]
    return {"chosen_ms": chosen, "best_ms": best, "layers": rows}


def _sums(choices: list[LayerChoice]) -> tuple[float, float]:
    return sum(c.ways[c.chosen].ms for c in choices), sum(c.ways[c.fastest].ms for c in choices)


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "-"
