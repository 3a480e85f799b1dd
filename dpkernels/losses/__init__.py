"""Losses that suit private training: one value per example, so that clipping stays exact.

:class:`LosingLess` is the loss of Shamsabadi & Papernot, "Losing Less: A Loss for Differentially Private Deep
Learning", 2023; the functions are what it is made of and what the paper compares it with.
"""

from dpkernels.losses.logits import focal, huber, sum_absolute_error, sum_squared_error
from dpkernels.losses.losing_less import LosingLess
from dpkernels.losses.outputs import recorded_outputs, weighted_layers

__all__ = [
    "LosingLess",
    "focal",
    "huber",
    "recorded_outputs",
    "sum_absolute_error",
    "sum_squared_error",
    "weighted_layers",
]
