"""How far clipped gradients in float32 lie from a loop over single examples in float64: all layer types, all models.

    python -m benchmarks.deviation [--only WORDS]

A deviation is the largest difference of a parameter's sum over the batch, relative to that parameter's largest entry,
over all parameters: of the sums without a bound, and of the sums clipped at the median norm. Norms carry a term that
keeps them above the true ones whatever was rounded, so that clipped examples come out smaller by as much; the column
says by how much at most, relative to each norm. The last column is the loop with plain autograd in float32, without a
bound: what the arithmetic costs without dpkernels.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpkernels import models
from dpkernels.bench import machine
from dpkernels.clipping import GhostClipper
from tests.clipping.oracle import cross_entropy, deviation, one_example_loop
from tests.configurations import LAYERS, Framed

GRAY, COLOUR = (81, 7, 7), (243, 8, 8)

#: name -> (model, shape of an example)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: models.linear((1, 8, 8), 10), (1, 8, 8)),
    "mnist_cnn": (models.mnist_cnn, (1, 28, 28)),
    "cifar10_cnn": (models.cifar10_cnn, (3, 32, 32)),
    "cifar10_cnn, small": (lambda: models.cifar10_cnn("small"), (3, 32, 32)),
    "simple_vgg": (models.simple_vgg, (3, 32, 32)),
    "scatternet_linear": (lambda: models.scatternet_linear(GRAY), GRAY),
    "scatternet_linear, 27 groups": (lambda: models.scatternet_linear(COLOUR, 27), COLOUR),
    "scatternet_cnn": (lambda: models.scatternet_cnn(GRAY), GRAY),
    "scatternet_cnn, 27 groups": (lambda: models.scatternet_cnn(COLOUR, 27), COLOUR),
    "resnet18": (lambda: models.resnet18(10, stem="cifar"), (3, 32, 32)),
    "resnet50": (lambda: models.resnet50(10, stem="cifar"), (3, 16, 16)),
    "resnet50, stem for photographs": (lambda: models.resnet50(10), (3, 64, 64)),
}
LAYER_BATCH, MODEL_BATCH = 6, 2

#: name -> what makes a model and a batch for it: the one list of the table and of the test
CONFIGURATIONS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    **{name: lambda c=c: (Framed(c), c.sample(LAYER_BATCH)) for name, c in LAYERS.items()},
    **{f"model: {name}": lambda m=m, s=s: (m(), torch.randn(MODEL_BATCH, *s)) for name, (m, s) in MODELS.items()},
}


@dataclass(frozen=True)
class Deviation:
    """Relative deviations from the loop in float64."""

    sums: float  # without a bound
    clipped: float
    norms_above: float  # the largest
    norms_below: float  # the largest, negative where every norm lies above
    autograd: float  # the loop in float32, without a bound


def measure(name: str, *, with_autograd: bool = True) -> Deviation:
    """The deviations of one configuration."""
    torch.manual_seed(0)
    model, x = CONFIGURATIONS[name]()
    with torch.no_grad():
        classes = model(x[:1]).size(1)
    y = torch.randint(0, classes, (len(x),))
    expected, norms = one_example_loop(model, cross_entropy, x, y, math.inf)
    with GhostClipper(model, math.inf) as clipper:
        sums = deviation(clipper.backward(cross_entropy(model, x, y)).grads, expected)
    plain = one_example_loop(model, cross_entropy, x, y, math.inf, torch.float32)[0] if with_autograd else expected
    autograd = deviation(plain, expected)
    bound = float(norms.median())
    expected, _ = one_example_loop(model, cross_entropy, x, y, bound)
    with GhostClipper(model, bound) as clipper:
        result = clipper.backward(cross_entropy(model, x, y))
    above = (result.norms - norms) / norms
    return Deviation(sums, deviation(result.grads, expected), float(above.max()), float(-above.min()), autograd)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    names = [name for name in CONFIGURATIONS if parser.parse_args().only in name]
    print(", ".join(f"{what}: {value}" for what, value in machine().items()), end="\n\n")
    print("| configuration | sums | clipped sums | norms above | autograd in float32 |")
    print("| --- | --- | --- | --- | --- |")
    rows = []
    for name in names:
        d = measure(name)
        rows.append((d.sums, d.clipped, d.norms_above, d.autograd))
        print(f"| {name} | {' | '.join(f'{value:.1e}' for value in rows[-1])} |", flush=True)
    print(f"| largest | {' | '.join(f'{max(column):.1e}' for column in zip(*rows, strict=True))} |")


if __name__ == "__main__":
    main()
