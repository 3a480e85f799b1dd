"""Kurakin et al. 2022: makes the runs of the paper's study of network sizes, reduced, and tells how they compare.

python -m benchmarks.papers.kurakin2022 rates sizes --seeds 1
python -m benchmarks.papers.kurakin2022 plot epsilons noises
"""

from benchmarks.papers.kurakin2022.accounting import epsilons, noises
from benchmarks.papers.kurakin2022.data import NAME, small_cifar10
from benchmarks.papers.kurakin2022.experiments import EXPERIMENTS
from benchmarks.papers.kurakin2022.plots import sizes
from benchmarks.papers.runner import Paper, main

PAPER = Paper(
    "kurakin2022",
    EXPERIMENTS,
    extras={"plot": sizes, "epsilons": epsilons, "noises": noises},
    datasets={NAME: small_cifar10},
)

if __name__ == "__main__":
    main(PAPER, __doc__)
