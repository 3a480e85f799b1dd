"""Differentially private training in PyTorch at nearly the price of ordinary training.

``plan`` says how many steps to take, at which sampling rate and with how much noise, and what that guarantees;
``PoissonLoader`` draws the batches; ``DPSGD``, ``DPAdam``, ``DPAdamW`` and ``DPOptimizer`` clip, add noise, update and
account. ``GhostClipper`` is the engine alone.
"""

from dpkernels import accounting, audit, clipping, data, features, losses, models, random, selection
from dpkernels.accounting import Plan, epsilon, noise_multiplier, plan
from dpkernels.clipping import ClippedSum, GhostClipper, UnsupportedModelError
from dpkernels.data import PoissonLoader
from dpkernels.optim import DPSGD, DPAdam, DPAdamW, DPOptimizer

__version__ = "0.1.0"

__all__ = [
    "DPSGD",
    "ClippedSum",
    "DPAdam",
    "DPAdamW",
    "DPOptimizer",
    "GhostClipper",
    "Plan",
    "PoissonLoader",
    "UnsupportedModelError",
    "accounting",
    "audit",
    "clipping",
    "data",
    "epsilon",
    "features",
    "losses",
    "models",
    "noise_multiplier",
    "plan",
    "random",
    "selection",
]
