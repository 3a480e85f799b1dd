"""`dpkernels audit`: what an attack finds of a private training run, beside what the run claims."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from dpkernels.audit import LIMITS, OneRunReport, one_run, plot
from dpkernels.data import ImageDataset, dataset_names, load_dataset
from dpkernels.models import create
from dpkernels.models import names as model_names
from dpkernels.optim import DPSGD
from dpkernels.training import RunFolder, TrainConfig, accuracy, resolve
from dpkernels.training.files import write_json
from dpkernels.training.privacy_report import write_report

EPSILONS = (1.0, 2.0, 4.0, 8.0)
EPOCHS = 5.0
REFUTED = 1


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "audit",
        help="lower bounds on epsilon from attacked training runs",
        description="Train once for each epsilon with planted canaries, guess which of them were in the data, and show "
        "the lower bound on epsilon beside the claim. The exit code is 1 where a claim is refuted. The models "
        "are thrown away. What is not given is as for `dpkernels train`, momentum apart.",
    )
    parser.add_argument("--dataset", metavar="NAME", default="digits", help=f"{', '.join(dataset_names())} or a folder")
    parser.add_argument("--model", metavar="NAME", help=", ".join(model_names()))
    parser.add_argument(
        "--epsilon", type=float, nargs="+", metavar="E", default=list(EPSILONS), help="default 1 2 4 8, a run for each"
    )
    parser.add_argument("--delta", type=float, metavar="D", help="default: 1e-5, or below 1/N for large data sets")
    parser.add_argument("--canaries", type=int, metavar="M", default=1000, help="default 1000")
    parser.add_argument("--confidence", type=float, metavar="P", default=0.95, help="of each bound (default 0.95)")
    parser.add_argument("--dataset-size", type=int, metavar="N", help="public number of training examples, for folders")
    parser.add_argument("--epochs", type=float, metavar="E", default=EPOCHS, help=f"default {EPOCHS:g}")
    parser.add_argument("--batch-size", type=int, metavar="B", help="expected size of a logical batch")
    parser.add_argument("--lr", type=float, metavar="R", help="learning rate without momentum")
    parser.add_argument("--max-grad-norm", type=float, metavar="C", help="bound on each example's gradient norm")
    parser.add_argument("--seed", type=int, help="reproducible, and NOT PRIVATE: for tests and comparisons")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="where audit.json and audit.png go")
    parser.add_argument("--physical-batch-size", type=int, default=256, metavar="B", help="rows at once (default 256)")
    parser.add_argument("--data-root", type=Path, metavar="DIR", help="where data sets lie (default DPKERNELS_DATA)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Audit a run for each epsilon, print a table, and return the exit code."""
    dataset = load_dataset(args.dataset, args.data_root)
    names = ("dataset", "model", "delta", "dataset_size", "epochs", "batch_size", "max_grad_norm", "seed")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    configs = [_config(dataset, {**given, "epsilon": epsilon}, args) for epsilon in args.epsilon]
    args.out.mkdir(parents=True, exist_ok=True)
    first = configs[0]
    if first.seeded:
        print(f"NOT PRIVATE: --seed {first.seed} makes the noise reproducible. For tests and comparisons only.")
    print(
        f"{first.model} on {dataset.name}: {args.canaries} canaries, batch size {first.batch_size}, "
        f"epochs {first.epochs:g}, learning rate {first.lr:.3g}, max_grad_norm {first.max_grad_norm:g}\n\n"
        "  claim  lower bound  guesses  correct  test accuracy",
        flush=True,
    )
    reports = []
    for config in configs:
        report, test_accuracy = _audit(dataset, config, args)
        if math.isinf(report.claim):
            raise ValueError(f"epsilon must be smaller, got {config.epsilon:g}, which is not claimed: see the warning")
        reports.append(report)
        print(
            f"{report.claim:7.3f}  {report.lower_bound:11.3f}  {report.guesses:7d}  {report.correct:7d}  "
            f"{test_accuracy:13.2%}{'  REFUTED' if report.refuted else ''}",
            flush=True,
        )
    picture = args.out / "audit.png"
    plot(reports, picture, title=f"{dataset.name}, {first.model}: one run with {args.canaries} canaries for each claim")
    write_json(args.out / "audit.json", [dataclasses.asdict(report) for report in reports])
    run = RunFolder(args.out)
    if run.report.exists():  # of a run that was trained there
        write_report(run)
    print(
        f"\nAt delta = {first.delta:g}; each lower bound holds with {100 * args.confidence:g}% confidence.\n"
        f"plot  {picture}\n\n{LIMITS}"
    )
    return REFUTED if any(report.refuted for report in reports) else 0


def _config(dataset: ImageDataset, given: dict[str, Any], args: argparse.Namespace) -> TrainConfig:
    """Plain SGD. Without momentum 1 / (1 - momentum) times the rate goes as far."""
    config = resolve(dataset, {"normalization": "none", **given})
    lr = config.lr / (1 - config.momentum) if args.lr is None else args.lr
    return dataclasses.replace(config, lr=lr, momentum=0.0, dataset_size=config.dataset_size + args.canaries // 2)


def _audit(dataset: ImageDataset, config: TrainConfig, args: argparse.Namespace) -> tuple[OneRunReport, float]:
    """The report and the accuracy of the model that was audited."""
    if config.seed is not None:
        torch.manual_seed(config.seed)
    plan, model = config.plan(), create(config.model, dataset.input_shape, dataset.num_classes)
    report = one_run(
        model,
        dataset.train.batch(torch.arange(len(dataset.train))),
        lambda audited: DPSGD(audited, plan, lr=config.lr, max_grad_norm=config.max_grad_norm, seed=config.seed),
        canaries=args.canaries,
        physical_batch_size=args.physical_batch_size,
        confidence=args.confidence,
        seed=config.seed,
    )
    return report, accuracy(model, dataset.test)
