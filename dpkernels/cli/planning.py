"""`dpkernels plan` and `dpkernels epsilon`: accounting without training."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from dpkernels.accounting import Plan, SampledGaussian, bound, noise_multiplier, plan
from dpkernels.accounting.accountants import Accountant
from dpkernels.accounting.iteration import iteration_noise_multiplier
from dpkernels.accounting.mechanisms import check_count
from dpkernels.cli.parsing import add_accountant, add_privacy_target
from dpkernels.training import default_delta
from dpkernels.training.files import write_atomically

PLOTTED_EPSILONS = (0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 20.0, 30.0, 50.0, 70.0, 100.0)


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
    planner.add_argument("--plot", type=Path, metavar="PNG", help="draw the noise that each epsilon needs")
    planner.add_argument(
        "--iteration",
        action="store_true",
        help="beside it the noise by amplification by iteration, for convex losses, fixed batches in a fixed order and "
        "steps of at most 2 / smoothness, where nothing but the last iterate is seen; for 99%% of the examples",
    )
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
    iterated = _by_iteration(planned, planned.epsilon) if args.iteration else {}
    if args.json:
        _print_json(
            **{f"{name.replace(' ', '_')}_noise_multiplier": value for name, value in iterated.items()},
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
        print(f"noise multiplier {planned.noise_multiplier:.6g}, {planned.steps} steps")
        for name, value in iterated.items():
            print(f"noise multiplier {value:.6g} with {name} (convex smooth losses, for 99% of the examples)")
        print(f"\n{planned}")
    if args.plot:
        _draw_noise(args.plot, planned, args.accountant, iteration=args.iteration)
    return 0


def _by_iteration(planned: Plan, epsilon: float) -> dict[str, float]:
    """Noise multipliers for the same run under amplification by iteration, by what is released."""
    if planned.epochs is None or planned.epochs % 1:
        raise ValueError(f"epochs must be a whole number for --iteration, got {planned.epochs}")
    return {
        name: iteration_noise_multiplier(
            target_epsilon=epsilon,
            dataset_size=planned.dataset_size,
            batch_size=planned.batch_size,
            epochs=int(planned.epochs),
            delta=planned.delta,
            learning_rate=1.0,  # a step of at most 2 / smoothness, whatever it is, gives the same
            smoothness=2.0,
            every_epoch=every_epoch,
        )
        for name, every_epoch in (
            ("amplification by iteration", False),
            ("amplification by iteration releasing epochs", True),
        )
    }


def _draw_noise(path: Path, planned: Plan, accountant: Accountant, *, iteration: bool) -> None:
    """Noise multiplier against epsilon, at the plan's sampling rate, steps and delta."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves: dict[str, list[float]] = {}
    for target in PLOTTED_EPSILONS:
        found = {
            f"DP-SGD ({accountant})": noise_multiplier(
                target_epsilon=target,
                delta=planned.delta,
                sampling_rate=planned.sampling_rate,
                steps=planned.steps,
                accountant=accountant,
            )
        }
        for name, value in (found | (_by_iteration(planned, target) if iteration else {})).items():
            curves.setdefault(name, []).append(value)
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for (name, values), style in zip(curves.items(), ("-", "--", ":"), strict=False):
        axes.loglog(PLOTTED_EPSILONS, values, style, marker="o", markersize=3, linewidth=1.5, label=name)
    axes.plot([planned.epsilon], [planned.noise_multiplier], "k*", markersize=10, label="this plan")
    axes.set_xlabel(f"\N{GREEK SMALL LETTER EPSILON}, at \N{GREEK SMALL LETTER DELTA} = {planned.delta:g}")
    axes.set_ylabel("noise multiplier")
    axes.set_title(
        f"{planned.steps} steps of {planned.batch_size} examples out of {planned.dataset_size}", fontsize="medium"
    )
    axes.grid(which="both", alpha=0.2)
    axes.legend(frameon=False)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=150))


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
