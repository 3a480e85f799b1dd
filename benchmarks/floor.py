"""The least time that each operator of a private step can take on a GPU, from bytes and operations alone.

    python -m benchmarks.floor [--document docs/gpu.md] [--measured benchmarks/results/gpu.json]

For every model: what the operators must read and write once, what they must compute, and the larger of both divided by
the device's rates. Activations and gradients are float32, products within an example run on tensor cores in TF32 (those
of selected weights on the float32 units), sums over examples and the noise in float64, and the random words on the
integer units. A convolution is counted by the way that is cheapest of those that the engine has: gradients stored,
computed twice, or norms from pairs of positions.
Launches, caches and occupancy are left out: the floor is what no kernel gets below, not what one should expect.
"""

import argparse
import functools
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.nn.modules.conv import _ConvNd

from benchmarks.models import Seen, layers_of, sparse_resnet18
from dpkernels import models
from dpkernels.bench.models import BASELINES, Workload
from dpkernels.layers.sparse import SparseConv2d
from dpkernels.training.files import write_text

BEGIN, END = "<!-- floor: benchmarks/floor.py -->", "<!-- /floor -->"

MEASURED = Path(__file__).parent / "results" / "gpu.json"

Shape = tuple[int, ...]
FLOAT, DOUBLE = 4, 8  # bytes
#: 64-bit words cost 10 double rounds of ChaCha20 for eight of them: 80 quarter rounds of 12 operations, and 16 more.
WORD_OPERATIONS = (80 * 12 + 16) / 8
#: Box and Muller in double: a logarithm, a sine and a cosine and a root for two values, about 20 multiply-adds each.
NORMAL_OPERATIONS = 80
#: Of a plane's scattering transform, an FMA counted as two: csrc/scatter/scatter_cpu.cpp counts them.
SCATTER_OPERATIONS = {(28, 28): 2.5e6, (32, 32): 3.1e6}


@dataclass(frozen=True)
class Device:
    """Peak rates per second; operations count multiplication and addition apart."""

    name: str
    bytes: float
    tensor: float
    single: float
    double: float
    integer: float


#: NVIDIA H100 SXM: datasheet, dense rates; integers: 64 lanes in each of 132 multiprocessors at 1.755 GHz.
H100 = Device("NVIDIA H100 SXM", 3.35e12, 494.7e12, 66.9e12, 66.9e12, 64 * 132 * 1.755e9)


@dataclass(frozen=True)
class Work:
    """What an operator must do at least, over one batch."""

    operator: str
    bytes: float = 0.0
    tensor: float = 0.0
    single: float = 0.0
    double: float = 0.0
    integer: float = 0.0

    def seconds(self, device: Device) -> float:
        """The time of the busiest unit."""
        return max(self.times(device).values())

    def times(self, device: Device) -> dict[str, float]:
        """Seconds that each unit of the device is busy."""
        units = {"memory": "bytes", "tensor cores": "tensor", "float32": "single", "float64": "double"}
        units["integers"] = "integer"
        return {unit: getattr(self, field) / getattr(device, field) for unit, field in units.items()}


def of_model(workload: Workload, batch: int, device: Device) -> list[Work]:
    """What a private step adds to forward and the gradients of inputs, by operator."""
    seen = layers_of(workload, batch, (_ConvNd, nn.Linear, nn.GroupNorm))
    works = [work for layer in seen for work in _of_layer(layer, device)]
    parameters = sum(p.numel() for layer in seen for p in layer.module.parameters())
    works.append(
        Work(
            "sgd_update",
            bytes=parameters * (DOUBLE + 4 * FLOAT),  # sum; parameter and momentum, read and written
            double=parameters * NORMAL_OPERATIONS,
            integer=parameters * WORD_OPERATIONS,
        )
    )
    return works


def _of_layer(layer: Seen, device: Device) -> list[Work]:
    if isinstance(layer.module, SparseConv2d):
        return _of_selected(layer.module, layer.input_shape, layer.output_shape)
    if isinstance(layer.module, _ConvNd):
        return _of_convolution(layer.module, layer.input_shape, layer.output_shape, device)
    if isinstance(layer.module, nn.Linear):
        return _of_linear(layer.module, layer.input_shape, layer.output_shape)
    # The layer's own backward, which the ordinary step has too; per-example gradients come with it.
    return [Work("group_norm_backward", bytes=3 * FLOAT * math.prod(layer.input_shape))]


def _of_convolution(module: _ConvNd, x: Shape, g: Shape, device: Device) -> list[Work]:
    batch = x[0]
    inputs, outputs = (g, x) if module.transposed else (x, g)  # of the convolution whose weight gradient it is
    positions, pixels = math.prod(outputs[2:]), math.prod(inputs[2:])
    size = inputs[1] // module.groups * math.prod(module.kernel_size) * outputs[1]
    operands, gradients, total = FLOAT * (math.prod(x) + math.prod(g)), FLOAT * size * batch, DOUBLE * size
    products, fold = 2.0 * positions * size * batch, 2.0 * size * batch  # fold: squares, or weighted into the sum
    pairs = float(positions**2 * outputs[1] + pixels**2 * inputs[1]) * batch  # half of each symmetric product
    norms, sums = functools.partial(Work, "conv_squared_norms"), functools.partial(Work, "conv_clipped_sums")
    again = sums(bytes=operands + total, tensor=products, double=fold)
    ways = {
        "stored": [
            norms(bytes=operands + gradients, tensor=products, double=fold),
            sums(bytes=gradients + total, double=fold),
        ],
        "direct": [norms(bytes=operands, tensor=products, double=fold), again],
        "gram": [norms(bytes=operands, tensor=pairs, double=2.0 * positions**2 * batch), again],
    }
    if set(module.stride) != {1}:
        del ways["gram"]
    return min(ways.values(), key=lambda works: sum(work.seconds(device) for work in works))


