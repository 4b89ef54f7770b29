"""Proof that runners agree: `worker` trains a few steps under one and records them, `diagnosis` says what differs."""
