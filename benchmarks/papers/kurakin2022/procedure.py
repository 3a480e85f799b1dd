"""The paper's procedure for choosing clipping norm and learning rate (section 3.3), with its larger batches (3.4).

python -m benchmarks.papers.kurakin2022.procedure --public --dataset digits --epsilon 3 --scale 2 --out runs/procedure

1. Without noise and clipping, the learning rate that is best: alpha_pub.
2. Without noise, at alpha_pub, the smallest clipping norm whose accuracy is within --tolerance of stage 1: C.
3. With C and the noise for --epsilon, the learning rate that is best. --scale K multiplies batch size and epochs of
   this stage and of the next: as many steps, each with less noise beside its sum.
4. With --refine: half, once and twice of C and of that learning rate, all nine.

THE PROCEDURE IS NOT PRIVATE, as the paper says itself: every trial looks at the data, and stages 1 and 2 add no noise
at all. Run it on public data that is like the private data, and say so with --public; then train on the private data
once, with what was found. Without --public everything that it prints or leaves is marked. `dpkernels tune` chooses
privately.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from dpkernels.accounting import Plan
from dpkernels.accounting import plan as make_plan
from dpkernels.data import ImageDataset, PoissonLoader, load_dataset
from dpkernels.models import create
from dpkernels.optim import DPSGD
from dpkernels.random import Key
from dpkernels.training import Execution, RunFolder, TrainConfig, accuracy, resolve, train
from dpkernels.training.files import write_json
from dpkernels.training.schedules import factor

NOT_PRIVATE = (
    "NOT PRIVATE: this procedure looks at the data in every trial, and in its first two stages without any noise. "
    "Nothing that it prints or leaves may be published as private, and what it chooses tells about the data. Run it on "
    "public data (--public), or choose with `dpkernels tune`."
)
PUBLIC = "The data was declared public (--public): what follows says nothing about any other data."
RATES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
NORMS = (30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03)
AROUND = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True)
class Trial:
    """One training run of the procedure, and the accuracy on the test split that it came to."""

    stage: int
    lr: float
    max_grad_norm: float
    noise_multiplier: float
    accuracy: float


@dataclass(frozen=True)
class Outcome:
    """What was found: stage 2's clipping norm and stage 3's learning rate, or stage 4's where it was run."""

    trials: tuple[Trial, ...]
    max_grad_norm: float
    lr: float


Report = Callable[[Trial], object]


def procedure(
    data: ImageDataset,
    fields: dict[str, Any],
    *,
    rates: Sequence[float] = RATES,
    norms: Sequence[float] = NORMS,
    tolerance: float = 0.01,
    scale: int = 1,
    refine: bool = False,
    seed: int = 1,
    report: Report = lambda trial: None,
    out: Path,
) -> Outcome:
    """Run the stages on `data` with the other `fields` of a configuration; stages 3 and 4 leave their runs in `out`.

    Raises ValueError where no norm is within `tolerance` of the accuracy of stage 1.
    """
    if fields.get("optimizer", "sgd") != "sgd":
        raise ValueError(f"optimizer must be sgd, whose momentum the procedure is for, got {fields['optimizer']!r}")
    config = resolve(data, fields | {"seed": seed})
    if config.features != "none" or config.normalization != "none":
        raise ValueError(f"features and normalization must be none, got {config.features}, {config.normalization}")
    plan = make_plan(  # for its steps and sampling rate alone
        dataset_size=config.dataset_size,
        batch_size=config.batch_size,
        epochs=config.epochs,
        delta=config.delta,
        noise_multiplier=1.0,
        accountant="rdp",
    )
    trials: list[Trial] = []

    def tried(stage: int, results: Iterable[Trial]) -> list[Trial]:
        for trial in results:
            trials.append(trial)
            report(trial)
        return [trial for trial in trials if trial.stage == stage]

    first = tried(1, (_without_noise(1, config, plan, data, lr, math.inf) for lr in rates))
    public = _best(first)
    second = tried(2, (_without_noise(2, config, plan, data, public.lr, norm) for norm in norms))
    close = [trial for trial in second if trial.accuracy >= public.accuracy - tolerance]
    if not close:
        found = f"{_best(second).accuracy:.2%} at most, and {public.accuracy:.2%} without clipping"
        raise ValueError(f"norms must hold one whose accuracy is within tolerance={tolerance}, got {found}")
    norm = min(trial.max_grad_norm for trial in close)

    scaled = fields | {"batch_size": config.batch_size * scale, "epochs": config.epochs * scale, "seed": seed}
    third = tried(3, (_private(3, scaled, data, public.lr * times, norm, out) for times in AROUND))
    best = _best(third)
    if refine:
        grid = ((best.lr * a, norm * c) for a in (0.5, 1.0, 2.0) for c in (0.5, 1.0, 2.0))
        best = _best(tried(4, (_private(4, scaled, data, lr, c, out) for lr, c in grid)))
    return Outcome(tuple(trials), best.max_grad_norm, best.lr)


