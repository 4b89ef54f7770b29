"""Datasets, the order of samples, tokenizers."""
