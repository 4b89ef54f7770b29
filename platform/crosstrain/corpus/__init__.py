"""Prepare text for training: read, filter, deduplicate, tokenize."""
