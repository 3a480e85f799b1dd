"""Differentially private training in PyTorch at nearly the price of ordinary training."""

from dpkernels import models
from dpkernels.accounting import Plan, epsilon, noise_multiplier, plan
from dpkernels.data import PoissonLoader

__all__ = ["Plan", "PoissonLoader", "epsilon", "models", "noise_multiplier", "plan"]
