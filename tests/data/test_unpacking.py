"""Compressed files and archives: what they hold comes out, and no more of it than is asked for."""

from __future__ import annotations

import bz2
import gzip
import io
import itertools
import lzma
import struct
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dpkernels.data import load_dataset
from dpkernels.data.unpacking import Unpacked, UnpackError
from tests.damage import one_outcome

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}


@mock.patch.multiple("dpkernels.data.unpacking", _PACKED=500, _PIECE=3000)
@settings(deadline=None, max_examples=60)
@given(
    packer=st.sampled_from(sorted(PACKERS)),
    seed=st.integers(0, 2**32),
    size=st.integers(0, 20_000),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 6000)), max_size=8),
    parts=st.integers(1, 3),
)
def test_unpacked_files_read_as_their_content(
    packer: str, seed: int, size: int, steps: list[tuple[bool, int]], parts: int
) -> None:
    content = np.random.default_rng(seed).integers(0, 4, size, np.uint8).tobytes()
    cuts = [size * part // parts for part in range(parts + 1)]
    packed = b"".join(PACKERS[packer](content[a:b]) for a, b in itertools.pairwise(cuts))
    padding = b"" if packer == "plain" else bytes(seed % 3 * 512)
    stream = Unpacked(io.BytesIO(packed + padding))
    at = 0
    for skips, count in steps:
        if skips:
            stream.seek(at + count)
            at = min(at + count, size) if stream.is_packed else at + count
        else:
            stream.allow(count)
            assert stream.read(count) == content[at : at + count]
            at = max(at, min(at + count, size))
        assert stream.tell() == at
    stream.allow(size)
    assert stream.read(size) == content[at:]


@pytest.mark.parametrize("packer", ["gzip", "bzip2", "xz"])
def test_cut_files_do_not_unpack(packer: str) -> None:
    packed = PACKERS[packer](np.random.default_rng(0).bytes(1000))
    for end in range(8, len(packed) - 1, 37):
        stream = Unpacked(io.BytesIO(packed[:end]))
        stream.allow(2000)
        with pytest.raises(UnpackError):
            stream.read(2000)


def test_no_more_is_unpacked_than_is_allowed() -> None:
    bomb = io.BytesIO(gzip.compress(bytes(10**8)))
    stream = Unpacked(bomb)
    stream.allow(100)
    assert stream.read(100) == bytes(100)
    assert bomb.tell() <= 2**18
    for size in (1, -1, 2**40):
        with pytest.raises(UnpackError, match="asks for"):
            stream.read(size)
    with pytest.raises(UnpackError, match="leads back"):
        stream.seek(50)


def packed_zeros(length: int) -> bytes:
    return (length >> 24) * gzip.compress(bytes(2**24))


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    for name, count in (("train", 20), ("t10k", 6)):
        (tmp_path / f"{name}-images-idx3-ubyte").write_bytes(
            struct.pack(">IIII", 0x803, count, 8, 8) + bytes(64 * count)
        )
        (tmp_path / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, count) + bytes(count))
    return tmp_path


def test_an_idx_file_that_unpacks_to_more_than_it_says(letters: Path) -> None:
    (letters / "train-images-idx3-ubyte").unlink()
    header = gzip.compress(struct.pack(">IIII", 0x803, 20, 8, 8))
    path = letters / "train-images-idx3-ubyte.gz"
    path.write_bytes(header + packed_zeros(2**31))
    words = one_outcome(lambda: load_dataset(letters), path.name)
    assert "expected 1296 bytes for an array of 20x8x8, got more" in words


@pytest.mark.parametrize("zipped", [False, True])
def test_an_idx_file_that_says_more_than_it_has(letters: Path, zipped: bool) -> None:
    path = letters / "train-images-idx3-ubyte"
    content = struct.pack(">IIII", 0x803, *(3 * [2**32 - 1])) + bytes(64)
    path.write_bytes(gzip.compress(content) if zipped else content)
    words = one_outcome(lambda: load_dataset(letters), path.name)
    assert ("memory of this machine" if zipped else "4294967295x4294967295x4294967295, got 80") in words


# ---- archives


def picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (8, 8)).save(buffer, "png")
    return buffer.getvalue()


def member(
    name: str = "train/a/1.png", size: int = 0, kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = size, kind, link
    return info


def header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.GNU_FORMAT)


def archive(*extra: bytes, end: bytes = bytes(1024)) -> bytes:
    """A good archive, with blocks put in before its last file."""
    names = ["train/a/0.png", "train/b/0.png", "test/a/0.png", "test/b/0.png"]
    image = picture()
    padded = image + bytes(-len(image) % 512)
    files = [header(member(name, len(image))) + padded for name in names]
    return b"".join([*files[:-1], *extra, files[-1], end])


