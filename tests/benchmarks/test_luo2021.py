"""The paper's experiments are configurations, and public and private data have nothing in common."""

from __future__ import annotations

import torch

from benchmarks.papers.luo2021.data import CIFAR_PRIVATE, CIFAR_PUBLIC, first_examples, halved, only_classes
from benchmarks.papers.luo2021.experiments import EXPERIMENTS
from dpkernels.data import load_dataset
from dpkernels.training import resolve


def test_every_row_is_a_configuration_of_its_own() -> None:
    digits = load_dataset("digits")
    for make in EXPERIMENTS.values():
        rows = make()
        assert len({row.name for row in rows}) == len(rows)
        assert len({str(resolve(digits, row.fields)) for row in rows}) == len(rows)


def test_parts_of_a_data_set() -> None:
    assert sorted(CIFAR_PUBLIC + CIFAR_PRIVATE) == list(range(10))
    digits = load_dataset("digits")
    odd = only_classes(digits, (1, 3, 5, 7, 9))
    assert odd.classes == ("1", "3", "5", "7", "9")
    assert torch.equal(odd.train.labels * 2 + 1, digits.train.labels[digits.train.labels % 2 == 1])
    few = halved(first_examples(digits, 100))
    assert (len(few.train), few.input_shape, len(few.test)) == (100, (1, 4, 4), len(digits.test))
    means = digits.train.batch(torch.arange(100))[0].unfold(2, 2, 2).unfold(3, 2, 2).mean((-1, -2))
    assert (few.train.batch(torch.arange(100))[0] - means).abs().max() <= 0.5 / 16 * 2 + 1e-6
