"""Keys and streams of the secure generator, ChaCha20 keyed by the operating system's entropy; exact discrete noise."""

from dpkernels.ops.noise import total_variation
from dpkernels.random.discrete import discrete_laplace
from dpkernels.random.key import Domain, Key, Sample

__all__ = ["Domain", "Key", "Sample", "discrete_laplace", "total_variation"]
