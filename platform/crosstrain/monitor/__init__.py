"""Metrics, throughput and trackers of a run."""
