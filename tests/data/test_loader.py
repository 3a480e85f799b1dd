"""The Poisson loader: what it hands out, what it announces, and how it goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from dpkernels import accounting
from dpkernels.data import PoissonLoader, load_dataset, poisson_sample
from dpkernels.random import Key, Sample

SIZE = 100


def make_plan(batch_size: int = 10, steps: int = 12, dataset_size: int = SIZE) -> accounting.Plan:
    return accounting.plan(
        dataset_size=dataset_size, batch_size=batch_size, steps=steps, delta=1e-5, noise_multiplier=1, accountant="rdp"
    )


class Recorder:
    """An optimizer as the loader sees it."""

    def __init__(self, key: Key | None = None, next_step: int = 0) -> None:
        self.key = key or Key.from_seed(0)
        self.next_step = next_step
        self.plan: accounting.Plan | None = None
        self.heard: list[tuple[int, bool]] = []

    def bind(self, plan: accounting.Plan) -> None:
        self.plan = plan

    def begin_physical_batch(self, rows: int, last: bool, sample: Sample) -> None:
        """As if each batch was used before the next one is fetched."""
        if self.heard and self.heard[-1][1]:
            self.next_step += 1
        assert sample.step == self.next_step
        self.heard.append((rows, last))

    def holds(self, sample: Sample) -> bool:
        return True


class Items(Dataset[tuple[Tensor, int]]):
    """Example i is (a 2x3 tensor full of i, i)."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        assert type(index) is int
        return torch.full((2, 3), float(index)), index


def tensors(size: int = SIZE) -> tuple[Tensor, Tensor]:
    return torch.arange(size, dtype=torch.float32)[:, None, None].expand(size, 2, 3), torch.arange(size)


def drawn(plan: accounting.Plan, seed: int, size: int = SIZE) -> list[list[int]]:
    """What each step must draw."""
    key = Key.from_seed(seed)
    return [poisson_sample(key, step, size, plan.sampling_rate).tolist() for step in range(plan.steps)]


def logical_batches(batches: Iterator[Any], optimizer: Recorder) -> list[list[int]]:
    """The labels handed out, gathered by what was announced before each physical batch."""
    whole: list[list[int]] = [[]]
    for x, y in batches:
        rows, last = optimizer.heard[-1]
        assert x.shape == (rows, 2, 3)
        assert torch.equal(x[:, 0, 0], y.float())
        whole[-1] += y.tolist()
        if last:
            whole.append([])
    assert whole.pop() == []
    return whole


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("physical", [None, 1, 3, 1000])
@pytest.mark.parametrize("kind", ["items", "tensors"])
def test_every_step_comes_whole_and_in_order(workers: int, physical: int | None, kind: str) -> None:
    plan, optimizer = make_plan(), Recorder()
    dataset = Items() if kind == "items" else tensors()
    loader = PoissonLoader(
        dataset, plan, optimizer=optimizer, physical_batch_size=physical, key=Key.from_seed(4), num_workers=workers
    )
    assert optimizer.plan is plan
    if physical is None:
        assert len(loader) == plan.steps
    assert logical_batches(loader, optimizer) == drawn(plan, 4)
    assert loader.next_step == plan.steps
    if physical is None:
        assert len(loader) == len(optimizer.heard) == plan.steps
    else:
        assert max(rows for rows, _ in optimizer.heard) <= physical
        full = [rows for rows, last in optimizer.heard if not last]
        assert set(full) <= {physical}


@pytest.mark.parametrize("workers", [0, 1])
def test_announcements_come_just_before_their_batch_and_not_with_prefetching(workers: int) -> None:
    optimizer = Recorder()
    loader = PoissonLoader(
        Items(), make_plan(), optimizer=optimizer, physical_batch_size=4, key=Key.from_seed(1), num_workers=workers
    )
    assert optimizer.heard == []
    for number, (_, y) in enumerate(loader, start=1):
        assert len(optimizer.heard) == number
        assert optimizer.heard[-1][0] == len(y)


