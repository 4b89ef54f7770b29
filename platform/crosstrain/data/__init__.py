"""Datasets, the order of samples, and tokenizers."""
