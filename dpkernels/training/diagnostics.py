"""How clipping fares while a model trains: norms of weights, pre-activations and gradients, and what clipping turns.

Shamsabadi & Papernot 2023, figures 1 and 5 to 8, on one fixed physical batch of the training data. All but the norms of
weights depend on single private examples and are released without noise: they are for whoever holds the data.
"""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dpkernels._files import read_json, reason
from dpkernels.clipping import GhostClipper
from dpkernels.data import Split
from dpkernels.losses import recorded_outputs, weighted_layers
from dpkernels.training.config import TrainConfig
from dpkernels.training.files import write_atomically, write_text
from dpkernels.training.objective import Objective
from dpkernels.training.run_folder import RunFolder, is_number

WARNING = "PRIVATE: these values depend on single training examples and hold no noise. Keep them as you keep the data."
_LARGEST = 2**28  # bytes of the file


@dataclass(frozen=True)
class Snapshot:
    """What was measured after `step` steps.

    weight_norms: of each linear and convolutional layer. output_norms: of their outputs, averaged over the examples;
    those of the last layer are the logits. gradient_norms: of each example's gradient, before clipping. cosine: between
    the batch's sums of clipped and of unclipped gradients. What is not finite is None, or left out of gradient_norms.
    """

    step: int
    epoch: float
    weight_norms: dict[str, float | None]
    output_norms: dict[str, float | None]
    gradient_norms: list[float]
    cosine: float | None

    def __post_init__(self) -> None:
        if type(self.step) is not int or self.step < 0:
            raise ValueError(f"step must be a count, got {self.step!r}")
        if not isinstance(self.gradient_norms, list) or None in (self.epoch, *self.gradient_norms):
            raise ValueError("epoch and the list of gradient_norms must be of numbers")
        norms = (*self.weight_norms.values(), *self.output_norms.values(), *self.gradient_norms)
        if not all(value is None or is_number(value) for value in (self.epoch, self.cosine, *norms)):
            raise ValueError("norms, cosine and epoch must be finite numbers, or null where they were not")


class Diagnostics:
    """The snapshots of one run, kept in `folder`."""

    def __init__(self, folder: RunFolder, config: TrainConfig, train: Split, rows: int) -> None:
        self._folder, self._config = folder, config
        # Spread over the data set, which may be in the order of its classes.
        self._examples, self._labels = train.batch(torch.linspace(0, len(train) - 1, min(rows, len(train))).long())
        self.snapshots: list[Snapshot] = []

    def restore(self, last_step: int) -> None:
        """Take up what lies in the folder, up to `last_step`. Raises ValueError for a damaged file."""
        path = self._folder.diagnostics
        if not os.path.lexists(path):
            return
        document = read_json(path, _LARGEST)
        try:
            saved = [Snapshot(**entry) for entry in document["snapshots"]]
            if len({(*entry.weight_norms, None, *entry.output_norms) for entry in saved}) > 1:
                raise ValueError("its snapshots are of different layers")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} must be diagnostics of a run, but: {reason(error)}; restore it from a copy, or remove it"
            ) from error
        self.snapshots = [snapshot for snapshot in saved if snapshot.step <= last_step]

    def measure(self, model: nn.Module, *, step: int, epoch: float) -> None:
        """Add a snapshot of `model`, which is left as it is, and write the file."""
        device = next(model.parameters()).device
        examples, labels = self._examples.to(device), self._labels.to(device)
        self.snapshots.append(take_snapshot(self._config, model, examples, labels, step=step, epoch=epoch))
        document = {
            "warning": WARNING,
            "examples": len(self._labels),
            "max_grad_norm": self._config.max_grad_norm,
            "snapshots": [asdict(snapshot) for snapshot in self.snapshots],
        }
        write_text(self._folder.diagnostics, json.dumps(document, allow_nan=False) + "\n", private=True)

    def draw(self) -> None:
        """Write the plot."""
        path = self._folder.diagnostics_plot
        write_atomically(path, lambda temporary: _draw(temporary, self._config, self.snapshots), private=True)


def take_snapshot(
    config: TrainConfig, model: nn.Module, examples: Tensor, labels: Tensor, *, step: int, epoch: float
) -> Snapshot:
    """Of `model` on one batch: two backward passes through the engine, on a copy."""
    with torch.random.fork_rng(devices=[]):  # a run's own draws stay what they were
        copied = copy.deepcopy(model)
        layers = weighted_layers(copied)
        objective = Objective(config, copied)
        with recorded_outputs(copied, layers) as outputs, GhostClipper(copied, config.max_grad_norm) as clipper:
            clipped = clipper.backward(objective(examples, labels, math.floor(epoch)))
        with GhostClipper(copied, math.inf) as clipper:
            whole = clipper.backward(objective(examples, labels, math.floor(epoch))).grads
    weights = {name: getattr(layer, "weight", None) for name, layer in layers.items()}
    return Snapshot(
        step=step,
        epoch=epoch,
        weight_norms={
            name: _finite(weight.detach().norm()) for name, weight in weights.items() if isinstance(weight, Tensor)
        },
        output_norms={name: _finite(h.detach().flatten(1).norm(dim=1).mean()) for name, h in outputs},
        gradient_norms=[float(f"{norm:.6g}") for norm in clipped.norms.tolist() if math.isfinite(norm)],
        cosine=_cosine(clipped.grads, whole),
    )


def _finite(value: Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None


def _cosine(a: dict[str, Tensor], b: dict[str, Tensor]) -> float | None:
    norms = [math.sqrt(sum(float(g.square().sum()) for g in grads.values())) for grads in (a, b)]
    if not all(0 < norm < math.inf for norm in norms):
        return None
    return sum(float((a[name] * b[name]).sum()) for name in a) / (norms[0] * norms[1])


def _plottable(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _draw(path: Path, config: TrainConfig, snapshots: Sequence[Snapshot]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{config.dataset}, {config.model}, {config.loss}\n{WARNING}", color="tab:red", fontsize="medium")
    (weights, outputs), (gradients, cosine) = figure.subplots(2, 2)
    epochs = [snapshot.epoch for snapshot in snapshots]
    for axes, what, field in (
        (weights, "norm of a layer's weight", "weight_norms"),
        (outputs, "norm of pre-activations (last: logits), mean", "output_norms"),
    ):
        for name in getattr(snapshots[-1], field):
            values = [getattr(snapshot, field)[name] for snapshot in snapshots]
            axes.plot(epochs, _plottable(values), label=name or "model")
        axes.set(xlabel="epoch", ylabel=what, yscale="log")
        axes.legend(fontsize="x-small", title="layer", title_fontsize="x-small")
    for snapshot in (snapshots[0], snapshots[-1]):
        gradients.hist(snapshot.gradient_norms, bins=40, alpha=0.6, label=f"epoch {snapshot.epoch:.4g}")
    gradients.axvline(config.max_grad_norm, color="black", linestyle="--", linewidth=1, label="max_grad_norm")
    gradients.set(xlabel="norm of an example's gradient", ylabel="examples")
    gradients.legend(fontsize="x-small")
    cosine.plot(epochs, _plottable([snapshot.cosine for snapshot in snapshots]), marker="o", markersize=3)
    cosine.set(xlabel="epoch", ylabel="cosine of clipped and unclipped sum")
    for axes in (weights, outputs, cosine):
        axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=130)
