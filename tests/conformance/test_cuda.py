"""Every CUDA kernel is run on the CPU by tests/simt, compiled for the device where nvcc is found, and keeps the law of
csrc/README.md. That a family's tests launch all of its kernels is held by tests/simt/conftest.py."""

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.conformance.test_families import families, names_used
from tests.simt.machine import kernels

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    r"__shared__": "shared memory is reached through DPK_SHARED and DPK_DYNAMIC_SHARED",
    r"<<<": "kernels are launched by DPK_LAUNCH",
    r"#include <cuda": "CUDA comes with common/launch.h",
    r"\bcuda(Malloc|Free|Memcpy|Memset|\w*Synchronize)": "a launcher neither allocates nor waits",
    r"__global__ void (?!(__launch_bounds__\([^)]*\)\s*)\w+_kernel\b)": "it is __launch_bounds__(...) <name>_kernel",
}


def sources(root: Path) -> list[Path]:
    return sorted(root.glob("csrc/*/*.cu"))


def violations(root: Path) -> list[str]:
    """What breaks the law of .cu files in the checkout `root`."""
    found = []
    for path in sources(root):
        family, at = path.parent.name, path.relative_to(root)
        if path.stem != family or family not in families(root):
            found.append(f"{at}: a .cu file is csrc/<family>/<family>.cu")
            continue
        text = path.read_text()
        for pattern, why in FORBIDDEN.items():
            found += [f"{at}: {match[0]!r}: {why}" for match in re.finditer(pattern, text)]
        binding, test = root / f"csrc/{family}/{family}_simt.cpp", root / f"tests/simt/test_{family}.py"
        missing = [str(p.relative_to(root)) for p in (binding, test) if not p.is_file()]
        if missing:
            found.append(f"{at}: {' and '.join(missing)} missing")
            continue
        launchers = re.findall(r"\bvoid (\w+)_cuda\(", path.with_suffix(".h").read_text())
        for operator in launchers:
            if f"{operator}_cuda(" not in binding.read_text():
                found.append(f"{at}: {operator}_cuda is not bound in {binding.name}")
            if operator not in names_used(test):
                found.append(f"{at}: {operator} is named by no test in {test.name}")
        if not launchers:
            found.append(f"{at}: {family}.h declares no launcher <operator>_cuda")
    return found


def test_kernels_keep_the_law() -> None:
    assert sources(ROOT)
    found = violations(ROOT)
    assert not found, "\n".join(["", *found])


def test_the_table_of_kernels_is_whole() -> None:
    document = (ROOT / "docs" / "gpu_kernels.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)", document, re.MULTILINE))
    written = set().union(*(kernels(path.parent.name) for path in sources(ROOT)))
    assert listed == written, f"write it anew: {document.splitlines()[2]}"


@pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not found")
@pytest.mark.skipif("DPKERNELS_SIMT" not in os.environ, reason="make test compiles the kernels")
@pytest.mark.parametrize("path", sources(ROOT), ids=lambda path: path.stem)
def test_nvcc_compiled_the_kernels(path: Path) -> None:
    report = Path(os.environ["DPKERNELS_SIMT"]) / "ptxas" / f"{path.relative_to(ROOT)}.json"
    assert report.is_file()
    assert report.stat().st_mtime >= path.stat().st_mtime, f"{report} is older than {path}"


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("csrc/f/f.cu", "DPK_SHARED(float, s, 4);", "__shared__ float s[4];", "reached through DPK_SHARED"),
        ("csrc/f/f.cu", "DPK_LAUNCH(a_kernel, 1, 32, 0, s);", "a_kernel<<<1, 32>>>();", "launched by DPK_LAUNCH"),
        ("csrc/f/f.cu", "DPK_LAUNCH", "cudaDeviceSynchronize(); DPK_LAUNCH", "neither allocates nor waits"),
        ("csrc/f/f.cu", " __launch_bounds__(32)", "", "it is __launch_bounds__"),
        ("csrc/f/f.cu", "#include", "#include <cuda_runtime.h>\n#include", "CUDA comes with common/launch.h"),
        ("csrc/f/f_simt.cpp", "a_cuda(", "b(", "a_cuda is not bound in f_simt.cpp"),
        ("csrc/f/f.h", "a_cuda", "a_gpu", "f.h declares no launcher"),
        ("tests/simt/test_f.py", "simt.a()", "pass", "a is named by no test in test_f.py"),
        ("csrc/families.txt", "f", "g", "a .cu file is csrc/<family>/<family>.cu"),
    ],
)
def test_a_broken_law_is_found(tmp_path: Path, file: str, old: str, new: str, words: str) -> None:
    texts = {
        "csrc/families.txt": "f\n",
        "csrc/f/f.h": "void a_cuda(S s);\n",
        "csrc/f/f.cu": '#include "f/f.h"\n'
        "__global__ void __launch_bounds__(32) a_kernel() { DPK_SHARED(float, s, 4); }\n"
        "void a_cuda(S s) { DPK_LAUNCH(a_kernel, 1, 32, 0, s); }\n",
        "csrc/f/f_simt.cpp": "a_cuda(call.stream());\n",
        "tests/simt/test_f.py": "def test_a(simt):\n    simt.a()\n",
    }
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert violations(tmp_path) == []
    assert old in texts[file]
    (tmp_path / file).write_text(texts[file].replace(old, new, 1))
    (found,) = violations(tmp_path)
    assert words in found


@pytest.mark.parametrize("source", sources(ROOT), ids=lambda path: path.stem)
def test_a_binding_leaves_the_cpu_out_on_the_device(source: Path) -> None:
    """The device's library holds no CPU kernels: what starts the CPU's threads is in `run`, or left out by hand."""
    binding = source.with_name(f"{source.stem}_torch.cpp")
    kept: list[str] = []
    left_out = [False]
    for line in binding.read_text().splitlines():
        if line.startswith("#if"):
            left_out.append("!defined(USE_CUDA)" in line)
        elif line.startswith("#else"):
            left_out[-1] = not left_out[-1]
        elif line.startswith("#endif"):
            left_out.pop()
        elif not any(left_out):
            kept.append(line)
    assert "parallel(" not in "\n".join(kept)
