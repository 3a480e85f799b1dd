"""Features of pixels in [0, 1], colours too, which the paper has around 0: what that is worth.

Under normalization by channel it makes no difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from dpkernels.training.build import UNIT


@contextmanager
def unit_pixels() -> Iterator[None]:
    """While this holds, features are taken of pixels in [0, 1]."""
    with mock.patch("dpkernels.training.build.PHOTOGRAPH", UNIT):
        yield
