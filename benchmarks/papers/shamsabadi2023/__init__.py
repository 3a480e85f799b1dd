"""Shamsabadi & Papernot 2023: Losing Less."""
