"""The CUDA kernels on the CPU: the module ``_simt`` that CMakeLists.txt builds, called with tensors.

``build/cpp`` is where `make cpp-test` builds it; DPKERNELS_SIMT names another folder.
"""

import importlib.util
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[2]


def find() -> tuple[Path | None, str]:
    """The module's file, or None and what is wrong."""
    folder = Path(os.environ.get("DPKERNELS_SIMT", os.path.relpath(ROOT / "build" / "cpp")))
    build = f"build it: cmake -S . -B {folder} -G Ninja && cmake --build {folder}"
    found = sorted(folder.glob("_simt.*.so"))
    if not found:
        return None, f"no module _simt in {folder}; {build}"
    newest = max(
        (p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".cu", ".cuh", ".h"} or p.match("*/simt/*.cpp")),
        key=lambda path: path.stat().st_mtime,
    )
    if newest.stat().st_mtime > found[0].stat().st_mtime:
        return None, f"{found[0]} is older than {newest.relative_to(ROOT)}; {build}"
    return found[0], ""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_simt", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernels(family: str) -> set[str]:
    """The names of the kernels in the family's .cu files, and of those in common/ that they include."""
    paths = list((ROOT / "csrc" / family).glob("*.cu*"))
    for path in paths:  # grows as it goes
        included = re.findall(r'#include "(common/\w+\.cuh)"', path.read_text())
        paths += [ROOT / "csrc" / name for name in included if ROOT / "csrc" / name not in paths]
    texts = [path.read_text() for path in paths]
    return {name for text in texts for name in re.findall(r"__global__\s+void[^;{]*?(\w+_kernel)\s*\(", text)}


def to_numpy(value: Any) -> Any:
    """Tensors as the module takes them: bfloat16 as its bits."""
    if isinstance(value, torch.Tensor):
        value = value.contiguous()
        return value.view(torch.uint16).numpy() if value.dtype == torch.bfloat16 else value.numpy()
    if isinstance(value, list | tuple):
        return [to_numpy(item) for item in value]
    return value


def to_tensor(array: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


class Machine:
    """Operators by name. A call runs under every schedule, and all must write the same bits."""

    def __init__(self, module: ModuleType):
        self.module = module

    def __getattr__(self, name: str) -> Any:
        operator = getattr(self.module, name)

        def run(*args: Any, **keywords: Any) -> Any:
            args = tuple(to_numpy(value) for value in args)
            keywords = {key: to_numpy(value) for key, value in keywords.items()}
            first = None
            for schedule in self.module.SCHEDULES:
                result = operator(*args, **keywords, schedule=schedule)
                arrays = result if isinstance(result, tuple) else (result,)
                bits = [array.tobytes() for array in arrays]
                assert first is None or bits == first, f"{name} writes other bits under {schedule}"
                first = bits
            tensors = tuple(to_tensor(array) for array in arrays)
            return tensors if len(tensors) > 1 else tensors[0]

        return run
