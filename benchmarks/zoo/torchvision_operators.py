"""torchvision without its compiled operators.

torchvision's wheels hold compiled operators (detection, codecs), which load only beside the build of torch that they
were made with: those of the package index beside CUDA's. Where they do not load, beside a CPU build of torch for
instance, `import torchvision` fails, because it registers shapes for two operators that nobody defined. timm, and
transformers where it finds torchvision, fail with it, although no model of the zoo calls either operator.
:func:`define_missing` defines the two by name. A call of one still fails, and says that it has no implementation.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_MISSING = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_library: torch.library.Library | None = None  # definitions end with it


def define_missing() -> None:
    """Make `import torchvision` possible where its operators do not load. Call it before anything imports torchvision;
    a second call does nothing."""
    global _library  # noqa: PLW0603
    spec = importlib.util.find_spec("torchvision")
    if _library is not None or spec is None or spec.origin is None or _loads(Path(spec.origin).parent):
        return
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _MISSING:
        _library.define(schema)


def _loads(folder: Path) -> bool:
    """Whether torchvision's operators load, of a package in this folder."""
    for file in folder.glob("_C*.so"):
        try:
            torch.ops.load_library(str(file))
        except OSError:
            continue
        return True
    return False
