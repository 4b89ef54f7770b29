"""Estimate the memory of a run before it starts."""
