"""Imports run as the arrows say and never back; torch is seen only where the house lets it in."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A room of dpkernels -> the rooms that it may import, besides itself. Every arrow points to a line above.
ARROWS: dict[str, set[str]] = {
    "_native": set(),
    "_files": set(),
    "reference": set(),
    "models": set(),
    "losses": set(),
    "accounting": {"_files"},
    "ops": {"_native"},
    "random": {"ops"},
    "layers": {"ops"},
    "clipping": {"layers", "ops"},
    "optim": {"clipping", "random", "accounting", "ops"},
    "data": {"_files", "random", "accounting"},
    "features": {"ops", "random", "accounting"},
    "transfer": {"_files", "layers"},
    "selection": {"random", "accounting"},
    "audit": {"optim", "data"},
    "training": {
        *("_files", "clipping", "optim", "data", "random", "accounting"),
        *("features", "models", "losses", "transfer", "selection"),
    },
    "search": {"_files", "training", "transfer", "features", "data", "models", "random", "accounting"},
    "bench": {"_native", "ops", "layers", "clipping", "optim", "models", "training"},
}
ARROWS["cli"] = set(ARROWS)  # the only room that may import everything
ARROWS["__main__"] = {"cli"}
TORCH_ONLY = {"reference", "models", "losses"}  # of what is neither Python's own nor the room's
NO_TORCH = {"accounting", "_files"}

TORCH_HEADER = re.compile(r"^(torch|ATen|c10|caffe2)/")
BINDING_HEADERS = {"common/torch.h", "common/conv_torch.h"}  # what bindings share
SEES_SIMT = {"common/launch.h", "common/mma.h"}  # what a .cu is written in, when a C++ compiler reads it
CUDA_HEADER = re.compile(r"^(cuda|cu[a-z]+\.h|cub/|cooperative_groups)")


def imports(path: Path, package: list[str]) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a module of `package` imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def import_violations(package: Path) -> list[str]:
    """What breaks the import law in the folder of the package dpkernels."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if parts == ("__init__",):
            continue  # the public names come from every room
        room, where = parts[0], f"dpkernels/{path.relative_to(package)}"
        if room not in ARROWS:
            found.append(f"{where}: the import law knows no room {room!r}")
            continue
        for line, name in imports(path, ["dpkernels", *parts[:-1]]):
            top, _, rest = name.partition(".")
            if top == "dpkernels":
                target = rest.split(".")[0]
                if target not in ARROWS:
                    found.append(f"{where}:{line} imports {name}: rooms import from rooms, not from the front door")
                elif target != room and target not in ARROWS[room]:
                    found.append(f"{where}:{line} imports {name}: no arrow leads from {room} to {target}")
            elif top not in sys.stdlib_module_names:
                if room in TORCH_ONLY and top != "torch":
                    found.append(f"{where}:{line} imports {name}: {room} imports torch only")
                if room in NO_TORCH and top.startswith("torch"):
                    found.append(f"{where}:{line} imports {name}: {room} never sees torch")
    return found


def include_violations(csrc: Path) -> list[str]:
    """What breaks the include law, csrc/README.md, in the folder csrc."""
    found = []
    families = set((csrc / "families.txt").read_text().split())
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"}):
        where = path.relative_to(csrc)
        folder = where.parts[0]
        binds_torch = path.name.endswith("_torch.cpp") or str(where) in BINDING_HEADERS
        for line, text in enumerate(path.read_text().splitlines(), 1):
            match = re.match(r'\s*#\s*include\s*[<"]([^>"]+)[>"]', text)
            if not match:
                continue
            header = match[1]
            at = f"csrc/{where}:{line} includes {header}"
            if (TORCH_HEADER.match(header) or header in BINDING_HEADERS) and not binds_torch:
                found.append(f"{at}: only *_torch.cpp sees torch")
            if header.startswith("pybind11/") and folder not in {"host", "simt"}:
                found.append(f"{at}: only host and simt see pybind11")
            if header == "simt/binding.h" and folder != "simt" and not path.name.endswith("_simt.cpp"):
                found.append(f"{at}: only *_simt.cpp binds to simt")
            if CUDA_HEADER.match(header) and folder != "common" and path.suffix not in {".cu", ".cuh"}:
                found.append(f"{at}: only .cu files see CUDA")
            if header.split("/")[0] in families | {"common", "host", "simt"}:
                if not (csrc / header).is_file():
                    found.append(f"{at}, which does not exist")
                reaches_simt = str(where) in SEES_SIMT or path.name.endswith("_simt.cpp")
                allowed = {folder, "common"} | ({"simt"} if reaches_simt else set())
                if folder in families | {"common"} and header.split("/")[0] not in allowed:
                    found.append(f"{at}: a family includes its own headers and common's")
            elif '"' in text:
                found.append(f"{at}: own headers are named from csrc, as family/file.h")
    return found


