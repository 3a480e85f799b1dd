"""Transfer from public to private data: training only what must be trained."""

from dpkernels.transfer.sparse import SparseConv2d, SparseLinear, densify, sparsify

__all__ = ["SparseConv2d", "SparseLinear", "densify", "sparsify"]
