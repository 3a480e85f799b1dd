"""Selected entries of the weight gradient of one example of a convolution,
``G[o, c, k] = sum_t g[o, t] x[c, t * stride + k * dilation - padding]``: all of it, of which they are kept."""

from collections.abc import Sequence

from torch import Tensor

from dpkernels.reference.conv import weight_grads


def sparse_gradients(
    input: Tensor,
    output_grads: Tensor,
    entries: Tensor,
    *,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int = 1,
) -> Tensor:
    grads = weight_grads(input, output_grads, kernel_size, stride, padding, dilation, groups, transposed=False)
    return grads.flatten(1)[:, entries]
