"""What a run leaves behind beside its model: metrics, and a plot of accuracy against epsilon."""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpkernels.accounting import Bound, Plan
from dpkernels.accounting.statement import rounded_up
from dpkernels.data import ArraySplit, ImageDataset
from dpkernels.training.build import Features
from dpkernels.training.config import TrainConfig
from dpkernels.training.files import write_atomically
from dpkernels.training.run_folder import EpochResult


def versions() -> dict[str, str]:
    """Of everything that decides the result."""
    try:
        own = importlib.metadata.version("dpkernels")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed, imported from its sources"
    return {
        "dpkernels": own,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def described(config: TrainConfig, dataset: ImageDataset, features: Features) -> dict[str, Any]:
    """What the data is, without anything that was computed from the private split.

    dataset: what the run trains on, which has `features`.
    """
    low, high = dataset.test.value_range
    steps = [f"pixels scaled to [{low:g}, {high:g}] by fixed numbers"]
    if isinstance(dataset.train, ArraySplit) and features.pixel_range is None:
        steps = ["features that the user brought; how they were made is not known here"]
    if config.image_size is not None:
        steps.append(f"each image alone cropped and resized to {config.image_size}x{config.image_size} pixels")
    if config.features != "none":
        steps.append(f"each image alone replaced by fixed features ({config.features})")
    steps += _NORMALIZATION[config.normalization]
    return {
        "name": dataset.name,
        "nominal_size": config.dataset_size,
        "classes": list(dataset.classes),
        "example_shape": list(features.image_shape),
        "private": "the training split: examples and labels",
        "public": f"the test split ({len(dataset.test)} examples), the names of the classes, the nominal size",
        "preprocessing": steps,
    }


_NORMALIZATION: dict[str, list[str]] = {
    "none": [],
    "group": ["each example alone normalized over groups of channels"],
    "public": ["channels normalized by statistics of synthetic images, which no data was used for"],
    "private": [
        "channels normalized by statistics of the training split, released with noise: they are part of the privacy "
        "statement as normalization statistics"
    ],
}


def metrics(
    config: TrainConfig,
    plan: Plan,
    history: Sequence[EpochResult],
    *,
    claim: Bound,
    updates: int,
    last_step: int,
    trained: int,
    statement: str,
    data: dict[str, Any],
    train_accuracy: float | None = None,
) -> dict[str, Any]:
    """What `metrics.json` holds.

    epsilon is that of `claim`, which the statement states: the plan's also where the run stopped early, since a run
    that may stop on something it saw costs what it was allowed to spend; None where none can be stated. noise_error is
    the total variation of all noise from ideal. steps counts what was spent; lost_steps those of the plan that a kill
    took away, `updates` being how many the model has seen and `last_step` the last one that the plan had room for.
    train_accuracy, where the configuration pays for it, is a noisy count. trained: numbers that were trained. No time
    is among them: it depends on which examples were drawn.
    """
    last, epsilon = history[-1], finite(claim.upper)
    return {
        "test_accuracy": last.test_accuracy,
        "last_iterate_accuracy": last.last_iterate_accuracy,
        **({} if train_accuracy is None else {"train_accuracy": train_accuracy}),
        "epsilon": epsilon,
        "delta": plan.delta,
        "noise_error": claim.noise_error,
        "private": not config.seeded and epsilon is not None,
        "noise_multiplier": plan.noise_multiplier,
        "sampling_rate": plan.sampling_rate,
        "steps": last.step,
        "planned_steps": plan.steps,
        "lost_steps": last.step - updates + plan.steps - last_step,
        "complete": last.step == last_step,
        "dataset": config.dataset,
        "model": config.model,
        "loss": config.loss,
        "features": config.features,
        "normalization": config.normalization,
        "init": config.init,
        "trained_parameters": trained,
        "data": data,
        "versions": versions(),
        "statement": statement,
    }


def finite(epsilon: float) -> float | None:
    """None for an infinite epsilon, which JSON does not know."""
    return None if math.isinf(epsilon) else epsilon


def write_plot(
    path: Path, config: TrainConfig, plan: Plan, epsilon: float | None, history: Sequence[EpochResult]
) -> None:
    """Test accuracy against the epsilon that was spent to reach it, a point an epoch; against the epoch where none can
    be stated. epsilon: of the whole plan."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    spent = [result.epsilon for result in history if result.epsilon is not None]
    stated = epsilon is not None and len(spent) == len(history)
    places = spent if stated else [result.epoch for result in history]
    accuracies = [100 * result.test_accuracy for result in history]
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(places, accuracies, color="tab:blue", marker="o", markersize=3, linewidth=1.5, clip_on=False, zorder=3)
    if stated and epsilon is not None:
        axes.axvline(epsilon, color="gray", linewidth=1, linestyle="--")
        axes.text(
            epsilon,
            0.02,
            f"plan: \N{GREEK SMALL LETTER EPSILON} = {rounded_up(epsilon)} ",
            transform=axes.get_xaxis_transform(),
            ha="right",
            color="gray",
        )
        axes.set_xlabel(f"\N{GREEK SMALL LETTER EPSILON} spent, at \N{GREEK SMALL LETTER DELTA} = {plan.delta:g}")
    else:
        axes.set_xlabel("epoch")
    axes.set_xlim(left=0)
    axes.set_ylabel("test accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(decimals=None))
    axes.grid(alpha=0.3)
    title = f"{config.dataset}, {config.model}: {accuracies[-1]:.1f}% after {history[-1].step} of {plan.steps} steps"
    if config.seeded:
        title += "\nNOT PRIVATE: the noise is seeded"
    axes.set_title(title, fontsize="medium", color="tab:red" if config.seeded else "black")
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=150))
