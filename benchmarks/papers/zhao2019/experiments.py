"""What is compared: accuracy after fine-tuning on labels that each method asked for, at equal epsilon.

MNIST's training set is split by the seed into a private and a public half; its test set is the test set. The paper has
all of it as private data and 50,000 images of QMNIST as public data. In the polluted pool are the 10,000 test images of
Fashion-MNIST as well, labelled by their own classes as if they were digits (CIFAR-10's are in the paper's pool of house
numbers).

The model is linear on ScatterNet features under group normalization, which costs nothing. What the model sees before
its logits has 3,969 entries; `Seen` takes them to 64 by components of the public pool. Every row has a norm of 63 at
most (group normalization makes it 63), so that the constant bound clips nothing.

One private run a seed leaves two checkpoints: the last one, at EPSILON, where the free methods start, and an earlier
one, where NearPrivate starts: the last epoch that leaves room for its two releases within EPSILON. NearPrivate chooses
in the order of the paper, and once more (screened) the most uncertain of the candidates that private examples are near
to. Sizes of the candidate sets, the learning rate of fine-tuning and the screen were chosen by a few runs of seed 1.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dpkernels as dpk
from benchmarks.papers.runner import Row
from dpkernels.accounting import Event, Ledger, Plan, SampledGaussian
from dpkernels.data import ArraySplit, ImageDataset, Split, load_dataset, with_features
from dpkernels.features import GroupNorm, ScatterNet
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
PRIVATE = 30_000
LABELS = (500, 1000, 2000, 4000, 7000)
METHODS = ("random", "entropy", "difference", "DiversePublic", "NearPrivate", "NearPrivate, screened")
POOLS = ("mnist", "polluted")
BATCH, EPOCHS, LR, MAX_GRAD_NORM = 1024, 20, 1.0, 0.1
GROUPS, CHANNELS, FEATURES, REDUCED = 27, 81, 3969, 64
NEAR = NearPrivate(candidates=10_000, pca=PCARelease(FEATURES**0.5, 8.0), support=SupportRelease(0.5))
SCREENED = replace(NEAR, smoothing=100, least_support=70)  # of 100 expected where the pool is like the private data
TUNING = FineTuning(epochs=10, batch_size=64, lr=0.01)


def rows() -> list[Row]:
    """One for each pool, method and number of labels."""
    return [_row(pool=pool, method=method, labels=labels) for pool in POOLS for method in METHODS for labels in LABELS]


def checkpoint_rows() -> dict[str, Row]:
    """The two checkpoints, by the methods that start from them."""
    return {name: _row(checkpoint=name) for name in ("free", "near")}


def _row(**what: Any) -> Row:
    return Row(", ".join(map(str, what.values())), {"dataset": "mnist"} | what)


@dataclass(frozen=True, eq=False)
class Data:
    """The parts of one seed: features [rows, 81, 7, 7] and labels."""

    private: ArraySplit
    test: Split
    pools: dict[str, ArraySplit]
    order: Tensor
    """Which images of MNIST's training set are in the public pool, in its order."""

    @classmethod
    def of(cls, seed: int, digits: ImageDataset, clothes: ImageDataset) -> Data:
        order = torch.randperm(len(digits.train), generator=torch.Generator().manual_seed(seed))
        private, public = (_part(digits.train, part) for part in (order[:PRIVATE], order[PRIVATE:]))
        dirt = _part(clothes.test, torch.arange(len(clothes.test)))
        polluted = ArraySplit(torch.cat([public.rows, dirt.rows]), torch.cat([public.labels, dirt.labels]))
        return cls(private, digits.test, {"mnist": public, "polluted": polluted}, order[PRIVATE:])


def _part(split: Split, chosen: Tensor) -> ArraySplit:
    assert isinstance(split, ArraySplit)
    return ArraySplit(split.rows[chosen], split.labels[chosen])


def features() -> tuple[ImageDataset, ImageDataset]:
    """MNIST and Fashion-MNIST as features, from the cache after the first time. Of the latter only the test set is
    used."""
    scatter, norm = ScatterNet((1, 28, 28)), GroupNorm(GROUPS, CHANNELS)
    clothes = load_dataset("fashion-mnist")

    def computed(dataset: ImageDataset) -> ImageDataset:
        return with_features(
            dataset,
            lambda images: norm(scatter(images)),
            shape=scatter.feature_shape,
            fingerprint=f"{scatter.fingerprint} group {GROUPS}",
        )

    return computed(load_dataset("mnist")), computed(replace(clothes, train=clothes.test))


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

    return _steps(plan, bisect.bisect_right(range(1, EPOCHS), EPSILON, key=total))


