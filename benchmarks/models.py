"""The shapes that the layers of the baseline models see, and those of their parameters."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dpkernels import models
from dpkernels.bench.models import BASELINES, Workload
from dpkernels.transfer.sparse import sparsify


@dataclass(frozen=True)
class Seen:
    """One layer of a model with the shapes of its input and output, batch first."""

    label: str
    module: nn.Module
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]


def layers(*kinds: type[nn.Module]) -> Iterator[Seen]:
    """The layers of these kinds in the baseline models, each configuration and shape once."""
    for name, workload in BASELINES.items():
        unlike: dict[tuple[str, tuple[int, ...]], Seen] = {}
        for seen in layers_of(workload, workload.batch, kinds):
            unlike.setdefault((repr(seen.module), seen.input_shape), seen)
        for k, seen in enumerate(unlike.values(), start=1):
            yield replace(seen, label=f"{name} {k}")


def layers_of(workload: Workload, batch: int, kinds: tuple[type[nn.Module], ...]) -> list[Seen]:
    """The layers of these kinds in a model, in the order of their calls. Nothing is computed."""
    seen: list[Seen] = []

    def record(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append(Seen(names[module], module, tuple(inputs[0].shape), tuple(output.shape)))

    with torch.device("meta"):
        model = workload.build()
        names = {module: name for name, module in model.named_modules()}
        for module in model.modules():
            if isinstance(module, kinds):
                module.register_forward_hook(record)
        model(torch.empty(batch, *workload.shape))
    return seen


def sparse_resnet18(share: float = 0.01) -> nn.Module:
    """A ResNet-18 for 32x32 images of whose convolution weights a random share is trained (Luo et al. 2021: 1%)."""
    model = models.resnet18(10, stem="cifar")
    sparsify(
        model,
        {
            f"{name}.weight": torch.rand(module.weight.shape, device="cpu") < share
            for name, module in model.named_modules()
            if isinstance(module, nn.Conv2d)
        },
    )
    return model


def parameter_shapes(name: str) -> list[torch.Size]:
    """The shapes of a baseline model's parameters."""
    with torch.device("meta"):
        return [p.shape for p in BASELINES[name].build().parameters()]
