"""A file that one live owner at a time holds, and replaces whole.

Beside `_files` this module imports the standard library only, and on systems without file locks it can be imported but
not used.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path
from types import ModuleType

from dpkernels._files import require_regular


class LedgerLockedError(RuntimeError):
    """Another live process, or another ledger object of this one, has the ledger open, or took its place."""


class LockedFile:
    """The file PATH, held from its opening to ``close``; it is made with ``initial`` where there is none.

    The lock is of the file itself and belongs to an open file description (flock): it is the same by every path that
    leads to the file, symbolic links included, and whoever else opens, reads, copies or closes the file, in this
    process or another one, does not end it. It goes along: a new content is written into a file beside, which is locked
    and then moved into the place of the old one. The operating system ends the lock with the process, and children that
    it forks neither hold nor end it.

    Raises:
        LedgerLockedError: somebody else holds it.
        ValueError: it is not a regular file.
        OSError: it cannot be opened and written, has several names (hard links), or cannot be locked on this file
            system or system.
    """

    def __init__(self, path: Path, initial: bytes) -> None:
        self._lock = file_locks("a ledger on disk")
        self._path = Path(os.path.realpath(path))
        self._beside = self._path.with_name(self._path.name + ".new")
        self._owner = os.getpid()
        self._file = -1
        while self._file < 0:
            try:
                require_regular(self._path)
                self._file = self._locked(self._path)
            except FileNotFoundError:
                self._create(initial)
        try:
            self._check_place()
        except BaseException:
            self.close()
            raise

    def read(self) -> bytes:
        """The content."""
        with open(self._file, "rb", closefd=False) as file:
            file.seek(0)
            return file.read()

    def write(self, content: bytes) -> None:
        """Replace the content, on disk when this returns. A kill leaves the old or the new one.

        Raises LedgerLockedError where the file is no longer in its place, OSError where writing fails or other names
        were given to the file. The content is the old one then.
        """
        with _FORKING:
            new = self._written(content, os.fstat(self._file).st_mode & 0o777)
            try:
                self._check_place()
                os.replace(self._beside, self._path)
            except BaseException:
                self._discard(new)
                raise
            _close(self._file)
            self._file = new
            self._sync_folder()

    def close(self) -> None:
        """Let the next one in. Harmless when called twice, and in a forked process."""
        if self._file >= 0 and os.getpid() == self._owner:
            _close(self._file)
        self._file = -1

    def __del__(self) -> None:
        if getattr(self, "_file", -1) >= 0:
            self.close()

    # ---- inside

    def _create(self, initial: bytes) -> None:
        """Make the file, unless somebody else did meanwhile. Whoever makes it holds the one beside until it moves."""
        with _FORKING:
            new = self._written(initial, None)
            if os.path.lexists(self._path):
                self._discard(new)
                return
            os.replace(self._beside, self._path)
            self._file = new
            self._sync_folder()

    def _written(self, content: bytes, mode: int | None) -> int:
        """The file beside, locked and with the content on disk."""
        new = self._locked(self._beside, os.O_CREAT | os.O_NOFOLLOW)
        try:
            if mode is not None:
                os.fchmod(new, mode)
            os.ftruncate(new, 0)
            with open(new, "wb", closefd=False) as file:
                file.write(content)
            os.fsync(new)
        except BaseException:
            self._discard(new)
            raise
        return new

    def _discard(self, new: int) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._beside)
        _close(new)

    def _locked(self, path: Path, flags: int = 0) -> int:
        """A descriptor of the file at ``path``, locked, and of the one that lies there now."""
        while True:
            with _FORKING:
                file = os.open(path, os.O_RDWR | flags, 0o666)
                _OPEN.add(file)
            try:
                self._lock.flock(file, self._lock.LOCK_EX | self._lock.LOCK_NB)
                if _lies_at(file, path):
                    return file
            except OSError as error:
                raise self._not_locked(file, error) from error
            except BaseException:
                _close(file)
                raise
            _close(file)  # replaced between opening and locking

    def _not_locked(self, file: int, error: OSError) -> Exception:
        """What to raise where ``file`` could not be locked; closes it."""
        here = any(os.path.sameopenfile(file, other) for other in _OPEN - {file})
        _close(file)
        if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
            where = "already open in this process" if here else "open in another live process"
            return LedgerLockedError(f"{self._path} is {where}")
        return OSError(
            error.errno,
            f"{self._path} cannot be locked ({error.strerror}), so that two processes could spend from it. Some "
            "network file systems have no locks: keep the ledger on a local disk",
        )

    def _check_place(self) -> None:
        """Raise unless the file that is held is the one in its place, and has no other name."""
        if not _lies_at(self._file, self._path):
            raise LedgerLockedError(
                f"{self._path} was removed or replaced by somebody else while it was open here; nothing was written"
            )
        if (names := os.fstat(self._file).st_nlink) > 1:
            raise OSError(
                errno.EMLINK,
                f"{self._path} has {names} names (hard links), which would become different files when it is replaced: "
                "remove the other names, or copy the file instead of linking it",
            )

    def _sync_folder(self) -> None:
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def file_locks(what: str) -> ModuleType:
    """The module with this system's file locks. Raises OSError that says what needs them where there are none."""
    try:
        import fcntl
    except ImportError:
        raise OSError(
            f"{what} needs POSIX file locks (the Python module fcntl), which this system does not have: use Linux, "
            "macOS or WSL"
        ) from None
    return fcntl


def _lies_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _close(file: int) -> None:
    with _FORKING:
        _OPEN.discard(file)
        os.close(file)


# A forked child shares the open file descriptions of its parent: the lock would outlive a killed parent in its workers.
_OPEN: set[int] = set()
_FORKING = threading.RLock()  # held while _OPEN does not tell the descriptors that are open


def _close_in_child() -> None:
    for file in _OPEN:
        with contextlib.suppress(OSError):
            os.close(file)
    _OPEN.clear()
    _FORKING.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_FORKING.acquire, after_in_parent=_FORKING.release, after_in_child=_close_in_child)
