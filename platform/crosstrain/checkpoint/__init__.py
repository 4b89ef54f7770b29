"""Checkpoints: sharded files, manifest, export. This package depends on models, not on runners."""
