"""`dpkernels sweep`: a grid of training runs, and what all of them cost together."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpkernels.cli import run_options
from dpkernels.cli.parsing import add_privacy_target
from dpkernels.search import grid, run_sweep
from dpkernels.search.sweep import SweepResult
from dpkernels.search.sweep_progress import SweepProgress
from dpkernels.search.sweep_report import Cost, Row, notes, summary, table
from dpkernels.search.workers import Watcher
from dpkernels.training.config import parse_value


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "sweep",
        help="train a grid of configurations, and account for all of them",
        description="Train every combination of some values, several at a time. Each run is left in a folder of --out "
        "as train leaves it; what is done is skipped and what was broken off is gone on with, so that the same command "
        "resumes a sweep. Beside the epsilon of a run stands what all of them cost together: every result of a grid is "
        "released.",
    )
    parser.add_argument(
        "--grid",
        action="append",
        default=[],
        type=_axis,
        metavar="FIELD=A,B,...",
        help="values to try, in every combination: an argument below, with _ for -; may be given several times",
    )
    parser.add_argument(
        "--seeds",
        metavar="A,B,...",
        help="every combination with each of these seeds: reproducible, and NOT PRIVATE",
    )
    run_options.add_fields(parser)
    add_privacy_target(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder for all runs")
    add_processes(parser)
    run_options.add_execution(parser)
    parser.set_defaults(run=run)


def add_processes(parser: argparse.ArgumentParser) -> None:
    """How many runs are made at a time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument(
        "--processes", type=int, default=cores, metavar="P", help=f"runs at a time (default one a core, {cores})"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="T", help="of each run (default 1)")


def _axis(text: str) -> tuple[str, list[Any]]:
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    try:
        return name, [parse_value(name, value) for value in values.split(",")]
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Run the grid, print the table, and return the exit code: 1 where a run failed."""
    axes: dict[str, list[Any]] = {}
    seeds = [] if args.seeds is None else [("seed", [parse_value("seed", seed) for seed in args.seeds.split(",")])]
    for name, values in [*args.grid, *seeds]:
        if name in axes:
            raise ValueError(f"{name} must be given once, got it twice")
        axes[name] = values
    points = grid({"dataset": "digits", **run_options.given_fields(args, elsewhere=axes)}, axes)
    _make(args.out)
    shown: list[SweepProgress] = []

    def begin(rows: Sequence[Row], costs: Sequence[Cost]) -> Watcher:
        if args.quiet:
            return Watcher()
        print("\n".join(map(str, costs)))
        if not rows:
            print("Everything is done already.")
        shown.append(SweepProgress(rows, bar=sys.stderr.isatty()))
        return shown[0]

    try:
        result = run_sweep(
            points,
            args.out,
            processes=args.processes,
            threads=args.threads,
            data_root=args.data_root,
            execution=run_options.execution(args),
            begin=begin,
            planning=None if args.quiet else _show_planning,
        )
    finally:
        for progress in shown:
            progress.end()
    _print_result(args, result)
    if result.stopped_by is not None:
        return 128 + result.stopped_by
    return 1 if any(row.state == "failed" for row in result.rows) else 0


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"the folder {out} must be writable, but: {error.strerror or error}") from error


def _show_planning(number: int, total: int) -> None:
    """Calibrating the noise of many configurations takes a while."""
    if sys.stderr.isatty():
        print(f"\rplanning run {number + 1} of {total}", end="\n" if number + 1 == total else "", file=sys.stderr)


def _print_result(args: argparse.Namespace, result: SweepResult) -> None:
    print(f"\n{table(result.rows)}\n")
    if (spread := summary(result.rows)) is not None:
        print(spread)
    for row in result.rows:
        if row.state == "failed":
            print(f"FAILED  {row.name}: {row.failure}")
    if result.stopped_by is not None:
        print("Stopped. The same command goes on.")
    for cost in result.costs:
        print(f"privacy  {cost}, by {cost.method}")
    print(f"table    {args.out / 'sweep.md'}")
    print(f"\n{notes(result.costs)}")
