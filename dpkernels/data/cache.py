"""Decoded images kept in the user's cache folder, so that a large tar of JPEGs is decoded once."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dpkernels._files import require_regular
from dpkernels.data.raw import RawImages, check_labels

_FORMAT = 1
_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def cache_folder() -> Path:
    """DPKERNELS_CACHE, else dpkernels in XDG_CACHE_HOME, else ~/.cache/dpkernels.

    Raises RuntimeError where the user has no home.
    """
    if own := os.environ.get("DPKERNELS_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dpkernels"
    except RuntimeError as error:
        raise RuntimeError(f"set the environment variable DPKERNELS_CACHE to a folder for caches: {error}") from None


def cached(source: Path, fingerprint: str, decode: Callable[[], RawImages]) -> RawImages:
    """What `decode` returns, from the cache where `source` was decoded before and `fingerprint` is the same.

    fingerprint: changes when the source changes (sizes and times). There is one entry a source, replaced as a whole, so
    that a reader never sees half a file. A damaged entry is decoded again; a cache that cannot be written is passed by
    with a warning. The folder and the file are readable by the user alone: images may be private.
    """
    source = source.resolve()
    name = hashlib.sha256(os.fsencode(source)).hexdigest()[:16]
    entry = cache_folder() / f"{source.stem}-{name}.safetensors"
    stamp = {"format": str(_FORMAT), "source": os.fspath(source), "fingerprint": fingerprint}
    images = _load(entry, stamp)
    if images is None:
        images = decode()
        try:
            _save(entry, stamp, images)
        except (OSError, SafetensorError, UnicodeError) as error:  # of a name that is no text
            warnings.warn(f"decoded images could not be kept in {entry.parent}: {error}", stacklevel=2)
    return images


def _load(entry: Path, stamp: dict[str, str]) -> RawImages | None:
    try:
        require_regular(entry)
        with safe_open(entry, framework="numpy") as file:
            metadata = file.metadata() or {}
            if not stamp.items() <= metadata.items():
                return None
            arrays = {name: file.get_tensor(name) for name in _ARRAYS}
            classes = tuple(map(str, json.loads(metadata["classes"])))
            for split in ("train", "test"):
                images, labels = arrays[f"{split}_images"], arrays[f"{split}_labels"]
                if (images.dtype, images.ndim, labels.dtype, labels.ndim) != (np.uint8, 4, np.int64, 1):
                    return None
                check_labels(entry, labels, len(images), len(classes))
            return RawImages(**arrays, classes=classes)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RecursionError):
        return None


def _save(entry: Path, stamp: dict[str, str], images: RawImages) -> None:
    entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    arrays = {name: np.ascontiguousarray(getattr(images, name)) for name in _ARRAYS}
    handle, temporary = tempfile.mkstemp(prefix=f".{entry.stem}-", dir=entry.parent)
    os.close(handle)
    try:
        save_file(arrays, temporary, metadata=stamp | {"classes": json.dumps(images.classes)})
        os.replace(temporary, entry)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
