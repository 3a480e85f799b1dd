"""`dpkernels plan` and `dpkernels epsilon`: accounting without training."""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from dpkernels.accounting import SampledGaussian, bound, plan
from dpkernels.accounting.mechanisms import check_count
from dpkernels.cli.parsing import add_accountant, add_privacy_target
from dpkernels.training import default_delta


def add_to(commands: Any) -> None:
    """Add both commands to the parser's."""
    planner = commands.add_parser(
        "plan",
        help="noise for a target epsilon, or epsilon for a noise, and the privacy statement",
        description="Plan a training run: how much noise a target epsilon needs, or what a noise guarantees.",
    )
    planner.add_argument("--dataset-size", type=int, required=True, metavar="N", help="public number of examples")
    planner.add_argument("--batch-size", type=int, required=True, metavar="B", help="expected batch size")
    length = planner.add_mutually_exclusive_group(required=True)
    length.add_argument("--epochs", type=float, metavar="E", help="passes over the data, fractions too")
    length.add_argument("--steps", type=int, metavar="T", help="steps, instead of --epochs")
    add_privacy_target(planner)
    add_accountant(planner)
    planner.set_defaults(run=run_plan)

    counter = commands.add_parser(
        "epsilon",
        help="epsilon of a number of noisy steps",
        description="Epsilon of Poisson-subsampled Gaussian steps; one example is added or removed.",
    )
    counter.add_argument("--noise-multiplier", type=float, required=True, metavar="S")
    counter.add_argument("--sampling-rate", type=float, metavar="Q", help="or --batch-size and --dataset-size")
    counter.add_argument("--batch-size", type=int, metavar="B", help="expected batch size")
    counter.add_argument("--dataset-size", type=int, metavar="N", help="public number of examples")
    counter.add_argument("--steps", type=int, required=True, metavar="T")
    counter.add_argument("--delta", type=float, required=True, metavar="D")
    add_accountant(counter)
    counter.set_defaults(run=run_epsilon)


def run_plan(args: argparse.Namespace) -> int:
    """Print the privacy statement, or the plan as JSON."""
    size = check_count("dataset_size", args.dataset_size)
    planned = plan(
        dataset_size=size,
        batch_size=args.batch_size,
        epochs=args.epochs,
        steps=args.steps,
        target_epsilon=3.0 if args.epsilon is None and args.noise_multiplier is None else args.epsilon,
        noise_multiplier=args.noise_multiplier,
        delta=default_delta(size) if args.delta is None else args.delta,
        accountant=args.accountant,
    )
    if args.json:
        _print_json(
            noise_multiplier=planned.noise_multiplier,
            sampling_rate=planned.sampling_rate,
            steps=planned.steps,
            epsilon=planned.epsilon,
            epsilon_lower=planned.bound.lower,
            delta=planned.delta,
            dataset_size=planned.dataset_size,
            batch_size=planned.batch_size,
            accountant=planned.bound.accountant,
            statement=str(planned),
        )
    else:
        print(f"noise multiplier {planned.noise_multiplier:.6g}, {planned.steps} steps\n\n{planned}")
    return 0


def run_epsilon(args: argparse.Namespace) -> int:
    """Print epsilon, or as JSON with its bounds."""
    event = SampledGaussian(args.noise_multiplier, _sampling_rate(args), check_count("steps", args.steps))
    found = bound([event], args.delta, args.accountant)
    if args.json:
        _print_json(
            epsilon=found.upper,
            epsilon_lower=found.lower,
            delta=args.delta,
            noise_multiplier=event.noise_multiplier,
            sampling_rate=event.sampling_rate,
            steps=event.count,
            accountant=found.accountant,
            method=found.method,
        )
    else:
        print(f"{found.upper:.6g}")
    return 0


def _sampling_rate(args: argparse.Namespace) -> float:
    sizes = (args.batch_size, args.dataset_size)
    if args.sampling_rate is not None:
        if sizes != (None, None):
            raise ValueError("sampling_rate must be given alone, got batch_size or dataset_size too")
        return float(args.sampling_rate)
    if None in sizes:
        raise ValueError("sampling_rate must be given, or both batch_size and dataset_size")
    if not 1 <= args.batch_size <= args.dataset_size:
        raise ValueError(f"batch_size must lie in [1, dataset_size={args.dataset_size}], got {args.batch_size}")
    return float(args.batch_size / args.dataset_size)


def _print_json(**values: Any) -> None:
    """An infinite epsilon, which JSON does not know, is null."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
    print(json.dumps(finite, indent=2, allow_nan=False))