def _best(trials: Sequence[Trial]) -> Trial:
    return max(trials, key=lambda trial: trial.accuracy)


class _Unplanned:
    """Lets a loader lead an optimizer that has no plan, because it adds no noise."""

    def __init__(self, optimizer: DPSGD) -> None:
        self._optimizer = optimizer
        self.key = optimizer.key
        self.begin_physical_batch = optimizer.begin_physical_batch
        self.holds = optimizer.holds

    @property
    def next_step(self) -> int:
        return self._optimizer.next_step

    def bind(self, plan: Plan) -> None:
        pass


def _without_noise(
    stage: int, config: TrainConfig, plan: Plan, data: ImageDataset, lr: float, max_grad_norm: float
) -> Trial:
    """The batches and steps of `plan` with no noise at all: Poisson sampling, and clipping where the norm is finite."""
    assert config.seed is not None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = create(config.model, data.input_shape, data.num_classes)
    optimizer = DPSGD(
        model,
        noise_multiplier=0.0,
        batch_size=config.batch_size,
        max_grad_norm=max_grad_norm,
        lr=lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
        seed=config.seed,
    )
    schedule = LambdaLR(
        optimizer, lambda step: factor(config.schedule, min(step, plan.steps), plan.steps, config.warmup)
    )
    key = Key.from_seed(config.seed)
    loader = PoissonLoader(data.train, plan, optimizer=_Unplanned(optimizer), physical_batch_size=256, key=key)
    model.train()
    while loader.next_step < plan.steps:
        for images, labels in loader.take(1):
            optimizer.backward(F.cross_entropy(model(images), labels, reduction="none"))
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
    return Trial(stage, lr, max_grad_norm, 0.0, accuracy(model, data.test))


def _private(
    stage: int, fields: dict[str, Any], data: ImageDataset, lr: float, max_grad_norm: float, out: Path
) -> Trial:
    config = resolve(data, fields | {"lr": lr, "max_grad_norm": max_grad_norm})
    folder = RunFolder(out / f"stage{stage}-lr{lr:g}-norm{max_grad_norm:g}")
    folder.claim()
    plan = config.plan()
    result = train(config, plan, data, folder, execution=Execution())
    if result.stopped_by is not None:
        raise SystemExit("stopped")
    return Trial(stage, lr, max_grad_norm, plan.noise_multiplier, result.metrics["test_accuracy"])


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--public", action="store_true", help="the data is public; else every line says NOT PRIVATE")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--dataset-size", type=int)
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--model")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--epsilon", type=float)
    parser.add_argument("--delta", type=float)
    parser.add_argument("--schedule")
    parser.add_argument("--warmup", type=float)
    parser.add_argument("--weight-decay", type=float)
    parser.add_argument("--nesterov", action="store_true", default=None)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="of stage 1")
    parser.add_argument("--norms", type=float, nargs="+", default=NORMS, help="of stage 2")
    parser.add_argument("--tolerance", type=float, default=0.01, help="accuracy that clipping may cost (default 0.01)")
    parser.add_argument("--scale", type=int, default=1, help="of batch size and epochs in stage 3 (default 1)")
    parser.add_argument("--refine", action="store_true", help="stage 4")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    options = vars(parser.parse_args(arguments))
    own = ("rates", "norms", "tolerance", "scale", "refine", "seed", "out")
    settings = {name: options.pop(name) for name in own}
    statement = PUBLIC if options.pop("public") else NOT_PRIVATE
    fields = {name: value for name, value in options.items() if value is not None}
    mark = "" if statement == PUBLIC else "NOT PRIVATE  "

    def report(trial: Trial) -> None:
        print(
            f"{mark}stage {trial.stage}: learning rate {trial.lr:g}, max_grad_norm {trial.max_grad_norm:g}, noise "
            f"multiplier {trial.noise_multiplier:.4g}: {trial.accuracy:.2%}",
            flush=True,
        )

    print(statement)
    data = load_dataset(fields["dataset"], image_size=fields.get("image_size"))
    found = procedure(data, fields, report=report, **settings)
    print(f"{mark}found: --lr {found.lr:g} --max-grad-norm {found.max_grad_norm:g}\n{statement}")
    trials = [asdict(trial) | {"max_grad_norm": str(trial.max_grad_norm)} for trial in found.trials]
    document = {"statement": statement, "lr": found.lr, "max_grad_norm": found.max_grad_norm, "trials": trials}
    write_json(settings["out"] / "procedure.json", json.loads(json.dumps(document)))


if __name__ == "__main__":
    main()
