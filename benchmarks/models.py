"""The five baseline models, their batch sizes, and the shapes that their layers see."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpkernels import models

# Name -> constructor, shape of an example, batch size.
BASELINES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "mnist_cnn": (models.mnist_cnn, (1, 28, 28), 512),
    "cifar10_cnn": (models.cifar10_cnn, (3, 32, 32), 256),
    "scatternet_linear": (lambda: models.scatternet_linear((243, 8, 8)), (243, 8, 8), 1024),
    "scatternet_cnn": (lambda: models.scatternet_cnn((243, 8, 8)), (243, 8, 8), 512),
    "resnet18": (lambda: models.resnet18(10, stem="cifar"), (3, 32, 32), 32),
}


@dataclass(frozen=True)
class Seen:
    """One layer of a model with the shapes of its input and output, batch first."""

    label: str
    module: nn.Module
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]


def layers(*kinds: type[nn.Module]) -> Iterator[Seen]:
    """The layers of these kinds in the baseline models, each configuration and shape once. Nothing is computed."""
    for name, (build, shape, batch) in BASELINES.items():
        seen: list[Seen] = []
        record = functools.partial(_record, name, seen)
        with torch.device("meta"):
            model = build()
            for module in model.modules():
                if isinstance(module, kinds):
                    module.register_forward_hook(record)
            model(torch.empty(batch, *shape))
        yield from seen


def _record(name: str, seen: list[Seen], module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    this = Seen(f"{name} {len(seen) + 1}", module, tuple(inputs[0].shape), tuple(output.shape))
    if all((repr(s.module), s.input_shape) != (repr(module), this.input_shape) for s in seen):
        seen.append(this)


def parameter_shapes(name: str) -> list[torch.Size]:
    """The shapes of a baseline model's parameters."""
    with torch.device("meta"):
        return [p.shape for p in BASELINES[name][0]().parameters()]
