"""Differentially private training in PyTorch at nearly the price of ordinary training.

plan          how many steps, at which sampling rate, with how much noise, and what that guarantees
PoissonLoader batches sampled as the plan says
DPSGD, DPAdam, DPAdamW, DPOptimizer   drop-in optimizers that clip, add noise and account
GhostClipper  the engine alone
epsilon, noise_multiplier             accounting
"""

from dpkernels import accounting, data, models, random
from dpkernels.accounting import Plan, epsilon, noise_multiplier, plan
from dpkernels.clipping import ClippedSum, GhostClipper, UnsupportedModelError
from dpkernels.data import PoissonLoader
from dpkernels.optim import DPAdam, DPAdamW, DPOptimizer, DPSGD

__version__ = "0.1.0"

__all__ = [
    "ClippedSum",
    "DPAdam",
    "DPAdamW",
    "DPOptimizer",
    "DPSGD",
    "GhostClipper",
    "Plan",
    "PoissonLoader",
    "UnsupportedModelError",
    "accounting",
    "data",
    "epsilon",
    "models",
    "noise_multiplier",
    "plan",
    "random",
]
