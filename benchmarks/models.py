"""The shapes that the layers of the baseline models see, and those of their parameters."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpkernels.bench.models import BASELINES


@dataclass(frozen=True)
class Seen:
    """One layer of a model with the shapes of its input and output, batch first."""

    label: str
    module: nn.Module
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]


def layers(*kinds: type[nn.Module]) -> Iterator[Seen]:
    """The layers of these kinds in the baseline models, each configuration and shape once. Nothing is computed."""
    for name, workload in BASELINES.items():
        seen: list[Seen] = []
        record = functools.partial(_record, name, seen)
        with torch.device("meta"):
            model = workload.build()
            for module in model.modules():
                if isinstance(module, kinds):
                    module.register_forward_hook(record)
            model(torch.empty(workload.batch, *workload.shape))
        yield from seen


def _record(name: str, seen: list[Seen], module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    this = Seen(f"{name} {len(seen) + 1}", module, tuple(inputs[0].shape), tuple(output.shape))
    if all((repr(s.module), s.input_shape) != (repr(module), this.input_shape) for s in seen):
        seen.append(this)


def parameter_shapes(name: str) -> list[torch.Size]:
    """The shapes of a baseline model's parameters."""
    with torch.device("meta"):
        return [p.shape for p in BASELINES[name].build().parameters()]
