"""The models that are measured: the papers' five, and a deep one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpkernels import models


@dataclass(frozen=True)
class Workload:
    """A model, the shape of an example, and how many of them a step takes."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int

    def make(self, batch: int | None = None, device: str = "cpu") -> tuple[nn.Module, Tensor, Tensor]:
        """The model and a batch [batch, *shape] of random examples with labels [batch]; the same at every call."""
        rows = self.batch if batch is None else batch
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = self.build(), torch.randn(rows, *self.shape), torch.randint(0, 10, (rows,))
        return made[0].to(device), made[1].to(device), made[2].to(device)


BASELINES: dict[str, Workload] = {
    "mnist_cnn": Workload(models.mnist_cnn, (1, 28, 28), 512),
    "cifar10_cnn": Workload(models.cifar10_cnn, (3, 32, 32), 256),
    "scatternet_linear": Workload(lambda: models.scatternet_linear((243, 8, 8)), (243, 8, 8), 1024),
    "scatternet_cnn": Workload(lambda: models.scatternet_cnn((243, 8, 8)), (243, 8, 8), 512),
    "resnet18": Workload(lambda: models.resnet18(10, stem="cifar"), (3, 32, 32), 32),
}

MODELS = BASELINES | {"resnet50": Workload(lambda: models.resnet50(10), (3, 64, 64), 16)}
