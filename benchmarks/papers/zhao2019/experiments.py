"""What is compared: accuracy after fine-tuning on labels that each method asked for, at equal epsilon.

MNIST's training set is split by the seed into a private and a public half; its test set is the test set. The paper has
all of it as private data and 50,000 images of QMNIST as public data. In the polluted pool are 10,000 images of
Fashion-MNIST as well, labelled by their own classes as if they were digits (CIFAR-10's are in the paper's pool of house
numbers).

One private run a seed leaves two checkpoints: the last one, at EPSILON, where the free methods start, and an earlier
one, where NearPrivate starts: the last epoch that leaves room for its two releases within EPSILON.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dpkernels as dpk
from benchmarks.papers.runner import Row
from dpkernels.accounting import Event, Ledger, Plan, SampledGaussian
from dpkernels.data import ImageSplit, load_dataset
from dpkernels.random import Key
from dpkernels.selection import (
    DiversePublic,
    FineTuning,
    NearPrivate,
    PCARelease,
    SupportRelease,
    Views,
    ask,
    fine_tune,
    uncertain,
    views,
)
from dpkernels.training import accuracy
from dpkernels.training.files import write_atomically

EPSILON, DELTA = 3.2, 1e-5
PRIVATE, POLLUTION = 30_000, 10_000
LABELS = (500, 1000, 2000, 4000, 7000)
METHODS = ("random", "entropy", "difference", "DiversePublic", "NearPrivate")
POOLS = ("mnist", "polluted")
BATCH, EPOCHS, LR, MAX_GRAD_NORM = 512, 40.0, 0.5, 0.1  # the private run: Tramèr & Boneh 2021, Table 13
HIDDEN = 32  # tanh units before the logits: embeddings have norm sqrt(32) at most
NEAR = NearPrivate(candidates=15_000, pca=PCARelease(HIDDEN**0.5, 12.0), support=SupportRelease(0.5), components=16)
TUNING = FineTuning(epochs=20, batch_size=64, lr=0.02)


def rows() -> list[Row]:
    """One for each pool, method and number of labels, and the checkpoints themselves."""
    found = []
    for pool in POOLS:
        for method in METHODS:
            for labels in LABELS:
                fields = {"dataset": "mnist", "pool": pool, "method": method, "labels": labels}
                found.append(Row(f"{pool}, {method}, {labels}", fields))
    return found


def checkpoint_rows() -> dict[str, Row]:
    """The two checkpoints, by the methods that start from them."""
    return {name: Row(name, {"dataset": "mnist", "checkpoint": name}) for name in ("free", "near")}


@dataclass(frozen=True, eq=False)
class Data:
    """The parts of one seed. Examples are images, in bytes until they are used."""

    private: ImageSplit
    public: ImageSplit
    pollution: ImageSplit
    test: ImageSplit

    @classmethod
    def of(cls, seed: int) -> Data:
        digits, clothes = load_dataset("mnist"), load_dataset("fashion-mnist")
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(digits.train), generator=generator)
        other = torch.randperm(len(clothes.train), generator=generator)[:POLLUTION]
        return cls(
            _part(digits.train, order[:PRIVATE]),
            _part(digits.train, order[PRIVATE:]),
            _part(clothes.train, other),
            digits.test,
        )

    def pool(self, name: str) -> tuple[Tensor, Tensor]:
        """Images float32 and labels of a pool; labels of the pollution are those of its own classes."""
        parts = [self.public] + ([self.pollution] if name == "polluted" else [])
        fetched = [part.batch(torch.arange(len(part))) for part in parts]
        return torch.cat([images for images, _ in fetched]), torch.cat([labels for _, labels in fetched])


def _part(split: object, chosen: Tensor) -> ImageSplit:
    assert isinstance(split, ImageSplit)
    return ImageSplit(split.images[chosen], split.labels[chosen], split.largest, split.value_range)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A private model, and what it cost."""

    model: nn.Module
    spent: Event
    accuracy: float


def private_plan() -> Plan:
    return dpk.plan(dataset_size=PRIVATE, batch_size=BATCH, epochs=EPOCHS, delta=DELTA, target_epsilon=EPSILON)


