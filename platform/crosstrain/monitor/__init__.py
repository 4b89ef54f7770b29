"""Metrics, progress, profiles and the run's folder."""
