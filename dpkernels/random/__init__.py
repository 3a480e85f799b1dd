"""Keys and streams of the secure generator, ChaCha20 keyed by the operating system's entropy; exact discrete noise."""

from dpkernels.random.discrete import discrete_laplace
from dpkernels.random.key import Domain, Key, Sample

__all__ = ["Domain", "Key", "Sample", "discrete_laplace"]