def early_step(plan: Plan) -> int:
    """The end of the last epoch that leaves room for NearPrivate."""

    def total(epoch: int) -> float:
        steps = SampledGaussian(plan.noise_multiplier, plan.sampling_rate, _steps(plan, epoch))
        return dpk.accounting.bound([steps, *NEAR.events], DELTA).upper

    return _steps(plan, bisect.bisect_right(range(1, int(EPOCHS)), EPSILON, key=total))


def _steps(plan: Plan, epochs: int) -> int:
    return plan.steps * epochs // int(EPOCHS)


def checkpoints(seed: int, data: Data, path: Path) -> dict[str, Checkpoint]:
    """The private models of a seed, trained where ``path`` does not hold them yet."""
    plan = private_plan()
    if not path.exists():
        found = _train(seed, plan, data)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda temporary: torch.save(found, temporary))
    made = {}
    for name, (steps, weights) in torch.load(path).items():
        model = dpk.models.mnist_cnn()
        model.load_state_dict(weights)
        event = SampledGaussian(plan.noise_multiplier, plan.sampling_rate, steps)
        made[name] = Checkpoint(model.eval(), event, accuracy(model, data.test))
    return made


def _train(seed: int, plan: Plan, data: Data) -> dict[str, tuple[int, dict[str, Tensor]]]:
    torch.manual_seed(seed)
    model = dpk.models.mnist_cnn()
    optimizer = dpk.DPSGD(model, plan, lr=LR, momentum=0.9, max_grad_norm=MAX_GRAD_NORM, seed=seed)
    loader = dpk.PoissonLoader(data.private, plan, optimizer=optimizer)
    found, early = {}, early_step(plan)
    for name, steps in (("near", early), ("free", plan.steps - early)):
        for images, labels in loader.take(steps):
            optimizer.backward(F.cross_entropy(model(images), labels, reduction="none"))
            optimizer.step()
            optimizer.zero_grad()
        found[name] = (optimizer.steps, {key: value.clone() for key, value in model.state_dict().items()})
    return found


@dataclass(frozen=True, eq=False)
class Seen:
    """What one of the checkpoints sees in the pool, and in the private examples where a method may ask for it."""

    public: Views
    private: Callable[[], Views]


def select(method: str, count: int, seen: Seen, seed: int, ledger: Ledger) -> Tensor:
    """The indices that a method asks labels for."""
    if method == "random":
        return torch.randperm(len(seen.public), generator=torch.Generator().manual_seed(seed))[:count]
    if method in {"entropy", "difference"}:
        return uncertain(seen.public, count, method)
    if method == "DiversePublic":
        clusters = max(100, count // 20)
        return DiversePublic(min(3 * count, len(seen.public)), clusters, seed=seed).select(seen.public, count)
    return NEAR.select(seen.public, seen.private(), count, ledger=ledger, key=Key.from_seed(seed))


def measure(checkpoint: Checkpoint, seen: Seen, pool: tuple[Tensor, Tensor], data: Data, row: Row, seed: int) -> dict:
    """Select, label, fine-tune and test: the record of one row and seed."""
    images, truth = pool
    method, count = row.fields["method"], row.fields["labels"]
    ledger = Ledger(seeded=True)
    ledger.record(checkpoint.spent, "private training")
    chosen = select(method, count, seen, seed, ledger)
    indices, labels = ask(lambda wanted: truth[wanted], chosen)
    tuned = fine_tune(checkpoint.model, images[indices], labels, TUNING)
    return {
        "fields": row.fields,
        "variant": row.variant,
        "seed": seed,
        "accuracy": round(100 * accuracy(tuned, data.test), 2),
        "epsilon": round(ledger.epsilon(DELTA), 4),
        "polluted": round(100 * float((chosen >= len(data.public)).double().mean()), 2),
        "labels per class": labels.bincount(minlength=10).tolist(),
    }


def seen_by(checkpoint: Checkpoint, images: Tensor, private: ImageSplit) -> Seen:
    return Seen(
        views(checkpoint.model, images.split(500)),
        lambda: views(checkpoint.model, (batch for batch, _ in private.batches(500))),
    )
