"""Auditing with one training run (Steinke, Nasr & Jagielski 2023, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from dpkernels.audit.bounds import one_run_bound, require_confidence
from dpkernels.audit.canaries import WithCanaries, log_likelihood_ratio
from dpkernels.audit.report import OneRunReport
from dpkernels.data import PoissonLoader
from dpkernels.optim import DPSGD, PrivateOptimizer

Examples = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]

#: The auditor tries guessing about all canaries, about half of them, and so on, and pays for every try.
GUESSED_FRACTIONS = tuple(2.0**-k for k in range(6))
_EXCESS = 10.0  # a canary's gradient before clipping, in multiples of the bound


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """One loss per example, [batch]."""
    return F.cross_entropy(outputs, targets, reduction="none")


def one_run(
    model: nn.Module,
    dataset: Examples,
    make_optimizer: Callable[[nn.Module], PrivateOptimizer],
    *,
    canaries: int | Examples = 1000,
    loss: Loss = cross_entropy,
    physical_batch_size: int = 256,
    confidence: float = 0.95,
    seed: int | None = None,
) -> OneRunReport:
    """Train once with canaries, each in the data with probability 1/2, and bound epsilon by how well guesses fare.

    The run is a real one: the model, the private optimizer that ``make_optimizer`` returns, and a PoissonLoader bound
    to it. It trains ``model``, whose privacy costs what the claim says; throw the model away.

    Args:
        model: the network to train.
        dataset: the real examples, (inputs [N, ...], targets [N, ...]).
        make_optimizer: makes the private optimizer, with a plan, for the module that it is given. The plan's
            dataset_size should count half of the canaries.
        canaries: a number of gradient canaries, for which the auditor sees every step (``DPSGD`` without momentum and
            weight decay); or examples, (inputs [m, ...], targets [m, ...]), for which it sees the losses before and
            after training.
        loss: one loss per example from the model's outputs and targets.
        physical_batch_size: of the loader.
        confidence: probability, at least, with which the true epsilon is not below the bound.
        seed: decides which canaries are in; by default they differ from call to call.

    Returns:
        The bound at the plan's delta beside what the optimizer claims to have spent.

    Raises:
        ValueError, TypeError: an argument does not fit. RuntimeError: see the optimizer.
    """
    require_confidence(confidence)
    if isinstance(canaries, bool) or (isinstance(canaries, int) and canaries < 1):
        raise ValueError(f"canaries must be a positive number, or (inputs, targets), got {canaries!r}")
    count = canaries if isinstance(canaries, int) else len(canaries[0])
    included = np.random.default_rng(seed).random(count) < 0.5
    if isinstance(canaries, int):
        audited = WithCanaries(model, count)
        optimizer = make_optimizer(audited)
        scores = _train_with_gradients(audited, optimizer, dataset, included, loss, physical_batch_size)
    else:
        optimizer = make_optimizer(model)
        scores = _train_with_examples(model, optimizer, dataset, canaries, included, loss, physical_batch_size)
    plan = optimizer.plan
    assert plan is not None  # else there is no loader
    bound, guesses, correct = bound_from_scores(scores, included, delta=plan.delta, confidence=confidence)
    return OneRunReport(bound, optimizer.epsilon(), plan.delta, confidence, count, guesses, correct)


def bound_from_scores(
    scores: NDArray[np.float64], included: NDArray[np.bool_], *, delta: float, confidence: float
) -> tuple[float, int, int]:
    """Guess "in" for the highest scores and "out" for as many of the lowest, and abstain on the rest.

    For each of ``GUESSED_FRACTIONS`` of the canaries the bound is taken at an equal share of the allowed error, so that
    the largest of them holds with the whole confidence.

    Args:
        scores: [canaries], higher for what is likelier in the data.
        included: [canaries], what is true.

    Returns:
        The largest bound, its number of guesses, and how many of them are right.
    """
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite: training diverged, or the optimizer released what is not a number")
    order = np.argsort(scores, kind="stable")
    counts = sorted({max(1, round(len(scores) * fraction / 2)) for fraction in GUESSED_FRACTIONS})
    found = []
    for k in counts:
        lowest, highest = order[:k], order[max(k, len(order) - k) :]
        correct = int((~included[lowest]).sum() + included[highest].sum())
        guesses = len(lowest) + len(highest)
        bound = one_run_bound(
            guesses=guesses,
            correct=correct,
            canaries=len(scores),
            delta=delta,
            confidence=1 - (1 - confidence) / len(counts),
        )
        found.append((bound, guesses, correct))
    return max(found)


def _train_with_gradients(
    audited: WithCanaries,
    optimizer: PrivateOptimizer,
    dataset: Examples,
    included: NDArray[np.bool_],
    loss: Loss,
    physical_batch_size: int,
) -> NDArray[np.float64]:
    """Train with the canaries that are included; the score is the log-likelihood ratio over all steps."""
    if not isinstance(optimizer, DPSGD) or any(g["momentum"] or g["weight_decay"] for g in optimizer.param_groups):
        raise ValueError(
            "make_optimizer must return a DPSGD without momentum and weight_decay where canaries is a number: what "
            "a step releases is read off the parameters"
        )
    inputs, targets = dataset
    numbers = torch.from_numpy(included.nonzero()[0]).to(inputs.device)
    rows = (
        torch.cat([inputs, inputs.new_zeros(len(numbers), *inputs.shape[1:])]),
        torch.cat([targets, targets[:1].expand(len(numbers), *targets.shape[1:])]),
        torch.cat([numbers.new_full((len(inputs),), audited.count), numbers]),
    )
    loader = _loader(rows, optimizer, physical_batch_size)
    plan, bound = loader.plan, optimizer.clipper.max_grad_norm
    group = next(g for g in optimizer.param_groups if any(p is audited.table.weight for p in g["params"]))
    scores, before = np.zeros(audited.count), audited.values()
    for x, y, which in loader:
        outputs, values = audited(x, which)
        steps, per_unit = optimizer.steps, group["lr"] * bound / plan.batch_size
        optimizer.backward(torch.where(which < audited.count, -_EXCESS * bound * values, loss(outputs, y)))
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.steps > steps:
            after = audited.values()
            released = (after - before) / per_unit
            scores += log_likelihood_ratio(released, plan.noise_multiplier, plan.sampling_rate)
            before = after
    return scores


def _train_with_examples(
    model: nn.Module,
    optimizer: PrivateOptimizer,
    dataset: Examples,
    canaries: Examples,
    included: NDArray[np.bool_],
    loss: Loss,
    physical_batch_size: int,
) -> NDArray[np.float64]:
    """Train with the canaries that are included; the score is how far training lowered a canary's loss."""

    def losses() -> NDArray[np.float64]:
        with torch.no_grad():
            parts = zip(*(part.split(physical_batch_size) for part in canaries), strict=True)
            return torch.cat([loss(model(x), y) for x, y in parts]).double().cpu().numpy()

    chosen = torch.from_numpy(included)
    rows = tuple(torch.cat([real, planted[chosen]]) for real, planted in zip(dataset, canaries, strict=True))
    before = losses()
    for x, y in _loader(rows, optimizer, physical_batch_size):
        optimizer.backward(loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return before - losses()


def _loader(rows: tuple[Tensor, ...], optimizer: PrivateOptimizer, physical_batch_size: int) -> PoissonLoader:
    if optimizer.plan is None:
        raise ValueError("make_optimizer must return an optimizer with a plan: without one there is no claim to audit")
    return PoissonLoader(rows, optimizer.plan, optimizer=optimizer, physical_batch_size=physical_batch_size)
