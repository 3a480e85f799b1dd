"""`dpkernels fewshot`: how well many small tasks are learned privately from a public model."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dpkernels.accounting.statement import rounded_up
from dpkernels.cli.parsing import add_privacy_target
from dpkernels.data import dataset_names, load_dataset
from dpkernels.models import names as model_names
from dpkernels.training import keep_freed_memory, learner, resolve
from dpkernels.training.files import write_json
from dpkernels.transfer import few_shot
from dpkernels.transfer.fewshot import Fit

_TRANSFER = ("init", "freeze", "sparse", "lr_body")
_FIELDS = ("dataset", "image_size", "model", "epsilon", "noise_multiplier", "delta", "lr", "max_grad_norm", "seed")


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "fewshot",
        help="few-shot evaluation of a public model, learned privately",
        description="Draw many tasks of a few classes and examples, learn each privately from the same public model, "
        "and print the mean accuracy with its 95% confidence interval (the protocol of CD-FSL). The privacy stated is "
        "that of the examples of one task.",
    )
    parser.add_argument("--dataset", required=True, metavar="NAME", help=f"{', '.join(dataset_names())} or a folder")
    parser.add_argument("--image-size", type=int, metavar="N", help="as for dpkernels train")
    parser.add_argument("--model", required=True, metavar="NAME", help=", ".join(model_names()))
    parser.add_argument("--init", metavar="FILE", help="weights of a public model, but for the classifier")
    parser.add_argument("--freeze", metavar="WHAT", help="as for dpkernels train")
    parser.add_argument("--sparse", type=float, metavar="P", help="as for dpkernels train")
    add_privacy_target(parser)
    parser.add_argument("--steps", type=int, default=50, metavar="T", help="on all examples of a task (default 50)")
    parser.add_argument("--lr", type=float, default=0.8, metavar="R", help="of the classifier (default 0.8)")
    parser.add_argument("--lr-body", type=float, default=0.1, metavar="R", help="of everything else (default 0.1)")
    parser.add_argument("--max-grad-norm", type=float, default=1.0, metavar="C", help="default 1")
    parser.add_argument("--split", choices=("train", "test"), default="test", help="to draw from (default test)")
    parser.add_argument("--ways", type=int, default=5, metavar="N", help="classes of a task (default 5)")
    parser.add_argument("--shots", type=int, default=5, metavar="K", help="examples of each to learn from (default 5)")
    parser.add_argument("--queries", type=int, default=15, metavar="Q", help="of each to be asked about (default 15)")
    parser.add_argument("--trials", type=int, default=600, metavar="T", help="tasks (default 600)")
    parser.add_argument("--seed", type=int, help="reproducible, and NOT PRIVATE: for tests and comparisons")
    parser.add_argument("--data-root", type=Path, metavar="DIR", help="where data sets lie (default DPKERNELS_DATA)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write configuration and accuracies there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Evaluate, print the result, and return the exit code."""
    given = {name: value for name in (*_TRANSFER, *_FIELDS) if (value := getattr(args, name)) is not None}
    size = args.ways * args.shots
    dataset = load_dataset(args.dataset, args.data_root, image_size=args.image_size)
    task = {"dataset_size": size, "batch_size": size, "epochs": args.steps, "schedule": "cosine", "optimizer": "sgd"}
    config = resolve(dataset, {**task, "momentum": 0.9, "normalization": "none", **given})
    split = dataset.test if args.split == "test" else dataset.train
    fit = learner(config, dataset.input_shape, args.ways)
    counts = {name: getattr(args, name) for name in ("ways", "shots", "queries", "trials")}
    keep_freed_memory()
    with tqdm(total=args.trials, unit="trial", disable=None) as bar:
        result = few_shot(split, _counted(fit, bar), **counts, seed=0 if config.seed is None else config.seed)
    plan = config.plan()
    print(f"accuracy       {result}, {args.ways}-way {args.shots}-shot")
    stated = f"epsilon {rounded_up(plan.epsilon)} at delta {plan.delta:g}"
    print(f"privacy        {stated} for the {size} examples of each task")
    if config.seeded:
        print("NOT PRIVATE: a seed makes the noise reproducible. For tests and comparisons only.")
    if args.json is not None:
        write_json(args.json, {"config": asdict(config), **counts, "mean": result.mean, "interval": result.interval})
    return 0


def _counted(fit: Fit, bar: Any) -> Fit:
    def counting(*examples: Any) -> Any:
        bar.update()
        return fit(*examples)

    return counting
