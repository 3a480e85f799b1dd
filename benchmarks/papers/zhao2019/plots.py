"""The pictures of docs/results/zhao2019.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.papers.pictures import new_figure, save
from benchmarks.papers.runner import Results, Row, Summary
from benchmarks.papers.zhao2019.experiments import (
    EPSILON,
    LABELS,
    METHODS,
    POOLS,
    SCREENED,
    Data,
    Seen,
    checkpoint_rows,
    checkpoints,
    features,
    rows,
)
from dpkernels.data import load_dataset
from dpkernels.random import Key
from dpkernels.selection import DiversePublic

TITLES = {"mnist": "public pool of digits", "polluted": "a quarter of the pool is clothing"}
RIGHT, WRONG = (0.2, 0.7, 0.2), (0.85, 0.1, 0.1)


def curves(results: Results) -> None:
    """Figures 1 and 3: test accuracy against the number of labels, at equal epsilon; bars are one standard deviation
    over seeds."""
    figure = new_figure(10.5, 4.4)
    panels = figure.subplots(1, len(POOLS))
    found: dict[tuple[str, str, int], Row] = {
        (row.fields["pool"], row.fields["method"], row.fields["labels"]): row for row in rows()
    }
    start = Summary.of(run["accuracy"] for run in results.of(checkpoint_rows()["free"]))
    for axes, pool in zip(panels, POOLS, strict=True):
        for number, method in enumerate(METHODS):
            points = [Summary.of(run["accuracy"] for run in results.of(found[pool, method, count])) for count in LABELS]
            if shown := [(count, point) for count, point in zip(LABELS, points, strict=True) if point is not None]:
                axes.errorbar(
                    [count * (1 + 0.012 * (number - 2.5)) for count, _ in shown],
                    [point.mean for _, point in shown],
                    [point.deviation or 0.0 for _, point in shown],
                    marker="o",
                    markersize=4,
                    linewidth=1.4,
                    elinewidth=0.8,
                    linestyle="--" if method.startswith("Near") else "-",
                    label=method,
                )
        if start is not None:
            axes.axhline(start.mean, color="black", linewidth=1, linestyle=":", label=f"before, at epsilon {EPSILON}")
        axes.set_title(f"MNIST, {TITLES[pool]}", fontsize="medium")
        axes.set_xscale("log")
        axes.set_xticks(LABELS, [f"{count:,}" for count in LABELS])
        axes.minorticks_off()
        axes.set_xlabel("labels asked for")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy, %")
    panels[0].legend(frameon=False, fontsize="small")
    save(figure, "zhao2019_labels.png")


def chosen(out: Path) -> None:
    """Figure 4b: the most central image of each of 100 clusters, framed by whether the private model had it right; and
    what DiversePublic and NearPrivate ask for first in the polluted pool. Of seed 1."""
    digits, clothes = features()
    data = Data.of(1, digits, clothes)
    models = checkpoints(1, data, out / "private-1.pt")
    images = load_dataset("mnist").train.images[data.order]  # type: ignore[union-attr]
    images = torch.cat([images, load_dataset("fashion-mnist").test.images])  # type: ignore[union-attr]
    diverse = DiversePublic(6000, clusters=100)
    pools = data.pools
    clean = Seen(models["free"].model, pools["mnist"], data.private)
    polluted = Seen(models["free"].model, pools["polluted"], data.private)
    near = Seen(models["near"].model, pools["polluted"], data.private)
    panels = {
        "DiversePublic, a cluster each": (clean, diverse.select(clean.public, 100)),
        "DiversePublic, polluted pool": (polluted, diverse.select(polluted.public, 100)),
        "NearPrivate screened, polluted pool": (
            near,
            SCREENED.select(near.public, near.private, 100, ledger=None, key=Key.from_seed(1)),
        ),
    }
    figure = new_figure(10.5, 3.8)
    for axes, (title, (seen, indices)) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        truth = data.pools["polluted"].labels[indices]
        right = (seen.public.logits[indices].argmax(1) == truth) & (indices < len(data.order))
        axes.imshow(_mosaic(images[indices, 0], right), interpolation="nearest")
        axes.set_title(title, fontsize="medium")
        axes.axis("off")
    save(figure, "zhao2019_chosen.png")


def _mosaic(images: Tensor, right: Tensor) -> np.ndarray[Any, Any]:
    """A hundred images [100, 28, 28], framed green where the model was right and red elsewhere: [320, 320, 3]."""
    tiles = np.empty((100, 32, 32, 3))
    tiles[:] = np.where(right.numpy()[:, None], RIGHT, WRONG)[:, None, None]
    tiles[:, 2:-2, 2:-2] = (images.double() / 255).numpy()[..., None]
    return tiles.reshape(10, 10, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(320, 320, 3)