@pytest.mark.parametrize(
    ("dataset", "empty"),
    [
        (tensors(), (torch.zeros(0, 2, 3), torch.zeros(0, dtype=torch.int64))),
        (Items(), [torch.zeros(0, 2, 3), torch.zeros(0, dtype=torch.int64)]),
        (TensorDataset(*tensors()), (torch.zeros(0, 2, 3), torch.zeros(0, dtype=torch.int64))),
        (Subset(Items(), range(50, 150)), [torch.zeros(0, 2, 3), torch.zeros(0, dtype=torch.int64)]),
        (torch.ones(SIZE, 4, dtype=torch.float16), torch.zeros(0, 4, dtype=torch.float16)),
        ([np.float64(1.5)] * SIZE, torch.zeros(0, dtype=torch.float64)),
        ([{"x": torch.ones(2), "y": 3, "name": "n"}] * SIZE, {"x": torch.zeros(0, 2), "y": torch.zeros(0), "name": []}),
    ],
)
def test_an_empty_batch_has_the_right_shape_and_dtype(dataset: Any, empty: Any) -> None:
    optimizer = Recorder()
    plan = make_plan(batch_size=1, steps=30)
    loader = PoissonLoader(dataset, plan, optimizer=optimizer, key=Key.from_seed(5), physical_batch_size=2)
    seen = [batch for batch in loader if optimizer.heard[-1] == (0, True)]
    assert 5 <= len(seen) <= 20  # each of 30 is empty with probability 0.366
    assert sum(last for _, last in optimizer.heard) == 30

    def same(got: Any, wanted: Any) -> None:
        if isinstance(wanted, Tensor):
            assert got.shape == wanted.shape
            if wanted.dtype != torch.float32 or got.is_floating_point():
                assert got.dtype == wanted.dtype
        elif isinstance(wanted, dict):
            assert got.keys() == wanted.keys()
            for key in wanted:
                same(got[key], wanted[key])
        else:
            assert type(got) is type(wanted)
            assert len(got) == len(wanted)
            for a, b in zip(got, wanted, strict=True):
                same(a, b)

    same(seen[0], empty)


def test_an_empty_batch_from_a_worker() -> None:
    batches = list(PoissonLoader(Items(), make_plan(1, 15), key=Key.from_seed(5), num_workers=1))
    assert {tuple(x.shape[1:]) for x, _ in batches} == {(2, 3)}
    assert any(len(x) == 0 for x, _ in batches)


def test_image_splits_are_scaled_as_they_are_fetched() -> None:
    split = load_dataset("digits").train
    plan = make_plan(dataset_size=len(split), steps=2)
    for (x, y), indices in zip(
        PoissonLoader(split, plan, key=Key.from_seed(1)), drawn(plan, 1, len(split)), strict=True
    ):
        expected, labels = split.batch(torch.tensor(indices))
        assert torch.equal(x, expected)
        assert torch.equal(y, labels)


class Pair(NamedTuple):
    first: Tensor
    names: list[str]


def test_a_collate_function_gets_examples_and_never_none() -> None:
    def collate(examples: list[tuple[Tensor, int]]) -> Pair:
        assert examples
        return Pair(torch.stack([x for x, _ in examples]), [str(i) for _, i in examples])

    plan = make_plan(1, 20)
    batches = list(PoissonLoader(Items(), plan, key=Key.from_seed(5), collate_fn=collate))
    assert [[int(name) for name in batch.names] for batch in batches] == drawn(plan, 5)
    empty = next(batch for batch in batches if not batch.names)
    assert isinstance(empty, Pair)
    assert empty.first.shape == (0, 2, 3)


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


def test_a_subclass_of_a_tensor_data_set_keeps_its_own_items() -> None:
    plan = make_plan(steps=1)
    ((_, y),) = PoissonLoader(Doubled(*tensors()), plan, key=Key.from_seed(4))
    assert y.tolist() == [2 * index for index in drawn(plan, 4)[0]]


