"""`dpkernels train`: a private training run in a folder."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpkernels.accounting.statement import rounded_up
from dpkernels.cli import run_options
from dpkernels.cli.parsing import add_privacy_target
from dpkernels.data import ImageDataset, load_dataset
from dpkernels.training import (
    Execution,
    RunFolder,
    RunResult,
    TrainConfig,
    default_progress,
    resolve,
    train,
)
from dpkernels.training.diagnostics import WARNING


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "train",
        help="train an image classifier privately",
        description="Train an image classifier with differential privacy, and leave a privacy report, metrics, "
        "history, a plot, a checkpoint and the weights in a folder. What is not given depends on the data set.",
    )
    run_options.add_fields(parser)
    add_privacy_target(parser)
    parser.add_argument("--seed", type=int, help="reproducible, and NOT PRIVATE: for tests and comparisons")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default runs/DATASET-TIME")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out, with what it began with")
    run_options.add_execution(parser)
    parser.add_argument(
        "--diagnostics",
        action="store_true",
        help="leave norms of single examples' gradients and pre-activations in the folder: PRIVATE, as the data is",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, print the result, and return the exit code."""
    given = run_options.given_fields(args)
    execution = replace(run_options.execution(args), diagnostics=args.diagnostics)
    result = _resume(args, given, execution) if args.resume else _start(args, given, execution)
    _print_result(result)
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def _start(args: argparse.Namespace, given: dict[str, Any], execution: Execution) -> RunResult:
    given = {"dataset": "digits", **given}
    folder = RunFolder(args.out or _fresh_folder(given["dataset"]))
    folder.claim()
    try:
        dataset = load_dataset(given["dataset"], args.data_root, image_size=given.get("image_size"))
        config = resolve(dataset, given)
        _announce(args, config, dataset, folder)
        plan = config.plan()
    except BaseException:
        folder.leave()
        raise
    progress = default_progress(args.quiet)
    return train(config, plan, dataset, folder, execution=execution, progress=progress)


def _resume(args: argparse.Namespace, given: dict[str, Any], execution: Execution) -> RunResult:
    if args.out is None:
        raise ValueError("out must name the folder of the run to resume")
    folder = RunFolder(args.out)
    folder.reclaim()
    config, plan = folder.read_config()
    begun = config.to_dict()
    other = [f"{name}={value!r} (was {begun[name]!r})" for name, value in given.items() if value != begun[name]]
    if other:
        raise ValueError(f"a resumed run keeps what it began with, got {', '.join(other)}")
    dataset = load_dataset(config.dataset, args.data_root, image_size=config.image_size)
    progress = default_progress(args.quiet)
    _announce(args, config, dataset, folder)
    return train(config, plan, dataset, folder, resume=True, execution=execution, progress=progress)


def _fresh_folder(dataset: str) -> Path:
    return Path("runs") / f"{Path(dataset).name or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"


def _announce(args: argparse.Namespace, config: TrainConfig, dataset: ImageDataset, folder: RunFolder) -> None:
    if config.seeded:
        print(f"NOT PRIVATE: --seed {config.seed} makes the noise reproducible. For tests and comparisons only.")
    if args.diagnostics:
        print(f"{WARNING} They go into {folder.diagnostics} and {folder.diagnostics_plot.name}.")
    if not args.quiet:
        on = dataset.name if config.features == "none" else f"{dataset.name} by {config.features} features"
        print(
            f"{config.model} on {on}: {config.loss}, {config.optimizer}, learning rate {config.lr:g}, batch size "
            f"{config.batch_size}, {config.epochs:g} epochs, max_grad_norm {config.max_grad_norm:g}, in {folder.path}",
            flush=True,
        )


def _print_result(result: RunResult) -> None:
    metrics, folder = result.metrics, result.folder
    if result.stopped_by is not None:
        print(
            f"Stopped after {metrics['steps']} of {metrics['planned_steps']} steps; an unfinished logical batch was "
            f"discarded. Go on with: dpkernels train --resume --out {folder.path}"
        )
    if metrics["lost_steps"]:
        print(f"{metrics['lost_steps']} steps were lost when the run was killed; they are paid for.")
    print(f"test accuracy  {metrics['test_accuracy']:.2%}")
    if "train_accuracy" in metrics:
        print(f"training set   {metrics['train_accuracy']:.2%} right, by a noisy count")
    epsilon, delta = metrics["epsilon"], metrics["delta"]
    stated = "no epsilon can be stated" if epsilon is None else f"epsilon {rounded_up(epsilon)}"
    print(f"privacy        {stated} at delta {delta:g}")
    print(f"steps          {metrics['steps']} of {metrics['planned_steps']}")
    print(f"plot           {folder.plot}")
    print(f"report         {folder.report}")
    print(f"\n{metrics['statement']}")
