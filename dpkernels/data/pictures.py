"""Image files decoded to bytes, by a fixed list of decoders and up to a fixed size."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from dpkernels._files import bad_file, reason
from dpkernels.data.raw import Bytes

EXTENSIONS = {".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
GRAY_MODES = {"1", "L", "LA"}  # of Pillow, with 8 bits a channel at most
_MODES = GRAY_MODES | {"RGB", "RGBA", "RGBX", "P", "PA", "CMYK", "YCbCr", "HSV", "LAB"}
# Pillow tries all that it knows on a file, whatever its name, and knows formats that are programs: it starts
# Ghostscript for PostScript.
_FORMATS = ("BMP", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
LARGEST_IMAGE = 89_478_485
"""Pixels of one image: above, Pillow too takes it for an attack (a quarter of a gigabyte in RGB)."""
_MOST_SCANNED = 2**31  # pixels times passes over them, of a JPEG
_MOST_AS_TEXT = 2**20  # bytes of a PPM whose numbers are written out: Pillow reads a megabyte a second
_MOST_READS = 300_000  # of one file
_FEW_BYTES = 2**17  # which few reads go through


def decoded(path: Path, content: bytes, convert: Callable[[Image.Image], Bytes]) -> Bytes:
    """What `convert` makes of the image that the file `path` holds, which has 8 bits a channel at most.

    convert: gets the image before its pixels are decoded, and may raise `Unfit`. Raises ValueError that names the file
    for anything else, for an image that is damaged, is larger than `LARGEST_IMAGE`, or would take minutes to decode.
    """
    try:
        with Image.open(_reader(content), formats=_FORMATS) as image:
            _check(image, content)
            return convert(image)
    except Unfit as error:
        raise bad_file(path, error.expected, error.got) from None
    except Exception as error:  # decoders raise nearly anything on a damaged file
        raise bad_file(path, f"an image ({', '.join(_FORMATS)})", _cause(error)) from None


class Unfit(Exception):
    """An image that is not what it should be, as its header tells: raised before its pixels are decoded."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(expected, got)
        self.expected, self.got = expected, got


def _check(image: Image.Image, content: bytes) -> None:
    pixels = math.prod(image.size)
    if pixels > LARGEST_IMAGE:
        raise Unfit(f"an image of at most {LARGEST_IMAGE:,} pixels", "{}x{}".format(*image.size))
    if image.mode not in _MODES:
        raise Unfit("an image with 8 bits a channel", f"Pillow mode {image.mode}")
    scans = content.count(b"\xff\xda") if content.startswith(b"\xff\xd8") else 0
    if scans * pixels > _MOST_SCANNED:
        raise Unfit("a JPEG of some ten scans", f"{scans} of {pixels:,} pixels")
    if content[:2] in (b"P1", b"P2", b"P3") and len(content) > _MOST_AS_TEXT:
        raise Unfit(f"numbers in binary (P4 to P6) above {_MOST_AS_TEXT:,} bytes", content[:2].decode())


def is_picture(name: str) -> bool:
    """Whether a file of this name is taken for an image."""
    return os.path.splitext(name)[1].lower() in EXTENSIONS and not name.startswith(".")


def gray_or_rgb(image: Image.Image) -> Bytes:
    """uint8 [height, width] of an image without colour, else [height, width, 3]."""
    return np.asarray(image.convert("L" if image.mode in GRAY_MODES else "RGB"))


def _reader(content: bytes) -> io.BytesIO:
    return io.BytesIO(content) if len(content) <= _FEW_BYTES else _Reader(content)


class _Reader(io.BytesIO):
    """A file in memory that ends the search of a decoder which looks byte by byte for what never comes."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self._left = min(_FEW_BYTES + len(content) // 128, _MOST_READS)

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise ValueError("it consists of too many parts")
        return super().read(size)


def _cause(error: Exception) -> str:
    if isinstance(error, Image.UnidentifiedImageError):
        return "a file of none of these formats"
    return f"{type(error).__name__}: {reason(error)}"
