"""Fetches rows of a data set as one batch; also no rows at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from dpkernels.data.arrays import ArraySplit
from dpkernels.data.files import FileSplit
from dpkernels.data.images import ImageSplit

Collate = Callable[[list[Any]], Any]


def fetcher(dataset: Any, collate_fn: Collate | None) -> Fetcher:
    """The fetcher for `dataset`: by indexing whole tensors where it consists of tensors, else example by example.

    Raises TypeError for a data set without length and indexing, ValueError for an empty one or one whose tensors differ
    in length.
    """
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            "dataset must have a length and be indexed by example (Poisson sampling draws any example at any step), "
            f"got {type(dataset).__name__}"
        )
    if collate_fn is None:
        if isinstance(dataset, (ImageSplit, ArraySplit, FileSplit)):
            return _checked(Fetcher(dataset.batch, len(dataset)))
        if isinstance(dataset, Tensor):
            return _checked(Fetcher(_Select((dataset,), alone=True), len(dataset)))
        tensors = dataset.tensors if type(dataset) is TensorDataset else dataset
        if isinstance(tensors, tuple) and tensors and all(isinstance(tensor, Tensor) for tensor in tensors):
            lengths = [len(tensor) for tensor in tensors]
            if len(set(lengths)) > 1:
                raise ValueError(f"dataset must be tensors of one length, got lengths {lengths}")
            return _checked(Fetcher(_Select(tensors, alone=False), lengths[0]))
    return _checked(Fetcher(_Examples(dataset, collate_fn or default_collate), len(dataset)))


class Fetcher(Dataset[Any]):
    """A data set whose items are whole batches, so that torch's workers run exactly what the main process runs."""

    def __init__(self, fetch: Callable[[Tensor], Any], size: int) -> None:
        self._fetch = fetch
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitems__(self, indices: list[int]) -> Any:
        return self._fetch(torch.tensor(indices, dtype=torch.int64))


class _Select:
    """Rows of tensors that share their first dimension."""

    def __init__(self, tensors: tuple[Tensor, ...], alone: bool) -> None:
        self.tensors = tensors
        self.alone = alone

    def __call__(self, indices: Tensor) -> Any:
        rows = tuple(tensor.index_select(0, indices.to(tensor.device)) for tensor in self.tensors)
        return rows[0] if self.alone else rows


class _Examples:
    """Examples one by one, collated; an empty batch is made from the first example's shapes and dtypes."""

    def __init__(self, dataset: Any, collate_fn: Collate) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.single: Any = None

    def __call__(self, indices: Tensor) -> Any:
        wanted = indices.tolist()
        if wanted:
            return self.collate_fn(self._examples(wanted))
        if self.single is None:
            self.single = self.collate_fn(self._examples([0]))
        return no_rows(self.single)

    def _examples(self, indices: list[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(indices))
        return [self.dataset[index] for index in indices]


def no_rows(batch: Any) -> Any:
    """`batch` with 0 rows: tensors and arrays keep dtype and other dimensions, lists of values are emptied."""
    if hasattr(batch, "shape") and hasattr(batch, "dtype"):
        return batch[:0]
    if isinstance(batch, Mapping):
        return {key: no_rows(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(no_rows, batch))
    if isinstance(batch, (list, tuple)):
        if all(isinstance(value, (str, bytes, int, float, type(None))) for value in batch):
            return type(batch)()
        return type(batch)(map(no_rows, batch))
    raise TypeError(
        "collate_fn must return tensors, or lists, tuples and dictionaries of them, so that an empty batch can be "
        f"made, got {type(batch).__name__}"
    )


def _checked(made: Fetcher) -> Fetcher:
    if len(made) == 0:
        raise ValueError("dataset must hold at least one example, got none")
    return made
