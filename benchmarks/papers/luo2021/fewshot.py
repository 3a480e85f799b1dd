"""Few-shot tasks of MNIST from the network that was pre-trained on Fashion-MNIST (Table 2's question, other data).

    python -m benchmarks.papers.luo2021.fewshot --shots 5 20 --epsilon 3 inf

5 ways, 15 queries, 60 trials as in the paper; 20 steps on all examples of a task at once, drawn from the test split,
which neither pre-training nor the private runs have seen. inf: next to no noise. Seeded, so not private.
"""

from __future__ import annotations

import argparse
import math
import time

from benchmarks.papers.luo2021.data import PAIRS
from benchmarks.papers.luo2021.experiments import VARIANTS
from dpkernels.training import learner, resolve
from dpkernels.transfer import few_shot

QUIET = 0.01  # a noise multiplier below all other randomness
WAYS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shots", type=int, nargs="+", default=[5, 20, 50])
    parser.add_argument("--epsilon", type=float, nargs="+", default=[3.0, math.inf])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["classifier", "classifier-norm"])
    parser.add_argument("--trials", type=int, default=60)
    options = parser.parse_args()
    pair = PAIRS["mnist"]
    data = pair.private()
    print("| what is trained | epsilon | shots | accuracy | seconds |\n| --- | --- | --- | --- | --- |")
    for variant in options.variants:
        for epsilon in options.epsilon:
            for shots in options.shots:
                noise = {"noise_multiplier": QUIET} if math.isinf(epsilon) else {"epsilon": epsilon}
                size = {"dataset_size": WAYS * shots, "batch_size": WAYS * shots, "epochs": 20}
                rates = {"lr": 4.0, "schedule": "cosine", "max_grad_norm": 1.0, "delta": 1e-5, "seed": 1}
                given = {"dataset": "mnist", "model": pair.model, "init": "runs/luo2021/mnist.safetensors"}
                config = resolve(data, given | size | rates | VARIANTS[variant] | noise)
                began = time.monotonic()
                result = few_shot(
                    data.test, learner(config, data.input_shape, WAYS), ways=WAYS, shots=shots, trials=options.trials
                )
                seconds = f"{time.monotonic() - began:.0f}"
                print(f"| {variant} | {epsilon:g} | {shots} | {result} | {seconds} |", flush=True)


if __name__ == "__main__":
    main()
