"""Keys and streams of the secure generator: ChaCha20 keyed by the operating system's entropy."""

from dpkernels.random.key import Domain, Key

__all__ = ["Domain", "Key"]
