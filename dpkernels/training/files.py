"""Files that are whole or not there: written beside their place, synced, and moved there in one step."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def write_atomically(path: Path, write: Callable[[Path], None], *, private: bool = False) -> None:
    """`write` a temporary file next to `path`, then put it in its place. A kill leaves the old file or the new one.

    private: readable by its owner alone.
    """
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.touch(0o600 if private else 0o666)
    mode = temporary.stat().st_mode
    write(temporary)
    temporary.chmod(mode)  # a writer that puts a file of its own there may have made it private
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomically(path, write, private=private)


def write_json(path: Path, document: Any) -> None:
    """Raises ValueError for a number that JSON cannot hold (infinite or not a number)."""
    write_text(path, json.dumps(document, indent=2, allow_nan=False) + "\n")
