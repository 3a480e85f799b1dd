"""Compressed files and tar archives, read forward and no further than they are allowed to make us."""

from __future__ import annotations

import bz2
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from dpkernels._files import bad_file, open_regular, reason

LARGEST_FILE = 2**29
"""Bytes of one image file, or of one member of an archive."""
_HEADERS = 2**15  # bytes of all headers of one member, long names and extended attributes among them
_PACKED = 2**18  # bytes of a compressed file that are read at once
_PIECE = 2**20  # bytes that they may unpack to before the next are read
_DICTIONARY = 2**28  # bytes that unpacking xz may take: xz -9 takes a quarter
_Key = TypeVar("_Key")


class UnpackError(ValueError):
    """The file is damaged, or unpacks to more than it may."""


class _Inflate:
    """zlib's unpacker with the methods of bz2's and lzma's."""

    def __init__(self) -> None:
        self._object = zlib.decompressobj(31)  # gzip with its checksum

    @property
    def eof(self) -> bool:
        return self._object.eof

    @property
    def unused_data(self) -> bytes:
        return self._object.unused_data

    @property
    def needs_input(self) -> bool:
        return not self._object.unconsumed_tail

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._object.decompress(self._object.unconsumed_tail + data, max_length)


_UNPACKERS: dict[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": _Inflate,
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ\0": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_DICTIONARY),
}


class Unpacked:
    """The content of a file, unpacked where it is compressed by gzip, bzip2 or xz: as much as `allow` allows.

    A file object of what `tarfile` needs; it goes forward only, so that no damaged position makes its reader go round
    in circles. is_packed: whether the file is compressed.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        start = file.read(6)
        file.seek(0)
        unpackers = [make for magic, make in _UNPACKERS.items() if start.startswith(magic)]
        self.is_packed = bool(unpackers)
        self._pieces = _unpack(file, unpackers[0]) if unpackers else iter(())
        self._piece, self._taken = b"", 0  # of the piece
        self._at = self._allowed = 0
        self.last = b""
        """What was read last."""

    def allow(self, size: int) -> None:
        """From here on `size` bytes may be read, until more are allowed. What is passed over does not count."""
        self._allowed = size

    def read(self, size: int = -1) -> bytes:
        """`size` bytes, fewer at the end of the content. Raises UnpackError."""
        if not 0 <= size <= self._allowed:
            raise UnpackError(f"it asks for {size:,} bytes where {self._allowed:,} at most can be meant")
        self.last = self._take(size) if self.is_packed else self._file.read(size)
        self._at += len(self.last)
        self._allowed -= len(self.last)
        return self.last

    def tell(self) -> int:
        return self._at

    def seek(self, position: int) -> int:
        """Raises UnpackError for a position that was passed."""
        if position < self._at:
            raise UnpackError("it leads back to what was read already")
        if not self.is_packed:
            self._at = self._file.seek(position)
        while self._at < position and self._more():
            step = min(len(self._piece) - self._taken, position - self._at)
            self._taken += step
            self._at += step
        return self._at

    def _take(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size and self._more():
            part = self._piece[self._taken : self._taken + size]
            self._taken += len(part)
            size -= len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _more(self) -> bool:
        if self._taken == len(self._piece):
            self._piece, self._taken = next(self._pieces, b""), 0
        return bool(self._piece)


def _unpack(file: BinaryIO, make: Callable[[], Any]) -> Iterator[bytes]:
    """The content of a compressed file, piece by piece. Streams that follow each other are one, and zeros after the
    last one are nothing."""
    unpacker, data = make(), b""
    try:
        while True:
            if unpacker.eof:
                data = unpacker.unused_data.lstrip(b"\0")
                while not data:
                    if not (data := file.read(_PACKED)):
                        return
                    data = data.lstrip(b"\0")
                unpacker = make()
            elif unpacker.needs_input:
                data = file.read(_PACKED)
            piece = unpacker.decompress(data, _PIECE)
            if piece:
                yield piece
            elif not data and not unpacker.eof:
                raise UnpackError("its end is missing")
            data = b""
    except (zlib.error, lzma.LZMAError, OSError, EOFError) as error:
        raise UnpackError(reason(error)) from None


def read_members(path: Path, wanted: Callable[[str], _Key | None]) -> Iterator[tuple[_Key, bytes]]:
    """What `wanted` makes of its name, and the content, of every member of the tar archive `path` for which that is not
    None; one at a time, in their order. The archive may be compressed. Nothing is unpacked to the disk.

    Raises ValueError that names the archive: where it is damaged or breaks off, and where a member that is wanted is no
    regular file, comes twice, has a name that leads out of the archive, or is larger than `LARGEST_FILE`.
    """
    seen: set[_Key] = set()
    with open_regular(path) as file:
        stream = Unpacked(file)
        stream.allow(_HEADERS)
        with _naming(path):
            archive = tarfile.TarFile(fileobj=stream, mode="r")  # type: ignore[arg-type]
        while True:
            with _naming(path):
                stream.allow(_HEADERS)
                member = archive.next()
                archive.members.clear()  # type: ignore[attr-defined]  # it would keep every header
            if member is None:
                break
            key = wanted(member.name)
            if key is None:
                continue
            if ".." in member.name.split("/"):
                raise bad_file(path, "names of files inside of it", f"{member.name!r}")
            inside = path / member.name
            if not member.isreg() or member.issparse():
                raise bad_file(inside, "a regular file", _kind(member))
            if not 0 <= member.size <= LARGEST_FILE:
                raise bad_file(inside, f"a file of at most {LARGEST_FILE:,} bytes", f"{member.size:,}")
            if key in seen:
                raise bad_file(path, f"{member.name} once", "it twice")
            seen.add(key)
            with _naming(path):
                stream.seek(member.offset_data)
                stream.allow(member.size)
                content = stream.read(member.size)
                if len(content) < member.size:
                    raise UnpackError(f"it ends in {member.name}")
            yield key, content
        # tarfile takes a damaged header for the end, and does not miss the block of zeros that ends an archive.
        if len(stream.last) != tarfile.BLOCKSIZE or stream.last.strip(b"\0"):
            raise bad_file(path, "a whole tar archive", "one that breaks off, or is damaged, after a part of its files")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """tarfile raises nearly anything on a damaged archive."""
    try:
        yield
    except Exception as error:
        raise bad_file(path, "a whole tar archive", f"one that does not unpack: {reason(error)}") from None


def _kind(member: tarfile.TarInfo) -> str:
    if member.issym() or member.islnk():
        return f"a link to {member.linkname!r}"
    return "a sparse file" if member.issparse() else "a folder" if member.isdir() else "something else"
