"""Images that were made to harm, and what is no file at all: none is waited for, and each is named."""

from __future__ import annotations

import io
import os
import socket
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpkernels.data import load_dataset
from tests.damage import one_outcome


def tiny(mode: str = "L", kind: str = "png", size: tuple[int, int] = (8, 8)) -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images by class, to which train/a/1.png may be added."""
    for split in ("train", "test"):
        for label in ("a", "b"):
            (tmp_path / "set" / split / label).mkdir(parents=True)
            (tmp_path / "set" / split / label / "0.png").write_bytes(tiny())
    return tmp_path / "set"


READERS: dict[str, Callable[[Path], object]] = {
    "memory": load_dataset,
    "photographs": lambda path: list(load_dataset(path, image_size=8).train.batches(3)),
}
each_reader = pytest.mark.parametrize("reader", READERS)


# ---- what is no regular file


@pytest.fixture
def unusual(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, Path], str]]:
    """Makes something that is no regular file, and says what the message calls it."""
    listening = socket.socket(socket.AF_UNIX)

    def make(kind: str, path: Path) -> str:
        path.unlink(missing_ok=True)
        if kind == "fifo":
            os.mkfifo(path)
            return "got a FIFO"
        if kind == "folder":
            path.mkdir()
            return "got a folder"
        if kind == "socket":
            with monkeypatch.context() as inside:  # a socket's name is at most 108 bytes long
                inside.chdir(path.parent)
                listening.bind(path.name)
            return "got a socket"
        target = {"device": "/dev/zero", "dangling": "nowhere", "loop": path.name}[kind]
        path.symlink_to(target)
        return {"device": "got a device", "dangling": "got a link to nothing", "loop": "symbolic links"}[kind]

    yield make
    listening.close()


KINDS = ["fifo", "folder", "socket", "device", "dangling", "loop"]


@each_reader
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_that_is_no_file(folder: Path, unusual: Callable[[str, Path], str], reader: str, kind: str) -> None:
    words = unusual(kind, folder / "train/a/1.png")
    assert words in one_outcome(lambda: READERS[reader](folder), "train/a/1.png")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["train.npy", "train-labels.npy", "train-images-idx3-ubyte", "data_batch_1", "x.tar"])
def test_a_file_of_data_that_is_none(tmp_path: Path, unusual: Callable[[str, Path], str], name: str, kind: str) -> None:
    for other in ("train", "test"):
        if name.endswith(".npy"):
            np.save(tmp_path / f"{other}.npy", np.zeros((2, 2), np.float32))
            np.save(tmp_path / f"{other}-labels.npy", np.zeros(2, int))
    if "idx" in name:
        for other in ("train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
            (tmp_path / other).write_bytes(b"")
    words = unusual(kind, tmp_path / name)
    if kind == "dangling" and name == "data_batch_1":
        words = "data_batch_1 is missing"
    assert words in one_outcome(lambda: load_dataset(tmp_path), name)


def test_a_link_to_a_file_is_followed(folder: Path) -> None:
    (folder / "train/a/1.png").symlink_to(folder / "train/b/0.png")
    assert len(load_dataset(folder).train) == len(load_dataset(folder, image_size=8).train) == 3


def test_a_folder_that_leads_back_to_itself(folder: Path) -> None:
    (folder / "train/a/loop").symlink_to(folder / "train")
    (folder / "train/c").symlink_to("c")
    assert len(load_dataset(folder).train) == 2


@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_data_set_that_is_no_file(tmp_path: Path, unusual: Callable[[str, Path], str], kind: str) -> None:
    words = unusual(kind, tmp_path / "data")
    assert words in one_outcome(lambda: load_dataset(tmp_path / "data"), "data")


# ---- images


@each_reader
def test_no_program_is_started_by_a_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    program = tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"
    (folder / "train/a/1.png").write_bytes(script)
    with pytest.raises(ValueError, match=r"train/a/1\.png: expected an image .*, got a file of none of these formats"):
        READERS[reader](folder)
    assert not (tmp_path / "ran").exists()


@each_reader
@pytest.mark.parametrize("kind", ["gif", "icns", "pcx", "sgi", "tga", "jpeg2000"])
def test_other_formats_are_not_tried(folder: Path, reader: str, kind: str) -> None:
    size = (16, 16)
    (folder / "train/a/1.png").write_bytes(tiny("RGB", kind, size))
    with pytest.raises(ValueError, match="got a file of none of these formats"):
        READERS[reader](folder)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks)


def many_scans() -> bytes:
    """A progressive JPEG that decodes its last, empty scan again and again."""
    buffer = io.BytesIO()
    Image.new("L", (9000, 9000)).save(buffer, "jpeg", progressive=True, quality=1)
    content = buffer.getvalue()
    last = content.rindex(b"\xff\xda")
    return content[:-2] + 2000 * content[last:-2] + b"\xff\xd9"


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "of pixels": (
        lambda: png(13_000, 13_000, chunk(b"IDAT", b"")),
        "an image of at most 89,478,485 pixels, got 13000x13000",
    ),
    "of 2^62 pixels": (lambda: png(2**31 - 1, 2**31 - 1, chunk(b"IDAT", b"")), "image"),
    "of text": (lambda: png(8, 8, chunk(b"zTXt", b"k\0\0" + zlib.compress(bytes(10**8)))), "too large"),
    "of a profile": (lambda: png(8, 8, chunk(b"iCCP", b"k\0\0" + zlib.compress(bytes(10**8)))), "too large"),
    "of parts": (lambda: png(8, 8, 1_000_000 * chunk(b"abCd", b"")), "too many parts"),
    "of scans": (many_scans, "a JPEG of some ten scans"),
    "of nothing in a JPEG": (lambda: b"\xff\xd8\xff\xe0" + bytes(40_000_000), "too many parts"),
    "of comments in a PPM": (lambda: b"P6\n#" + b"a" * 40_000_000, "too many parts"),
    "of digits in a PPM": (lambda: b"P3 9000 9000 255\n" + b"1 " * 10_000_000, "binary"),
}


@each_reader
@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs(folder: Path, reader: str, bomb: str) -> None:
    make, words = BOMBS[bomb]
    (folder / "train/a/1.png").write_bytes(make())
    message = one_outcome(lambda: READERS[reader](folder), "train/a/1.png", seconds=5)
    # The reader into memory knows the size that it should have.
    assert words in message or (reader == "memory" and "pixels as in test/a/0.png" in message)


def test_a_file_without_an_end(folder: Path) -> None:
    with open(folder / "train/a/1.png", "wb") as file:
        file.write(tiny())
        file.truncate(2**40)
    for reader in READERS.values():
        words = one_outcome(lambda reader=reader: reader(folder), "train/a/1.png")  # type: ignore[misc]
        assert "expected a file of at most 536,870,912 bytes, got 1,099,511,627,776" in words


@pytest.mark.parametrize("as_tar", [False, True])
def test_images_that_do_not_fit_into_memory(folder: Path, monkeypatch: pytest.MonkeyPatch, as_tar: bool) -> None:
    """Each is small enough, and all together are not; that is found before they are decoded."""
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 2**12}.__getitem__)
    source = folder
    for path in folder.glob("*/*/0.png"):
        path.write_bytes(tiny(size=(1000, 1000)))
    for index in range(16):
        (folder / f"train/a/{index}.png").write_bytes(tiny(size=(1000, 1000)))
    if as_tar:
        source = folder.with_suffix(".tar")
        with tarfile.open(source, "w") as made:
            made.add(folder, ".")
    with pytest.raises(ValueError, match=r": expected what fits into the 0\.0 GB of memory of this machine, got 0\.0"):
        load_dataset(source)
