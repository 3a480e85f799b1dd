"""Loads the compiled libraries: the operators ``torch.ops.dpkernels.*`` on the CPU (``_C``) and, where torch has CUDA
and they were built, on CUDA (``_C_cuda``), and the pybind11 module ``_host``."""

import importlib.util
from pathlib import Path

import torch


def _explain(error: Exception) -> ImportError:
    return ImportError(
        f"dpkernels' compiled library could not be loaded with torch {torch.__version__}: {error}\n"
        "Build it against this torch with: pip install --no-build-isolation . (from a checkout: "
        "python setup.py build_ext --inplace)"
    )


def _load_operators(library: str, *, needed: bool) -> bool:
    """Whether the library is there; a needed one that is not raises, and so does one that cannot be loaded."""
    spec = importlib.util.find_spec(f"dpkernels.{library}")
    if spec is None or spec.origin is None:
        if not needed:
            return False
        raise _explain(FileNotFoundError(f"no {library} library in {Path(__file__).parent}"))
    try:
        torch.ops.load_library(spec.origin)
    except OSError as error:
        raise _explain(error) from error
    return True


_load_operators("_C", needed=True)
#: Whether the operators run on CUDA tensors.
has_cuda = torch.version.cuda is not None and _load_operators("_C_cuda", needed=False)
# Operators are not differentiable: autograd passes them by, without a node and without its cost.
_autograd = torch.library.Library("dpkernels", "IMPL")
for _name in torch._C._dispatch_get_all_op_names():
    if _name.startswith("dpkernels::"):
        _autograd.impl(_name, torch.library.fallthrough_kernel, "Autograd")

try:
    host = importlib.import_module("dpkernels._host")
except ImportError as error:
    raise _explain(error) from error

__all__ = ["active_isa", "has_cuda", "host", "isas", "set_isa"]


def isas() -> list[str]:
    """Instruction sets that the CPU kernels can run here, narrowest first: ``baseline``, ``avx2``, ``avx512``."""
    return list(host.cpu_isas())


def active_isa() -> str:
    """The instruction set that the CPU kernels run now; the widest unless :func:`set_isa` chose another."""
    return isas()[torch.ops.dpkernels.get_cpu_isa()]


def set_isa(isa: str) -> None:
    """Make the CPU kernels run ``isa``, one of :func:`isas`; for tests and measurements."""
    if isa not in isas():
        raise ValueError(f"isa must be one of {isas()} on this CPU, got {isa!r}")
    torch.ops.dpkernels.set_cpu_isa(isas().index(isa))
