"""The engine: attaches to a model, takes per-example norms and clipped sums out of an ordinary backward."""

from dpkernels.clipping.check import CheckReport, check
from dpkernels.clipping.engine import ClippedSum, GhostClipper
from dpkernels.clipping.survey import UnsupportedModelError

__all__ = ["CheckReport", "ClippedSum", "GhostClipper", "UnsupportedModelError", "check"]
