"""Photographs of any size in folders by class, cropped to one size and decoded when they are fetched: more than memory
holds, such as ImageNet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from dpkernels._files import bad_file, read_regular, require_regular
from dpkernels.data.images import ImageDataset, scaled
from dpkernels.data.pictures import EXTENSIONS, decoded, is_picture
from dpkernels.data.raw import Bytes
from dpkernels.data.unpacking import LARGEST_FILE

CROP = 7 / 8  # of the shorter side: 224 of 256 pixels, as photographs are usually evaluated
_TEST_FOLDERS = ("test", "val")
_LAYOUT = "train/<class>/<image> and test/<class>/<image> (or val/<class>/<image>)"
_GAP = 3.0  # a picture is shrunk by whole numbers first, to this many times what is asked for


@dataclass(frozen=True, eq=False)
class FileSplit(Dataset[tuple[Tensor, int]]):
    """Image files and labels of one split. Nothing is decoded before it is fetched, and nothing is kept.

    From each image the square in its middle is taken, of a side `CROP` times the shorter one, and resized to size x
    size by bicubic interpolation; RGB.

    folder, names: an image lies at folder / name; names as bytes in one NumPy array, so that a million of them take
    little memory and workers share it. labels: int64 [examples]. value_range: what 0 and 255 are scaled to.
    """

    folder: Path
    names: npt.NDArray[np.bytes_]
    labels: Tensor
    size: int
    value_range: tuple[float, float] = (0.0, 1.0)

    @property
    def shape(self) -> tuple[int, ...]:
        """(channels, height, width)"""
        return 3, self.size, self.size

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Image float32 [3, size, size] and label. Raises ValueError that names the file, where it cannot be read."""
        images, labels = self.batch(torch.tensor([index]))
        return images[0], int(labels[0])

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images float32 [rows, 3, size, size] and labels int64 [rows] of `indices`, int64 [rows]."""
        return self._stacked(list(map(self._decode, indices.tolist()))), self.labels.index_select(0, indices)

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All examples in order, at most `size` at a time, decoded by a thread a core: for evaluation."""
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            for indices in torch.arange(len(self)).split(size):
                decoded = list(threads.map(self._decode, indices.tolist()))
                yield self._stacked(decoded), self.labels.index_select(0, indices)

    def _stacked(self, images: list[Bytes]) -> Tensor:
        pixels = np.empty((len(images), self.size, self.size, 3), np.uint8)
        for row, image in enumerate(images):
            pixels[row] = image
        return scaled(torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), 255, self.value_range)

    def _decode(self, index: int) -> Bytes:
        """uint8 [size, size, 3]"""
        path = self.folder / os.fsdecode(self.names[index])
        return decoded(path, read_regular(path, LARGEST_FILE), self._cropped)

    def _cropped(self, image: Image.Image) -> Bytes:
        shrink = self.size / (CROP * min(image.size))
        if shrink < 1:  # a JPEG can be decoded at a half, a quarter or an eighth of its size
            image.draft("RGB", (int(_GAP / 2 * shrink * image.width), int(_GAP / 2 * shrink * image.height)))
        square = image.convert("RGB")
        side = CROP * min(square.size)
        left, top = ((whole - side) / 2 for whole in square.size)
        box = (left, top, left + side, top + side)
        return np.asarray(square.resize((self.size, self.size), Image.Resampling.BICUBIC, box, _GAP))

    def __repr__(self) -> str:
        return f"FileSplit({len(self)} files in {self.folder}, {self.size}x{self.size})"


def read_photographs(folder: Path, size: int, value_range: tuple[float, float]) -> ImageDataset:
    """The images under folder/train and folder/test (or folder/val), in the order of class and file name, cropped to
    size x size pixels. Only names are read. Raises ValueError or FileNotFoundError that names the folder."""
    test = next((folder / name for name in _TEST_FOLDERS if (folder / name).is_dir()), None)
    if not (folder / "train").is_dir() or test is None:
        raise FileNotFoundError(f"{folder}: expected {_LAYOUT}, got {sorted(path.name for path in folder.iterdir())}")
    train_files, test_files = _files(folder / "train"), _files(test)
    classes = tuple(train_files)
    unknown = sorted(set(test_files) - set(classes))
    if unknown:
        raise bad_file(folder, f"the classes of train in {test.name}", f"{unknown}, which train does not have")

    def split(where: Path, files: dict[str, list[bytes]]) -> FileSplit:
        names = np.array([name for own in files.values() for name in own], np.bytes_)
        if not len(names):
            raise bad_file(where, f"{_LAYOUT}, of the types {sorted(EXTENSIONS)}", "no image")
        counts = torch.tensor([len(files.get(label, ())) for label in classes])
        labels = torch.arange(len(classes)).repeat_interleave(counts)
        return FileSplit(where, names, labels, size, value_range)

    return ImageDataset(folder.resolve().name, classes, split(folder / "train", train_files), split(test, test_files))


def _files(folder: Path) -> dict[str, list[bytes]]:
    """The images of every class that has any, as class/name."""
    found: dict[str, list[bytes]] = {}
    for label in sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()):
        images = [entry for entry in os.scandir(folder / label) if is_picture(entry.name)]
        for entry in images:
            if not entry.is_file(follow_symlinks=False) and not entry.is_symlink():  # where links lead is seen later
                require_regular(entry.path)
        if images:
            found[label] = [os.fsencode(f"{label}/{name}") for name in sorted(entry.name for entry in images)]
    return found
