"""What the project's files must not hold, and what its public names must: docstrings."""

import importlib
import inspect
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

import dpkernels

ROOT = Path(__file__).parents[2]
SOURCES = {".py", ".cpp", ".h", ".cu", ".cuh"}
MAXIMUM_LINES = 500

# The classes in brackets keep these lines from matching themselves.
FAST_MATH = re.compile(r"-Ofas[t]|-f(fast|unsafe|associative|reciprocal|finite)-mat[h]|fast_mat[h]|fast-mat[h]")
MACHINE_PATH = re.compile(r"(?<![\w.}~-])/(wor[k]|tm[p]|roo[t]|hom[e]|User[s]|opt/wheel[s])/[\w.]")


def project_files(root: Path) -> list[Path]:
    """The files that are the project's own: what git tracks or would add; without git, all but what builds leave."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            check=True,
        ).stdout.decode()
        files = [root / name for name in listed.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        built = {"build", "dist", "runs", "__pycache__"}
        files = [
            path
            for path in root.rglob("*")
            if not any(part in built or part.startswith(".") for part in path.relative_to(root).parts[:-1])
        ]
    return sorted(path for path in files if path.is_file())


def matches(files: Iterable[Path], root: Path, pattern: re.Pattern[str], what: str) -> list[str]:
    found = []
    for path in files:
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue  # a picture or other data
        for number, line in enumerate(lines, 1):
            if match := pattern.search(line):
                found.append(f"{path.relative_to(root)}:{number} {what}: {match[0]}")
    return found


def build_files(root: Path) -> list[Path]:
    """The files that decide how native code is compiled."""
    names = {"setup.py", "CMakeLists.txt", "Makefile", "pyproject.toml"}
    return [p for p in project_files(root) if p.name in names or "csrc" in p.relative_to(root).parts]


def long_files(root: Path) -> list[str]:
    sources = [p for p in project_files(root) if p.suffix in SOURCES]
    lengths = [(p.relative_to(root), len(p.read_text().splitlines())) for p in sources]
    return [f"{path} has {lines} lines, above {MAXIMUM_LINES}" for path, lines in lengths if lines > MAXIMUM_LINES]


def undocumented(module: object, name: str) -> list[str]:
    """The public names of a module that have no docstring of their own; plain values need none."""
    found = []
    for public in module.__all__:
        value = getattr(module, public)
        if not (inspect.ismodule(value) or inspect.isclass(value) or callable(value)):
            continue
        doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
        if not doc or not doc.strip() or doc.startswith(f"{public}("):  # a dataclass writes its signature there
            found.append(f"{name}.{public} has no docstring")
    return found


def public_modules() -> list[str]:
    """dpkernels and its rooms, where they are packages with public names."""
    rooms = sorted(path.parent.name for path in (ROOT / "dpkernels").glob("*/__init__.py"))
    return ["dpkernels", *(f"dpkernels.{room}" for room in rooms)]


def test_no_fast_math() -> None:
    found = matches(build_files(ROOT), ROOT, FAST_MATH, "asks for inexact arithmetic")
    assert not found, "\n".join(["", *found])


def test_no_machine_paths() -> None:
    found = matches(project_files(ROOT), ROOT, MACHINE_PATH, "names a path of one machine")
    assert not found, "\n".join(["", *found])


def test_a_file_can_be_read_in_a_sitting() -> None:
    found = long_files(ROOT)
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize("name", public_modules())
def test_public_names_have_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    if hasattr(module, "__all__"):
        found = undocumented(module, name)
        assert not found, "\n".join(["", *found])


def test_front_door() -> None:
    missing = [name for name in dpkernels.__all__ if not hasattr(dpkernels, name)]
    assert not missing
    assert len(set(dpkernels.__all__)) == len(dpkernels.__all__)
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{dpkernels.__version__}"' in project, "dpkernels.__version__ is not pyproject.toml's version"


def test_planted_texts_are_found(tmp_path: Path) -> None:
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "a.cpp").write_text("int x;\n")
    (tmp_path / "setup.py").write_text("FLAGS = ['-O3']\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    assert matches(build_files(tmp_path), tmp_path, FAST_MATH, "") == []
    assert matches(project_files(tmp_path), tmp_path, MACHINE_PATH, "") == []
    assert long_files(tmp_path) == []

    (tmp_path / "setup.py").write_text("FLAGS = ['-O3', '-ffast" + "-math']\n")
    (tmp_path / "csrc" / "a.cpp").write_text("int x;\n" * (MAXIMUM_LINES + 1) + "// see /hom" + "e/someone/notes\n")
    assert matches(build_files(tmp_path), tmp_path, FAST_MATH, "inexact") == ["setup.py:1 inexact: -ffast" + "-math"]
    assert matches(project_files(tmp_path), tmp_path, MACHINE_PATH, "path") == [
        f"csrc/a.cpp:{MAXIMUM_LINES + 2} path: /hom" + "e/s"
    ]
    assert long_files(tmp_path) == [f"csrc/a.cpp has {MAXIMUM_LINES + 2} lines, above {MAXIMUM_LINES}"]


def test_a_missing_docstring_is_found() -> None:
    class Documented:
        """Words."""

    class Undocumented(Documented):
        pass

    module = ModuleType("m")
    module.VERSION, module.Documented, module.Undocumented = "1", Documented, Undocumented
    module.function = lambda: None
    module.__all__ = ["VERSION", "Documented", "Undocumented", "function"]
    assert undocumented(module, "m") == ["m.Undocumented has no docstring", "m.function has no docstring"]
