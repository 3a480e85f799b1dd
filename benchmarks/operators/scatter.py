"""Scattering features of the images of MNIST and CIFAR-10: two scales, eight angles."""

from collections.abc import Iterator

import torch

from benchmarks.entry import Entry, size
from benchmarks.floor import SCATTER_OPERATIONS
from dpkernels.features.scatternet import kymatio_filters
from dpkernels.ops.scatter import scatter


def entries() -> Iterator[Entry]:
    for shape, planes in (((28, 28), 256), ((32, 32), 192)):
        filters, images = kymatio_filters(*shape, 2, 8), torch.rand(planes, *shape)
        yield Entry(
            "scatter",
            f"[{planes}, {shape[0]}, {shape[1]}]",
            lambda images=images, filters=filters: ((images, filters), {}),
            planes * SCATTER_OPERATIONS[shape],
            size(images, scatter(images, filters)),
        )
