"""Features on disk: computed once, found again, never half a file, and read as the loader reads images."""

from __future__ import annotations

import dataclasses
import os
import struct
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import dpkernels as dpk
from dpkernels.data import ArraySplit, ImageDataset, ImageSplit, load_dataset, with_features
from tests.damage import one_outcome


def images(count: int, seed: int = 0) -> ImageSplit:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, 1, 4, 4), dtype=torch.uint8, generator=generator)
    return ImageSplit(pixels, torch.arange(count) % 3)


@pytest.fixture
def dataset() -> ImageDataset:
    return ImageDataset("small", ("a", "b", "c"), images(2100), images(30, 1))


class Doubled:
    """A transform that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return torch.cat([x, 2 * x], 1)


def build(dataset: ImageDataset, transform: Doubled, folder: Path, **changes: object) -> ImageDataset:
    options = {"shape": (2, 4, 4), "fingerprint": "doubled", "folder": folder} | changes
    return with_features(dataset, transform, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_features_replace_images(dataset: ImageDataset, tmp_path: Path, dtype: str) -> None:
    made = build(dataset, Doubled(), tmp_path, dtype=dtype)
    assert made.input_shape == (2, 4, 4)
    assert made.num_classes == 3
    assert isinstance(made.train, ArraySplit)
    assert made.train.rows.dtype == getattr(torch, dtype)
    index = torch.tensor([2099, 0, 7])
    (rows, labels), (pixels, wanted) = made.train.batch(index), dataset.train.batch(index)
    assert rows.dtype == torch.float32
    assert torch.equal(labels, wanted)
    torch.testing.assert_close(rows, Doubled()(pixels), rtol=1e-3 if dtype == "float16" else 0, atol=0)
    assert [len(y) for _, y in made.train.batches(1000)] == [1000, 1000, 100]
    assert made.test[3][0].shape == (2, 4, 4)
    assert "2100 rows (2, 4, 4)" in repr(made.train)


def test_they_are_computed_once(dataset: ImageDataset, tmp_path: Path) -> None:
    transform = Doubled()
    build(dataset, transform, tmp_path)
    calls = transform.calls
    build(dataset, transform, tmp_path)
    assert transform.calls == calls
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".lock", ".lock", ".npy", ".npy"]
    for path in tmp_path.iterdir():
        assert path.stat().st_mode & 0o077 == 0


def test_everything_that_matters_is_in_the_key(dataset: ImageDataset, tmp_path: Path) -> None:
    transform = Doubled()

    def rebuilt(data: ImageDataset = dataset, **changes: object) -> bool:
        before = transform.calls
        build(data, transform, tmp_path, **changes)
        return transform.calls > before

    assert rebuilt()
    assert not rebuilt()
    assert rebuilt(fingerprint="doubled, version 2")
    assert rebuilt(dtype="float32")
    assert rebuilt(dataset.scaled(-1, 1))
    pixels = images(2100).images
    pixels[17, 0, 3, 3] ^= 1
    other = dataclasses.replace(dataset, train=ImageSplit(pixels, dataset.train.labels))
    assert rebuilt(other)
    assert not rebuilt(dataclasses.replace(dataset, train=ImageSplit(images(2100).images, 2 - dataset.train.labels)))
    assert not rebuilt(other)


class Breaking(Doubled):
    """Ends with the second batch."""

    def __call__(self, x: Tensor) -> Tensor:
        if self.calls == 1:
            raise KeyboardInterrupt
        return super().__call__(x)


def test_a_build_that_is_broken_off_goes_on(dataset: ImageDataset, tmp_path: Path) -> None:
    whole = build(dataset, Doubled(), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        build(dataset, Breaking(), tmp_path)
    assert {path.suffix for path in tmp_path.glob("small-*")} == {".lock", ".unfinished"}
    with pytest.raises(KeyboardInterrupt):  # once more, in the last batch
        build(dataset, Breaking(), tmp_path)
    rest = Doubled()
    made = build(dataset, rest, tmp_path)
    assert rest.calls == 2  # the last batch of train and one of test
    for ours, theirs in zip(sorted(tmp_path.glob("*.npy")), sorted((tmp_path / "whole").glob("*.npy")), strict=True):
        assert ours.read_bytes() == theirs.read_bytes()
    assert torch.equal(made.train.batch(torch.arange(2100))[0], whole.train.batch(torch.arange(2100))[0])


@pytest.mark.parametrize("damage", ["rows", "note", "count", "file"])
def test_a_damaged_beginning_starts_over(dataset: ImageDataset, tmp_path: Path, damage: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        build(dataset, Breaking(), tmp_path)
    (unfinished,), (note,) = tmp_path.glob("*.unfinished"), tmp_path.glob("*.lock")
    if damage == "rows":
        os.truncate(unfinished, unfinished.stat().st_size - 1)
    elif damage == "file":
        unfinished.unlink()
    else:
        note.write_bytes(b"-1".rjust(20) if damage == "note" else b"%020d" % 2101)
    transform = Doubled()
    made = build(dataset, transform, tmp_path)
    assert transform.calls == 4
    wanted = dataset.train.batch(torch.arange(2100))[0]
    torch.testing.assert_close(made.train.batch(torch.arange(2100))[0], Doubled()(wanted), rtol=1e-3, atol=0)


def test_what_a_killed_build_left_is_overwritten(dataset: ImageDataset, tmp_path: Path) -> None:
    build(dataset, Doubled(), tmp_path)
    for path in tmp_path.glob("*-train-*.npy"):
        path.with_suffix(".unfinished").write_bytes(b"x" * 10**6)  # longer than what will be written
        path.unlink()
    made = build(dataset, Doubled(), tmp_path)
    index = torch.arange(5)
    torch.testing.assert_close(made.train.batch(index)[0][:, :1], dataset.train.batch(index)[0], rtol=1e-3, atol=0)
    assert not list(tmp_path.glob("*.unfinished"))


def test_a_second_build_waits_for_the_first(dataset: ImageDataset, tmp_path: Path) -> None:
    transform = Doubled()
    threads = [threading.Thread(target=build, args=(dataset, transform, tmp_path)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert transform.calls == 4  # three batches of train and one of test
    assert len(list(tmp_path.glob("*.npy"))) == 2


def test_writing_to_a_batch_leaves_the_file(dataset: ImageDataset, tmp_path: Path) -> None:
    made = build(dataset, Doubled(), tmp_path, dtype="float32")
    first, _ = next(made.train.batches(10))
    kept = first.clone()
    first.zero_()
    again = build(dataset, Doubled(), tmp_path, dtype="float32")
    assert torch.equal(next(again.train.batches(10))[0], kept)


def test_features_that_are_refused(dataset: ImageDataset, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype must be one of float16, float32, got 'int8'"):
        build(dataset, Doubled(), tmp_path, dtype="int8")
    with pytest.raises(ValueError, match=r"transform must give \[1024, 3, 4, 4\], got \(1024, 2, 4, 4\)"):
        build(dataset, Doubled(), tmp_path, shape=(3, 4, 4))
    with pytest.raises(ValueError, match="dtype must hold the features, got float16"):
        with_features(dataset, lambda x: 1e6 * x, shape=(1, 4, 4), fingerprint="large", folder=tmp_path)
    with pytest.raises(TypeError, match="train must be images, got ArraySplit"):
        build(build(dataset, Doubled(), tmp_path), Doubled(), tmp_path)
    with pytest.raises(TypeError, match="train must be images"):
        build(dataset, Doubled(), tmp_path).scaled(0, 1)
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_features_that_are_no_numbers_are_not_kept(dataset: ImageDataset, tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match=f"dtype must hold the features, got float32 for {value}"):
        with_features(dataset, lambda x: value + x, shape=(1, 4, 4), fingerprint="x", dtype="float32", folder=tmp_path)
    assert not list(tmp_path.glob("*.npy"))


def test_a_kept_file_of_other_features_is_named(dataset: ImageDataset, tmp_path: Path) -> None:
    build(dataset, Doubled(), tmp_path)
    (path,) = tmp_path.glob("*-test-*.npy")
    np.save(path, np.zeros((30, 2, 4, 5), np.float16))
    with pytest.raises(ValueError, match=rf"{path.name}: expected features float16 \(30, 2, 4, 4\).*delete it"):
        build(dataset, Doubled(), tmp_path)
    path.unlink()
    os.mkfifo(path)
    assert "got a FIFO" in one_outcome(lambda: build(dataset, Doubled(), tmp_path), path.name)


def test_splits_that_are_refused() -> None:
    with pytest.raises(ValueError, match="rows must be float16 or float32"):
        ArraySplit(torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"labels must be int64 \[3\]"):
        ArraySplit(torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64))


def test_the_loader_draws_rows(dataset: ImageDataset, tmp_path: Path) -> None:
    made = build(dataset, Doubled(), tmp_path)
    plan = dpk.plan(dataset_size=2100, batch_size=5, steps=40, delta=1e-5, noise_multiplier=1.0)
    sizes = [len(rows) for rows, _ in dpk.PoissonLoader(made.train, plan)]
    assert len(sizes) == 40
    assert 3 < sum(sizes) / 40 < 7


def brought(folder: Path, **changes: np.ndarray) -> Path:
    files = {
        "train.npy": np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32),
        "train-labels.npy": np.arange(7) % 2,
        "test.npy": np.ones((4, 5), np.float16),
        "test-labels.npy": np.array([0, 1, 1, 0], np.uint8),
    } | changes
    folder.mkdir(exist_ok=True)
    for name, values in files.items():
        np.save(folder / name, values)
    return folder


def test_features_that_the_user_brings(tmp_path: Path) -> None:
    dataset = load_dataset(brought(tmp_path / "mine"))
    assert (dataset.name, dataset.num_classes, dataset.input_shape, dataset.nominal_size) == ("mine", 2, (5,), None)
    assert dataset.train.batch(torch.tensor([3]))[0].dtype == torch.float32
    assert next(dataset.test.batches(9))[1].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train.npy": np.zeros((7, 5))}, "train.npy: expected float16 or float32"),
        ({"test.npy": np.zeros(4, np.float32)}, "test.npy: expected float16 or float32"),
        ({"train-labels.npy": np.zeros(7)}, "train-labels.npy: expected integers"),
        ({"train-labels.npy": np.zeros(6, int)}, "train-labels.npy: expected 7 labels"),
        ({"train-labels.npy": np.full(7, 5)}, "train-labels.npy: expected labels from 0 to 1"),
        ({"test.npy": np.ones((4, 6), np.float32)}, "must have one shape"),
    ],
)
def test_brought_features_that_do_not_fit(tmp_path: Path, changes: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_dataset(brought(tmp_path / "mine", **changes))


def test_brought_files_that_are_missing_or_damaged(tmp_path: Path) -> None:
    folder = brought(tmp_path / "mine")
    (folder / "train.npy").write_bytes(b"\x93NUMPY junk")
    with pytest.raises(ValueError, match=r"train\.npy: expected an array"):
        load_dataset(folder)
    os.remove(folder / "test.npy")
    with pytest.raises(FileNotFoundError, match=r"test\.npy is missing"):
        load_dataset(folder)


@pytest.mark.parametrize("label", [2**62, 10**9, 10**4, 2**63 - 1])
def test_labels_that_number_no_classes(tmp_path: Path, label: int) -> None:
    folder = brought(tmp_path, **{"test-labels.npy": np.array([0, 1, 0, label])})
    words = one_outcome(lambda: load_dataset(folder), "test-labels.npy")
    assert f"below 10,000 for these labels, got label {label}" in words


def test_unsigned_labels_do_not_wrap_around(tmp_path: Path) -> None:
    folder = brought(tmp_path, **{"train-labels.npy": np.full(7, 2**64 - 1, np.uint64)})
    with pytest.raises(ValueError, match=r"train-labels\.npy: expected labels from 0 to 1, got 18446744073709551615"):
        load_dataset(folder)


def test_many_classes_are_fine_where_they_occur(tmp_path: Path) -> None:
    count = 30_000
    rows = np.ones((count, 1), np.float16)
    labels = np.arange(count)
    files = {"train.npy": rows, "test.npy": rows, "train-labels.npy": labels, "test-labels.npy": labels}
    data = load_dataset(brought(tmp_path, **files))
    assert data.num_classes == count


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["train.npy", "test.npy"])
def test_features_must_be_finite(tmp_path: Path, name: str, value: float, dtype: type) -> None:
    rows = {"train.npy": np.ones((7, 100_000), dtype), "test.npy": np.ones((4, 100_000), dtype)}
    rows[name][-1, -1] = value
    with pytest.raises(ValueError, match=rf"/{name}: expected finite numbers"):
        load_dataset(brought(tmp_path, **rows))


@pytest.mark.parametrize("name", ["train.npy", "train-labels.npy"])
@pytest.mark.parametrize("kind", ["archive", "objects", "cut", "longer header", "deep header"])
def test_arrays_that_are_none(tmp_path: Path, name: str, kind: str) -> None:
    path = brought(tmp_path) / name
    good = path.read_bytes()
    if kind == "archive":
        with open(path, "wb") as file:
            np.savez(file, a=np.zeros(3))
    elif kind == "objects":
        np.save(path, np.array([{}] * 20, dtype=object), allow_pickle=True)
    elif kind == "cut":
        path.write_bytes(good[:-1])
    elif kind == "longer header":
        path.write_bytes(good.replace(b"(7,", b"(7000000000000000,"))
    else:
        path.write_bytes(b"\x93NUMPY\1\0" + struct.pack("<H", 9000) + b"(" * 9000)
    assert "expected an array as numpy.save writes it" in one_outcome(lambda: load_dataset(tmp_path), path.name)


@pytest.mark.parametrize("shape", [(0, 5), (7, 0), (0, 0)])
def test_arrays_without_numbers(tmp_path: Path, shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"train\.npy: expected float16 or float32 .*one number at least"):
        load_dataset(brought(tmp_path, **{"train.npy": np.ones(shape, np.float32)}))


def test_labels_that_do_not_fit_into_memory(tmp_path: Path) -> None:
    """A sparse file of a terabyte, which takes no room on disk."""
    folder = brought(tmp_path)
    for name, shape, kind in (("train", (10**12, 1), "<f2"), ("train-labels", (10**12,), "|u1")):
        with open(folder / f"{name}.npy", "wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})
            file.truncate(file.tell() + 10**12 * np.dtype(kind).itemsize)
    with pytest.raises(ValueError, match=r"train-labels\.npy: expected what fits into the .* GB of memory"):
        load_dataset(folder)
