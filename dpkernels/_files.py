"""Files that came from elsewhere, opened only where they are plain files and read only as far as memory allows.

A path may lead to a FIFO on which opening waits for ever, to a device without an end, or to a file of any size. Every
reader of the package opens through here, and every error names the file.

This module imports the standard library only.
"""

from __future__ import annotations

import json
import os
import stat
from typing import Any, BinaryIO

Name = str | os.PathLike[str]

LARGEST_DOCUMENT = 2**24
"""Bytes of a JSON document: parsed, it takes up to a hundred times as much."""
_FLAGS = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))  # not every system has all
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def bad_file(path: Name, expected: str, got: str) -> ValueError:
    """The error about a file that is not what it should be."""
    return ValueError(f"{os.fspath(path)}: expected {expected}, got {got}")


def reason(error: BaseException) -> str:
    """What an error says, in one line; its type where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def require_regular(path: Name) -> os.stat_result:
    """The status of the regular file `path`, which may be a link to one.

    Raises ValueError for anything else that lies there, FileNotFoundError and OSError where nothing can be reached.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        if os.path.islink(path):
            raise FileNotFoundError(f"{os.fspath(path)}: expected a regular file, got a link to nothing") from None
        raise
    return _regular(path, status)


def open_regular(path: Name, flags: int = os.O_RDONLY, mode: int = 0o666) -> BinaryIO:
    """The regular file `path`, opened to be read, or with O_RDWR among `flags` to be written too, and with O_CREAT made
    with `mode` where it is missing.

    Raises as `require_regular` does. Nothing is waited for.
    """
    if not (flags & os.O_CREAT and not os.path.lexists(path)):
        require_regular(path)  # before it is opened: opening a device may do something
    descriptor = os.open(path, flags | _FLAGS, mode)
    try:
        _regular(path, os.fstat(descriptor))  # it may have been replaced
        return open(descriptor, "r+b" if flags & os.O_RDWR else "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Name, most: int) -> bytes:
    """The content of the regular file `path`. Raises as `require_regular` does, and ValueError beyond `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise bad_file(path, f"a file of at most {most:,} bytes", f"{size:,}")
        return file.read(size)


def read_text(path: Name, most: int = LARGEST_DOCUMENT) -> str:
    """The regular file `path` as UTF-8. Raises as `read_regular` does, and ValueError for other bytes."""
    try:
        return read_regular(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad_file(path, "text in UTF-8", f"other bytes: {error}") from None


def read_json(path: Name, most: int = LARGEST_DOCUMENT) -> Any:
    """What the JSON file `path` holds. Raises as `read_text` does, and ValueError for what is not JSON."""
    return parse_json(path, read_text(path, most))


def parse_json(where: Name, text: str) -> Any:
    """What the JSON `text` says; ValueError names `where` it stands."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise bad_file(where, "JSON", f"something else: {reason(error)}") from None


def require_memory(path: Name, needed: int) -> None:
    """Raise ValueError where the content of `path` takes `needed` bytes and the machine has less memory."""
    if not hasattr(os, "sysconf"):  # this system does not tell
        return
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > whole:
        raise bad_file(path, f"what fits into the {_gigabytes(whole)} of memory of this machine", _gigabytes(needed))


def _regular(path: Name, status: os.stat_result) -> os.stat_result:
    if not stat.S_ISREG(status.st_mode):
        got = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise bad_file(path, "a regular file", got)
    return status


def _gigabytes(count: int) -> str:
    return f"{count / 2**30:,.1f} GB"