def test_data_sets_that_fetch_many_at_once_are_asked_so() -> None:
    class Many(Items):
        def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
            calls.append(indices)
            return [Items.__getitem__(self, index) for index in indices]

    calls: list[list[int]] = []
    plan = make_plan()
    loader = PoissonLoader(Many(), plan, key=Key.from_seed(4))
    assert calls == [[0], [0, 0]]  # whether an empty batch can be made
    list(loader)
    assert calls[2:] == drawn(plan, 4)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_second_loop_goes_on_where_the_first_stopped(workers: int) -> None:
    """Also in the middle of a logical batch: nothing is skipped, and nothing comes twice."""
    plan, optimizer = make_plan(), Recorder()
    loader = PoissonLoader(
        Items(), plan, optimizer=optimizer, physical_batch_size=3, key=Key.from_seed(4), num_workers=workers
    )

    def in_pieces() -> Iterator[Any]:
        for stop in (1, 2, 4, 3, None):
            yield from itertools.islice(loader, stop)

    assert logical_batches(in_pieces(), optimizer) == drawn(plan, 4)
    with pytest.warns(UserWarning, match=r"nothing is left of the loader's 12 steps, .* `for batches in loader.epochs"):
        assert list(loader) == []


def test_next_step_counts_whole_logical_batches() -> None:
    optimizer = Recorder()
    loader = PoissonLoader(Items(), make_plan(), optimizer=optimizer, physical_batch_size=3, key=Key.from_seed(4))
    ended = 0
    assert loader.next_step == 0
    for _ in loader:
        ended += optimizer.heard[-1][1]
        assert loader.next_step == ended


def test_take_runs_so_many_steps() -> None:
    plan, optimizer = make_plan(), Recorder()
    loader = PoissonLoader(Items(), plan, optimizer=optimizer, physical_batch_size=3, key=Key.from_seed(4))
    expected = drawn(plan, 4)
    assert logical_batches(loader.take(5), optimizer) == expected[:5]
    assert list(loader.take(0)) == []
    begun = next(loader)[1].tolist()
    assert loader.next_step == 5
    assert optimizer.heard[-1] == (3, False)
    rest = logical_batches(loader.take(2), optimizer)
    assert [begun + rest[0], rest[1]] == expected[5:7]
    assert logical_batches(loader.take(100), optimizer) == expected[7:]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_seeded_run_sees_the_same_batches(workers: int) -> None:
    plan, optimizer = make_plan(), Recorder(next_step=7)
    loader = PoissonLoader(Items(), plan, optimizer=optimizer, steps=3, key=Key.from_seed(4), num_workers=workers)
    assert (len(loader), loader.next_step) == (3, 7)
    assert logical_batches(loader, optimizer) == drawn(plan, 4)[7:10]
    assert loader.next_step == 10
    alone = PoissonLoader(Items(), plan, start_step=7, key=Key.from_seed(4))
    assert [y.tolist() for _, y in alone] == drawn(plan, 4)[7:]
    with pytest.warns(UserWarning, match="nothing is left"):
        assert list(PoissonLoader(Items(), plan, start_step=plan.steps)) == []


def test_without_a_key_every_loader_draws_anew() -> None:
    plan = make_plan(batch_size=50, steps=3)
    first, second = ([y.tolist() for _, y in PoissonLoader(tensors(), plan)] for _ in range(2))
    assert first != second


def test_the_key_of_the_optimizer_is_the_default() -> None:
    plan = make_plan()
    assert [y.tolist() for _, y in PoissonLoader(tensors(), plan, optimizer=Recorder(Key.from_seed(4)))] == drawn(
        plan, 4
    )


def test_a_seeded_sample_for_an_optimizer_with_fresh_noise_is_refused() -> None:
    with pytest.raises(ValueError, match="key must not be seeded where the optimizer's key is fresh"):
        PoissonLoader(tensors(), make_plan(), optimizer=Recorder(Key.fresh()), key=Key.from_seed(4))
    PoissonLoader(tensors(), make_plan(), optimizer=Recorder(Key.from_seed(4)), key=Key.fresh())


def test_torch_seeds_do_not_matter() -> None:
    plan = make_plan(batch_size=50, steps=2)
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        runs.append([y.tolist() for _, y in PoissonLoader(tensors(), plan)])
    assert runs[0] != runs[1]


