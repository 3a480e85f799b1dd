"""The wheel works away from the checkout, the source distribution can build it, and setup.py says what is missing."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="needs the checkout")


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
    )


def setup(*arguments: str | Path) -> None:
    """Runs setup.py; the objects of the last build are reused, and nothing else in the checkout changes."""
    result = run("setup.py", "--quiet", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr


def test_wheel_works_away_from_the_checkout(tmp_path: Path) -> None:
    base, site = tmp_path / "egg", tmp_path / "site"
    base.mkdir()
    setup(
        *("egg_info", "--egg-base", base, "build", "--build-base", tmp_path / "build"),
        *("bdist_wheel", "--bdist-dir", tmp_path / "bdist", "--dist-dir", tmp_path),
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    tops = {name.split("/")[0].split("-")[0] for name in names}
    assert tops == {"dpkernels"}
    for needed in ("dpkernels/_C.abi3.so", "dpkernels/py.typed", "dpkernels/ops/linear.py"):
        assert needed in names
    script = (
        "import dpkernels, torch, pathlib; from dpkernels.ops.linear import linear_squared_norms as norms\n"
        "print(pathlib.Path(dpkernels.__file__).parent)\n"
        "print(norms(torch.ones(1, 1, 3), torch.ones(1, 1, 2), bias=False).item())"
    )
    result = run("-c", script, cwd=tmp_path, PYTHONPATH=str(site))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == [str(site / "dpkernels"), "6.0"]


def test_source_distribution_can_build(tmp_path: Path) -> None:
    setup("egg_info", "--egg-base", tmp_path, "sdist", "--dist-dir", tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    assert sources <= names
    assert {"setup.py", "pyproject.toml", "CMakeLists.txt", "LICENSE", "dpkernels/py.typed"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


@pytest.mark.parametrize("missing", ["torch", "pybind11"])
def test_a_missing_requirement_is_named(missing: str) -> None:
    script = f"import runpy, sys; sys.modules[{missing!r}] = None; runpy.run_path('setup.py', run_name='__main__')"
    result = run("-c", script)
    assert result.returncode == 1
    assert f"{missing!r} is not installed" in result.stderr
    assert "pip install torch setuptools ninja pybind11" in result.stderr