def negative_size() -> bytes:
    """A size of -1024 leads back to the header itself."""
    block = bytearray(header(member("train/a/1.png")))
    block[124:136] = b"\xff" * 10 + (2**16 - 1024).to_bytes(2, "big")
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + 8 * 32 + sum(block[156:]))
    return bytes(block)


def sparse(length: int) -> bytes:
    """GNU's sparse file: a length, and no data."""
    block = bytearray(header(member("train/a/1.png", 0, tarfile.GNUTYPE_SPARSE)))
    block[483:495] = b"%011o\0" % length
    block[148:156] = b"%06o\0 " % (sum(block[:148]) + 8 * 32 + sum(block[156:]))
    return bytes(block)


ARCHIVES: dict[str, tuple[Callable[[], bytes], str]] = {
    "sparse file": (lambda: archive(sparse(8**11 - 1)), "train/a/1.png: expected a regular file, got a sparse file"),
    "huge file": (lambda: archive(header(member(size=8**11 - 1))), "at most 536,870,912 bytes, got 8,589,934,591"),
    "symbolic link": (lambda: archive(header(member(kind=tarfile.SYMTYPE, link="/etc/passwd"))), "a link to '/etc/"),
    "hard link": (lambda: archive(header(member(kind=tarfile.LNKTYPE, link="train/a/1.png"))), "a link to 'train/"),
    "FIFO": (lambda: archive(header(member(kind=tarfile.FIFOTYPE))), "expected a regular file, got something else"),
    "folder": (lambda: archive(header(member(kind=tarfile.DIRTYPE))), "expected a regular file, got a folder"),
    "way out": (lambda: archive(header(member("train/../1.png"))), "names of files inside of it, got 'train/../1.png'"),
    "same name": (lambda: archive(header(member("train/a/0.png"))), "expected train/a/0.png once, got it twice"),
    "negative size": (lambda: archive(negative_size()), "x.tar"),
    "long name": (lambda: archive(header(member("x", 2**29, tarfile.GNUTYPE_LONGNAME))), "asks for 536,870,912 bytes"),
    "extended header": (lambda: archive(header(member("x", 2**29, tarfile.XHDTYPE))), "asks for 536,870,912 bytes"),
    "damaged header": (lambda: archive(b"\1" * 512), "breaks off, or is damaged, after a part of its files"),
    "no end": (lambda: archive(end=b""), "breaks off, or is damaged, after a part of its files"),
    "other text": (lambda: b"name,value\n" * 100, "expected a whole tar archive"),
    "nothing": (lambda: b"", "expected a whole tar archive"),
}


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("kind", ARCHIVES)
def test_archives(tmp_path: Path, kind: str, ending: str) -> None:
    make, words = ARCHIVES[kind]
    path = tmp_path / f"x.tar{ending}"
    path.write_bytes(gzip.compress(make()) if ending else make())
    assert words in one_outcome(lambda: load_dataset(path), "x.tar")
    path.write_bytes(gzip.compress(archive()) if ending else archive())
    assert len(load_dataset(path).train) == 2


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_an_archive_whose_headers_unpack_to_gigabytes(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "x.tar.gz"
    path.write_bytes(gzip.compress(header(member("x", 2**31, kind))) + packed_zeros(2**31))
    assert "x.tar.gz: expected a whole tar archive" in one_outcome(lambda: load_dataset(path), "x.tar.gz")


def test_a_dictionary_of_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "x.tar.xz"
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 2**29}]
    # Packing needs as much memory as unpacking would: the size is put into the header instead.
    small = lzma.compress(archive(), filters=[{**filters[0], "dict_size": 2**20}])
    place = small.index(b"\x21\x01", 12) + 2
    block = bytearray(small)
    block[place] = 36  # 2^30, as xz writes it
    length = (block[12] + 1) * 4
    block[12 + length - 4 : 12 + length] = struct.pack("<I", zlib.crc32(bytes(block[12 : 12 + length - 4])))
    path.write_bytes(bytes(block))
    assert "Memory usage limit" in one_outcome(lambda: load_dataset(path), "x.tar.xz")


def test_an_archive_cut_anywhere_is_not_whole(tmp_path: Path) -> None:
    whole = archive(end=bytes(512))
    path = tmp_path / "x.tar"
    for end in range(0, len(whole), 256):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"x\.tar: expected a whole tar archive"):
            load_dataset(path)


def test_the_batches_of_an_archive_are_files(tmp_path: Path) -> None:
    path = tmp_path / "cifar-10-python.tar.gz"
    link = header(member("cifar-10-batches-py/data_batch_1", 0, tarfile.SYMTYPE, "data_batch_1"))
    path.write_bytes(gzip.compress(link + bytes(1024)))
    with pytest.raises(ValueError, match=r"data_batch_1: expected a regular file, got a link to 'data_batch_1'"):
        load_dataset(path)
