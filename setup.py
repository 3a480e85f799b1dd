"""Builds dpkernels' native libraries.

``_C``       the operators on the CPU, through PyTorch's stable ABI: one binary for every torch from 2.11 on
``_C_cuda``  the same operators on CUDA; built where torch has CUDA and nvcc is found (DPKERNELS_CUDA=0 or 1 overrides),
             for the architectures of TORCH_CUDA_ARCH_LIST
``_host``    a pybind11 module with build information, without torch

``csrc/families.txt`` lists the kernel families; CMakeLists.txt reads the same list.
"""

import copy
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup


def toolkit() -> str | None:
    """Where nvcc's toolkit lies, as it says itself: the nvcc on PATH may stand for one elsewhere."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    plan = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False)
    top = re.search(r"^#\$ TOP=(.+)$", plan.stderr, re.MULTILINE)
    return os.path.realpath(top[1]) if top else None


if not {"CUDA_HOME", "CUDA_PATH"} & os.environ.keys() and (home := toolkit()):
    os.environ["CUDA_HOME"] = home  # read by torch when it is imported

try:
    import pybind11
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension, include_paths
except ImportError as error:
    sys.exit(
        f"dpkernels builds against the installed torch, and {error.name!r} is not installed. Install what it needs:\n"
        "    pip install torch setuptools ninja pybind11\n"
        "and then\n"
        "    pip install --no-build-isolation ."
    )

TORCH_MINIMUM = (2, 11)
if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < TORCH_MINIMUM:
    sys.exit(f"dpkernels needs torch >= {TORCH_MINIMUM[0]}.{TORCH_MINIMUM[1]}, found {torch.__version__}")

ROOT = Path(__file__).parent.resolve()
os.chdir(ROOT)
FAMILIES = (ROOT / "csrc" / "families.txt").read_text().split()
CUDA_FAMILIES = [f for f in FAMILIES if (ROOT / "csrc" / f / f"{f}.cu").exists()]
STABLE_ABI = f"0x{TORCH_MINIMUM[0]:02x}{TORCH_MINIMUM[1]:02x}000000000000"
FLAGS = ["-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas"]
HEADERS = sorted(str(path) for path in Path("csrc").rglob("*.h"))
OPERATORS = [("TORCH_TARGET_VERSION", STABLE_ABI), ("Py_LIMITED_API", "0x030A0000")]
# As system headers, torch's are compiled without their warnings.
TORCH_FLAGS = FLAGS + [flag for path in include_paths() for flag in ("-isystem", path)]
# No fused multiply-add that is not written: the tests see the device's rounding.
NVCC_FLAGS = ["-O3", "-std=c++20", "--fmad=false", "--Werror=all-warnings"]
CUDA_ARCHITECTURES = "8.0;9.0+PTX"  # without a GPU torch would compile for every architecture


def cuda_release() -> str | None:
    """The release of nvcc, such as "13.0", if the kernels for CUDA are to be built."""
    wanted = os.environ.get("DPKERNELS_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        sys.exit(f"DPKERNELS_CUDA must be 0 or 1, got {wanted!r}")
    lacking = [what for what, there in (("a torch with CUDA", torch.version.cuda), ("nvcc", CUDA_HOME)) if not there]
    if wanted == "1" and lacking:
        sys.exit(
            f"DPKERNELS_CUDA=1 needs {' and '.join(lacking)} (torch is {torch.__version__}; CUDA_HOME names nvcc's)"
        )
    if wanted == "0" or lacking:
        return None
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", CUDA_ARCHITECTURES)
    told = subprocess.run(
        [str(Path(CUDA_HOME) / "bin" / "nvcc"), "--version"], capture_output=True, text=True, check=True
    )
    match = re.search(r"release (\S+),", told.stdout)
    return match[1] if match else "unknown"


CUDA = cuda_release()


class Build(BuildExtension):
    """Keeps object files between builds, so that ninja compiles only what changed, also under pip and in an editable
    install, which build in a fresh folder each time. The folder is one for each Python and torch."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = str(ROOT / "build" / f"objects-{sys.implementation.cache_tag}-torch{torch.__version__}")

    def build_extension(self, extension: Extension) -> None:
        """Gives each library its own folder: two of them compile the same bindings, each for its device."""
        folder, self.build_temp = self.build_temp, str(Path(self.build_temp) / extension.name)
        super().build_extension(extension)
        self.build_temp = folder

    def build_extensions(self) -> None:
        """Leaves the extensions as they were: bdist_wheel builds twice, and torch adds its flags each time, with which
        ninja would compile all again."""
        given = [copy.deepcopy(extension.extra_compile_args) for extension in self.extensions]
        super().build_extensions()
        for extension, flags in zip(self.extensions, given, strict=True):
            extension.extra_compile_args = flags


operators = CppExtension(
    "dpkernels._C",
    ["csrc/common/isa_torch.cpp"] + [f"csrc/{f}/{f}_{part}.cpp" for f in FAMILIES for part in ("cpu", "torch")],
    include_dirs=[str(ROOT / "csrc")],
    depends=HEADERS,
    define_macros=OPERATORS,
    extra_compile_args=TORCH_FLAGS,
    py_limited_api=True,
)
cuda_operators = CUDA and CUDAExtension(
    "dpkernels._C_cuda",
    [f"csrc/{f}/{f}{end}" for f in CUDA_FAMILIES for end in (".cu", "_torch.cpp")],
    include_dirs=[str(ROOT / "csrc")],
    depends=HEADERS,
    define_macros=[*OPERATORS, ("USE_CUDA", None)],
    extra_compile_args={"cxx": TORCH_FLAGS, "nvcc": NVCC_FLAGS},
    py_limited_api=True,
)
host = Extension(
    "dpkernels._host",
    ["csrc/host/host.cpp"],
    include_dirs=[str(ROOT / "csrc"), pybind11.get_include()],
    depends=HEADERS,
    define_macros=[
        ("DPK_BUILD_TORCH", f'"{torch.__version__}"'),
        ("DPK_STABLE_ABI", '"{}.{}"'.format(*TORCH_MINIMUM)),
        ("DPK_BUILD_CUDA", f'"{CUDA or "none"}"'),
    ],
    extra_compile_args=FLAGS,
    language="c++",
)

setup(
    ext_modules=[extension for extension in (operators, cuda_operators, host) if extension],
    cmdclass={"build_ext": Build},
)
