"""Luo et al. 2021, Scalable Differential Privacy with Sparse Network Finetuning."""