def _steps(plan: Plan, epochs: int) -> int:
    return plan.steps * epochs // EPOCHS


def checkpoints(seed: int, data: Data, path: Path) -> dict[str, Checkpoint]:
    """The private models of a seed, trained where ``path`` does not hold them yet."""
    plan = private_plan()
    if not path.exists():
        found = _train(seed, plan, data)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda temporary: torch.save(found, temporary))
    made = {}
    for name, (steps, weights) in torch.load(path).items():
        model = _model()
        model.load_state_dict(weights)
        event = SampledGaussian(plan.noise_multiplier, plan.sampling_rate, steps)
        made[name] = Checkpoint(model.eval(), event, accuracy(model, data.test))
    return made


def _model() -> nn.Module:
    return dpk.models.scatternet_linear((CHANNELS, 7, 7))


def _train(seed: int, plan: Plan, data: Data) -> dict[str, tuple[int, dict[str, Tensor]]]:
    torch.manual_seed(seed)
    model = _model()
    optimizer = dpk.DPSGD(model, plan, lr=LR, momentum=0.9, max_grad_norm=MAX_GRAD_NORM, seed=seed)
    loader = dpk.PoissonLoader(data.private, plan, optimizer=optimizer)
    found, early = {}, early_step(plan)
    for name, steps in (("near", early), ("free", plan.steps - early)):
        for examples, labels in loader.take(steps):
            optimizer.backward(F.cross_entropy(model(examples), labels, reduction="none"))
            optimizer.step()
            optimizer.zero_grad()
        found[name] = (optimizer.steps, {key: value.clone() for key, value in model.state_dict().items()})
    return found


class Seen:
    """What a checkpoint sees in a pool, and in the private examples where a method asks for it; embeddings reduced by
    components of the pool, which are public."""

    def __init__(self, model: nn.Module, pool: ArraySplit, private: ArraySplit) -> None:
        whole = views(model, (examples for examples, _ in pool.batches(1000)))
        sample = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))[:5000]
        torch.manual_seed(0)
        axes = torch.pca_lowrank(whole.embeddings[sample], q=REDUCED)[2]
        self._split, self._model, self._axes = private, model, axes
        self._private: Views | None = None
        self.public = Views(whole.embeddings @ axes, whole.logits)

    @property
    def private(self) -> Views:
        if self._private is None:
            parts = [views(self._model, [examples]) for examples, _ in self._split.batches(1000)]
            reduced = torch.cat([part.embeddings @ self._axes for part in parts])
            self._private = Views(reduced, torch.cat([part.logits for part in parts]))
        return self._private


def select(method: str, count: int, seen: Seen, seed: int, ledger: Ledger) -> Tensor:
    """The indices that a method asks labels for."""
    if method == "random":
        return torch.randperm(len(seen.public), generator=torch.Generator().manual_seed(seed))[:count]
    if method in {"entropy", "difference"}:
        return uncertain(seen.public, count, method)
    if method == "DiversePublic":
        return DiversePublic(3 * count // 2, clusters=max(50, count // 20), seed=seed).select(seen.public, count)
    how = SCREENED if method.endswith("screened") else NEAR
    return how.select(seen.public, seen.private, count, ledger=ledger, key=Key.from_seed(seed))


def measure(row: Row, seed: int, checkpoint: Checkpoint, seen: Callable[[], Seen], data: Data) -> dict[str, Any]:
    """Select, label, fine-tune and test: the record of one row and seed."""
    pool = data.pools[row.fields["pool"]]
    ledger = Ledger(seeded=True)
    ledger.record(checkpoint.spent, "private training")
    chosen = select(row.fields["method"], row.fields["labels"], seen(), seed, ledger)
    indices, labels = ask(lambda wanted: pool.labels[wanted], chosen)
    tuned = fine_tune(checkpoint.model, pool.batch(indices)[0], labels, TUNING)
    return {
        "fields": row.fields,
        "variant": row.variant,
        "seed": seed,
        "accuracy": round(100 * accuracy(tuned, data.test), 2),
        "epsilon": round(ledger.epsilon(DELTA), 4),
        "pollution": round(100 * float((chosen >= len(data.order)).double().mean()), 2),
    }
