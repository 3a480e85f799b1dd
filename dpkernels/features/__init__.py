"""Features that cost no privacy, and normalization that costs little."""

from dpkernels.features.mirrored import Mirrored
from dpkernels.features.normalization import GroupNorm, NormRelease, PrivateDataNorm
from dpkernels.features.public import PublicStatistics, PublicWhitening, public_statistics, synthetic_images
from dpkernels.features.scatternet import ScatterNet

__all__ = [
    "GroupNorm",
    "Mirrored",
    "NormRelease",
    "PrivateDataNorm",
    "PublicStatistics",
    "PublicWhitening",
    "ScatterNet",
    "public_statistics",
    "synthetic_images",
]
