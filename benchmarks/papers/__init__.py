"""The papers' experiments on real data."""
