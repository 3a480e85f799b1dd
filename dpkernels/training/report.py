"""What a run leaves behind beside its model: metrics, and a plot of accuracy against epsilon."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpkernels.accounting import Plan
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


def metrics(
    config: TrainConfig,
    plan: Plan,
    history: Sequence[EpochResult],
    *,
    updates: int,
    trained: int,
    seconds: float,
    statement: str,
    spent: float,
    train_accuracy: float | None = None,
) -> dict[str, Any]:
    """What `metrics.json` holds.

    epsilon is the plan's also where the run stopped early: a run that may stop on something it saw costs what it was
    allowed to spend. epsilon_spent (`spent`) is that of what was released. steps counts what was spent, lost_steps
    those of them that a kill took away: `updates` is how many the model has seen. train_accuracy, where the
    configuration pays for it, is a noisy count. trained: numbers that were trained.
    """
    last = history[-1]
    return {
        "test_accuracy": last.test_accuracy,
        "last_iterate_accuracy": last.last_iterate_accuracy,
        **({} if train_accuracy is None else {"train_accuracy": train_accuracy}),
        "epsilon": plan.epsilon,
        "epsilon_spent": spent,
        "delta": plan.delta,
        "private": not config.seeded,
        "noise_multiplier": plan.noise_multiplier,
        "sampling_rate": plan.sampling_rate,
        "steps": last.step,
        "planned_steps": plan.steps,
        "lost_steps": last.step - updates,
        "complete": last.step == plan.steps,
        "seconds": round(seconds, 3),
        "dataset": config.dataset,
        "model": config.model,
        "loss": config.loss,
        "features": config.features,
        "normalization": config.normalization,
        "init": config.init,
        "trained_parameters": trained,
        "versions": versions(),
        "statement": statement,
    }


def write_plot(path: Path, config: TrainConfig, plan: Plan, history: Sequence[EpochResult]) -> None:
    """Test accuracy against the epsilon that was spent to reach it, a point an epoch."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    epsilons = [result.epsilon for result in history]
    accuracies = [100 * result.test_accuracy for result in history]
    figure = Figure(figsize=(7, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(epsilons, accuracies, color="tab:blue", marker="o", markersize=3, linewidth=1.5, clip_on=False, zorder=3)
    axes.axvline(plan.epsilon, color="gray", linewidth=1, linestyle="--")
    axes.text(
        plan.epsilon,
        0.02,
        f"plan: \N{GREEK SMALL LETTER EPSILON} = {plan.epsilon:.3g} ",
        transform=axes.get_xaxis_transform(),
        ha="right",
        color="gray",
    )
    axes.set_xlim(left=0)
    axes.set_xlabel(f"\N{GREEK SMALL LETTER EPSILON} spent, at \N{GREEK SMALL LETTER DELTA} = {plan.delta:g}")
    axes.set_ylabel("test accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(decimals=None))
    axes.grid(alpha=0.3)
    title = f"{config.dataset}, {config.model}: {accuracies[-1]:.1f}% after {history[-1].step} of {plan.steps} steps"
    if config.seeded:
        title += "\nNOT PRIVATE: the noise is seeded"
    axes.set_title(title, fontsize="medium", color="tab:red" if config.seeded else "black")
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=150))
