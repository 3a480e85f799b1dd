"""IDX files: read as written, and refused with the file's name when they are not whole."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpkernels.data import load_dataset
from dpkernels.data.idx import read_idx

Arrays = dict[str, np.ndarray]
NAMES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


def idx_bytes(array: np.ndarray, kind: int = 8) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, kind, array.ndim, *array.shape) + array.tobytes()


def some_arrays(train: int = 5, test: int = 3, size: tuple[int, int] = (4, 6)) -> Arrays:
    random = np.random.default_rng(0)
    return {
        "train_images": random.integers(0, 256, (train, *size), np.uint8),
        "train_labels": random.integers(0, 10, train, np.uint8),
        "test_images": random.integers(0, 256, (test, *size), np.uint8),
        "test_labels": random.integers(0, 10, test, np.uint8),
    }


def write(folder: Path, arrays: Arrays, zipped: bool = False) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    for role, array in arrays.items():
        content = idx_bytes(array)
        name = NAMES[role] + (".gz" if zipped else "")
        (folder / name).write_bytes(gzip.compress(content) if zipped else content)
    return folder


@pytest.mark.parametrize("zipped", [False, True])
def test_images_and_labels_come_back(tmp_path: Path, zipped: bool) -> None:
    arrays = some_arrays()
    data = load_dataset(write(tmp_path / "letters", arrays, zipped))
    assert data.name == "letters"
    assert data.input_shape == (1, 4, 6)
    assert data.nominal_size is None
    np.testing.assert_array_equal(data.train.images[:, 0].numpy(), arrays["train_images"])
    np.testing.assert_array_equal(data.train.labels.numpy(), arrays["train_labels"])
    np.testing.assert_array_equal(data.test.images[:, 0].numpy(), arrays["test_images"])
    np.testing.assert_array_equal(data.test.labels.numpy(), arrays["test_labels"])


def test_the_name_with_a_dot_is_found_too(tmp_path: Path) -> None:
    folder = write(tmp_path, some_arrays())
    (folder / NAMES["train_images"]).rename(folder / "train-images.idx3-ubyte")
    assert len(load_dataset(folder).train) == 5


def damaged(array: np.ndarray, how: str) -> bytes:
    whole = idx_bytes(array)
    zipped = gzip.compress(whole)
    flipped = bytearray(zipped)
    flipped[len(zipped) // 2] ^= 0xFF
    return {
        "cut": whole[:-1],
        "too long": whole + b"\0",
        "header only": whole[:7],
        "empty": b"",
        "float": idx_bytes(array, kind=0x0D),
        "text": b"<html>not found</html>",
        "gzip cut": zipped[: len(zipped) // 2],
        "gzip flipped": bytes(flipped),
    }[how]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("cut", "expected 136 bytes for an array of 5x4x6, got 135"),
        ("too long", "expected 136 bytes for an array of 5x4x6, got 137"),
        ("header only", "expected a header of 16 bytes, got 7"),
        ("empty", r"magic 00000803\), got $"),
        ("float", r"magic 00000803\), got 00000d03"),
        ("text", r"magic 00000803\), got 3c68746d"),
        ("gzip cut", "expected a whole gzip file"),
        ("gzip flipped", "expected a whole gzip file"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, how: str, words: str) -> None:
    arrays = some_arrays()
    folder = write(tmp_path, arrays)
    (folder / NAMES["train_images"]).write_bytes(damaged(arrays["train_images"], how))
    with pytest.raises(ValueError, match=words) as caught:
        load_dataset(folder)
    assert str(folder / NAMES["train_images"]) in str(caught.value)


def test_an_image_file_in_place_of_a_label_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(idx_bytes(np.zeros((2, 3, 3), np.uint8)))
    with pytest.raises(ValueError, match=r"1 dimensions .magic 00000801., got 00000803"):
        read_idx(path, rank=1)


def test_labels_must_fit_images_and_classes(tmp_path: Path) -> None:
    arrays = some_arrays()
    folder = write(tmp_path / "a", arrays | {"train_labels": arrays["train_labels"][:4]})
    with pytest.raises(ValueError, match=r"train-labels-idx1-ubyte: expected 5 labels, one per example, got 4"):
        load_dataset(folder)
    letters = arrays | {"test_labels": np.array([1, 30, 46], np.uint8)}
    folder = write(tmp_path / "b", letters)
    with pytest.raises(ValueError, match=r"t10k-labels-idx1-ubyte: expected labels from 0 to 9, got 30 \(2 labels"):
        load_dataset(folder)
    assert load_dataset(folder, num_classes=47).num_classes == 47
    for count in (0, 257, 10**12, 2.0, True):
        with pytest.raises(ValueError, match="num_classes must be an integer from 1 to 256, got"):
            load_dataset(folder, num_classes=count)  # type: ignore[arg-type]


def test_train_and_test_images_must_have_one_size(tmp_path: Path) -> None:
    other = np.zeros((3, 4, 5), np.uint8)
    with pytest.raises(ValueError, match="t10k-images-idx3-ubyte: expected images of 4x6"):
        load_dataset(write(tmp_path, some_arrays() | {"test_images": other}))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, some_arrays())
    (folder / NAMES["test_labels"]).unlink()
    with pytest.raises(FileNotFoundError, match="t10k-labels-idx1-ubyte"):
        load_dataset(folder)


@pytest.mark.parametrize("nothing", [{"train": 0}, {"test": 0}, {"size": (0, 6)}, {"size": (4, 0)}])
def test_no_examples_at_all(tmp_path: Path, nothing: Any) -> None:
    with pytest.raises(ValueError, match=r"-images-idx3-ubyte: expected one number at least, got an array of [0-9x]+$"):
        load_dataset(write(tmp_path, some_arrays(**nothing)))


@pytest.mark.parametrize(("name", "mean"), [("mnist", 0.13066), ("fashion-mnist", 0.28602)])
def test_the_real_files(real_data: Path, name: str, mean: float) -> None:
    data = load_dataset(name, real_data)
    assert (len(data.train), len(data.test), data.input_shape) == (60_000, 10_000, (1, 28, 28))
    assert (data.name, data.num_classes, data.nominal_size) == (name, 10, 60_000)
    assert data.train.images.double().mean().item() / 255 == pytest.approx(mean, abs=1e-4)
    assert torch.bincount(data.test.labels, minlength=10).min() > 800
