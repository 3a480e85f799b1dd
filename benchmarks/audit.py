"""The audit table: what the two-world test finds of every broken optimizer, and of the real one by the same attack.

    python -m benchmarks.audit [--runs 100000] [--variant NAME ...] [--seed 1]

Attacks, faults and test are those of tests/audit. 100,000 runs of each take about a quarter of an hour.
"""

from __future__ import annotations

import argparse
import time

import torch

from dpkernels.audit import LIMITS
from tests.audit.variants import CONFIDENCE, DELTA, SIGMA, VARIANTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, help="of each test; by default as many as the tests use")
    parser.add_argument("--variant", nargs="+", metavar="NAME", help="beginnings of names")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"noise multiplier {SIGMA:g}, delta = {DELTA:g}, confidence {100 * CONFIDENCE:g}%\n")
    print("| variant | runs | claim | lower bound, broken | lower bound, real | seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for variant in VARIANTS:
        if args.variant and not variant.name.startswith(tuple(args.variant)):
            continue
        start = time.perf_counter()
        broken, real = (variant.audit(broken=b, seed=args.seed, runs=args.runs) for b in (True, False))
        print(
            f"| {variant.name} | {broken.runs:,} | {broken.claim:.3f} | {broken.lower_bound:.3f} "
            f"({'convicted' if broken.refuted else 'ACQUITTED'}) | {real.lower_bound:.3f} "
            f"({'CONVICTED' if real.refuted else 'acquitted'}) | {time.perf_counter() - start:.0f} |",
            flush=True,
        )
    print(f"\n{LIMITS}")


if __name__ == "__main__":
    main()