def test_arrows_lead_down() -> None:
    above: set[str] = set()
    for room, targets in ARROWS.items():
        assert targets <= above, f"{room} imports {sorted(targets - above)}, which do not stand above it"
        above.add(room)


def test_imports_run_as_the_arrows_say() -> None:
    found = import_violations(ROOT / "dpkernels")
    assert not found, "\n".join(["", *found])


def test_includes_run_as_the_folder_says() -> None:
    found = include_violations(ROOT / "csrc")
    assert not found, "\n".join(["", *found])


@pytest.mark.parametrize(
    ("file", "line", "words"),
    [
        ("ops/linear.py", "from dpkernels.layers import Layer", "no arrow leads from ops to layers"),
        ("ops/linear.py", "from ..optim.sgd import DPSGD", "no arrow leads from ops to optim"),
        ("_native.py", "import dpkernels.ops.linear", "no arrow leads from _native to ops"),
        ("layers/base.py", "def f():\n    from dpkernels import clipping", "no arrow leads from layers to clipping"),
        ("layers/base.py", "from dpkernels import GhostClipper", "not from the front door"),
        ("reference/linear.py", "import numpy", "reference imports torch only"),
        ("reference/linear.py", "from dpkernels.ops.linear import f", "no arrow leads from reference to ops"),
        ("models/resnet.py", "from torchvision import models", "models imports torch only"),
        ("accounting/prv.py", "from torch import Tensor", "accounting never sees torch"),
        ("accounting/prv.py", "from dpkernels.random import Key", "no arrow leads from accounting to random"),
        ("attic/old.py", "import math", "knows no room 'attic'"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, file: str, line: str, words: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("import math\nimport torch\n" if not file.startswith("accounting") else "import numpy\n")
    if not file.startswith("attic"):
        assert import_violations(tmp_path) == []
    path.write_text(line)
    (found,) = import_violations(tmp_path)
    assert found.startswith(f"dpkernels/{file}")
    assert words in found


@pytest.mark.parametrize(
    ("file", "line", "words"),
    [
        ("linear/linear_cpu.cpp", "#include <torch/csrc/stable/tensor.h>", "only *_torch.cpp sees torch"),
        ("linear/linear.h", '#include "common/torch.h"', "only *_torch.cpp sees torch"),
        ("linear/linear.h", "#include <cuda_runtime.h>", "only .cu files see CUDA"),
        ("linear/linear_cpu.cpp", "#include <pybind11/pybind11.h>", "only host and simt see pybind11"),
        ("linear/linear_cpu.cpp", '#include "clip/clip.h"', "a family includes its own headers and common's"),
        ("common/simd.h", '#include "clip/clip.h"', "a family includes its own headers and common's"),
        ("linear/linear.cu", '#include "simt/simt.h"', "a family includes its own headers and common's"),
        ("linear/linear_cpu.cpp", '#include "linear/tile.h"', "which does not exist"),
        ("linear/linear_cpu.cpp", '#include "linear.h"', "own headers are named from csrc"),
    ],
)
def test_a_wrong_include_is_found(tmp_path: Path, file: str, line: str, words: str) -> None:
    (tmp_path / "families.txt").write_text("linear\nclip\n")
    headers = ("common/torch.h", "linear/linear.h", "clip/clip.h", "simt/simt.h", "linear/linear_torch.cpp")
    for header in (*headers, file):
        path = tmp_path / header
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / "linear/linear_torch.cpp").write_text('#include "common/torch.h"\n#include "linear/linear.h"\n')
    (tmp_path / "common/torch.h").write_text("#include <torch/csrc/stable/tensor.h>\n#include <vector>\n")
    assert include_violations(tmp_path) == []
    (tmp_path / file).write_text(f"#include <vector>\n{line}\n")
    (found,) = include_violations(tmp_path)
    assert found.startswith(f"csrc/{file}:2 includes ")
    assert words in found
