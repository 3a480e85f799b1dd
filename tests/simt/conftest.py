"""The fixture `simt`, and the law that a family's tests run every one of its kernels."""

import os
from collections.abc import Iterator

import pytest

from tests.simt.machine import Machine, find, kernels, load


@pytest.fixture(scope="session")
def simt() -> Machine:
    path, reason = find()
    if path is None:
        (pytest.fail if "DPKERNELS_SIMT" in os.environ else pytest.skip)(reason)
    return Machine(load(path))


@pytest.fixture(scope="module", autouse=True)
def _every_kernel_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """After all tests of test_<family>.py, each kernel of the family has been launched."""
    session = request.session
    before = session.testsfailed
    yield
    chosen = any("::" in arg for arg in request.config.args) or request.config.option.keyword
    if chosen or session.testsfailed > before or find()[0] is None:
        return
    family = request.module.__name__.rpartition("test_")[2]
    launched = {name.strip("()") for name in request.getfixturevalue("simt").module.launches()}
    missing = kernels(family) - launched
    assert not missing, f"tests/simt/test_{family}.py launches no {', '.join(sorted(missing))}"
