"""The linear classifier (multinomial logistic regression)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from dpkernels.models._shapes import check_count, check_shape


def linear(input_shape: Sequence[int], num_classes: int = 10, *, standardize: bool = True) -> nn.Sequential:
    """Logistic regression with a bias per class on the flattened input.

    input_shape: the shape of one example, of any rank, e.g. (1, 8, 8). standardize: each example is first brought to
    mean 0 and variance 1 by its own statistics (no other example's, so it costs no privacy), which evens out the
    gradient norms and with them what clipping cuts off. Input [batch, *input_shape], output [batch, num_classes]. The
    weights begin at zero: the problem is convex, and a random start would only be a detour.
    """
    shape = check_shape("input_shape", input_shape)
    layer = nn.Linear(math.prod(shape), check_count("num_classes", num_classes))
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    first = [nn.LayerNorm(shape, elementwise_affine=False)] if standardize else []
    return nn.Sequential(*first, nn.Flatten(), layer)
