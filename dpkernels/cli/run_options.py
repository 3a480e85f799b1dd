"""The arguments that say what a training run computes, and how: `train`, `sweep` and `tune` share them."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dpkernels.cli.parsing import require_device
from dpkernels.data import dataset_names
from dpkernels.models import names as model_names
from dpkernels.training import RECIPES, Execution, recipe
from dpkernels.training.config import (
    FEATURES,
    LOSSES,
    NORMALIZATIONS,
    OPTIMIZERS,
    SCHEDULES,
    check_values,
    field_names,
)


def add_fields(parser: argparse.ArgumentParser) -> None:
    """--recipe, and an argument for every field of a `TrainConfig` but its privacy target and its seed."""
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help=f"hyper-parameters of a paper: {', '.join(RECIPES)}; what is given beside it wins",
    )
    parser.add_argument("--dataset", metavar="NAME", help=f"{', '.join(dataset_names())} or a folder (default digits)")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help=f"{', '.join(model_names())}, or simple_vgg-32x2-64x2-128x2-128: two convolutions of 32 channels, two of "
        "64, two of 128, and 128 hidden units",
    )
    parser.add_argument(
        "--image-size",
        type=int,
        metavar="N",
        help="for a folder of photographs: crop and resize each to NxN when it is fetched, none kept in memory",
    )
    parser.add_argument("--dataset-size", type=int, metavar="N", help="public number of training examples, for folders")
    parser.add_argument("--epochs", type=float, metavar="E")
    parser.add_argument("--batch-size", type=int, metavar="B", help="expected size of a logical batch")
    parser.add_argument("--lr", type=float, metavar="R", help="learning rate")
    parser.add_argument("--momentum", type=float, metavar="M", help="of sgd (default 0.9)")
    parser.add_argument(
        "--nesterov", action=argparse.BooleanOptionalAction, default=None, help="Nesterov's momentum (default no)"
    )
    parser.add_argument("--weight-decay", type=float, metavar="W", help="default 0")
    parser.add_argument("--max-grad-norm", type=float, metavar="C", help="bound on each example's gradient norm")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="default sgd")
    parser.add_argument("--schedule", choices=SCHEDULES, help="of the learning rate (default constant)")
    parser.add_argument("--warmup", type=float, metavar="F", help="fraction of the steps over which it rises")
    parser.add_argument(
        "--averaging", type=float, metavar="D", help="leave a moving average of the weights with this decay"
    )
    parser.add_argument(
        "--loss", choices=LOSSES, help="default cross-entropy; what the others have beside it depends on the data set"
    )
    parser.add_argument("--loss-threshold-epoch", type=float, metavar="E", help="when its parts weigh the same")
    parser.add_argument("--loss-beta", type=float, metavar="B", help="divides its penalty; of huber, where squares end")
    parser.add_argument("--loss-gamma", type=float, metavar="G", help="power of the focal loss")
    parser.add_argument(
        "--features",
        choices=FEATURES,
        help="replace images by handcrafted features (default none; scatternet for the models that stand on them)",
    )
    parser.add_argument(
        "--normalization",
        choices=NORMALIZATIONS,
        help="of the model's input; private statistics are part of the plan (default none, for cifar10 public, with "
        "features private)",
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
    parser.add_argument(
        "--score-noise-multiplier",
        type=float,
        metavar="S",
        help="also release the number of training examples that the trained model gets right, with noise of this "
        "standard deviation; it is part of the plan",
    )


def add_execution(parser: argparse.ArgumentParser) -> None:
    """How a run is computed, and where its data lies."""
    parser.add_argument("--physical-batch-size", type=int, default=256, metavar="B", help="rows at once (default 256)")
    parser.add_argument("--device", default="cpu", help="default cpu")
    parser.add_argument("--workers", type=int, default=0, metavar="W", help="processes that fetch data (default 0)")
    parser.add_argument("--data-root", type=Path, metavar="DIR", help="where data sets lie (default DPKERNELS_DATA)")
    parser.add_argument("--quiet", action="store_true", help="no progress, only the result")


def execution(args: argparse.Namespace) -> Execution:
    """What `add_execution` was given. Raises ValueError that names the argument."""
    return Execution(require_device(args.device), args.physical_batch_size, args.workers)


def given_fields(args: argparse.Namespace, elsewhere: Iterable[str] = ()) -> dict[str, Any]:
    """The fields that were given, over those of the recipe.

    elsewhere: fields whose values come from somewhere else. They must not be given too; a recipe's are left out. Raises
    ValueError or TypeError that names the field.
    """
    elsewhere = set(elsewhere)
    given = {name: value for name in field_names() if (value := getattr(args, name, None)) is not None}
    if "init" in given:
        given["init"] = str(Path(given["init"]).absolute())  # a resume may start elsewhere
    if twice := sorted(elsewhere & given.keys()):
        raise ValueError(f"{twice[0]} must be given once, got {given[twice[0]]!r} beside the values to try")
    if args.recipe is not None:
        given = _beside(recipe(args.recipe), given, elsewhere)
    check_values(given)
    return given


def _beside(values: dict[str, Any], given: dict[str, Any], elsewhere: set[str]) -> dict[str, Any]:
    """A recipe's values with those that were given; one of a kind that excludes another replaces it."""
    named = elsewhere | given.keys()
    if "noise_multiplier" in named:
        values.pop("epsilon", None)
    if "epsilon" in named:
        values.pop("noise_multiplier", None)
    if "loss" in named:
        for name in LOSSES["losing-less"]:
            values.pop(name, None)
    if "normalization" in named:
        values.pop("groups", None)
        values.pop("norm_noise_multiplier", None)
    return {name: value for name, value in values.items() if name not in elsewhere} | given
