"""Tramèr & Boneh 2021: makes the runs of the paper's experiments, a few seeds each, and tells how they compare.

python -m benchmarks.papers.tramer2021 accuracy --rows cifar10 --seeds 3
python -m benchmarks.papers.tramer2021 plot-accuracy
"""

from benchmarks.papers.runner import Paper, main
from benchmarks.papers.tramer2021.experiments import EXPERIMENTS
from benchmarks.papers.tramer2021.plots import PLOTS
from benchmarks.papers.tramer2021.shuffle import random_shuffle
from benchmarks.papers.tramer2021.transfer import efficientnet_features
from benchmarks.papers.tramer2021.unit_pixels import unit_pixels

PAPER = Paper(
    "tramer2021",
    EXPERIMENTS,
    extras=PLOTS,
    variants={"shuffle": random_shuffle, "unit-pixels": unit_pixels},
    datasets={"cifar10-efficientnet": efficientnet_features},
)

if __name__ == "__main__":
    main(PAPER, __doc__)
