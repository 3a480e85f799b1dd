"""Times every operator of a private step on a GPU, in the models and batches of the floor's table.

    python -m benchmarks.gpu [--model NAME ...] [--out benchmarks/results/gpu.json]

Each operator runs alone on the data of a real step, again and again on one stream between two events; its time is the
median over the repetitions, summed over the layers of a model. `python -m benchmarks.floor --document docs/gpu.md` sets
the times beside the floor. Two rates of the device are measured first: a large copy, counting bytes read and written,
and a square product in TF32.
"""

import argparse
import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.floor import FEATURES, MEASURED, WORKLOADS
from dpkernels.bench import machine
from dpkernels.bench.choices import records_of
from dpkernels.bench.models import Workload
from dpkernels.features import ScatterNet
from dpkernels.layers import Record, SelectedRule
from dpkernels.layers.conv import ConvRule
from dpkernels.layers.linear import LinearRule
from dpkernels.ops.clip import row_squared_norms, weighted_row_sum
from dpkernels.ops.sparse import sparse_gradients
from dpkernels.ops.update import sgd_update
from dpkernels.training.files import write_json

WARM_UP, REPETITIONS = 3, 20
KEY = torch.arange(32, dtype=torch.uint8)


def microseconds(call: Callable[[], object]) -> float:
    """The median time of a call on the device."""
    for _ in range(WARM_UP):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPETITIONS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return 1e3 * statistics.median(begin.elapsed_time(end) for begin, end in itertools.pairwise(marks))


def ceilings() -> dict[str, float]:
    """Rates that the device reaches."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    copied = microseconds(lambda: target.copy_(source))
    a = torch.randn(8192, 8192, device="cuda")
    product = torch.empty_like(a)
    multiplied = microseconds(lambda: torch.mm(a, a, out=product))
    return {"copy_gb_per_s": 2e-3 * source.nbytes / copied, "tf32_tflop_per_s": 2e-6 * 8192**3 / multiplied}


def operators(workload: Workload, batch: int) -> dict[str, float]:
    """Microseconds of each operator, its layers together."""
    network, x, y = workload.make(batch, "cuda")
    times: Counter[str] = Counter()
    for seen in records_of(network, x, y):
        for name, call in _calls(seen.record):
            times[name] += microseconds(call)
    parameters = [p.detach() for p in network.parameters()]
    sums, momenta = [p.double() for p in parameters], [torch.zeros_like(p) for p in parameters]
    noise = {"key": KEY, "step": 0, "noise_std": 1.0, "grid": 2.0**-20}
    times["sgd_update"] = microseconds(
        lambda: sgd_update(parameters, sums, momenta, lr=1e-6, momentum=0.9, denominator=float(batch), **noise)
    )
    return dict(times)


def features(shape: tuple[int, ...], batch: int) -> dict[str, float]:
    """Microseconds of the features of a batch of images."""
    net, images = ScatterNet(shape), torch.rand(batch, *shape, device="cuda")
    return {"scatter": microseconds(lambda: net(images))}


def _calls(record: Record) -> Iterator[tuple[str, Callable[[], object]]]:
    """What the engine calls for an operation, by the operator that does the work."""
    rule, operands = record.rule, record.operands
    weights = torch.full((record.output_grad.size(0),), 0.5, dtype=torch.float64, device="cuda")
    if isinstance(rule, SelectedRule):
        x, g, settings = rule.convolution(record)
        entries = record.settings["entries"]
        gradients = sparse_gradients(x, g, entries, **settings)
        yield "sparse_gradients", lambda: sparse_gradients(x, g, entries, **settings)
        yield "row_squared_norms", lambda: row_squared_norms(gradients)
        yield "weighted_row_sum", lambda: weighted_row_sum(gradients, weights)
        return
    family = {ConvRule: "conv", LinearRule: "linear"}.get(type(rule), "stored")
    fresh = replace(record, per_example=dict(record.per_example))
    again = replace(record, per_example=dict(record.per_example))
    yield (
        f"{family}_squared_norms",
        lambda: rule.squared_norms(replace(again, per_example=dict(again.per_example)), operands),
    )
    rule.squared_norms(fresh, operands)  # leaves what the sum takes
    yield f"{family}_clipped_sums", lambda: rule.clipped_sums(fresh, weights, operands)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*WORKLOADS, *FEATURES]
    parser.add_argument("--model", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--out", type=Path, default=MEASURED, help="default: %(default)s")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.gpu needs a CUDA device, and none is present")
    torch.backends.cuda.matmul.allow_tf32 = True
    report = {"machine": machine(), "ceilings": ceilings(), "operators": {}}
    print(report["machine"], report["ceilings"], flush=True)
    for name in options.model:
        report["operators"][name] = operators(*WORKLOADS[name]) if name in WORKLOADS else features(*FEATURES[name])
        print(name, {k: round(v, 1) for k, v in report["operators"][name].items()}, flush=True)
        torch.cuda.empty_cache()
        write_json(options.out, report)


if __name__ == "__main__":
    main()
