"""CIFAR-10's pickles: the format as distributed, and nothing else that a pickle could do."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest

from dpkernels.data import load_dataset

BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


def batch_bytes(rows: int, seed: int, **replaced: object) -> bytes:
    random = np.random.default_rng(seed)
    batch = {
        b"batch_label": b"some batch",
        b"labels": random.integers(0, 10, rows).tolist(),
        b"data": random.integers(0, 256, (rows, 3072), np.uint8),
        b"filenames": [b"x.png"] * rows,
    }
    return pickle.dumps(batch | {key.encode(): value for key, value in replaced.items()}, protocol=2)


def batches(rows: int = 3) -> dict[str, bytes]:
    return {name: batch_bytes(rows, seed) for seed, name in enumerate(BATCHES)}


def write_folder(folder: Path, contents: dict[str, bytes]) -> Path:
    inner = folder / "cifar-10-batches-py"
    inner.mkdir(parents=True)
    for name, content in contents.items():
        (inner / name).write_bytes(content)
    return inner


def write_tar(path: Path, contents: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def check(data: object) -> None:
    expected = [pickle.loads(batch_bytes(3, seed), encoding="bytes") for seed in range(6)]
    pixels = np.concatenate([batch[b"data"] for batch in expected[:5]]).reshape(15, 3, 32, 32)
    np.testing.assert_array_equal(data.train.images.numpy(), pixels)
    assert data.train.labels.tolist() == [label for batch in expected[:5] for label in batch[b"labels"]]
    np.testing.assert_array_equal(data.test.images.numpy().reshape(3, 3072), expected[5][b"data"])
    assert data.test.labels.tolist() == expected[5][b"labels"]
    assert data.classes[0] == "airplane"
    assert data.classes[9] == "truck"


def test_folder_and_tar(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a", batches())
    check(load_dataset(folder))
    check(load_dataset(tmp_path / "a"))
    check(load_dataset(write_tar(tmp_path / "cifar-10-python.tar.gz", batches())))
    named = load_dataset("CIFAR-10", tmp_path)
    check(named)
    assert (named.name, named.nominal_size) == ("cifar10", 50_000)
    check(load_dataset("cifar10", tmp_path / "a"))


def test_a_pickle_of_an_old_python_and_numpy(tmp_path: Path) -> None:
    """The distributed files were written by Python 2: str keys and labels, and NumPy's module under its old name."""
    modern = batch_bytes(3, 0)
    old = modern.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
    assert b"numpy.core.multiarray" in old
    check(load_dataset(write_folder(tmp_path, batches() | {"data_batch_1": old})))


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (self.marker,)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "was-here"
    evil = pickle.dumps({b"data": Evil(marker), b"labels": [0]})
    folder = write_folder(tmp_path, batches() | {"data_batch_3": evil})
    with pytest.raises(ValueError, match=r"data_batch_3: expected a pickled CIFAR-10 batch.*posix.mkdir|nt.mkdir"):
        load_dataset(folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (batch_bytes(3, 0)[:1000], "got another: it is truncated or damaged"),
        (b"", "got another: it is truncated or damaged"),
        (b"<html>", "got another: it has the instruction b'<'"),
        (pickle.dumps({b"fine_labels": [1]}), "got none with b'data'"),
        (pickle.dumps([1, 2]), "got list"),
        (batch_bytes(3, 0, data=np.zeros((3, 3071), np.uint8)), r"got uint8 \(3, 3071\)"),
        (batch_bytes(3, 0, data=np.zeros((3, 3072), np.float32)), r"got float32 \(3, 3072\)"),
        (batch_bytes(3, 0, data=b"pixels"), "got bytes"),
        (batch_bytes(3, 0, labels=[0, 1]), "expected 3 labels, one per example, got 2"),
        (batch_bytes(3, 0, labels=[0, 1, 10]), "expected labels from 0 to 9, got 10"),
        (batch_bytes(3, 0, labels=[0, 1, -1]), "expected labels from 0 to 9, got -1"),
        (batch_bytes(3, 0, labels=[0.5, 1, 2]), "labels that are float"),
    ],
)
def test_a_damaged_batch_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    folder = write_folder(tmp_path, batches() | {"test_batch": content})
    with pytest.raises(ValueError, match=words) as caught:
        load_dataset(folder)
    assert str(caught.value).startswith(str(folder / "test_batch"))


def test_missing_batches_and_a_cut_archive(tmp_path: Path) -> None:
    contents = batches()
    del contents["data_batch_4"]
    with pytest.raises(FileNotFoundError, match="data_batch_4 is missing"):
        load_dataset(write_folder(tmp_path / "a", contents))
    path = write_tar(tmp_path / "cifar-10-python.tar.gz", contents)
    with pytest.raises(FileNotFoundError, match="data_batch_4 is missing"):
        load_dataset(path)
    whole = write_tar(path, batches()).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cifar-10-python.tar.gz: expected a whole tar archive"):
        load_dataset(path)