def _of_selected(module: SparseConv2d, x: Shape, g: Shape) -> list[Work]:
    batch, selected = x[0], module.index.numel()
    gradients = FLOAT * batch * selected
    operands = FLOAT * (math.prod(x) + math.prod(g)) + DOUBLE * selected
    return [
        Work("sparse_gradients", bytes=operands + gradients, single=2.0 * math.prod(g[2:]) * batch * selected),
        Work("row_squared_norms", bytes=gradients, double=2.0 * batch * selected),
        Work("weighted_row_sum", bytes=gradients + DOUBLE * selected, double=2.0 * batch * selected),
    ]


def _of_linear(module: nn.Linear, x: Shape, g: Shape) -> list[Work]:
    positions, values = math.prod(x[1:-1]), math.prod(x) + math.prod(g)
    size = module.in_features * module.out_features
    products = 2.0 * x[0] * positions * size if positions > 1 else 0.0  # one position: the product of two norms
    return [
        Work("linear_squared_norms", bytes=FLOAT * values, tensor=products, double=2.0 * values),
        Work("linear_clipped_sums", bytes=FLOAT * values + DOUBLE * size, tensor=products, double=2.0 * x[0] * size),
    ]


def of_features(shape: Shape, batch: int) -> list[Work]:
    """Scattering features of images [channels, height, width], two scales and eight angles."""
    channels, height, width = shape
    features = 81 * ((height + 8) // 4 - 2) * ((width + 8) // 4 - 2)
    filters = 16 * (height + 8) * (width + 8)  # of the padded size
    planes = batch * channels
    return [
        Work(
            "scatter",
            bytes=FLOAT * (planes * (height * width + features) + filters),
            single=planes * SCATTER_OPERATIONS[height, width],
        )
    ]


def table(device: Device, measured: dict[str, dict[str, float]]) -> str:
    """Markdown: a row for each operator of each model, its layers together."""
    rows = [
        "| model (batch) | operator | layers | GB | TFLOP | floor, us | bound by | measured, us | measured / floor |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    works_of = {(name, batch): of_model(workload, batch, device) for name, (workload, batch) in WORKLOADS.items()}
    works_of |= {(name, batch): of_features(shape, batch) for name, (shape, batch) in FEATURES.items()}
    for (name, batch), works in works_of.items():
        for operator in dict.fromkeys(work.operator for work in works):
            own = [work for work in works if work.operator == operator]
            busy: Counter[str] = Counter()
            for work in own:
                unit, seconds = max(work.times(device).items(), key=lambda item: item[1])
                busy[unit] += seconds
            floor, seen = 1e6 * sum(busy.values()), measured.get(name, {}).get(operator)
            cells = [
                f"{name} ({batch})",
                f"`{operator}`",
                f"{len(own)}",
                f"{1e-9 * sum(work.bytes for work in own):.3f}",
                f"{1e-12 * sum(work.tensor + work.single + work.double for work in own):.3f}",
                f"{floor:.1f}",
                busy.most_common(1)[0][0],
                "" if seen is None else f"{seen:.1f}",
                "" if seen is None else f"{seen / floor:.2f}",
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


#: name -> (model, batch): large batches, as a GPU is used.
WORKLOADS: dict[str, tuple[Workload, int]] = {
    "mnist_cnn": (BASELINES["mnist_cnn"], 4096),
    "cifar10_cnn": (BASELINES["cifar10_cnn"], 2048),
    "scatternet_linear": (BASELINES["scatternet_linear"], 8192),
    "scatternet_cnn": (BASELINES["scatternet_cnn"], 4096),
    "resnet18": (BASELINES["resnet18"], 1024),
    "resnet18, 1% of its convolutions": (Workload(sparse_resnet18, (3, 32, 32), 32), 1024),
    "resnet50, 224x224": (Workload(lambda: models.resnet50(1000), (3, 224, 224), 256), 256),
}

#: name -> (image, batch) of which scattering features are taken.
FEATURES: dict[str, tuple[Shape, int]] = {
    "features, 3x32x32": ((3, 32, 32), 4096),
    "features, 1x28x28": ((1, 28, 28), 8192),
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--measured", type=Path, default=MEASURED, help="what benchmarks.gpu wrote (default: %(default)s)"
    )
    parser.add_argument("--document", type=Path, help="replace the table in this Markdown file instead of printing it")
    options = parser.parse_args(arguments)
    measured = json.loads(options.measured.read_text())["operators"] if options.measured.exists() else {}
    text = table(H100, measured)
    if options.document is None:
        print(text)
        return
    before, _, rest = options.document.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        raise SystemExit(f"{options.document} must hold the lines {BEGIN} and {END}")
    write_text(options.document, f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
