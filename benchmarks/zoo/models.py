"""The models: name -> what builds one at two sizes, a batch for it, and its losses.

The size for the benchmark has the proportions of the real thing with fewer layers and a smaller vocabulary; the small
one is for exactness, within a second in float64. Weights are random; dropout and stochastic depth are off, so that an
example gives the same loss alone and in a batch.
"""

from __future__ import annotations

import importlib.metadata

from benchmarks.zoo import images, layers, text
from benchmarks.zoo.base import FULL, SMALL, Examples, Model, Size
from benchmarks.zoo.torchvision_operators import define_missing

__all__ = ["FULL", "MODELS", "SMALL", "Examples", "Model", "Size", "library_versions", "missing"]

define_missing()  # the builders import what imports torchvision

LIBRARIES = ("transformers", "timm", "peft", "torchvision")
MODELS: dict[str, Model] = {**text.MODELS, **images.MODELS, **layers.MODELS}


def missing(library: str) -> str | None:
    """Why a library's models cannot be built here, else None."""
    needed = {"timm": ("timm", "torchvision"), "peft": ("peft", "transformers"), "torch.nn": ()}
    for name in needed.get(library, (library,)):
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return f"{name} is not installed (pip install 'dpkernels[zoo]')"
    return None


def library_versions() -> dict[str, str]:
    """Of the libraries that are installed."""
    return {name: importlib.metadata.version(name) for name in LIBRARIES if missing(name) is None}
