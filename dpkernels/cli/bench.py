"""`dpkernels bench`: what a private step costs beside an ordinary one and peers, and what each layer's choice costs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from dpkernels.bench import MODELS, LayerChoice, StepResult, choices, explain, measure, report
from dpkernels.bench.engines import installed
from dpkernels.cli.parsing import require_device
from dpkernels.training.files import write_json

STEP_SECONDS, LAYER_SECONDS = 10.0, 0.3


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "bench",
        help="time and memory of a private step beside an ordinary one and peers",
        description="Time whole training steps on random data, each engine's interleaved with ordinary ones in a "
        "process of its own, and measure their memory. A line is the median of both, the median ratio with its "
        "quartiles, the ratio of the peak memory above model and data, and how much faster dpkernels is.",
    )
    parser.add_argument("--models", type=_names, default=list(MODELS), metavar="A,B", help=f"of {', '.join(MODELS)}")
    parser.add_argument(
        "--engines", type=_names, metavar="A,B", help=f"default: those installed, {', '.join(installed())}"
    )
    parser.add_argument("--batch", type=int, metavar="N", help="examples of a step, instead of each model's own")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help=f"of timing for each ({STEP_SECONDS:g}; layers {LAYER_SECONDS:g})"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), metavar="T", help="default %(default)s")
    parser.add_argument("--device", default="cpu", metavar="D", help="of whole steps (default %(default)s)")
    parser.add_argument(
        "--channels-last", action="store_true", help="let the maps of whole steps lie so, for every engine"
    )
    parser.add_argument(
        "--explain", metavar="MODEL", help="instead: each layer's choice of the cost model beside its alternatives"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write step.json and step.png, or explain.json")
    parser.set_defaults(run=run)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def run(args: argparse.Namespace) -> int:
    """Print the table or the JSON document, and return the exit code."""
    return _steps(args) if args.explain is None else _layers(args)


def _steps(args: argparse.Namespace) -> int:
    """1 where an engine failed. What was measured before Ctrl-C is kept."""
    seconds = STEP_SECONDS if args.seconds is None else args.seconds
    engines = installed() if args.engines is None else args.engines
    measured = measure(
        args.models,
        engines,
        batch=args.batch,
        seconds=seconds,
        threads=args.threads,
        device=require_device(args.device),
        channels_last=args.channels_last,
    )
    _prepare(args)
    if not args.json:
        _print_conditions(args.threads)
        print(report.HEADER, flush=True)
    results: list[StepResult] = []
    try:
        for result in measured:
            results.append(result)
            if not args.json:
                print(report.line(result), flush=True)
    finally:
        document = report.document(results, threads=args.threads, seconds=seconds, channels_last=args.channels_last)
        if args.json:
            print(json.dumps(document, indent=2, allow_nan=False))
        if args.out is not None and results:
            _write_steps(args, document, results)
    return 1 if any(result.failure is not None for result in results) else 0


def _write_steps(args: argparse.Namespace, document: dict[str, Any], results: list[StepResult]) -> None:
    write_json(args.out / "step.json", document)
    if any(result.ratio is not None for result in results):
        machine = document["machine"]
        title = f"{machine['processor']}, {args.threads} {'thread' if args.threads == 1 else 'threads'}"
        title += ", channels-last" if args.channels_last else ""
        report.plot(results, args.out / "step.png", title=title)


def _layers(args: argparse.Namespace) -> int:
    seconds = LAYER_SECONDS if args.seconds is None else args.seconds
    before = torch.get_num_threads()
    if args.threads < 1:
        raise ValueError(f"threads must be at least 1, got {args.threads}")
    torch.set_num_threads(args.threads)
    try:
        explained = explain(args.explain, batch=args.batch, seconds=seconds)
        _prepare(args)
        if not args.json:
            _print_conditions(args.threads)
            print(f"{args.explain}, batch {args.batch or MODELS[args.explain].batch}\n\n{choices.LEGEND}\n", flush=True)
        layers: list[LayerChoice] = []
        for choice in explained:
            layers.append(choice)
            if not args.json:
                print(choices.line(choice), flush=True)
    finally:
        torch.set_num_threads(before)
    document = {
        **report.conditions(args.threads),
        "model": args.explain,
        "batch": args.batch or MODELS[args.explain].batch,
        **choices.as_json(layers),
    }
    print(json.dumps(document, indent=2) if args.json else f"\n{choices.total(layers)}")
    if args.out is not None:
        write_json(args.out / "explain.json", document)
    return 0


def _prepare(args: argparse.Namespace) -> None:
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)


def _print_conditions(threads: int) -> None:
    facts = {**report.machine(), "threads": threads, **report.versions()}
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
