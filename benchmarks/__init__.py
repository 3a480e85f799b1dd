"""Measurements: `kernels.py` times one operator at a time."""
