"""`dpkernels train`: a private training run in a folder."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from dpkernels.cli.parsing import add_privacy_target, require_device
from dpkernels.data import ImageDataset, dataset_names, load_dataset
from dpkernels.models import names as model_names
from dpkernels.training import (
    RECIPES,
    Execution,
    RunFolder,
    RunResult,
    TrainConfig,
    default_progress,
    recipe,
    resolve,
    train,
)
from dpkernels.training.config import (
    FEATURES,
    LOSSES,
    NORMALIZATIONS,
    OPTIMIZERS,
    SCHEDULES,
    check_values,
    field_names,
)
from dpkernels.training.diagnostics import WARNING


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "train",
        help="train an image classifier privately",
        description="Train an image classifier with differential privacy, and leave metrics, history, a plot, a "
        "checkpoint and the weights in a folder. What is not given depends on the data set.",
    )
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help=f"hyper-parameters of a paper: {', '.join(RECIPES)}; what is given beside it wins",
    )
    parser.add_argument("--dataset", metavar="NAME", help=f"{', '.join(dataset_names())} or a folder (default digits)")
    parser.add_argument("--model", metavar="NAME", help=", ".join(model_names()))
    add_privacy_target(parser)
    parser.add_argument("--dataset-size", type=int, metavar="N", help="public number of training examples, for folders")
    parser.add_argument("--epochs", type=float, metavar="E")
    parser.add_argument("--batch-size", type=int, metavar="B", help="expected size of a logical batch")
    parser.add_argument("--lr", type=float, metavar="R", help="learning rate")
    parser.add_argument("--momentum", type=float, metavar="M", help="of sgd (default 0.9)")
    parser.add_argument("--weight-decay", type=float, metavar="W", help="default 0")
    parser.add_argument("--max-grad-norm", type=float, metavar="C", help="bound on each example's gradient norm")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="default sgd")
    parser.add_argument("--schedule", choices=SCHEDULES, help="of the learning rate (default constant)")
    parser.add_argument("--warmup", type=float, metavar="F", help="fraction of the steps over which it rises")
    parser.add_argument(
        "--averaging",
        type=float,
        metavar="D",
        help="leave a moving average of the weights with this decay",
    )
    parser.add_argument(
        "--loss", choices=LOSSES, help="default cross-entropy; what the others have beside it depends on the data set"
    )
    parser.add_argument("--loss-threshold-epoch", type=float, metavar="E", help="when its parts weigh the same")
    parser.add_argument("--loss-beta", type=float, metavar="B", help="divides its penalty; of huber, where squares end")
    parser.add_argument("--loss-gamma", type=float, metavar="G", help="power of the focal loss")
    parser.add_argument("--features", choices=FEATURES, help="replace images by handcrafted features (default none)")
    parser.add_argument(
        "--normalization",
        choices=NORMALIZATIONS,
        help="of the model's input; private statistics are part of the plan (default none, with features private)",
    )
    parser.add_argument("--groups", type=int, metavar="G", help="of group normalization")
    parser.add_argument("--norm-noise-multiplier", type=float, metavar="S", help="of private statistics (default 32)")
    parser.add_argument(
        "--init", metavar="FILE", help="weights of a public model (safetensors, state_dict), but for the classifier"
    )
    parser.add_argument(
        "--freeze", metavar="WHAT", help="block groups, by their number, or modules, norm or body, with commas between"
    )
    parser.add_argument(
        "--sparse", type=float, metavar="P", help="train classifier, normalization, and this fraction of convolutions"
    )
    parser.add_argument("--lr-body", type=float, metavar="R", help="of everything but the classifier (default: --lr)")
    parser.add_argument("--seed", type=int, help="reproducible, and NOT PRIVATE: for tests and comparisons")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default runs/DATASET-TIME")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out, with what it began with")
    parser.add_argument("--physical-batch-size", type=int, default=256, metavar="B", help="rows at once (default 256)")
    parser.add_argument("--device", default="cpu", help="default cpu")
    parser.add_argument("--workers", type=int, default=0, metavar="W", help="processes that fetch data (default 0)")
    parser.add_argument("--data-root", type=Path, metavar="DIR", help="where data sets lie (default DPKERNELS_DATA)")
    parser.add_argument(
        "--diagnostics",
        action="store_true",
        help="leave norms of single examples' gradients and pre-activations in the folder: PRIVATE, as the data is",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress, only the result")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, print the result, and return the exit code."""
    given = {name: value for name in field_names() if (value := getattr(args, name)) is not None}
    if args.init is not None:
        given["init"] = str(Path(args.init).absolute())  # a resume may start elsewhere
    if args.recipe is not None:
        given = _beside(recipe(args.recipe), given)
    check_values(given)
    execution = Execution(require_device(args.device), args.physical_batch_size, args.workers, args.diagnostics)
    result = _resume(args, given, execution) if args.resume else _start(args, given, execution)
    _print_result(result)
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def _start(args: argparse.Namespace, given: dict[str, Any], execution: Execution) -> RunResult:
    given = {"dataset": "digits", **given}
    folder = RunFolder(args.out or _fresh_folder(given["dataset"]))
    folder.claim()
    try:
        dataset = load_dataset(given["dataset"], args.data_root)
        config = resolve(dataset, given)
        _announce(args, config, dataset, folder)
        plan = config.plan()
    except BaseException:
        folder.leave()
        raise
    progress = default_progress(args.quiet)
    return train(config, plan, dataset, folder, execution=execution, progress=progress)


def _beside(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """A recipe's values with those that were given; one of a kind that excludes another replaces it."""
    if "noise_multiplier" in given:
        values.pop("epsilon", None)
    if "epsilon" in given:
        values.pop("noise_multiplier", None)
    if "loss" in given:
        for name in LOSSES["losing-less"]:
            values.pop(name, None)
    if "normalization" in given:
        values.pop("groups", None)
        values.pop("norm_noise_multiplier", None)
    return {**values, **given}


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
    dataset = load_dataset(config.dataset, args.data_root)
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
        print(
            f"{config.model} on {dataset.name}: {config.loss}, {config.optimizer}, learning rate {config.lr:g}, batch "
            f"size {config.batch_size}, {config.epochs:g} epochs, max_grad_norm {config.max_grad_norm:g}, in "
            f"{folder.path}",
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
        print(f"{metrics['lost_steps']} steps were lost when the run was killed; they stay spent.")
    print(f"test accuracy  {metrics['test_accuracy']:.2%}")
    print(f"privacy        epsilon {metrics['epsilon']:.4g} at delta {metrics['delta']:g}")
    print(f"time           {metrics['seconds']:.1f} s, {metrics['steps']} steps")
    print(f"plot           {folder.plot}")
    print(f"\n{metrics['statement']}")
