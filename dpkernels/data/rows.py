"""Fetches rows of a data set as one batch; also no rows at all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
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

    def prepare(self) -> None:
        """Raise TypeError where no empty batch can be made."""
        if isinstance(self._fetch, _Examples):
            self._fetch.prepare()

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
    """Examples one by one, collated; an empty batch is made of the first example."""

    def __init__(self, dataset: Any, collate_fn: Collate) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.tried: tuple[Any, Any] | None = None  # batches of the first example, once and twice

    def __call__(self, indices: Tensor) -> Any:
        one, two = self.prepare()
        wanted = indices.tolist()
        return self.collate_fn(self._examples(wanted)) if wanted else no_rows(one, two)

    def prepare(self) -> tuple[Any, Any]:
        """Two batches of the first example, once and twice, that tell which rows an empty one leaves out.

        Raises TypeError where they do not.
        """
        if self.tried is None:
            one, two = (self._collated(self._examples([0] * count)) for count in (1, 2))
            no_rows(one, two)
            self.tried = one, two
        return self.tried

    def _collated(self, examples: list[Any]) -> Any:
        try:
            return self.collate_fn(examples)
        except Exception as error:
            raise TypeError(
                "collate_fn must make a batch of any number of examples, from one on; of the first example, taken "
                f"{len(examples)} times, it raised {type(error).__name__}: {error}"
            ) from error

    def _examples(self, indices: list[int]) -> list[Any]:
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(indices))
        return [self.dataset[index] for index in indices]


def no_rows(one: Any, two: Any, path: str = "the batch") -> Any:
    """The batch of no examples, from the batch `one` of an example and `two` of the same one twice.

    Whatever is twice as long in `two` is emptied: tensors and arrays in dimension 0, where they keep their other
    dimensions, and lists. Strings, None and bools stay. Raises TypeError that names what has no rows to leave out.
    """
    if hasattr(one, "shape") and hasattr(one, "dtype"):
        if one.ndim and two.ndim and len(two) == 2 * len(one):
            return one[:0]
        got = f"shape {tuple(one.shape)} for one example and {tuple(two.shape)} for two"
    elif isinstance(one, Mapping):
        if one.keys() == two.keys():
            return _like(one, {key: no_rows(one[key], two[key], f"{path}[{key!r}]") for key in one})
        got = f"keys {sorted(map(str, one))} for one example and {sorted(map(str, two))} for two"
    elif isinstance(one, (list, tuple)):
        if len(two) == 2 * len(one):
            return type(one)()
        if len(two) == len(one):
            parts = [no_rows(*both, f"{path}[{k}]") for k, both in enumerate(zip(one, two, strict=True))]
            return type(one)(*parts) if hasattr(one, "_fields") else type(one)(parts)
        got = f"length {len(one)} for one example and {len(two)} for two"
    elif isinstance(one, (str, bytes, bool, type(None))):
        return one
    else:
        got = type(one).__name__
    raise TypeError(
        "collate_fn must return tensors with the examples in dimension 0, or lists, tuples and dictionaries of them, "
        f"so that an empty batch can be made, but {path} has {got}. Put the examples first (batch_first=True in "
        "pad_sequence), and compute what is one number for all examples in the loop, from the batch."
    )


def _like(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the same type, with its methods."""
    if not isinstance(mapping, MutableMapping):
        return values
    made = copy.copy(mapping)
    made.update(values)
    return made


def _checked(made: Fetcher) -> Fetcher:
    if len(made) == 0:
        raise ValueError("dataset must hold at least one example, got none")
    return made
