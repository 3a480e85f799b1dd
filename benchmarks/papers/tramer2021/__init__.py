"""Tramèr & Boneh 2021, Differentially Private Learning Needs Better Features (or Much More Data)."""
