"""Data sets by name: where they are looked for, how they are scaled, and what is public about them."""

from __future__ import annotations

import struct
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from dpkernels.data import ImageDataset, ImageSplit, dataset_names, load_dataset


def test_digits_are_whole_and_split_as_documented() -> None:
    data = load_dataset("digits")
    assert (len(data.train), len(data.test), data.nominal_size) == (1437, 360, 1437)
    assert (data.input_shape, data.classes) == ((1, 8, 8), tuple("0123456789"))
    source = load_digits()
    order = np.random.RandomState(0).permutation(1797)
    np.testing.assert_array_equal(data.test.images[:, 0].numpy(), source.images[order[:360]])
    np.testing.assert_array_equal(data.train.labels.numpy(), source.target[order[360:]])
    assert data.train.images.max() == 16


@pytest.mark.parametrize("value_range", [(0.0, 1.0), (-1.0, 1.0), (-0.5, 2.0)])
def test_pixels_are_scaled_by_a_fixed_range(value_range: tuple[float, float]) -> None:
    low, high = value_range
    data = load_dataset("digits", value_range=value_range)
    expected = low + data.train.images.double() / 16 * (high - low)
    images, labels = data.train.batch(torch.arange(len(data.train)))
    assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    torch.testing.assert_close(images.double(), expected, rtol=0, atol=1e-6)
    assert (images.min().item(), images.max().item()) == value_range
    image, label = data.train[7]
    assert torch.equal(image, images[7])
    assert label == labels[7]
    assert torch.equal(torch.cat([x for x, _ in data.train.batches(100)]), images)
    assert torch.equal(torch.cat([y for _, y in data.train.batches(100)]), labels)


def test_scaling_does_not_depend_on_the_other_images() -> None:
    """The scale is 255 also where no pixel reaches it."""
    dim = ImageSplit(torch.full((2, 1, 2, 2), 51, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    torch.testing.assert_close(dim[0][0], torch.full((1, 2, 2), 0.2))


def test_a_batch_of_no_rows() -> None:
    images, labels = load_dataset("digits").train.batch(torch.zeros(0, dtype=torch.int64))
    assert (images.shape, images.dtype, labels.shape) == ((0, 1, 8, 8), torch.float32, (0,))


@pytest.mark.parametrize("value_range", [(1.0, 0.0), (0.0, 0.0), (0.0, float("inf")), (0.0,)])
def test_bad_value_range(value_range: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"value_range must be .low, high., finite and low < high, got"):
        load_dataset("digits", value_range=value_range)


@pytest.mark.parametrize("name", ["mnist", "MNIST", "fashion_mnist", "FashionMNIST", "CIFAR-10", "cifar10"])
def test_a_missing_data_set_says_where_to_put_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"was not found: looked in .*Put .* root or the environment") as caught:
        load_dataset(name, tmp_path)
    assert str(tmp_path) in str(caught.value)
    monkeypatch.setenv("DPKERNELS_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        load_dataset(name)
    monkeypatch.delenv("DPKERNELS_DATA")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "data")):
        load_dataset(name)


def test_a_named_data_set_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    for split in ("train", "test"):
        folder = tmp_path / "cifar10" / split / "cat"
        folder.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / "a.png")
    with pytest.raises(ValueError, match=r"expected cifar10, 10 classes of images \(3, 32, 32\), got 1 classes"):
        load_dataset("cifar10", tmp_path)


def test_unknown_names() -> None:
    with pytest.raises(FileNotFoundError, match=r"one of digits, mnist, fashion-mnist, cifar10, .* got 'imagenet'"):
        load_dataset("imagenet")
    with pytest.raises(TypeError, match="name_or_folder must be a string or a path, got int"):
        load_dataset(3)
    assert dataset_names() == ["digits", "mnist", "fashion-mnist", "cifar10"]


def test_a_path_object_is_never_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError):
        load_dataset(Path("digits"))


def test_image_splits_check_themselves() -> None:
    images, labels = torch.zeros(2, 1, 3, 3, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"images must be uint8 .* got torch.float32 \(2, 1, 3, 3\)"):
        ImageSplit(images.float(), labels)
    with pytest.raises(ValueError, match=r"labels must be int64 \[2\], one per image, got torch.int64 \(1,\)"):
        ImageSplit(images, labels[:1])
    other = ImageSplit(torch.zeros(1, 3, 3, 3, dtype=torch.uint8), labels[:1])
    with pytest.raises(ValueError, match="x: train and test images must have one shape"):
        ImageDataset("x", ("a",), ImageSplit(images, labels), other)


