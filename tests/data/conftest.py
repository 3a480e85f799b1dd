"""What the tests of the data room share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def real_data() -> Path:
    """The folder with real data sets, or the test is skipped."""
    default = Path(__file__).resolve().parents[2].parent / "shared" / "data"
    folder = Path(os.environ.get("DPKERNELS_DATA") or default)
    if not folder.is_dir():
        pytest.skip(f"no real data: set DPKERNELS_DATA, or put it into {default}")
    return folder
