"""Checkpoints: sharded files, manifest, export. Knows models, not runners."""
