"""Luo et al. 2021: the ablation of Table 3 on networks that were pre-trained here.

python -m benchmarks.papers.luo2021.pretrain mnist
python -m benchmarks.papers.luo2021 ablation --seeds 1
"""

from benchmarks.papers.luo2021.data import PAIRS, halved, other_examples
from benchmarks.papers.luo2021.experiments import EXPERIMENTS
from benchmarks.papers.runner import Paper, main
from dpkernels.data import load_dataset

PAPER = Paper(
    "luo2021",
    EXPERIMENTS,
    datasets={name: pair.private for name, pair in PAIRS.items()}
    | {"mnist-other": lambda: halved(other_examples(load_dataset("mnist"), 10_000))},
)

if __name__ == "__main__":
    main(PAPER, __doc__)
