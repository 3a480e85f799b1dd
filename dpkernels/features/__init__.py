"""Features that cost no privacy, and normalization that costs little."""

from dpkernels.features.scatternet import ScatterNet

__all__ = ["ScatterNet"]
