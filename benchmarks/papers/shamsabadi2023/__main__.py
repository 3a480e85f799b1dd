"""Shamsabadi & Papernot 2023: makes the runs of the paper's experiments, a few seeds each, and tells how they compare.

python -m benchmarks.papers.shamsabadi2023 accuracy --rows cifar10-cnn --seeds 5
python -m benchmarks.papers.shamsabadi2023 within plot-accuracy
"""

from benchmarks.papers.runner import Paper, main
from benchmarks.papers.shamsabadi2023.experiments import EXPERIMENTS
from benchmarks.papers.shamsabadi2023.plots import accuracy
from benchmarks.papers.shamsabadi2023.within import within

PAPER = Paper(
    "shamsabadi2023",
    EXPERIMENTS,
    extras={"within": lambda results: print(within(EXPERIMENTS, results)), "plot-accuracy": accuracy},
)

if __name__ == "__main__":
    main(PAPER, __doc__)
