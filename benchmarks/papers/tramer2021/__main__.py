"""Runs the paper's experiments, a few seeds each, and tells how they compare.

    python -m benchmarks.papers.tramer2021 accuracy --rows cifar10 --seeds 3 --out runs/tramer2021
    python -m benchmarks.papers.tramer2021 --report benchmarks/results/tramer2021.json --out runs/tramer2021

What is in --out is not run again, and what was broken off is gone on with.
"""

from benchmarks.papers.runner import main
from benchmarks.papers.tramer2021.experiments import EXPERIMENTS

if __name__ == "__main__":
    main(__doc__, "tramer2021", EXPERIMENTS)
