"""Builds dpkernels' two native libraries.

``_C``     the operators, through PyTorch's stable ABI: one binary for every torch from 2.11 on
``_host``  a pybind11 module with build information, without torch

``csrc/families.txt`` lists the kernel families; CMakeLists.txt reads the same list.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

try:
    import pybind11
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths
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
STABLE_ABI = f"0x{TORCH_MINIMUM[0]:02x}{TORCH_MINIMUM[1]:02x}000000000000"
FLAGS = ["-O3", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas"]
HEADERS = sorted(str(path) for path in Path("csrc").rglob("*.h"))


class Build(BuildExtension):
    """Keeps object files between builds, so that ninja compiles only what changed, also under pip and in an editable
    install, which build in a fresh folder each time. The folder is one for each Python and torch."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = str(ROOT / "build" / f"objects-{sys.implementation.cache_tag}-torch{torch.__version__}")

    def build_extensions(self) -> None:
        """Leaves the extensions as they were: bdist_wheel builds twice, and torch adds its flags each time, with which
        ninja would compile all again."""
        given = [list(extension.extra_compile_args) for extension in self.extensions]
        super().build_extensions()
        for extension, flags in zip(self.extensions, given, strict=True):
            extension.extra_compile_args = flags


operators = CppExtension(
    "dpkernels._C",
    ["csrc/common/isa_torch.cpp"] + [f"csrc/{f}/{f}_{part}.cpp" for f in FAMILIES for part in ("cpu", "torch")],
    include_dirs=[str(ROOT / "csrc")],
    depends=HEADERS,
    define_macros=[("TORCH_TARGET_VERSION", STABLE_ABI), ("Py_LIMITED_API", "0x030A0000")],
    # As system headers, torch's are compiled without their warnings.
    extra_compile_args=FLAGS + [flag for path in include_paths() for flag in ("-isystem", path)],
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
        ("DPK_BUILD_CUDA", '"none"'),
    ],
    extra_compile_args=FLAGS,
    language="c++",
)

setup(
    ext_modules=[operators, host],
    cmdclass={"build_ext": Build},
)
