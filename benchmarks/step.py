"""Whole training steps against an ordinary one and against peers: time and memory.

    python -m benchmarks.step [--models mnist_cnn,...] [--engines dpkernels,...] [--seconds 10] [--threads 2]

A step is zero_grad, forward, backward, clip, noise, update. Each engine is timed in a process of its own, its steps
interleaved with ordinary ones; what counts is the median of the ratios of neighbours, because machines are noisy.
Memory is measured in separate processes: how far the resident peak of a few steps lies above the model and the data.
An engine whose package is missing, or which fails, is reported as such.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.machine import machine
from benchmarks.models import BASELINES
from dpkernels import models

BOUND, SIGMA, LR, MOMENTUM = 0.1, 1.0, 0.01, 0.9
Step = Callable[[], None]

MODELS = BASELINES | {"resnet50": (lambda: models.resnet50(10), (3, 64, 64), 16)}


def ordinary(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def dpkernels(model: nn.Module, x: Tensor, y: Tensor, memory: str = "keep") -> Step:
    from dpkernels import DPSGD

    optimizer = DPSGD(
        model,
        lr=LR,
        momentum=MOMENTUM,
        noise_multiplier=SIGMA,
        batch_size=len(x),
        max_grad_norm=BOUND,
        memory=memory,
    )

    def step() -> None:
        optimizer.zero_grad()
        optimizer.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()

    return step


def opacus_hooks(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(model)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM),
        noise_multiplier=SIGMA,
        max_grad_norm=BOUND,
        expected_batch_size=len(x),
    )

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        optimizer.step()

    return step


def opacus_ghost(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=BOUND, use_ghost_clipping=True)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM),
        noise_multiplier=SIGMA,
        max_grad_norm=BOUND,
        expected_batch_size=len(x),
    )
    criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())

    def step() -> None:
        optimizer.zero_grad()
        criterion(wrapped(x), y).backward()
        optimizer.step()

    return step


def vmap(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    from torch.func import functional_call, grad
    from torch.func import vmap as over_examples

    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    named = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], one_x: Tensor, one_y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (one_x[None],)), one_y[None])

    per_example = over_examples(grad(loss), in_dims=(None, 0, 0), randomness="different")

    def step() -> None:
        grads = per_example({name: p.detach() for name, p in named.items()}, x, y)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)
        factors = (BOUND / norms).clamp(max=1)
        for name, p in named.items():
            p.grad = torch.einsum("b,b...->...", factors, grads[name])
            p.grad.add_(torch.randn_like(p), alpha=SIGMA * BOUND).div_(len(x))
        optimizer.step()

    return step


ENGINES: dict[str, Callable[[nn.Module, Tensor, Tensor], Step]] = {
    "ordinary": ordinary,
    "dpkernels": dpkernels,
    "dpkernels-lean": lambda model, x, y: dpkernels(model, x, y, memory="lean"),
    "opacus-hooks": opacus_hooks,
    "opacus-ghost": opacus_ghost,
    "vmap": vmap,
}


def make(engine: str, name: str, batch: int | None) -> Step:
    torch.manual_seed(0)
    build, shape, default = MODELS[name]
    rows = batch or default
    return ENGINES[engine](build(), torch.randn(rows, *shape), torch.randint(0, 10, (rows,)))


def time_pair(engine: str, name: str, batch: int | None, seconds: float) -> dict[str, float]:
    """Median milliseconds of both, and quartiles of the ratio of neighbouring steps."""
    baseline, step = make("ordinary", name, batch), make(engine, name, batch)
    for _ in range(2):
        baseline()
        step()
    times: list[tuple[float, float]] = []
    start = time.perf_counter()
    while len(times) < 7 or time.perf_counter() - start < seconds:
        t0 = time.perf_counter()
        baseline()
        t1 = time.perf_counter()
        step()
        times.append((t1 - t0, time.perf_counter() - t1))
    ratios = sorted(b / a for a, b in times)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "ordinary_ms": statistics.median(a for a, _ in times) * 1e3,
        "ms": statistics.median(b for _, b in times) * 1e3,
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
        "pairs": len(times),
    }


def peak_memory(engine: str, name: str, batch: int | None) -> dict[str, float]:
    """MiB of resident memory that three steps take above model and data."""
    step = make(engine, name, batch)
    before = _resident("VmRSS")
    for _ in range(3):
        step()
    return {"extra_mib": _resident("VmHWM") - before}


def _resident(field: str) -> float:
    line = next(text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith(field))
    return int(line.split()[1]) / 1024


def in_a_process(arguments: list[str]) -> dict[str, float | str]:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.step", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        return {"failed": (run.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--engines", default=",".join(e for e in ENGINES if e != "ordinary"))
    parser.add_argument("--batch", type=int, help="instead of each model's own")
    parser.add_argument("--seconds", type=float, default=10.0, help="of timing for each pair")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--worker", choices=["time", "memory"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.worker == "time":
        print(json.dumps(time_pair(options.engines, options.models, options.batch, options.seconds)))
        return
    if options.worker == "memory":
        print(json.dumps(peak_memory(options.engines, options.models, options.batch)))
        return

    results: dict[str, dict[str, dict[str, float | str]]] = {}
    print(", ".join(f"{key} {value}" for key, value in machine().items()))
    print(f"{'model':<19}{'engine':<16}{'ordinary':>10}{'private':>10}{'ratio':>7}  {'quartiles':<12}{'memory':>8}")
    for name in options.models.split(","):
        common = ["--models", name, "--threads", str(options.threads), "--seconds", str(options.seconds)]
        common += ["--batch", str(options.batch)] if options.batch else []
        base = in_a_process([*common, "--engines", "ordinary", "--worker", "memory"])
        results[name] = {"ordinary": base}
        for engine in options.engines.split(","):
            row = in_a_process([*common, "--engines", engine, "--worker", "time"])
            if "failed" not in row:
                row |= in_a_process([*common, "--engines", engine, "--worker", "memory"])
            results[name][engine] = row
            print(_line(name, engine, row, base), flush=True)
    if options.out:
        document = {"machine": machine(), "results": results}
        temporary = options.out.with_suffix(".new")
        temporary.write_text(json.dumps(document, indent=1) + "\n")
        temporary.replace(options.out)


def _line(name: str, engine: str, row: dict[str, float | str], base: dict[str, float | str]) -> str:
    if "failed" in row:
        return f"{name:<19}{engine:<16}failed: {row['failed']}"
    memory = float(row.get("extra_mib", "nan")) / max(float(base.get("extra_mib", "nan")), 1.0)
    quartiles = f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}"
    return (
        f"{name:<19}{engine:<16}{row['ordinary_ms']:>8.1f}ms{row['ms']:>8.1f}ms{row['ratio']:>7.2f}  {quartiles:<12}"
        f"{memory:>7.2f}x"
    )


if __name__ == "__main__":
    main()
