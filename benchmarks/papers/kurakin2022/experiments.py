"""What each experiment runs: rows of fields of `dpkernels.training.TrainConfig`.

rates    the learning rate at each noise multiplier, for the smallest network: what "sizes" takes for all of them
control  two larger networks at the most noise with a lower learning rate than that
sizes    Appendix H and Figure 6 reduced: simpleVGGs of other widths, depths and numbers of blocks

Appendix H trains networks of 32 channels and more on CIFAR-10 for 100 epochs. What is affordable here are a quarter of
the channels, a quarter of the pixels, a fifth of the images, and EPOCHS epochs; batches of 500, the clipping norm 1,
momentum and the noise multipliers are the paper's. Figure 6 is a picture without numbers, and so there are none here.
"""

from __future__ import annotations

from typing import Any

from benchmarks.papers.kurakin2022.data import NAME, SIZE
from benchmarks.papers.runner import Row

EPOCHS = 8.0
QUIET = 0.01  # a noise multiplier below all other randomness; 0 is refused, since no plan could state its privacy
BASE = "8x2-16x2-32x2"
STUDY = {
    "channels": ("4x2-8x2-16x2", BASE, "16x2-32x2-64x2"),
    "layers a block": ("8x1-16x1-32x1", BASE, "8x3-16x3-32x3"),
    "blocks": ("8x2-16x2", BASE, "8x2-16x2-32x2-64x2"),
}
NETWORKS = tuple(dict.fromkeys(network for networks in STUDY.values() for network in networks))
RATES = {QUIET: (0.5, 1.0, 2.0), 3.5: (0.1, 0.25, 0.5), 1.5: (0.1, 0.25, 0.5)}
BEST = {QUIET: 1.0, 3.5: 0.25, 1.5: 0.5}
"""Of RATES, by the experiment "rates"."""


def fields(network: str, sigma: float, lr: float) -> dict[str, Any]:
    """A simpleVGG of that name with a noise multiplier."""
    return {
        "dataset": NAME,
        "dataset_size": SIZE,
        "model": f"simple_vgg-{network}-128",
        "batch_size": 500,
        "epochs": EPOCHS,
        "lr": lr,
        "momentum": 0.9,
        "max_grad_norm": 1.0,
        "noise_multiplier": sigma,
        "delta": 1e-5,
    }


def _rates() -> list[Row]:
    return [
        Row(f"sigma {sigma:g}, learning rate {lr:g}", fields(NETWORKS[0], sigma, lr))
        for sigma, rates in RATES.items()
        for lr in rates
    ]


def _sizes() -> list[Row]:
    return [
        Row(f"{network}, sigma {sigma:g}", fields(network, sigma, lr))
        for sigma, lr in BEST.items()
        for network in NETWORKS
    ]


def _control() -> list[Row]:
    return [Row(f"{network}, learning rate 0.1", fields(network, 3.5, 0.1)) for network in STUDY["channels"][1:]]


EXPERIMENTS = {"rates": _rates, "control": _control, "sizes": _sizes}
