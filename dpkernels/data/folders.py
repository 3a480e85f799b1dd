"""Images sorted into folders by class, in a directory or in a tar: train/<class>/<image> and test/<class>/<image>."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image
from tqdm import tqdm

from dpkernels.data.cache import cached
from dpkernels.data.raw import COLOUR_MODES, GRAY_MODES, IMAGE_EXTENSIONS, Bytes, Labels, RawImages, bad_file

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


def read_image_folder(folder: Path) -> RawImages:
    """The images under folder/train and folder/test, in the order of class and file name.

    All images have one size, that of the first test image. They are grayscale where every test image is (the test split
    is public), else RGB, and then grayscale training images are repeated over the three channels. 8 bits a channel.
    Decoded once, then read from the cache. Raises ValueError with the file's name.
    """
    files = {entry: folder / entry.split / entry.label / entry.name for entry in _walk(folder)}
    seen = hashlib.sha256()
    for entry, path in files.items():
        status = path.stat()
        seen.update(os.fsencode(f"{entry.order} {status.st_size} {status.st_mtime_ns}\n"))
    return cached(
        folder,
        seen.hexdigest(),
        lambda: _collect(folder, ((entry, path.read_bytes()) for entry, path in files.items()), len(files)),
    )


def read_image_tar(path: Path) -> RawImages:
    """The same from a tar of such a folder (compressed or not), which may have one folder around train and test.

    Nothing is unpacked to the disk. Decoded once, then read from the cache.
    """
    status = path.stat()
    return cached(path, f"{status.st_size} {status.st_mtime_ns}", lambda: _collect(path, _members(path), None))


def _walk(folder: Path) -> Iterator[_Entry]:
    for split in _SPLITS:
        if not (folder / split).is_dir():
            raise FileNotFoundError(f"{folder}: expected {_LAYOUT}, the folder {split} is missing")
        for directory in sorted(path for path in (folder / split).iterdir() if path.is_dir()):
            for file in sorted(directory.iterdir()):
                if file.suffix.lower() in IMAGE_EXTENSIONS and not file.name.startswith("."):
                    yield _Entry(split, directory.name, file.name)


def _members(path: Path) -> Iterator[tuple[_Entry, bytes]]:
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                parts = PurePosixPath(member.name).parts
                if len(parts) == 4 and parts[0] not in _SPLITS:
                    parts = parts[1:]
                if not member.isfile() or len(parts) != 3 or parts[0] not in _SPLITS:
                    continue
                name = PurePosixPath(parts[2])
                if name.suffix.lower() in IMAGE_EXTENSIONS and not name.name.startswith("."):
                    file = archive.extractfile(member)
                    assert file is not None  # it is a regular file
                    yield _Entry(*parts), file.read()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise bad_file(path, "a whole tar archive", f"one that does not unpack: {error}") from None


def _collect(source: Path, files: Iterator[tuple[_Entry, bytes]], total: int | None) -> RawImages:
    progress = tqdm(files, f"decoding {source.name}", total, unit=" images", delay=1.0, disable=None, leave=False)
    images = {entry: _decode(source, entry, content) for entry, content in progress}
    entries = sorted(images, key=lambda entry: entry.order)
    by_split = {split: [entry for entry in entries if entry.split == split] for split in _SPLITS}
    for split in _SPLITS:
        if not by_split[split]:
            raise bad_file(source, f"{_LAYOUT}, of the types {sorted(IMAGE_EXTENSIONS)}", f"no image in {split}")
    classes = sorted({entry.label for entry in by_split["train"]})
    unknown = {entry.label for entry in by_split["test"]} - set(classes)
    if unknown:
        raise bad_file(source, "the classes of train in test", f"{sorted(unknown)}, which train does not have")

    reference = images[by_split["test"][0]]
    gray = all(images[entry].ndim == 2 for entry in by_split["test"])
    shape = reference.shape[:2] if gray else (*reference.shape[:2], 3)

    def stack(split: str) -> tuple[Bytes, Labels]:
        pixels = np.empty((len(by_split[split]), 1 if gray else 3, *shape[:2]), np.uint8)
        for row, entry in enumerate(by_split[split]):
            image = images[entry]
            if image.shape[:2] != shape[:2] or (gray and image.ndim == 3):
                raise bad_file(
                    source / entry.split / entry.label / entry.name,
                    f"{_describe(shape)} as in the test images",
                    _describe(image.shape),
                )
            pixels[row] = image if image.ndim == 2 else image.transpose(2, 0, 1)
        labels = np.array([classes.index(entry.label) for entry in by_split[split]], np.int64)
        return pixels, labels

    return RawImages(*stack("train"), *stack("test"), classes=tuple(classes))


def _describe(shape: tuple[int, ...]) -> str:
    return f"{'RGB' if len(shape) == 3 else 'grayscale'} {shape[0]}x{shape[1]}"


def _decode(source: Path, entry: _Entry, content: bytes) -> Bytes:
    """uint8 [height, width] for grayscale, [height, width, 3] for colour."""
    path = source / entry.split / entry.label / entry.name
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.mode in GRAY_MODES:
                return np.asarray(image.convert("L"))
            if image.mode in COLOUR_MODES:
                return np.asarray(image.convert("RGB"))
            mode = image.mode
    except Exception as error:  # decoders raise nearly anything on a damaged file
        raise bad_file(path, "an image", f"{type(error).__name__}: {error}") from None
    raise bad_file(path, "an image with 8 bits a channel", f"Pillow mode {mode}")
