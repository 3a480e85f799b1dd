"""Runs the paper's experiments, a few seeds each, and tells how they compare.

    python -m benchmarks.papers.shamsabadi2023 accuracy --rows -cnn --seeds 5 --out runs/shamsabadi2023
    python -m benchmarks.papers.shamsabadi2023 --at 1.5 2 3 --out runs/shamsabadi2023

What is in --out is not run again, and what was broken off is gone on with.
"""

from benchmarks.papers.runner import main
from benchmarks.papers.shamsabadi2023.experiments import EXPERIMENTS

if __name__ == "__main__":
    main(__doc__, "shamsabadi2023", EXPERIMENTS)
