"""Every kind of data file, damaged at random, ends in a data set or in an error that names it."""

from __future__ import annotations

import gzip
import io
import pickle
import random
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dpkernels.data import load_dataset
from tests.damage import COUNTS, mutations, outcomes

Maker = Callable[[Path], tuple[Path, Path]]  # makes a data set: its path, and the file of it that is damaged


def idx(damaged: str) -> Maker:
    def make(folder: Path) -> tuple[Path, Path]:
        noise = random.Random(0)
        for name, count in (("train", 20), ("t10k", 6)):
            images = struct.pack(">IIII", 0x803, count, 8, 8) + noise.randbytes(64 * count)
            labels = struct.pack(">II", 0x801, count) + bytes(i % 10 for i in range(count))
            (folder / f"{name}-images-idx3-ubyte").write_bytes(images)
            (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels)
        if damaged.endswith(".gz"):
            plain = folder / damaged.removesuffix(".gz")
            (folder / damaged).write_bytes(gzip.compress(plain.read_bytes()))
            plain.unlink()
        return folder, folder / damaged

    return make


def features(damaged: str) -> Maker:
    def make(folder: Path) -> tuple[Path, Path]:
        for name, count in (("train", 20), ("test", 6)):
            np.save(folder / f"{name}.npy", np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32))
            np.save(folder / f"{name}-labels.npy", np.arange(count) % 2)
        return folder, folder / damaged

    return make


def cifar(folder: Path) -> tuple[Path, Path]:
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        batch = {b"data": np.zeros((1, 3072), np.uint8), b"labels": [3], b"filenames": [b"x.png"]}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return folder, folder / "data_batch_1"


def picture(kind: str, **options: object) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


PICTURES = {
    "bmp": picture("bmp"),
    "jpg": picture("jpeg"),
    "png": picture("png"),
    "ppm": picture("ppm"),
    "tif": picture("tiff", compression="tiff_lzw"),
    "webp": picture("webp"),
}


def images(extension: str) -> Maker:
    def make(folder: Path) -> tuple[Path, Path]:
        for name in ("train/a/1", "train/b/2", "test/a/3", "test/b/4"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.{extension}").write_bytes(PICTURES[extension])
        return folder, folder / f"train/a/1.{extension}"

    return make


def tar(ending: str) -> Maker:
    def make(folder: Path) -> tuple[Path, Path]:
        path = folder / f"x.tar{ending}"
        with tarfile.open(path, f"w:{ending.removeprefix('.')}") as archive:
            for name in ("train/a/1.png", "train/b/2.png", "test/a/3.png", f"test/b/{'long' * 30}.png"):
                member = tarfile.TarInfo(name)
                member.size = len(PICTURES["png"])
                archive.addfile(member, io.BytesIO(PICTURES["png"]))
        return path, path

    return make


MAKERS: dict[str, Maker] = {
    **{name: idx(name) for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")},
    **{name: idx(name) for name in ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")},
    **{name: features(name) for name in ("train.npy", "train-labels.npy", "test.npy", "test-labels.npy")},
    "cifar": cifar,
    **{extension: images(extension) for extension in PICTURES},
    **{f"tar{ending}": tar(ending) for ending in ("", ".gz", ".bz2", ".xz")},
}


def reader(path: Path, damaged: Path, image_size: int | None = None) -> Callable[[bytes], object]:
    """Writes the damaged file, and reads the data set and every example of it."""

    def read(content: bytes) -> object:
        damaged.write_bytes(content)
        data = load_dataset(path, image_size=image_size)
        for split in (data.train, data.test):
            images, labels = split.batch(torch.arange(len(split)))
            assert images.isfinite().all()
            assert 0 <= labels.min() <= labels.max() < data.num_classes
        return data

    return read


@COUNTS
@pytest.mark.parametrize("kind", MAKERS)
def test_damaged_data_sets(tmp_path: Path, kind: str, count: int) -> None:
    path, damaged = MAKERS[kind](tmp_path)
    good = damaged.read_bytes()
    reader(path, damaged)(good)
    counts, wrong = outcomes(reader(path, damaged), mutations(good, count), damaged.name)
    assert not wrong, wrong[:10]
    assert sum(counts.values()) == count
    assert counts["refused"]


@COUNTS
@pytest.mark.parametrize("extension", PICTURES)
def test_damaged_photographs(tmp_path: Path, extension: str, count: int) -> None:
    path, damaged = MAKERS[extension](tmp_path)
    counts, wrong = outcomes(reader(path, damaged, 8), mutations(PICTURES[extension], count, seed=1), damaged.name)
    assert not wrong, wrong[:10]
    assert sum(counts.values()) == count
    assert counts["refused"]


@COUNTS
def test_headers_of_a_pickle(tmp_path: Path, count: int) -> None:
    """Nearly all of a batch is pixels, which may be anything: here it is what lies around them that is damaged."""
    path, damaged = cifar(tmp_path)
    good = damaged.read_bytes()
    source = random.Random(2)
    places = [*range(150), *range(len(good) - 80, len(good))]

    def altered() -> bytes:
        content = bytearray(good)
        for place in source.sample(places, source.choice([1, 2, 3])):
            content[place] = source.randrange(256)
        return bytes(content)

    counts, wrong = outcomes(reader(path, damaged), (altered() for _ in range(3 * count)), damaged.name)
    assert not wrong, wrong[:10]
    assert sum(counts.values()) == 3 * count
    assert counts["refused"] > count
