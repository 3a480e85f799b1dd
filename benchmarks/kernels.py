"""Times one operator at a time, beside its plain-torch reference and what the machine can do.

    python -m benchmarks.kernels [--family linear conv ...] [--operator NAME ...] [--isa avx2 ...] [--seconds 0.5]
        [--json FILE]

A line is one operator on one shape: the best time, how many times longer the reference takes, and the rates of memory
and arithmetic beside the machine's own, measured in the same run: GB/s of a large copy, GFLOP/s of a square float32
matrix product. With --isa also how many times longer the operator takes by these instruction sets of the CPU instead of
the widest, in turns with it. On a noisy machine trust the ratios of one run rather than its times.
"""

import argparse
import importlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.entry import Entry
from dpkernels import _native
from dpkernels.bench import machine

OPERATORS = Path(__file__).parent / "operators"
TURNS = 5


@dataclass(frozen=True)
class Timing:
    best: float  # seconds
    median: float
    runs: int


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches with the threads that torch uses."""

    copy_gb_per_s: float
    float32_gflop_per_s: float
    float64_gflop_per_s: float


def measure(call: Callable[[], object], seconds: float) -> Timing:
    """Runs `call` once to warm up, then for about `seconds`, at least twice."""
    start = time.perf_counter()
    call()
    times: list[float] = []
    if time.perf_counter() - start > 4 * seconds:  # a slow one: its first run is as good as any
        times.append(time.perf_counter() - start)
    while len(times) < 2 or sum(times) < seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        if sum(times) > 4 * seconds:
            break
    times.sort()
    return Timing(times[0], times[len(times) // 2], len(times))


def by_isa(call: Callable[[], object], isas: list[str], seconds: float) -> dict[str, float]:
    """The best time of `call` by each instruction set, in short turns of about `seconds` for each in all."""
    widest, best = _native.active_isa(), dict.fromkeys(isas, math.inf)
    try:
        for _ in range(TURNS):
            for isa in isas:
                _native.set_isa(isa)
                best[isa] = min(best[isa], measure(call, seconds / TURNS).best)
    finally:
        _native.set_isa(widest)
    return best


def ceilings(seconds: float) -> Ceilings:
    source = torch.zeros(1 << 25)  # 128 MiB, beyond the caches
    target = torch.empty_like(source)
    copied = measure(lambda: target.copy_(source), seconds).best
    n = 1024
    products = {}
    for dtype in (torch.float32, torch.float64):
        a = torch.randn(n, n, dtype=dtype)
        products[dtype] = 2e-9 * n**3 / measure(lambda a=a: a @ a, seconds).best
    return Ceilings(2e-9 * source.nbytes / copied, products[torch.float32], products[torch.float64])


def families() -> list[str]:
    return sorted(path.stem for path in OPERATORS.glob("*.py") if path.stem != "__init__")


def entries(family: str) -> list[Entry]:
    return list(importlib.import_module(f"benchmarks.operators.{family}").entries())


def run(family: str, entry: Entry, seconds: float, isas: list[str]) -> dict[str, object]:
    """Times an entry; one line of the table, as the JSON file has it. isas: which to compare with the widest."""
    args, kwargs = entry.arguments()
    operator = getattr(importlib.import_module(f"dpkernels.ops.{family}"), entry.operator)
    timing = measure(lambda: operator(*args, **kwargs), seconds)
    result = {"family": family, "operator": entry.operator, "case": entry.case, **asdict(timing)}
    result |= {"gb_per_s": 1e-9 * entry.bytes / timing.best, "gflop_per_s": 1e-9 * entry.flops / timing.best}
    if entry.reference:
        reference = getattr(importlib.import_module(f"dpkernels.reference.{family}"), entry.operator)
        result["reference_best"] = measure(lambda: reference(*args, **kwargs), seconds / 4).best
    if isas:
        widest = _native.active_isa()
        best = by_isa(lambda: operator(*args, **kwargs), [widest, *isas], seconds)
        result["times_longer"] = {isa: best[isa] / best[widest] for isa in isas}
    return result


HEADER = f"{'operator':<28}{'case':<46}{'ms':>10}{'reference':>11}{'GB/s':>8}{'GFLOP/s':>9}"


def line(result: dict[str, object]) -> str:
    ratio = f"{result['reference_best'] / result['best']:.1f}x" if "reference_best" in result else "-"
    isas = "".join(f"  {isa} {times:.2f}x" for isa, times in result.get("times_longer", {}).items())
    return (
        f"{result['operator']:<28}{result['case']:<46}{1e3 * result['best']:>10.3f}{ratio:>11}"
        f"{result['gb_per_s']:>8.1f}{result['gflop_per_s']:>9.1f}{isas}"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="+", choices=families(), default=families())
    parser.add_argument("--operator", nargs="+", help="only operators of these names")
    parser.add_argument("--isa", nargs="+", choices=_native.isas()[:-1], default=[], help="compare with the widest")
    parser.add_argument("--seconds", type=float, default=0.5, help="to spend on each entry (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    options = parser.parse_args(arguments)

    about, reached = machine(), ceilings(options.seconds)
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(
        f"this machine: copy {reached.copy_gb_per_s:.1f} GB/s, matrix product {reached.float32_gflop_per_s:.1f} GFLOP/s"
        f" in float32, {reached.float64_gflop_per_s:.1f} in float64\n"
    )
    print(HEADER)
    results = []
    for family in options.family:
        for entry in entries(family):
            if options.operator and entry.operator not in options.operator:
                continue
            results.append(run(family, entry, options.seconds, options.isa))
            print(line(results[-1]), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": about, "ceilings": asdict(reached), "results": results}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