def test_the_true_length_is_used_whatever_the_nominal_size(recwarn: pytest.WarningsRecorder) -> None:
    """Data sets of N and N - 1 examples are treated alike: the same rate, and no complaint."""
    plan = make_plan(steps=3)
    for size in (SIZE - 1, SIZE, SIZE + 1):
        loader = PoissonLoader(tensors(size), plan, key=Key.from_seed(4))
        assert [y.tolist() for _, y in loader] == drawn(plan, 4, size)
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"dataset has 300 examples, .*dataset_size=100: .* 30.0 examples on average"):
        PoissonLoader(tensors(300), plan)


def test_a_plan_of_whole_batches() -> None:
    plan = make_plan(batch_size=SIZE, steps=2)
    assert [y.tolist() for _, y in PoissonLoader(tensors(), plan)] == [list(range(SIZE))] * 2


class Refusing(Recorder):
    refuse = False

    def begin_physical_batch(self, rows: int, last: bool, sample: Sample) -> None:
        if self.refuse:
            raise RuntimeError("the last batch was not used")
        super().begin_physical_batch(rows, last, sample)


def test_a_batch_that_the_optimizer_refuses_comes_again() -> None:
    plan, optimizer = make_plan(), Refusing()
    loader = PoissonLoader(Items(), plan, optimizer=optimizer, physical_batch_size=3, key=Key.from_seed(4))

    def stubborn() -> Iterator[Any]:
        for number in itertools.count():
            optimizer.refuse = number % 2 == 0
            try:
                yield next(loader)
            except RuntimeError:
                assert optimizer.refuse
            except StopIteration:
                return

    assert logical_batches(stubborn(), optimizer) == drawn(plan, 4)


def test_an_optimizer_of_another_plan_refuses_the_loader() -> None:
    class Other(Recorder):
        def bind(self, plan: accounting.Plan) -> None:
            raise ValueError("the plan is another")

    with pytest.raises(ValueError, match="the plan is another"):
        PoissonLoader(Items(), make_plan(), optimizer=Other())


def test_a_loader_that_lost_a_batch_never_goes_on() -> None:
    class Broken(Items):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            if index == bad:
                raise OSError("disk")
            return super().__getitem__(index)

    plan = make_plan()
    bad = drawn(plan, 4)[3][0]
    first = next(step for step, indices in enumerate(drawn(plan, 4)) if bad in indices)
    loader = PoissonLoader(Broken(), plan, key=Key.from_seed(4))
    with pytest.raises(OSError, match="disk"):
        list(loader)
    assert loader.next_step == first
    with pytest.raises(RuntimeError, match=f"failed in the middle of step {first}; make another, which goes on there"):
        next(loader)
    again = PoissonLoader(Items(), plan, key=Key.from_seed(4), start_step=loader.next_step)
    assert [y.tolist() for _, y in again] == drawn(plan, 4)[first:]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("dataset", "options", "error", "words"),
    [
        (Stream(), {}, TypeError, "dataset must have a length and be indexed .* got Stream"),
        (iter([1]), {}, TypeError, "dataset must have a length and be indexed .* got list_iterator"),
        ([], {}, ValueError, "dataset must hold at least one example, got none"),
        ((torch.ones(3), torch.ones(2)), {}, ValueError, r"tensors of one length, got lengths \[3, 2\]"),
        (Items(), {"physical_batch_size": 0}, ValueError, "physical_batch_size must be at least 1, got 0"),
        (Items(), {"physical_batch_size": 2.5}, TypeError, "physical_batch_size must be an int, got float"),
        (Items(), {"num_workers": -1}, ValueError, "num_workers must be at least 0, got -1"),
        (Items(), {"start_step": 13}, ValueError, "start_step must be from 0 to 12, got 13"),
        (Items(), {"start_step": 4, "steps": 9}, ValueError, "steps must be from 0 to 8, got 9"),
        (Items(), {"steps": True}, TypeError, "steps must be an int, got bool"),
        (Items(), {"key": 3}, TypeError, "key must be a dpkernels.random.Key or None, got int"),
    ],
)
def test_bad_arguments_are_named(dataset: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        PoissonLoader(dataset, make_plan(), **options)


def test_a_plan_must_be_a_plan() -> None:
    with pytest.raises(TypeError, match=r"plan must be a dpkernels.accounting.Plan, got float"):
        PoissonLoader(Items(), 0.1)
