"""Fixtures that several rooms' tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dpkernels import _native


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test once for every instruction set that this CPU has."""
    if request.param not in _native.isas():
        pytest.skip(f"this CPU does not run {request.param}")
    before = _native.active_isa()
    _native.set_isa(request.param)
    yield request.param
    _native.set_isa(before)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("DPKERNELS_CACHE", str(tmp_path / "cache"))
