"""Images sorted into folders by class, in a directory or in a tar: train/<class>/<image> and test/<class>/<image>."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image
from tqdm import tqdm

from dpkernels._files import bad_file, read_regular, require_memory, require_regular
from dpkernels.data.cache import cached
from dpkernels.data.pictures import EXTENSIONS, Unfit, decoded, gray_or_rgb, is_picture
from dpkernels.data.raw import Bytes, Labels, RawImages
from dpkernels.data.unpacking import LARGEST_FILE, read_members

_SPLITS = ("train", "test")
_LAYOUT = "train/<class>/<image> and test/<class>/<image>"


@dataclass(frozen=True)
class _Entry:
    """One image file; `order` sorts by split, class and name."""

    split: str
    label: str
    name: str

    @property
    def order(self) -> tuple[str, str, str]:
        return self.split, self.label, self.name

    @property
    def path(self) -> str:
        return "/".join(self.order)


def read_image_folder(folder: Path) -> RawImages:
    """The images under folder/train and folder/test, in the order of class and file name.

    All images have one size, that of the first test image. They are grayscale where every test image is (the test split
    is public), else RGB, and then grayscale training images are repeated over the three channels. 8 bits a channel.
    Decoded once, then read from the cache. Raises ValueError with the file's name.
    """
    files = {entry: folder / entry.split / entry.label / entry.name for entry in _walk(folder)}
    seen = hashlib.sha256()
    for entry, path in files.items():
        status = require_regular(path)
        seen.update(os.fsencode(f"{entry.order} {status.st_size} {status.st_mtime_ns}\n"))
    contents = ((entry, read_regular(path, LARGEST_FILE)) for entry, path in files.items())
    return cached(folder, seen.hexdigest(), lambda: _collect(folder, contents, len(files)))


def read_image_tar(path: Path) -> RawImages:
    """The same from a tar of such a folder (compressed or not), which may have one folder around train and test.

    Nothing is unpacked to the disk. Decoded once, then read from the cache.
    """
    status = require_regular(path)
    members = read_members(path, _inside)
    return cached(path, f"{status.st_size} {status.st_mtime_ns}", lambda: _collect(path, members, None))


def _walk(folder: Path) -> Iterator[_Entry]:
    for split in reversed(_SPLITS):  # the first image decides the size, and should be a public one
        if not (folder / split).is_dir():
            raise FileNotFoundError(f"{folder}: expected {_LAYOUT}, the folder {split} is missing")
        for directory in sorted(path for path in (folder / split).iterdir() if path.is_dir()):
            for file in sorted(directory.iterdir()):
                if is_picture(file.name):
                    yield _Entry(split, directory.name, file.name)


def _inside(name: str) -> _Entry | None:
    """What the member `name` of an archive is, where it is an image of the data set."""
    parts = PurePosixPath(name).parts
    if len(parts) == 4 and parts[0] not in _SPLITS:
        parts = parts[1:]
    if len(parts) != 3 or parts[0] not in _SPLITS or not is_picture(parts[2]):
        return None
    return _Entry(*parts)


def _collect(source: Path, files: Iterator[tuple[_Entry, bytes]], total: int | None) -> RawImages:
    progress = tqdm(files, f"decoding {source.name}", total, unit=" images", delay=1.0, disable=None, leave=False)
    images: dict[_Entry, Bytes] = {}
    first: _Entry | None = None
    held = 0
    for entry, content in progress:
        image = _decode(source, entry, content, None if first is None else (first, images[first].shape))
        first = first or entry
        images[entry] = image
        held += image.nbytes
        require_memory(source, 2 * max(held, (total or 0) * image.nbytes))  # apart, and then in one array
    entries = sorted(images, key=lambda entry: entry.order)
    by_split = {split: [entry for entry in entries if entry.split == split] for split in _SPLITS}
    for split in _SPLITS:
        if not by_split[split]:
            raise bad_file(source, f"{_LAYOUT}, of the types {sorted(EXTENSIONS)}", f"no image in {split}")
    classes = sorted({entry.label for entry in by_split["train"]})
    numbers = {label: number for number, label in enumerate(classes)}
    unknown = {entry.label for entry in by_split["test"]} - numbers.keys()
    if unknown:
        raise bad_file(source, "the classes of train in test", f"{sorted(unknown)}, which train does not have")

    gray = all(images[entry].ndim == 2 for entry in by_split["test"])
    height, width = images[by_split["test"][0]].shape[:2]

    def stack(split: str) -> tuple[Bytes, Labels]:
        pixels = np.empty((len(by_split[split]), 1 if gray else 3, height, width), np.uint8)
        for row, entry in enumerate(by_split[split]):
            image = images[entry]
            if gray and image.ndim == 3:
                raise bad_file(source / entry.path, "grayscale as in the test images", "RGB")
            pixels[row] = image if image.ndim == 2 else image.transpose(2, 0, 1)
        return pixels, np.array([numbers[entry.label] for entry in by_split[split]], np.int64)

    return RawImages(*stack("train"), *stack("test"), classes=tuple(classes))


def _decode(source: Path, entry: _Entry, content: bytes, first: tuple[_Entry, tuple[int, ...]] | None) -> Bytes:
    """uint8 [height, width] for grayscale, [height, width, 3] for colour. first: the image whose size all have."""

    def convert(image: Image.Image) -> Bytes:
        size = image.height, image.width
        if first is not None and size != first[1][:2]:
            raise Unfit(f"{'{}x{}'.format(*first[1])} pixels as in {first[0].path}", "{}x{}".format(*size))
        return gray_or_rgb(image)

    return decoded(source / entry.path, content, convert)
