"""Differentially private training in PyTorch at nearly the price of ordinary training."""

from dpkernels.accounting import Plan, epsilon, noise_multiplier, plan

__all__ = ["Plan", "epsilon", "noise_multiplier", "plan"]
