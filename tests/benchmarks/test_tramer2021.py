"""The paper's experiments are configurations, and batches by shuffle are what they say."""

from __future__ import annotations

import pytest
import torch

from benchmarks.papers.tramer2021 import spread
from benchmarks.papers.tramer2021.__main__ import PAPER
from benchmarks.papers.tramer2021.experiments import SIZES, classic_noise
from benchmarks.papers.tramer2021.shuffle import shuffled_batch
from benchmarks.papers.tramer2021.unit_pixels import unit_pixels
from dpkernels.data import load_dataset
from dpkernels.random import Key
from dpkernels.training import build, resolve
from dpkernels.training.config import check_values


def test_every_row_is_a_configuration_of_its_own() -> None:
    digits = load_dataset("digits")
    for make in PAPER.experiments.values():
        rows = make()
        assert len({row.name for row in rows}) == len(rows)
        for row in rows:
            check_values(row.fields)
            resolve(digits, row.fields | {"dataset_size": SIZES[row.fields["dataset"].removesuffix("-efficientnet")]})
            assert row.variant in {"", *PAPER.variants}


def test_noise_of_the_papers_accounting() -> None:
    assert classic_noise("cifar10", 8192, 60, 8.0) == pytest.approx(5.7, abs=0.05)
    assert classic_noise("mnist", 4096, 40, None) < classic_noise("mnist", 4096, 40, 8.0)


def test_shuffled_batches_visit_every_example_once_an_epoch() -> None:
    key, size, batch = Key.from_seed(3), 25, 10
    drawn = torch.cat([shuffled_batch(key, step, size, batch / size) for step in range(5)])
    assert drawn.bincount(minlength=size).tolist() == [2] * size
    again = torch.cat([shuffled_batch(key, step, size, batch / size) for step in range(5)])
    assert torch.equal(drawn, again)
    assert not torch.equal(shuffled_batch(key, 0, size, 0.4), shuffled_batch(Key.from_seed(4), 0, size, 0.4))
    first, second = (shuffled_batch(key, step, size, 0.4) for step in (0, 5))
    assert not torch.equal(first, second)


def test_the_variant_of_unit_pixels_takes_features_of_pixels_in_0_to_1() -> None:
    with unit_pixels():
        inside = build.features_of("scatternet", (3, 32, 32))
    outside = build.features_of("scatternet", (3, 32, 32))
    assert (inside.pixel_range, outside.pixel_range) == ((0.0, 1.0), (-2.5, 2.5))


def test_the_spread_is_over_the_papers_grid() -> None:
    whole = spread.points("mnist", "scatternet-linear")
    assert len(whole) == 6 * 4 * 3 * 5
    assert len({point.name for point in whole}) == len(whole)
    assert [point.name for point in whole] == [point.name for point in spread.points("mnist", "scatternet-linear")]
    assert len(spread.points("mnist", "scatternet-linear", epochs=5)) == 6 * 4 * 5
    assert len(spread.points("cifar10", "cnn")) == 6 * 4 * 3
    for point in (*whole[:20], *spread.points("cifar10", "cnn")[:5]):
        config = resolve(load_dataset("digits"), point.fields | {"dataset_size": 60_000})
        assert config.epsilon == 3.0
        assert config.lr * 512 / config.batch_size in {0.125, 0.25, 0.5, 1, 2}
    assert spread.spread([0.9, 0.91, 0.93, 0.95, 0.96]) == {
        "min": 90.0,
        "max": 96.0,
        "median": 93.0,
        "MAD": 2.0,
        "q1": 91.0,
        "q3": 95.0,
    }