class Digits:
    """Like a torchvision data set: (root, train, download), and items of (image, label)."""

    def __init__(self, root: Path, train: bool = True, download: bool = False) -> None:
        if not (Path(root) / "here").exists() and not download:
            raise RuntimeError("Dataset not found.")
        self.rows = 4 if train else 2

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.new("L", (5, 6), index), index


class Colours(Digits):
    classes = ("red", "green", "blue", "white")

    def __init__(self, root: Path, split: str = "train", transform: Callable | None = None) -> None:
        self.rows = {"train": 3, "test": 1}[split]

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.new("RGB", (5, 6), (index, 7, 9)), index


class Ragged(Colours):
    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.new("RGB", (5, 6 + index)), index


class Damaged(Colours):
    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        raise EOFError


class Unreadable(Colours):
    def __init__(self, root: Path, split: str = "train") -> None:
        raise struct.error("unpack requires a buffer of 4 bytes")


class Numbered(Digits):
    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.new("L", (5, 6)), 10**9


class Unsplit:
    def __init__(self, root: Path) -> None: ...


@pytest.fixture
def torchvision_like(monkeypatch: pytest.MonkeyPatch) -> None:
    package, datasets = types.ModuleType("torchvision"), types.ModuleType("torchvision.datasets")
    for kind in (Digits, Colours, Ragged, Damaged, Unreadable, Numbered, Unsplit):
        setattr(datasets, kind.__name__, kind)
    package.datasets = datasets
    monkeypatch.setitem(sys.modules, "torchvision", package)
    monkeypatch.setitem(sys.modules, "torchvision.datasets", datasets)


@pytest.mark.usefixtures("torchvision_like")
def test_torchvision_by_class_name(tmp_path: Path) -> None:
    (tmp_path / "here").write_text("")
    gray = load_dataset("torchvision:Digits", tmp_path)
    assert (len(gray.train), len(gray.test), gray.input_shape, gray.num_classes) == (4, 2, (1, 6, 5), 4)
    assert gray.train.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    colour = load_dataset("torchvision:Colours", tmp_path)
    assert (colour.name, colour.classes, colour.input_shape) == ("torchvision:Colours", Colours.classes, (3, 6, 5))
    assert colour.train.images[2, :, 0, 0].tolist() == [2, 7, 9]


@pytest.mark.usefixtures("torchvision_like")
def test_torchvision_errors(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"torchvision:Digits in .*: Dataset not found"):
        load_dataset("torchvision:Digits", tmp_path)
    assert len(load_dataset("torchvision:Digits", tmp_path, download=True).train) == 4
    with pytest.raises(ValueError, match=r"torchvision:Ragged\[1\]: expected one size, \(6, 5, 3\), got \(7, 5, 3\)"):
        load_dataset("torchvision:Ragged", tmp_path)
    with pytest.raises(ValueError, match=r"torchvision:Damaged\[0\]: expected a labelled image .*, got EOFError"):
        load_dataset("torchvision:Damaged", tmp_path)
    with pytest.raises(
        ValueError, match=r"torchvision:Unreadable in .*: expected a labelled image .*, got error: unpack"
    ):
        load_dataset("torchvision:Unreadable", tmp_path)
    (tmp_path / "here").write_text("")
    with pytest.raises(ValueError, match=r"torchvision:Numbered: expected classes numbered from 0, .*label 1000000000"):
        load_dataset("torchvision:Numbered", tmp_path)
    with pytest.raises(ValueError, match=r"torchvision:Unsplit: expected a data set with a train and a test split"):
        load_dataset("torchvision:Unsplit", tmp_path)
    with pytest.raises(ValueError, match=r"torchvision:Nothing: expected a class of torchvision.datasets"):
        load_dataset("torchvision:Nothing", tmp_path)


def test_without_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match=r"torchvision:CIFAR100 needs torchvision, which cannot be imported"):
        load_dataset("torchvision:CIFAR100", tmp_path)
