"""Batches of no rows, from what a collate function makes of one example: right, or refused when the loader is made."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_sequence

import dpkernels as dpk
from dpkernels.data import PoissonLoader
from dpkernels.random import Key

SIZE = 40
SEQUENCES = [torch.arange(n % 5 + 1) for n in range(SIZE)]


def make_loader(collate: Any, dataset: Any = SEQUENCES, **options: Any) -> PoissonLoader:
    plan = dpk.plan(dataset_size=SIZE, batch_size=1, steps=30, delta=1e-3, noise_multiplier=1.0, accountant="rdp")
    return PoissonLoader(dataset, plan, collate_fn=collate, key=Key.from_seed(2), **options)


class Encoding(UserDict[str, Any]):
    """A mapping with methods, as tokenizers return it."""

    def __init__(self, data: dict[str, Any] | None = None, note: str = "") -> None:
        super().__init__(data or {})
        self.note = note

    def to(self, device: str) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.items()}, self.note)


class Pair(NamedTuple):
    ids: Tensor
    names: list[str]


def boxes(examples: list[Tensor]) -> dict[str, Any]:
    """As for detection: all objects of all images in one tensor, and the number of each image's."""
    return {"boxes": torch.cat(examples), "counts": torch.tensor([len(e) for e in examples]), "kind": "xyxy"}


@pytest.mark.parametrize(
    ("collate", "empty"),
    [
        (lambda e: pad_sequence(e, batch_first=True), torch.zeros(0, 1, dtype=torch.int64)),
        (lambda e: e, []),
        (tuple, ()),
        (lambda e: (pad_sequence(e, True), [str(len(x)) for x in e]), (torch.zeros(0, 1, dtype=torch.int64), [])),
        (lambda e: [np.array([len(x) for x in e])], [np.zeros(0, dtype=np.int64)]),
        (lambda e: Pair(pad_sequence(e, True), ["a"] * len(e)), Pair(torch.zeros(0, 1, dtype=torch.int64), [])),
        (boxes, {"boxes": torch.zeros(0).long(), "counts": torch.zeros(0).long(), "kind": "xyxy"}),
        (lambda e: {"x": e, "train": True, "more": None}, {"x": [], "train": True, "more": None}),
    ],
)
def test_an_empty_batch_has_no_row(collate: Any, empty: Any) -> None:
    def same(got: Any, wanted: Any) -> bool:
        if isinstance(wanted, (Tensor, np.ndarray)):
            return type(got) is type(wanted) and got.dtype == wanted.dtype and got.shape == wanted.shape
        if isinstance(wanted, Mapping):
            return got.keys() == wanted.keys() and all(same(got[key], wanted[key]) for key in wanted)
        if isinstance(wanted, (list, tuple)):
            parts = zip(got, wanted, strict=True)
            return type(got) is type(wanted) and len(got) == len(wanted) and all(same(a, b) for a, b in parts)
        return bool(got == wanted)

    batches = list(make_loader(collate))
    assert 5 <= sum(same(batch, empty) for batch in batches) <= 20  # each of 30 is empty with probability 0.363


@pytest.mark.parametrize("workers", [0, 1])
def test_a_mapping_keeps_its_type_and_its_methods(workers: int) -> None:
    loader = make_loader(collate_encodings, num_workers=workers)
    rows = [(len(batch.to("cpu")["ids"]), batch.note) for batch in loader]
    assert {note for _, note in rows} == {"kept"}
    assert min(count for count, _ in rows) == 0 < max(count for count, _ in rows)


def collate_encodings(examples: list[Tensor]) -> Encoding:
    return Encoding({"ids": pad_sequence(examples, batch_first=True)}, "kept")


def fails_on_one(examples: list[Tensor]) -> Tensor:
    assert len(examples) % 2 == 0, "batches must be even"
    return pad_sequence(examples, True)


@pytest.mark.parametrize(
    ("collate", "words"),
    [
        (pad_sequence, r"the batch has shape \(1, 1\) for one example and \(1, 2\) for two"),  # time first
        (
            lambda e: {"x": (e, torch.stack(e, 1))},
            r"the batch\['x'\]\[1\] has shape \(1, 1\) for one example and \(1, 2\)",
        ),
        (lambda e: (pad_sequence(e, True), torch.tensor(len(e))), r"the batch\[1\] has shape \(\) for one example"),
        (lambda e: (pad_sequence(e, True), max(map(len, e))), r"the batch\[1\] has int"),
        (len, "the batch has int"),
        (lambda e: {"loss": 0.5}, r"the batch\['loss'\] has float"),
        (lambda e: [e[0]] * (len(e) + 1), "the batch has length 2 for one example and 3 for two"),
        (lambda e: {str(len(e)): e}, r"the batch has keys \['1'\] for one example and \['2'\] for two"),
        (
            lambda e: pack_sequence(e, enforce_sorted=False),
            r"the batch\[1\] has shape \(1,\) for one example and \(1,\)",
        ),
        (fails_on_one, r"of the first example, taken 1 times, it raised AssertionError: batches must be even"),
        (lambda e: {1, 2}, "the batch has set"),
    ],
)
def test_what_cannot_be_emptied_is_refused_when_the_loader_is_made(collate: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"collate_fn must .*{words}"):
        make_loader(collate)


def test_workers_refuse_it_with_their_first_batch() -> None:
    """Not when the loader is made: a data set may open its files in the process that reads them."""
    opened: list[int] = []

    class Lazy:
        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, index: int) -> Tensor:
            opened.append(index)
            return SEQUENCES[index]

    loader = make_loader(pad_sequence, Lazy(), num_workers=1)
    assert not opened
    with pytest.raises(TypeError, match="collate_fn must return tensors with the examples in dimension 0"):
        next(loader)


def test_errors_of_the_data_set_are_its_own() -> None:
    class Broken:
        def __len__(self) -> int:
            return SIZE

        def __getitem__(self, index: int) -> Tensor:
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        make_loader(None, Broken())


def test_random_structures() -> None:
    """Of any nesting: every leaf has the rows of the batch, or there is an error when the loader is made."""
    chance = random.Random(0)

    def structure(depth: int) -> Any:
        kind = chance.choice(
            ["rows", "rows", "rows", "list", "tuple", "dict", "names", "columns"] if depth else ["rows"]
        )
        if kind in ("rows", "names", "columns"):
            return kind
        parts = [structure(depth - 1) for _ in range(chance.randrange(1, 4))]
        return {"list": parts, "tuple": tuple(parts), "dict": dict(enumerate(parts))}[kind]

    def fill(shape: Any, examples: list[Tensor]) -> Any:
        if shape == "rows":
            return torch.zeros(len(examples), 3)
        if shape == "columns":
            return torch.zeros(3, len(examples))
        if shape == "names":
            return ["a"] * len(examples)
        if isinstance(shape, dict):
            return {key: fill(value, examples) for key, value in shape.items()}
        return type(shape)(fill(value, examples) for value in shape)

    def count(batch: Any) -> set[int]:
        if isinstance(batch, dict):
            return set().union(*map(count, batch.values()))
        if isinstance(batch, (list, tuple)) and batch and not isinstance(batch[0], str):
            return set().union(*map(count, batch))
        return {len(batch)}

    refused = 0
    for _ in range(60):
        shape = structure(3)
        try:
            loader = make_loader(lambda examples, shape=shape: fill(shape, examples))
        except TypeError:
            refused += 1
            assert "columns" in str(shape)
            continue
        assert "columns" not in str(shape)
        assert all(len(count(batch)) == 1 for batch in loader.take(10))
    assert 5 < refused < 55
