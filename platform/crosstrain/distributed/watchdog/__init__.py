"""Diagnose hangs: the rank, the location and the cause."""
