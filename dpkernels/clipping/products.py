"""Keeps one example's NaN out of the products of others, where torch lets it through.

torch's bfloat16 products on CPUs with AMX (seen with torch 2.13, for most sizes that tiles do not divide, in no other
dtype and below AMX never) turn numbers in other rows into NaN where one row holds NaN: a non-finite example has
others dropped with it, and so changes a clipped sum by more than the bound. oneDNN, which makes these products, can be
kept from AMX as long as it has made none.
"""

import functools
import math
import os

import torch

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # oneDNN reads it at its first use


@functools.cache
def examples_stay_apart() -> bool:
    """Whether a row of NaN leaves the other rows of a bfloat16 product on the CPU as they are."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        rows = torch.ones(65, 33, dtype=torch.bfloat16, device="cpu")
        rows[32] = math.nan
        product = rows @ torch.ones(33, 33, dtype=torch.bfloat16, device="cpu")
    return int(product.isnan().any(1).sum()) == 1


def require_apart(output_grad: torch.Tensor) -> None:
    """Raises RuntimeError where a layer with this output gradient was computed by products that mix examples."""
    if output_grad.dtype == torch.bfloat16 and output_grad.device.type == "cpu" and not examples_stay_apart():
        raise RuntimeError(
            "torch's bfloat16 products on this CPU (AMX) carry NaN of one example into others, which would not be "
            "private: import dpkernels before torch computes anything, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 in "
            "the environment"
        )
