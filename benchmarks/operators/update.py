"""Noise and update of all parameters of the smallest and the largest baseline model."""

from collections.abc import Iterator

import torch

from benchmarks.entry import Entry
from benchmarks.models import parameter_shapes


def entries() -> Iterator[Entry]:
    noise = {"key": torch.arange(32, dtype=torch.uint8), "step": 1, "noise_std": 1.0, "grid": 2.0**-30}
    for name in ("mnist_cnn", "resnet18"):
        shapes = parameter_shapes(name)
        count = sum(shape.numel() for shape in shapes)
        small = count < 1_000_000
        for operator, states, settings, flops in (
            ("noised_mean", 0, {}, 3),
            ("sgd_update", 1, {"lr": 1e-3, "momentum": 0.9}, 9),
            ("adam_update", 2, {"lr": 1e-3, "steps": 10}, 18),
        ):

            def arguments(shapes=shapes, operator=operator, states=states, settings=settings):
                made = [torch.randn(shape) for shape in shapes]
                sums = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
                kept = [[torch.zeros(shape) for shape in shapes] for _ in range(states)]
                if operator == "adam_update":
                    kept.append([torch.empty(0) for _ in shapes])  # no AMSGrad
                return (made, sums, *kept), {"denominator": 256.0, **settings, **noise}

            # A sum is read, a parameter and its states are read and written; the mean is only written.
            moved = 8 + (4 if operator == "noised_mean" else 8 * (1 + states))
            yield Entry(operator, f"{name}: {count} values", arguments, flops * count, moved * count, reference=small)
